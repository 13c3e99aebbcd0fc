"""Running a plan with torch's CPU flash op: forward, merge by log-sum-exp, and backward on the merged result."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from sinkflex.attention.heads import HeadGroups
from sinkflex.attention.merge import merge_parts
from sinkflex.attention.plan import Call, Plan
from sinkflex.attention.rows import Tokens, read_lse, weightless

_forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class CpuEngine:
    """Attention without a sink over a plan, and its exact backward for a changed output and log-sum-exp.

    Args:
        plan: the kernel calls.
        scale: factor on the raw scores.
    """

    head_dim_multiple = 1
    max_head_dim: int | None = None

    def __init__(self, plan: Plan, scale: float) -> None:
        self.plan = plan
        self.scale = scale

    def forward(
        self,
        query: Float[Tensor, "B Hq Tq D"],
        key: Float[Tensor, "B Hkv Tk D"],
        value: Float[Tensor, "B Hkv Tk D"],
    ) -> tuple[Float[Tensor, "B Hq Tq D"], Float[Tensor, "B Hq Tq"]]:
        """Return (out, lse) over all calls; a query that sees nothing has out 0 and lse -inf.

        Both are fresh memory; lse, and an out merged of parts, are at least fp32.
        """
        batch, heads, length, dim = query.shape
        tokens = batch * length
        if self.plan.whole and heads == key.shape[1]:
            ((_, _, out, lse),) = _attend(self.plan.calls[0], query, key, value, self.scale)
            return out, lse
        accumulate = query.dtype if self.plan.whole else torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros((tokens + 1, heads, dim), dtype=accumulate)
        lse_dtype = torch.promote_types(query.dtype, torch.float32)
        lse = query.new_full((tokens + 1, heads), -torch.inf, dtype=lse_dtype)
        q, k, v = Tokens(query), Tokens(key), Tokens(value)
        for call in self.plan.calls:
            rows = call.q
            parts = _attend(call, q.read(rows), k.read(call.k), v.read(call.k), self.scale)
            for heads_of, number, part_out, part_lse in parts:
                out_place, lse_place = heads_of.query_place(out, number), heads_of.query_place(lse, number)
                part_out, part_lse = heads_of.query_slots(part_out), heads_of.query_slots(part_lse)
                if not call.first:
                    held = (rows.tokens(out_place), rows.tokens(lse_place))
                    part_out, part_lse = merge_parts(*held, part_out, part_lse)
                rows.write(out_place, part_out)
                rows.write(lse_place, part_lse)
        return (
            out[:tokens].view(batch, length, heads, dim).transpose(1, 2),
            lse[:tokens].view(batch, length, heads).transpose(1, 2),
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
        inputs = (query, key, value)
        if self.plan.whole and query.shape[1] == key.shape[1]:
            safe = lse.masked_fill(lse == -torch.inf, torch.inf)
            parts = _attend_backward(self.plan.calls[0], grad, *inputs, out, safe, self.scale)
            ((_, _, whole),) = parts
            return whole
        accumulate = torch.promote_types(query.dtype, torch.float32)
        totals = [x.new_zeros((x.shape[0] * x.shape[2] + 1, x.shape[1], x.shape[3]), dtype=accumulate) for x in inputs]
        grads, q, k, v, outs = (Tokens(x) for x in (grad, *inputs, out))
        flat_lse = weightless(lse)
        for call in self.plan.calls:
            rows = call.q
            parts = _attend_backward(
                call,
                grads.read(rows),
                q.read(rows),
                k.read(call.k),
                v.read(call.k),
                outs.read(rows),
                read_lse(rows, flat_lse),
                self.scale,
            )
            for heads_of, number, (grad_q, grad_k, grad_v) in parts:
                rows.add(heads_of.query_place(totals[0], number), heads_of.query_slots(grad_q))
                call.k.add(heads_of.key_place(totals[1], number), heads_of.key_slots(grad_k))
                call.k.add(heads_of.key_place(totals[2], number), heads_of.key_slots(grad_v))
        finished = [
            total[:-1].view(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2).to(x.dtype)
            for total, x in zip(totals, inputs, strict=True)
        ]
        return finished[0], finished[1], finished[2]


def _attend(
    call: Call, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> Iterator[tuple[HeadGroups, int, Tensor, Tensor]]:
    """Run one call on [n, H, L, D]: for each op call its heads, its number, and (out, lse) as the op gives them."""
    bias, dead = call.bias(q.dtype)
    heads = HeadGroups.of(q, k, v, per_row_bias=bias is not None and bias.shape[0] > 1)
    bias, dead = heads.bias(bias), heads.dead(dead)
    for number in heads.calls:
        part_q, part_k, part_v = heads.queries(q, number), heads.keys(k, number), heads.keys(v, number)
        out, lse = _forward_op(part_q, part_k, part_v, 0.0, call.causal, attn_mask=bias, scale=scale)
        # The op reports 0, not -inf, for a query whose keys are all hidden.
        yield heads, number, out, lse if dead is None else lse.masked_fill(dead, -torch.inf)


def _attend_backward(
    call: Call,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> Iterator[tuple[HeadGroups, int, tuple[Tensor, Tensor, Tensor]]]:
    """Gradients of one call's q, k and v, per op call; lse is +inf where a query's weights are to be zero."""
    bias, _ = call.bias(q.dtype)
    heads = HeadGroups.of(q, k, v, grad, out, per_row_bias=bias is not None and bias.shape[0] > 1)
    bias = heads.bias(bias)
    lse = lse[..., None]
    for number in heads.calls:
        grads = _backward_op(
            heads.queries(grad, number),
            heads.queries(q, number),
            heads.keys(k, number),
            heads.keys(v, number),
            heads.queries(out, number),
            heads.queries(lse, number)[..., 0],
            0.0,
            call.causal,
            attn_mask=bias,
            scale=scale,
        )
        yield heads, number, grads
