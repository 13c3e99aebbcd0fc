"""Packing: from trajectories to rows of at most a token budget, with shared prefixes held once where that pays.

The trajectories of a GRPO group begin with the same prompt, and often with the same first turns. In a packed row such a
prefix stands once, its continuations after it, and a ``SequenceLayout`` lets each see its own past only. Logprobs come
back for every trained token of every *original* trajectory: a token that several of them share counts once for each, so
losses and gradients are those of separate rows. A model term that counts *tokens of the row*, such as a router's load
balancing loss, does see each shared token once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from sinkflex.attention import SequenceLayout
from sinkflex.errors import RolloutError
from sinkflex.rollout.prefix_tree import PrefixTree, SortedSequences, Tokens, build_tree, lay_side_by_side

MIN_SAVED_TOKENS = 64
"""Fewest tokens a branching must save: below that the extra kernel calls of a node cost more than its tokens."""

PAYS_FROM = 0.1
"""Share of tokens that prefix sharing must save to be used at all. With short rows, where a node's overhead weighs
most, it breaks even at 6 % (``benchmarks/prefix_tree_step.py --tasks 8 --prefix 8 --response 120``)."""


@runtime_checkable
class TokenRow(Protocol):
    """A token sequence to train on: a trajectory's ledger or a demonstration."""

    @property
    def ids(self) -> Sequence[int]:
        """[T] token ids, none negative."""
        ...

    @property
    def loss_mask(self) -> Sequence[bool]:
        """[T] True on trained tokens; not on the first, which nothing predicts."""
        ...


