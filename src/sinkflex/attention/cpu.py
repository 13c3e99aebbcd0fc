"""Running a plan with torch's CPU flash op: forward, merge by log-sum-exp, and backward on the merged result."""

from __future__ import annotations

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

        Both are fresh memory, lse and a merged out in at least fp32.
        """
        if self.plan.whole:
            return _attend(self.plan.calls[0], query, key, value, self.scale)
        batch, heads, length, dim = query.shape
        accumulate = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros((batch * length + 1, heads, dim), dtype=accumulate)
        lse = query.new_full((batch * length + 1, heads), -torch.inf, dtype=accumulate)
        q, k, v = Tokens(query), Tokens(key), Tokens(value)
        for call in self.plan.calls:
            part_out, part_lse = _attend(call, q.read(call.q), k.read(call.k), v.read(call.k), self.scale)
            part_out, part_lse = part_out.transpose(1, 2), part_lse.transpose(1, 2)
            if not call.first:
                held = (call.q.tokens(out), call.q.tokens(lse))
                part_out, part_lse = merge_parts(*held, part_out, part_lse)
            call.q.write(out, part_out)
            call.q.write(lse, part_lse)
        tokens = batch * length
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
        if self.plan.whole:
            safe = lse.masked_fill(lse == -torch.inf, torch.inf)
            return _attend_backward(self.plan.calls[0], grad, query, key, value, out, safe, self.scale)
        accumulate = torch.promote_types(query.dtype, torch.float32)
        grads = [
            x.new_zeros((x.shape[0] * x.shape[2] + 1, x.shape[1], x.shape[3]), dtype=accumulate)
            for x in (query, key, value)
        ]
        q_side = [Tokens(x) for x in (grad, query, out)]
        k_side = [Tokens(x) for x in (key, value)]
        flat_lse = weightless(lse)
        for call in self.plan.calls:
            part_grad, part_q, part_out = (x.read(call.q) for x in q_side)
            part_k, part_v = (x.read(call.k) for x in k_side)
            part_lse = read_lse(call.q, flat_lse)
            parts = _attend_backward(call, part_grad, part_q, part_k, part_v, part_out, part_lse, self.scale)
            for rows, total, part in zip((call.q, call.k, call.k), grads, parts, strict=True):
                rows.add(total, part.transpose(1, 2))
        return tuple(  # type: ignore[return-value]
            total[:-1].view(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2).to(x.dtype)
            for total, x in zip(grads, (query, key, value), strict=True)
        )


def _attend(call: Call, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One call on [n, Hq, L, D]: (out, lse), both fresh memory."""
    bias, dead = call.bias(q.dtype)
    heads = HeadGroups.of(q, k, v, per_row_bias=bias is not None and bias.shape[0] > 1)
    bias = heads.bias(bias)
    outs, lses = [], []
    for part_q, part_k, part_v in zip(heads.queries(q), heads.keys(k), heads.keys(v), strict=True):
        out, lse = _forward_op(part_q, part_k, part_v, 0.0, call.causal, attn_mask=bias, scale=scale)
        outs.append(out)
        lses.append(lse[..., None])
    out, lse = heads.join_queries(outs), heads.join_queries(lses)[..., 0]
    if dead is not None:
        # The op reports 0, not -inf, for a query whose keys are all hidden.
        lse = lse.masked_fill(dead, -torch.inf)
    return out, lse


def _attend_backward(
    call: Call,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one call's q, k and v [n, H, L, D]; lse is +inf where a query's weights are to be zero."""
    bias, _ = call.bias(q.dtype)
    heads = HeadGroups.of(q, k, v, grad, out, per_row_bias=bias is not None and bias.shape[0] > 1)
    bias = heads.bias(bias)
    q_side = [heads.queries(x) for x in (grad, q, out, lse[..., None])]
    parts = []
    for part_grad, part_q, part_out, part_lse, part_k, part_v in zip(
        *q_side, heads.keys(k), heads.keys(v), strict=True
    ):
        parts.append(
            _backward_op(
                part_grad,
                part_q,
                part_k,
                part_v,
                part_out,
                part_lse[..., 0],
                0.0,
                call.causal,
                attn_mask=bias,
                scale=scale,
            )
        )
    grad_q, grad_k, grad_v = zip(*parts, strict=True)
    return heads.join_queries(grad_q), heads.join_keys(grad_k), heads.join_keys(grad_v)
