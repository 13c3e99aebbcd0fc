"""From a layout to kernel calls.

A plan is a list of calls whose key sets, for each query, are disjoint and together are what the query sees. Their
results merge by log-sum-exp; the sink enters once, after the merge. Documents of similar length share one padded call
(right padding needs no mask: empty queries and keys come last), a node's keys meet the queries of all descendants in
one unmasked call per run of columns (``tree.py``), and windows are cut into blocks (``windowed.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from sinkflex.attention.layout import SequenceLayout
from sinkflex.attention.masks import MaskMod, dense_mask, visible
from sinkflex.attention.rows import Rows
from sinkflex.attention.tree import Job, tree_jobs
from sinkflex.attention.windowed import WindowCall, window_calls

# A kernel call costs about as much as this many query-key pairs; documents this long are never padded to share one.
_CALL_COST_PAIRS = 20_000
_ALONE_FROM = 1024
# Few queries against a cache: one masked call, whose mask is no larger than the keys.
_FEW_QUERIES = 32
# Entries of one block's mask when the caller's own mask_mod is evaluated block by block.
_MASK_BLOCK_ENTRIES = 1 << 22


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One kernel call: these queries against these keys.

    Attributes:
        q: query slots.
        k: key slots.
        causal: slot ``i`` of the queries sees key slots up to ``i``.
        hidden: gives a mask [n or 1, 1 or Hq, L or 1, Lk], True where the key is hidden; None hides nothing.
        first: no earlier call of the plan has touched these queries.
        keep: the mask is small enough to be kept between calls.
    """

    q: Rows
    k: Rows
    causal: bool = False
    hidden: Callable[[], Bool[Tensor, "n H L Lk"]] | None = None
    first: bool = False
    keep: bool = True
    _kept: dict[torch.dtype, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def bias(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """The additive mask in ``dtype``, and which queries [n or 1, 1 or Hq, L or 1] see nothing in this call."""
        if self.hidden is None:
            return None, None
        if dtype in self._kept:
            return self._kept[dtype]
        hidden = self.hidden()
        pair = (torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf), hidden.all(-1))
        if self.keep:
            self._kept[dtype] = pair
        return pair


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Kernel calls for one layout and mask, in order.

    Attributes:
        calls: see :class:`Call`.
        whole: the plan is one call over all queries and all keys, so results need no merging.
    """

    calls: tuple[Call, ...]
    whole: bool


def build_plan(
    layout: SequenceLayout,
    *,
    device: torch.device,
    num_heads: int,
    window: int | None,
    num_sink_tokens: int,
    mask_mod: MaskMod | None,
) -> Plan:
    """Plan the kernel calls; cached on the layout except under a ``mask_mod``, which may close over anything.

    Args:
        layout: documents, padding and prefixes.
        device: where gathers and masks live.
        num_heads: query heads, each shown to ``mask_mod``.
        window: keys a query sees at most, its own included, in logical positions; None means all.
        num_sink_tokens: keys at positions below this stay visible.
        mask_mod: the caller's own mask.
    """
    if mask_mod is not None:
        calls = list(_masked_calls(layout, num_heads, window, num_sink_tokens, mask_mod))
        return Plan(calls=tuple(calls), whole=False)
    if window is not None and window >= layout.longest_path:
        window, num_sink_tokens = None, 0
    key = ("plan", device, window, num_sink_tokens)
    return layout.cached(key, lambda: _build(layout, device, window, num_sink_tokens))


def _build(layout: SequenceLayout, device: torch.device, window: int | None, num_sink_tokens: int) -> Plan:
    if layout.num_queries < layout.num_keys and layout.num_queries <= _FEW_QUERIES:
        calls = [_cache_call(layout, device, window, num_sink_tokens)]
    else:
        causal, full, local = tree_jobs(layout, window, num_sink_tokens)
        calls = _packed_calls(causal, layout, device)
        if window is not None:
            calls += [_window_call(call, layout, device) for call in window_calls(layout, local, window)]
        cached = [job._replace(k_length=job.k_length - job.length) for job in causal]
        full += [job for job in cached if job.k_length > 0]
        calls += [Call(q=Rows.span(j.q_start, j.length), k=Rows.span(j.k_start, j.k_length)) for j in full]
    whole = len(calls) == 1 and all(
        rows.gather is None and rows.start == 0 and (rows.n, rows.length, rows.step) == (layout.batch, size, size)
        for rows, size in ((calls[0].q, layout.num_queries), (calls[0].k, layout.num_keys))
    )
    return Plan(calls=tuple(calls), whole=whole)


def _packed_calls(jobs: Sequence[Job], layout: SequenceLayout, device: torch.device) -> list[Call]:
    """Causal runs of similar length side by side in padded calls, queries against their own keys."""
    calls = []
    jobs = sorted(jobs, key=lambda job: job.length)
    lengths = np.array([job.length for job in jobs], dtype=np.int64)
    for low, high in _buckets(lengths):
        inside = np.arange(lengths[high - 1])
        empty = inside >= lengths[low:high, None]
        rows = []
        for starts, size in (
            ([job.q_start for job in jobs[low:high]], layout.num_queries),
            ([job.k_start + job.k_length - job.length for job in jobs[low:high]], layout.num_keys),
        ):
            index = np.where(empty, -1, np.array(starts)[:, None] + inside)
            rows.append(Rows.of(index, (layout.batch, size), device))
        calls.append(Call(q=rows[0], k=rows[1], causal=True, first=True))
    return calls


def _buckets(lengths: np.ndarray) -> Iterable[tuple[int, int]]:
    """Cut sorted lengths into runs [low, high) that minimise padded pairs plus the cost of a call each."""
    sizes, first = np.unique(lengths, return_index=True)
    edges = np.append(first, len(lengths))
    short = int(np.searchsorted(sizes, _ALONE_FROM))
    best = np.zeros(short + 1)
    cut = np.zeros(short + 1, dtype=np.int64)
    for i in range(1, short + 1):
        cost = best[:i] + (edges[i] - edges[:i]) * float(sizes[i - 1]) ** 2 + _CALL_COST_PAIRS
        cut[i] = int(cost.argmin())
        best[i] = cost[cut[i]]
    runs = [(int(edges[i]), int(edges[i + 1])) for i in range(short, len(sizes))]
    i = short
    while i > 0:
        runs.append((int(edges[cut[i]]), int(edges[i])))
        i = int(cut[i])
    return runs


def _window_call(call: WindowCall, layout: SequenceLayout, device: torch.device) -> Call:
    hidden = torch.from_numpy(call.hidden)[:, None].to(device)
    return Call(
        q=Rows.of(call.q_index, (layout.batch, layout.num_queries), device),
        k=Rows.of(call.k_index, (layout.batch, layout.num_keys), device),
        hidden=lambda: hidden,
        first=True,
    )


def _cache_call(layout: SequenceLayout, device: torch.device, window: int | None, num_sink_tokens: int) -> Call:
    """A few queries of each row against its cache, or against the part of it that a window can reach."""
    seen = visible(layout.to(device), window=window, num_sink_tokens=num_sink_tokens)
    grid = np.arange(layout.batch * layout.num_keys).reshape(layout.batch, layout.num_keys)
    reach = layout.num_keys
    if window is not None and num_sink_tokens == 0 and all(node.parent < 0 for node in layout.nodes):
        reach = min(layout.num_keys, window - 1 + layout.num_queries)
        last = np.array(layout.query_start)[:, None] + layout.num_queries
        columns = np.maximum(last - reach, 0) + np.arange(reach)
        grid = np.take_along_axis(grid, columns, axis=1)
        seen = seen.gather(2, torch.from_numpy(columns).to(device)[:, None].expand(-1, layout.num_queries, -1))
    hidden = ~seen[:, None]
    if bool((hidden == hidden[:1]).all()):
        hidden = hidden[:1]
    return Call(
        q=Rows(n=layout.batch, length=layout.num_queries, step=layout.num_queries),
        k=Rows.of(grid, (layout.batch, layout.num_keys), device),
        hidden=(lambda: hidden) if bool(hidden.any()) else None,
        first=True,
    )


def _masked_calls(
    layout: SequenceLayout, num_heads: int, window: int | None, num_sink_tokens: int, mask_mod: MaskMod
) -> Iterable[Call]:
    """Blocks of queries against all keys of the row; each block's mask lives only while it is used."""
    block = max(1, _MASK_BLOCK_ENTRIES // (num_heads * layout.num_keys))

    def hidden(row: int, columns: slice) -> Tensor:
        return ~dense_mask(
            layout,
            num_heads=num_heads,
            window=window,
            num_sink_tokens=num_sink_tokens,
            mask_mod=mask_mod,
            rows=slice(row, row + 1),
            columns=columns,
        )

    for row in range(layout.batch):
        for low in range(0, layout.num_queries, block):
            high = min(low + block, layout.num_queries)
            columns = slice(low, high)
            yield Call(
                q=Rows.span(row * layout.num_queries + low, high - low),
                k=Rows.span(row * layout.num_keys, layout.num_keys),
                hidden=lambda row=row, columns=columns: hidden(row, columns),  # type: ignore[misc]
                first=True,
                keep=False,
            )