@dataclass(frozen=True, kw_only=True)
class PackingPlan:
    """Which trajectories share a row, decided before any tensor is built.

    Attributes:
        rows: for each packed row the indices of its trajectories.
        shares_prefixes: True when prefixes are held once, False when documents only lie side by side.
        tokens_before: tokens in separate rows. Tokens after a trajectory's last prediction count neither here nor
            below: no loss depends on them, so they are left out in any case.
        tokens_after: tokens in the packed rows.
        min_saved_tokens: fewest tokens a branching saves.
    """

    rows: tuple[tuple[int, ...], ...]
    shares_prefixes: bool
    min_saved_tokens: int
    tokens_before: int
    tokens_after: int

    @property
    def saved_fraction(self) -> float:
        """Share of the tokens that need not be computed, in [0, 1)."""
        return 1 - self.tokens_after / self.tokens_before

    def describe(self) -> str:
        """One line for a log: what was packed into what, and what it saves."""
        sequences = sum(len(row) for row in self.rows)
        how = f"shared prefixes save {self.saved_fraction:.1%}" if self.shares_prefixes else "no prefix sharing"
        return (
            f"{sequences} trajectories of {self.tokens_before:,} tokens in {len(self.rows)} packed rows of "
            f"{self.tokens_after:,}: {how}"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRow:
    """One forward pass.

    Trajectories ``[7 8 3 1]`` and ``[7 8 5 2]`` whose last two tokens are trained give, with a shared prefix::

        input_ids     7 8 | 3 | 5        their last tokens predict nothing and are left out
        position_ids  0 1 | 2 | 2
        predictors    1 2   1 3          targets  3 1   5 2          flat  0 1   2 3

    Attributes:
        members: indices of the trajectories it holds, into the list it was packed from.
        input_ids: [1, P] packed tokens.
        position_ids: [1, P] logical positions.
        layout: which token sees which.
        predictors: [n] packed index of the hidden state that predicts each trained token, member by member.
        targets: [n] the trained tokens.
        flat: [n] where each trained token stands among all trained tokens of that list, end to end.
    """

    members: tuple[int, ...]
    input_ids: Int[Tensor, "1 P"]
    position_ids: Int[Tensor, "1 P"]
    layout: SequenceLayout
    predictors: Int[Tensor, " n"]
    targets: Int[Tensor, " n"]
    flat: Int[Tensor, " n"]


def plan_packing(
    rows: Sequence[TokenRow],
    *,
    token_budget: int,
    min_saved_tokens: int = MIN_SAVED_TOKENS,
    pays_from: float = PAYS_FROM,
) -> PackingPlan:
    """Decide which trajectories share a packed row, and whether prefix sharing pays.

    Trajectories that share a prefix stay together as long as the budget allows; where it does not, the cut falls where
    it repeats fewest tokens. The pieces are then placed first-fit-decreasing.

    Args:
        rows: what to pack, at least one.
        token_budget: most tokens of a packed row; a longer trajectory gets a row of its own.
        min_saved_tokens: fewest tokens a single branching must save.
        pays_from: share of all tokens that sharing must save; above 1 switches it off.

    Raises:
        RolloutError: no rows, a row without trained tokens or whose first token is trained, or a budget below 1.
    """
    if token_budget < 1:
        raise RolloutError(f"token_budget is {token_budget}, expected at least 1 token")
    sequences = _needed_tokens(rows)
    before = sum(len(sequence) for sequence in sequences)
    ranked = SortedSequences.of(sequences, range(len(sequences)))
    packed = _first_fit(_clusters(ranked, token_budget, min_saved_tokens), token_budget)
    after = sum(
        len(build_tree(SortedSequences.of(sequences, members), min_saved_tokens=min_saved_tokens).tokens)
        for members in packed
    )
    pays = 1 - after / before >= pays_from
    if not pays:
        packed = _first_fit([(len(tokens), (index,)) for index, tokens in enumerate(sequences)], token_budget)
    return PackingPlan(
        rows=packed,
        shares_prefixes=pays,
        min_saved_tokens=min_saved_tokens,
        tokens_before=before,
        tokens_after=after if pays else before,
    )


def pack(rows: Sequence[TokenRow], plan: PackingPlan, *, device: torch.device) -> list[PackedRow]:
    """Build the tensors of a plan.

    Args:
        rows: the list the plan was made from.
        plan: from ``plan_packing``.
        device: where the tensors go.

    Returns:
        One packed row a forward pass; each trained token of ``rows`` is in exactly one of them.
    """
    sequences = _needed_tokens(rows)
    counts = np.array([np.count_nonzero(row.loss_mask) for row in rows])
    starts = np.cumsum(counts) - counts
    packed = []
    for members in plan.rows:
        if plan.shares_prefixes:
            ranked = SortedSequences.of(sequences, members)
            tree, order = build_tree(ranked, min_saved_tokens=plan.min_saved_tokens), ranked.order
        else:
            tree, order = lay_side_by_side([sequences[index] for index in members]), members
        packed.append(_packed_row(rows, tree, order, starts, device))
    return packed


def _packed_row(
    rows: Sequence[TokenRow],
    tree: PrefixTree,
    order: Sequence[int],
    starts: Tokens,
    device: torch.device,
) -> PackedRow:
    predictors, targets, flat = [], [], []
    for index, columns in sorted(zip(order, tree.columns, strict=True), key=lambda pair: pair[0]):
        trained = np.flatnonzero(rows[index].loss_mask)
        predictors.append(columns[trained - 1])
        targets.append(np.asarray(rows[index].ids, dtype=np.int64)[trained])
        flat.append(starts[index] + np.arange(len(trained)))

    def tensor(parts: Sequence[Tokens]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    layout = SequenceLayout.from_prefix_tree([list(tree.lengths)], [list(tree.parents)], device=device)
    return PackedRow(
        members=tuple(sorted(order)),
        input_ids=tensor([tree.tokens])[None],
        position_ids=layout.position.long(),
        layout=layout,
        predictors=tensor(predictors),
        targets=tensor(targets),
        flat=tensor(flat),
    )


def _needed_tokens(rows: Sequence[TokenRow]) -> list[Tokens]:
    """Each row's tokens up to the one that predicts its last trained token."""
    if not rows:
        raise RolloutError("rows is empty, expected at least one trajectory to pack")
    sequences = []
    for index, row in enumerate(rows):
        trained = np.flatnonzero(row.loss_mask)
        if len(trained) == 0:
            raise RolloutError(f"rows[{index}] has no trained token, expected at least one; leave it out of the batch")
        if trained[0] == 0:
            raise RolloutError(
                f"rows[{index}] trains its first token, which nothing predicts; its loss_mask must start with False"
            )
        sequences.append(np.asarray(row.ids[: int(trained[-1])], dtype=np.int64))
    return sequences


def _clusters(ranked: SortedSequences, token_budget: int, min_saved_tokens: int) -> list[tuple[int, tuple[int, ...]]]:
    """Cut the sorted order into (tokens, members) pieces that fit the budget and share no prefix worth sharing."""
    whole = build_tree(ranked, min_saved_tokens=min_saved_tokens)
    first_columns = [int(columns[0]) for columns in whole.columns]
    roots = [0, *(i for i, (one, two) in enumerate(pairwise(first_columns), start=1) if one != two)]
    pieces = []
    for low, high in zip(roots, [*roots[1:], len(ranked.order)], strict=True):
        while low < high:
            cut = _cut(ranked, low, high, token_budget, min_saved_tokens)
            tokens = len(build_tree(ranked.part(low, cut), min_saved_tokens=min_saved_tokens).tokens)
            pieces.append((tokens, ranked.order[low:cut]))
            low = cut
    return pieces


def _cut(ranked: SortedSequences, low: int, high: int, token_budget: int, min_saved_tokens: int) -> int:
    """Return where the piece that starts at ``low`` ends: at ``high`` if it fits, else where least is repeated."""

    def fits(end: int) -> bool:
        tree = build_tree(ranked.part(low, end), min_saved_tokens=min_saved_tokens)
        return len(tree.tokens) <= token_budget

    if fits(high):
        return high
    good, bad = low + 1, high
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return min(range(low + 1, good + 1), key=lambda end: (ranked.common[end], -end))


def _first_fit(pieces: Sequence[tuple[int, tuple[int, ...]]], token_budget: int) -> tuple[tuple[int, ...], ...]:
    """First-fit-decreasing: the largest piece first, each into the first row with room."""
    room: list[int] = []
    rows: list[list[int]] = []
    for tokens, members in sorted(pieces, key=lambda piece: (-piece[0], piece[1])):
        place = next((i for i, left in enumerate(room) if left >= tokens), None)
        if place is None:
            place = len(rows)
            rows.append([])
            room.append(token_budget)
        rows[place] += members
        room[place] -= tokens
    return tuple(tuple(row) for row in rows)
