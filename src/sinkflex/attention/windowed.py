"""Sliding windows at a cost linear in the number of tokens: blocks of queries against the keys a window can reach.

Tokens are laid out in *strips*: neighbouring documents share one, a node below a prefix has its own that begins with
the end of its path. A strip is cut into blocks of queries; each block meets its own keys and the ``window - 1`` before.
Inside a long document all blocks have the same mask and are read through overlapping views, without copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from sinkflex.attention.forest import Node, ancestors
from sinkflex.attention.layout import SequenceLayout

Index = NDArray[np.int64]
Flags = NDArray[np.bool_]
_SMALLEST_BLOCK = 64
# Runs of equal masks shorter than this share a call with the irregular blocks.
_SHORTEST_RUN = 4
_MOST_RUNS = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowCall:
    """Blocks for one kernel call.

    Attributes:
        q_index: [n, S] flat query of each slot, -1 for an empty one.
        k_index: [n, K] flat key of each slot, -1 for an empty one.
        hidden: [n, S, K], or [1, S, K] when all blocks agree: True where the key is out of sight.
    """

    q_index: Index
    k_index: Index
    hidden: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Strip:
    """Query slots, and key slots that start ``halo`` earlier; ``chain`` tells documents apart, -1 is empty."""

    queries: Index
    keys: Index
    position: Index
    chain: Index


def window_calls(layout: SequenceLayout, nodes: Sequence[Node], window: int) -> list[WindowCall]:
    """Cut the queries of ``nodes`` into blocks, each query in exactly one.

    Args:
        layout: where queries and keys lie.
        nodes: the forest to attend within; parents before children.
        window: keys a query sees at most, its own included, in logical positions.
    """
    block, halo = block_size(window), -(-(window - 1) // 16) * 16
    pooled: list[WindowCall] = []
    calls: list[WindowCall] = []
    slots = np.arange(block)[:, None] + halo - np.arange(block + halo)
    band = ~((slots >= 0) & (slots < window))
    for strip in _strips(layout, nodes, window, block, halo):
        blocks = _Blocks(strip, block, halo)
        plain = blocks.plain()
        for low, high, same in _runs(blocks.unbroken(window), plain):
            alone = high - low >= _SHORTEST_RUN and plain[low]
            part = WindowCall(
                q_index=blocks.queries[low:high],
                k_index=blocks.keys[low:high],
                hidden=band[None] if same and alone else blocks.hidden(low, high, window),
            )
            (calls if alone else pooled).append(part)
    if pooled:
        calls.append(
            WindowCall(
                q_index=np.concatenate([part.q_index for part in pooled]),
                k_index=np.concatenate([part.k_index for part in pooled]),
                hidden=np.concatenate([part.hidden for part in pooled]),
            )
        )
    return calls


def block_size(window: int) -> int:
    """Queries a block: as many as the window, in whole vector registers, and no fewer than pays for a block."""
    return max(_SMALLEST_BLOCK, -(-window // 16) * 16)


def _runs(alike: Flags, plain: Flags) -> Iterator[tuple[int, int, bool]]:
    """Cut a strip's blocks into runs [low, high) that can share a call, and whether the run shares one mask too.

    Where documents are short, nearly every block has a mask of its own: then only ``plain`` (no empty slot) counts.
    """
    kind = np.where(plain, np.where(alike, 2, 1), 0)
    edges = np.flatnonzero(np.diff(kind)) + 1
    if len(edges) > _MOST_RUNS:
        kind = np.minimum(kind, 1)
        edges = np.flatnonzero(np.diff(kind)) + 1
    for low, high in zip([0, *edges.tolist()], [*edges.tolist(), len(kind)], strict=True):
        yield low, high, bool(kind[low] == 2)


class _Blocks:
    """A strip cut into blocks, as views: queries [n, S]; keys, positions and documents [n, S + halo]."""

    def __init__(self, strip: _Strip, block: int, halo: int) -> None:
        def cut(values: Index) -> Index:
            return sliding_window_view(values, block + halo)[::block]

        self.queries = strip.queries.reshape(-1, block)
        self.keys, self._position, self._chain = cut(strip.keys), cut(strip.position), cut(strip.chain)
        self._halo = halo

    def plain(self) -> Flags:
        """[n] whether every slot of the block is taken."""
        taken: Flags = np.all(self.queries >= 0, axis=1) & np.all(self.keys >= 0, axis=1)
        return taken

    def unbroken(self, window: int) -> Flags:
        """[n] whether one document fills the block and what its queries reach, so that its mask is the plain band."""
        reached = slice(self._halo - (window - 1), None)
        chain, position = self._chain[:, reached], self._position[:, reached]
        alone: Flags = np.all(chain == chain[:, :1], axis=1) & np.all(np.diff(position, axis=1) == 1, axis=1)
        return alone

    def hidden(self, low: int, high: int, window: int) -> Flags:
        """[high - low, S, S + halo] True where the key is out of sight; written block by block, as it is large."""
        hidden = np.empty((high - low, self.queries.shape[1], self.keys.shape[1]), dtype=np.bool_)
        for i in range(low, high):
            position, chain = self._position[i], self._chain[i]
            back = position[self._halo :, None] - position
            seen = (back >= 0) & (back < window) & (chain[self._halo :, None] == chain) & (self.keys[i] >= 0)
            np.logical_not(seen, out=hidden[i - low])
        return hidden


def _strips(layout: SequenceLayout, nodes: Sequence[Node], window: int, block: int, halo: int) -> Iterator[_Strip]:
    """Neighbouring whole documents share a strip; any other node with queries has its own."""
    run: list[Node] = []
    for i, node in enumerate(nodes):
        start, stop = layout.query_columns(node)
        if start == stop:
            continue
        if node.parent < 0 and (start, stop) == (node.start, node.start + node.length):
            if run and (run[-1].row, run[-1].start + run[-1].length) != (node.row, node.start):
                yield _strip(layout, run, [], block, halo)
                run = []
            run.append(node)
        else:
            queries = Node(node.row, start, stop - start, node.position + start - node.start, -1)
            yield _strip(layout, [queries], path_end(nodes, i, start - node.start, window - 1), block, halo)
    if run:
        yield _strip(layout, run, [], block, halo)


def path_end(nodes: Sequence[Node], index: int, own: int, count: int) -> list[Node]:
    """The last tokens on the path to a node's first query, as runs in path order.

    Args:
        nodes: the forest.
        index: the node.
        own: how many of the node's own tokens come before its first query.
        count: how many tokens are wanted; fewer come back where the path is shorter.
    """
    runs: list[Node] = []
    available = own
    for j in [index, *ancestors(nodes, index)]:
        node = nodes[j]
        available = own if j == index else node.length
        take = min(available, count)
        if take > 0:
            skipped = available - take
            runs.append(Node(node.row, node.start + skipped, take, node.position + skipped, -1))
        count -= take
    return runs[::-1]


def _strip(layout: SequenceLayout, run: Sequence[Node], before: Sequence[Node], block: int, halo: int) -> _Strip:
    """Lay out ``run`` (the queries) after ``before`` (keys only, of the same document)."""
    length = sum(node.length for node in run)
    size = -(-length // block) * block
    queries = np.full(size, -1, dtype=np.int64)
    keys = np.full(halo + size, -1, dtype=np.int64)
    position = np.zeros(halo + size, dtype=np.int64)
    chain = np.full(halo + size, -1, dtype=np.int64)
    at = halo - sum(node.length for node in before)
    for number, node in enumerate([*before, *run]):
        here, inside = slice(at, at + node.length), np.arange(node.length)
        keys[here] = node.row * layout.num_keys + node.start + inside
        position[here] = node.position + inside
        chain[here] = max(0, number - len(before))
        at += node.length
    first = run[0]
    q_start = first.row * layout.num_queries + first.start - layout.query_start[first.row]
    queries[:length] = q_start + np.arange(length)
    return _Strip(queries=queries, keys=keys, position=position, chain=chain)
