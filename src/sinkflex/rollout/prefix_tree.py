"""Token sequences folded into a tree of shared prefixes: the one place that decides which tokens become one.

Two sequences that begin alike need the hidden states of their common tokens only once, as a causal model computes them
from those tokens alone. Sorted, sequences with a common prefix are neighbours, and the lengths of the common prefixes
of neighbours say where the tree branches. A branching that would save fewer tokens than ``min_saved_tokens`` is not
made: its tokens are repeated in each branch, since every node costs kernel calls. With ``min_saved_tokens=2``::

    a  1 2 3 4 5            node 0  [1 2 3]    shared by a, b and c; d ends inside it
    b  1 2 3 4 6    ->      node 1  [4 5]      a   (a and b share the 4 too, but that saves one token only)
    c  1 2 3 7              node 2  [4 6]      b
    d  1 2                  node 3  [7]        c
    e  9                    node 4  [9]        e, another root
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixTree:
    """Sequences laid out as runs of tokens, depth first.

    Attributes:
        lengths: tokens of each node, each at least one.
        parents: each node's parent (always earlier), or -1.
        tokens: [P] all nodes' tokens end to end.
        columns: for each sequence [its length] where each of its tokens lies among the P.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    tokens: Tokens
    columns: tuple[NDArray[np.int64], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class SortedSequences:
    """Sequences in an order in which those with a common prefix are neighbours.

    Attributes:
        order: index of each sequence in the list it came from.
        sequences: the sequences, sorted; none is empty.
        common: tokens that each shares with the one before it; 0 for the first.
    """

    order: tuple[int, ...]
    sequences: tuple[Tokens, ...]
    common: tuple[int, ...]

    @classmethod
    def of(cls, sequences: Sequence[Tokens], members: Sequence[int]) -> SortedSequences:
        """Sort the ``members`` of a list of sequences."""
        # Bytes of equal width per token bring common prefixes together and a prefix before what it begins. That their
        # order is not that of the numbers does not matter.
        order = sorted(members, key=lambda index: (sequences[index].tobytes(), index))
        ranked = tuple(sequences[index] for index in order)
        common = [0] if ranked else []
        common += [common_prefix(one, two) for one, two in pairwise(ranked)]
        return cls(order=tuple(order), sequences=ranked, common=tuple(common))

    def part(self, low: int, high: int) -> SortedSequences:
        """The sequences ``low`` to ``high`` of the sorted order."""
        return SortedSequences(
            order=self.order[low:high],
            sequences=self.sequences[low:high],
            common=(0, *self.common[low + 1 : high]),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Branch:
    """Sorted sequences ``low`` to ``high``, whose first ``depth`` tokens are placed already.

    ``path`` holds the placed tokens as (first column, length) runs. ``riders`` ended in a branching that was not made:
    what is left of them begins this branch.
    """

    low: int
    high: int
    depth: int
    parent: int
    path: tuple[tuple[int, int], ...]
    riders: tuple[int, ...]


def common_prefix(one: Tokens, two: Tokens) -> int:
    """Number of leading tokens that two sequences share."""
    size = min(len(one), len(two))
    different = one[:size] != two[:size]
    return int(different.argmax()) if different.any() else size


def build_tree(ranked: SortedSequences, *, min_saved_tokens: int) -> PrefixTree:
    """Fold sorted sequences into a tree.

    Args:
        ranked: what to fold; at least one sequence.
        min_saved_tokens: fewest tokens a branching must save, at least 1.

    Returns:
        The tree; ``columns`` is in the sorted order.
    """
    sequences, common = ranked.sequences, ranked.common
    lengths: list[int] = []
    parents: list[int] = []
    pieces: list[Tokens] = []
    paths: list[tuple[tuple[int, int], ...]] = [()] * len(sequences)
    used = 0
    stack = [_Branch(low=0, high=len(sequences), depth=0, parent=-1, path=(), riders=())]
    while stack:
        branch = stack.pop()
        low, high, depth = branch.low, branch.high, branch.depth
        end = min(common[low + 1 : high], default=len(sequences[low]))
        edges = [low, *(i for i in range(low + 1, high) if common[i] == end), high]
        spans = list(pairwise(edges))
        ended = [start for start, _ in spans if len(sequences[start]) == end]
        live = [span for span in spans if len(sequences[span[0]]) > end]
        if live and (end - depth) * (len(live) - 1) < min_saved_tokens:
            parent, path, reached, riders = branch.parent, branch.path, depth, (*branch.riders, *ended)
        else:
            parent, path, reached, riders = len(lengths), (*branch.path, (used, end - depth)), end, ()
            lengths.append(end - depth)
            parents.append(branch.parent)
            pieces.append(sequences[low][depth:end])
            for member in (*branch.riders, *ended):
                paths[member] = (*branch.path, (used, len(sequences[member]) - depth))
            used += end - depth
        stack += [
            _Branch(low=a, high=b, depth=reached, parent=parent, path=path, riders=riders if number == 0 else ())
            for number, (a, b) in enumerate(live)
        ][::-1]
    return PrefixTree(
        lengths=tuple(lengths),
        parents=tuple(parents),
        tokens=np.concatenate(pieces),
        columns=tuple(_columns(path) for path in paths),
    )


def lay_side_by_side(sequences: Sequence[Tokens]) -> PrefixTree:
    """The tree that shares nothing: each sequence a root of its own, in the order given."""
    lengths = tuple(len(sequence) for sequence in sequences)
    starts = np.cumsum([0, *lengths])
    return PrefixTree(
        lengths=lengths,
        parents=(-1,) * len(lengths),
        tokens=np.concatenate(sequences),
        columns=tuple(np.arange(a, b) for a, b in pairwise(starts)),
    )


def _columns(path: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(start, start + length) for start, length in path])
