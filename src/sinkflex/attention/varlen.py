"""Running a layout with packed-sequence ("varlen") kernels, which is what the CUDA flash kernels are.

The kernels align causal masks and windows at the end of each pair of sequences. So a document, with or without cached
keys before its queries, is one pair; a window below a prefix is a pair whose keys begin with the end of the path; and a
prefix's keys meet all queries below it in an unmasked pair. Parts of one query merge by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from sinkflex.attention.kernels import MAX_HEAD_DIM, Sequences, VarlenKernel
from sinkflex.attention.layout import SequenceLayout
from sinkflex.attention.merge import merge_parts
from sinkflex.attention.tree import tree_jobs
from sinkflex.attention.windowed import path_end

Index = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class VarlenCall:
    """One kernel call.

    Attributes:
        q_tokens: [Nq] flat query token of each packed query; None when they are all queries in order.
        k_tokens: [Nk] flat key token of each packed key, repeats allowed; None when they are all keys in order.
        sequences: lengths, mask and window.
        first: no earlier call of the plan has touched these queries.
    """

    q_tokens: Tensor | None
    k_tokens: Tensor | None
    sequences: Sequences
    first: bool


def build_varlen_plan(
    layout: SequenceLayout, *, device: torch.device, window: int | None, num_sink_tokens: int
) -> tuple[VarlenCall, ...]:
    """Plan the kernel calls; cached on the layout.

    Args:
        layout: documents, padding and prefixes.
        device: where the kernel runs.
        window: keys a query sees at most, its own included, in logical positions; None means all.
        num_sink_tokens: keys at positions below this stay visible.
    """
    if window is not None and window >= layout.longest_path:
        window, num_sink_tokens = None, 0
    key = ("varlen", device, window, num_sink_tokens)
    return layout.cached(key, lambda: _build(layout, device, window, num_sink_tokens))


def _build(
    layout: SequenceLayout, device: torch.device, window: int | None, num_sink_tokens: int
) -> tuple[VarlenCall, ...]:
    causal, full, local = tree_jobs(layout, window, num_sink_tokens)
    calls = []
    if causal:
        pairs = [(_run(job.q_start, job.length), _run(job.k_start, job.k_length)) for job in causal]
        calls.append(_call(layout, device, pairs, causal=True, first=True))
    if window is not None:
        pairs = []
        for i, node in enumerate(local):
            start, stop = layout.query_columns(node)
            if start == stop:
                continue
            before = path_end(local, i, start - node.start, window - 1)
            own = node._replace(start=start, length=stop - start)
            keys = [_run(part.row * layout.num_keys + part.start, part.length) for part in (*before, own)]
            first = node.row * layout.num_queries + start - layout.query_start[node.row]
            pairs.append((_run(first, stop - start), np.concatenate(keys)))
        if pairs:  # none where the always-visible keys are all there is
            calls.append(_call(layout, device, pairs, causal=True, first=True, window=window))
    for level in sorted({job.level for job in full}):
        jobs = [job for job in full if job.level == level]
        pairs = [(_run(job.q_start, job.length), _run(job.k_start, job.k_length)) for job in jobs]
        calls.append(_call(layout, device, pairs, causal=False, first=False))
    return tuple(calls)


def _run(start: int, length: int) -> Index:
    return np.arange(start, start + length)


def _call(
    layout: SequenceLayout,
    device: torch.device,
    pairs: Sequence[tuple[Index, Index]],
    *,
    causal: bool,
    first: bool,
    window: int | None = None,
) -> VarlenCall:
    lengths = np.array([(len(q), len(k)) for q, k in pairs], dtype=np.int32)
    cumulative = np.concatenate([np.zeros((1, 2), np.int32), lengths.cumsum(0, dtype=np.int32)])
    cu_q, cu_k = (torch.from_numpy(column.copy()).to(device) for column in cumulative.T)
    tokens = []
    for side, total in enumerate((layout.num_queries, layout.num_keys)):
        index = np.concatenate([pair[side] for pair in pairs])
        whole = np.array_equal(index, np.arange(layout.batch * total))
        tokens.append(None if whole else torch.from_numpy(index).to(device))
    sequences = Sequences(
        cu_q=cu_q,
        cu_k=cu_k,
        max_q=int(lengths[:, 0].max()),
        max_k=int(lengths[:, 1].max()),
        causal=causal,
        window=window,
    )
    return VarlenCall(q_tokens=tokens[0], k_tokens=tokens[1], sequences=sequences, first=first)


class VarlenEngine:
    """Attention without a sink through a packed-sequence kernel, and its exact backward.

    Args:
        calls: from :func:`build_varlen_plan`.
        kernel: the kernel.
        scale: factor on the raw scores.
    """

    head_dim_multiple = 8
    max_head_dim: int | None = MAX_HEAD_DIM

    def __init__(self, calls: Sequence[VarlenCall], kernel: VarlenKernel, scale: float) -> None:
        self.calls = calls
        self.kernel = kernel
        self.scale = scale

    def forward(
        self,
        query: Float[Tensor, "B Hq Tq D"],
        key: Float[Tensor, "B Hkv Tk D"],
        value: Float[Tensor, "B Hkv Tk D"],
    ) -> tuple[Float[Tensor, "B Hq Tq D"], Float[Tensor, "B Hq Tq"]]:
        """Return (out, lse) over all calls, in at least fp32; a query that sees nothing has out 0 and lse -inf."""
        q, k, v = (_packed(x) for x in (query, key, value))
        accumulate = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(q.shape, dtype=accumulate)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=accumulate)
        for call in self.calls:
            part_k, part_v = _pick(k, call.k_tokens), _pick(v, call.k_tokens)
            part_out, part_lse = self.kernel.forward(
                _pick(q, call.q_tokens), part_k, part_v, call.sequences, self.scale
            )
            part_lse = part_lse.T.to(accumulate)
            part_lse = part_lse.masked_fill(part_lse == torch.inf, -torch.inf)
            if not call.first:
                held = (_pick(out, call.q_tokens), _pick(lse, call.q_tokens))
                part_out, part_lse = merge_parts(*held, part_out, part_lse)
            if call.q_tokens is None:
                out, lse = part_out.to(accumulate), part_lse
            else:
                out.index_copy_(0, call.q_tokens, part_out.to(accumulate))
                lse.index_copy_(0, call.q_tokens, part_lse)
        batch, length = query.shape[0], query.shape[2]
        return (
            torch.unflatten(out, 0, (batch, length)).transpose(1, 2),
            torch.unflatten(lse, 0, (batch, length)).transpose(1, 2),
        )

    def backward(
        self,
        grad: Float[Tensor, "B Hq Tq D"],
        query: Float[Tensor, "B Hq Tq D"],
        key: Float[Tensor, "B Hkv Tk D"],
        value: Float[Tensor, "B Hkv Tk D"],
        out: Float[Tensor, "B Hq Tq D"],
        lse: Float[Tensor, "B Hq Tq"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, given the final out and lse."""
        packed = [_packed(x) for x in (query, key, value)]
        q_side = [_packed(x) for x in (grad, query, out)]
        weightless = lse.masked_fill(lse == -torch.inf, torch.inf)
        packed_lse = weightless.transpose(1, 2).flatten(0, 1)
        accumulate = torch.promote_types(query.dtype, torch.float32)
        totals = [x.new_zeros(x.shape, dtype=accumulate) for x in packed]
        for call in self.calls:
            part_grad, part_q, part_out = (_pick(x, call.q_tokens) for x in q_side)
            part_k, part_v = (_pick(x, call.k_tokens) for x in packed[1:])
            part_lse = _pick(packed_lse, call.q_tokens).T.contiguous()
            parts = self.kernel.backward(
                part_grad, part_q, part_k, part_v, part_out, part_lse, call.sequences, self.scale
            )
            places = (call.q_tokens, call.k_tokens, call.k_tokens)
            for total, part, tokens in zip(totals, parts, places, strict=True):
                if tokens is None:
                    total.add_(part)
                else:
                    total.index_add_(0, tokens, part.to(accumulate))
        grads = [
            torch.unflatten(total, 0, (x.shape[0], x.shape[2])).transpose(1, 2).to(x.dtype)
            for total, x in zip(totals, (query, key, value), strict=True)
        ]
        return grads[0], grads[1], grads[2]


def _packed(x: Float[Tensor, "B H T D"]) -> Float[Tensor, "N H D"]:
    return x.transpose(1, 2).flatten(0, 1)


def _pick(x: Tensor, tokens: Tensor | None) -> Tensor:
    return x if tokens is None else x.index_select(0, tokens)
