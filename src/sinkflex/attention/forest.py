"""The host-side structure of a layout: runs of tokens in a forest, and the few operations on it.

A *node* is a run of neighbouring columns of one row with consecutive logical positions. A document is a root without
children; a shared prefix is a node with children; a document with a hole in its padding mask is a chain of nodes. A
token sees the earlier tokens of its own node and all tokens of its node's ancestors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Node(NamedTuple):
    """One run of tokens.

    Attributes:
        row: batch row.
        start: first key column of the run in that row.
        length: number of tokens, at least one.
        position: logical position of the first token.
        parent: index of the parent in the node tuple (always smaller than the node's own), or -1 for a root.
    """

    row: int
    start: int
    length: int
    position: int
    parent: int


class Split(NamedTuple):
    """The result of cutting nodes: the pieces, and for each piece the index of the node it came from."""

    nodes: tuple[Node, ...]
    origin: tuple[int, ...]


def preorder(nodes: Sequence[Node]) -> tuple[list[int], list[int]]:
    """Number the forest: node ``a`` is ``b`` or an ancestor of ``b`` iff ``enter[a] <= enter[b] < exit[a]``.

    Returns:
        (enter, exit), one number per node.
    """
    size = [1] * len(nodes)
    for i in range(len(nodes) - 1, -1, -1):
        if nodes[i].parent >= 0:
            size[nodes[i].parent] += size[i]
    enter = [0] * len(nodes)
    free_root = 0
    next_child = [0] * len(nodes)
    for i, node in enumerate(nodes):
        if node.parent < 0:
            enter[i] = free_root
            free_root += size[i]
        else:
            enter[i] = next_child[node.parent]
            next_child[node.parent] += size[i]
        next_child[i] = enter[i] + 1
    return enter, [e + s for e, s in zip(enter, size, strict=True)]


def ancestors(nodes: Sequence[Node], index: int) -> list[int]:
    """The proper ancestors of a node, nearest first."""
    chain = []
    parent = nodes[index].parent
    while parent >= 0:
        chain.append(parent)
        parent = nodes[parent].parent
    return chain


def longest_path(nodes: Sequence[Node]) -> int:
    """The largest number of tokens that any token can see, itself included."""
    seen = [0] * len(nodes)
    for i, node in enumerate(nodes):
        seen[i] = node.length + (seen[node.parent] if node.parent >= 0 else 0)
    return max(seen, default=0)


def cut(nodes: Sequence[Node], at: Callable[[Node], Sequence[int]], joined: Callable[[int], bool]) -> Split:
    """Cut nodes at logical positions.

    Args:
        nodes: the forest.
        at: for a node, the positions (strictly inside it, ascending) before which it is cut.
        joined: whether a piece that starts at this position still sees what precedes it; if not it becomes a root.

    Returns:
        The pieces in an order that keeps parents before children.
    """
    pieces: list[Node] = []
    origin: list[int] = []
    last_piece: list[int] = []
    for i, node in enumerate(nodes):
        parent = last_piece[node.parent] if node.parent >= 0 else -1
        edges = [node.position, *at(node), node.position + node.length]
        for low, high in itertools.pairwise(edges):
            parent = parent if joined(low) else -1
            pieces.append(Node(node.row, node.start + low - node.position, high - low, low, parent))
            origin.append(i)
            parent = len(pieces) - 1
        last_piece.append(len(pieces) - 1)
    return Split(tuple(pieces), tuple(origin))


def cut_prefix(nodes: Sequence[Node], num_tokens: int) -> tuple[Node, ...]:
    """Cut so that each node lies wholly before or wholly from position ``num_tokens`` on."""

    def at(node: Node) -> list[int]:
        return [num_tokens] if node.position < num_tokens < node.position + node.length else []

    return cut(nodes, at, lambda position: True).nodes


def cut_chunks(nodes: Sequence[Node], chunk: int) -> tuple[Node, ...]:
    """Cut at every multiple of ``chunk``; what lies in an earlier chunk is no longer seen (chunked local attention)."""

    def at(node: Node) -> list[int]:
        return list(range((node.position // chunk + 1) * chunk, node.position + node.length, chunk))

    return cut(nodes, at, lambda position: position % chunk != 0).nodes
