"""Shared prefixes: which runs of queries meet which runs of keys.

Attention over a forest splits exactly into parts: each node's tokens among themselves (causal), and each node's tokens
as keys for all queries below it (unmasked). A query's parts hold disjoint keys, so they merge by log-sum-exp, and the
backward of each part, run on the merged output and log-sum-exp, gives the exact gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sinkflex.attention.forest import Node, ancestors, cut_prefix
from sinkflex.attention.layout import SequenceLayout


class Job(NamedTuple):
    """A run of queries against a run of keys, as flat tokens (row * T + column).

    Attributes:
        q_start: first query.
        length: queries.
        k_start: first key.
        k_length: keys. In a causal job the queries are the last of them.
        level: depth of the keys' node; the jobs of one level have disjoint queries.
    """

    q_start: int
    length: int
    k_start: int
    k_length: int
    level: int


class Jobs(NamedTuple):
    """What a layout asks for: causal jobs, unmasked jobs, and the nodes to be attended through a window."""

    causal: list[Job]
    full: list[Job]
    local: tuple[Node, ...]


def tree_jobs(layout: SequenceLayout, window: int | None, num_sink_tokens: int) -> Jobs:
    """Split a layout into jobs.

    Args:
        layout: documents, padding and prefixes.
        window: None sees everything; else only tokens below ``num_sink_tokens`` are always seen.
        num_sink_tokens: positions below this are outside the window's reach; they form jobs of their own.
    """
    nodes: Sequence[Node] = layout.nodes
    if window is None:
        always = [True] * len(nodes)
    else:
        nodes = cut_prefix(nodes, num_sink_tokens)
        always = [node.position < num_sink_tokens for node in nodes]
    causal: list[Job] = []
    depth: list[int] = []
    below: list[list[list[int]]] = [[] for _ in nodes]
    for i, node in enumerate(nodes):
        depth.append(depth[node.parent] + 1 if node.parent >= 0 else 0)
        start, stop = layout.query_columns(node)
        if start == stop:
            continue
        q_start = node.row * layout.num_queries + start - layout.query_start[node.row]
        k_start = node.row * layout.num_keys + node.start
        if always[i]:
            causal.append(Job(q_start, stop - start, k_start, stop - node.start, depth[i]))
        for j in ancestors(nodes, i):
            if always[j]:
                _append_run(below[j], q_start, q_start + stop - start)
    full = [
        Job(low, high - low, nodes[j].row * layout.num_keys + nodes[j].start, nodes[j].length, depth[j])
        for j, runs in enumerate(below)
        for low, high in runs
    ]
    return Jobs(causal, full, _local_nodes(nodes, always))


def _append_run(runs: list[list[int]], low: int, high: int) -> None:
    if runs and runs[-1][1] == low:
        runs[-1][1] = high
    else:
        runs.append([low, high])


def _local_nodes(nodes: Sequence[Node], always: Sequence[bool]) -> tuple[Node, ...]:
    """The nodes that are not always visible; those whose parent is become roots."""
    number = [-1] * len(nodes)
    local: list[Node] = []
    for i, node in enumerate(nodes):
        if not always[i]:
            number[i] = len(local)
            local.append(node._replace(parent=number[node.parent] if node.parent >= 0 else -1))
    return tuple(local)
