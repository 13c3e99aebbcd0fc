"""The flash impl: any flash kernel, made sink-aware by a rescale in front and its own backward behind.

With ``l`` the kernel's log-sum-exp and ``s`` the sink logit, ``l' = logaddexp(l, s)`` and ``O' = O * exp(l - l')``.
A flash backward recomputes the weights as ``exp(scores - lse)`` and needs the output only for ``rowsum(dO * O)``, so
run on ``(O', l')`` it yields the exact dQ, dK and dV; the sink's gradient is ``-sum(exp(s - l') * rowsum(dO * O'))``.

A gradient of the returned log-sum-exp turns ``rowsum(dO * O')`` into ``rowsum(dO * O') - dlse``. No stock kernel takes
that, so the head dimension is widened: keys, queries and values get zero columns, the output columns of ones and its
gradient columns that add up to ``-dlse``. The kernel then computes exactly that row sum.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from sinkflex.attention.cpu import CpuEngine
from sinkflex.attention.kernels import kernel_for
from sinkflex.attention.layout import SequenceLayout
from sinkflex.attention.masks import MaskMod
from sinkflex.attention.plan import build_plan
from sinkflex.attention.varlen import VarlenEngine, build_varlen_plan


@runtime_checkable
class FlashEngine(Protocol):
    """Attention without a sink, and its backward for a given output and log-sum-exp."""

    head_dim_multiple: int
    """Head dimensions the kernel takes are multiples of this."""

    max_head_dim: int | None
    """The largest head dimension the kernel takes; None has no limit."""

    scale: float
    """Factor on the raw scores."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return (out [B, Hq, Tq, D], lse [B, Hq, Tq]); a query that sees nothing has out 0 and lse -inf."""
        ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value with weights ``exp(scores - lse)`` and delta ``rowsum(grad * out)``."""
        ...


def flash_attention(
    query: Float[Tensor, "B Hq Tq D"],
    key: Float[Tensor, "B Hkv Tk D"],
    value: Float[Tensor, "B Hkv Tk Dv"],
    sink_logits: Float[Tensor, " Hq"] | None,
    *,
    layout: SequenceLayout,
    window: int | None,
    num_sink_tokens: int,
    mask_mod: MaskMod | None,
    scale: float,
) -> tuple[Float[Tensor, "B Hq Tq Dv"], Float[Tensor, "B Hq Tq"]]:
    """Sink-aware attention through the device's flash kernel.

    Args:
        query: [B, Hq, Tq, D].
        key: [B, Hkv, Tk, D].
        value: [B, Hkv, Tk, Dv].
        sink_logits: [Hq], in the units of the scaled scores; None means no sink.
        layout: documents, padding and prefixes.
        window: keys a query sees at most, its own included, in logical positions; None means all.
        num_sink_tokens: keys at positions below this stay visible outside the window.
        mask_mod: the caller's own mask; CPU only.
        scale: factor on the raw scores.

    Returns:
        (out, lse): lse is natural, includes the sink, is at least fp32 and carries gradient, as do all inputs.
    """
    engine: FlashEngine
    if query.device.type == "cpu":
        plan = build_plan(
            layout,
            device=query.device,
            num_heads=query.shape[1],
            window=window,
            num_sink_tokens=num_sink_tokens,
            mask_mod=mask_mod,
        )
        engine = CpuEngine(plan, scale)
    else:
        varlen = build_varlen_plan(layout, device=query.device, window=window, num_sink_tokens=num_sink_tokens)
        engine = VarlenEngine(varlen, kernel_for(query.device), scale)
    return sink_attention_through(engine, query, key, value, sink_logits)


def sink_attention_through(
    engine: FlashEngine,
    query: Float[Tensor, "B Hq Tq D"],
    key: Float[Tensor, "B Hkv Tk D"],
    value: Float[Tensor, "B Hkv Tk Dv"],
    sink_logits: Float[Tensor, " Hq"] | None,
) -> tuple[Float[Tensor, "B Hq Tq Dv"], Float[Tensor, "B Hq Tq"]]:
    """Run an engine with the sink in front and the exact backward behind.

    Head dimensions that the kernel does not take, or that differ, are padded with zeros, which change no score.

    Args:
        engine: runs the kernel over one layout and mask.
        query: [B, Hq, Tq, D].
        key: [B, Hkv, Tk, D].
        value: [B, Hkv, Tk, Dv].
        sink_logits: [Hq] or None.
    """
    dim, value_dim = query.shape[-1], value.shape[-1]
    multiple = engine.head_dim_multiple
    wide = -(-max(dim, value_dim) // multiple) * multiple
    if dim < wide:
        query, key = (torch.nn.functional.pad(x, (0, wide - dim)) for x in (query, key))
    if value_dim < wide:
        value = torch.nn.functional.pad(value, (0, wide - value_dim))
    out, lse = _SinkFlash.apply(query, key, value, sink_logits, engine)  # type: ignore[no-untyped-call]
    return out[..., :value_dim], lse


class _SinkFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink_logits: Tensor | None, engine: FlashEngine
    ) -> tuple[Tensor, Tensor]:
        out, lse = engine.forward(query, key, value)
        if sink_logits is not None:
            sink = sink_logits.to(lse.dtype)[:, None]
            total = torch.logaddexp(lse, sink)
            # A query that saw nothing under a sink of -inf: its weight is 0, not exp(-inf + inf).
            weight = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))
            out, lse = out.mul_(weight[..., None]), total
        out = out.to(query.dtype)
        ctx.engine = engine
        ctx.save_for_backward(query, key, value, sink_logits, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
        query, key, value, sink_logits, out, lse = ctx.saved_tensors
        if grad is None and grad_lse is None:
            return None, None, None, None, None
        grad = torch.zeros_like(out) if grad is None else grad
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        grads: list[Tensor | None] = [None, None, None]
        if any(ctx.needs_input_grad[:3]):
            if grad_lse is None:
                grads = list(ctx.engine.backward(grad, query, key, value, out, lse))
            else:
                grads = list(_backward_with_lse(ctx.engine, grad, grad_lse, query, key, value, out, lse))
        grad_sink = None
        if sink_logits is not None and ctx.needs_input_grad[3]:
            grad_sink = _sink_gradient(grad, grad_lse, sink_logits, out, lse)
        return grads[0], grads[1], grads[2], grad_sink, None


def _backward_with_lse(
    engine: FlashEngine,
    grad: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    dim = query.shape[-1]
    columns = _summands(-grad_lse, grad.dtype)
    extra = -(-columns.shape[-1] // engine.head_dim_multiple) * engine.head_dim_multiple
    if engine.max_head_dim is not None and dim + extra > engine.max_head_dim:
        return _backward_in_two(engine, grad, grad_lse, query, key, value, out, lse)

    def widen(x: Tensor, column: Tensor | float) -> Tensor:
        wide = torch.nn.functional.pad(x, (0, extra))
        wide[..., dim : dim + columns.shape[-1]] = column
        return wide

    grads = engine.backward(
        widen(grad, columns), widen(query, 0.0), widen(key, 0.0), widen(value, 0.0), widen(out, 1.0), lse
    )
    return grads[0][..., :dim], grads[1][..., :dim], grads[2][..., :dim]


def _summands(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of ``dtype`` that add up to ``x`` [...]: [..., 1], or [..., 3] where ``dtype`` has fewer bits than x."""
    rest, parts = x, []
    for _ in range(1 if dtype == x.dtype else 3):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].to(x.dtype)
    return torch.stack(parts, dim=-1)


def _backward_in_two(
    engine: FlashEngine,
    grad: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Where no column is left to widen: with weights P, dlse adds ``scale * dlse * P K`` to dQ and the like to dK.

    ``P K`` is attention with the keys as values; ``P^T (dlse * Q)`` is the value gradient of ``dO = dlse * Q``.
    """
    grads = engine.backward(grad, query, key, value, out, lse)
    mean_key, plain_lse = engine.forward(query, key, key)
    share = torch.exp(plain_lse - lse.masked_fill(lse == -torch.inf, 0.0)) * grad_lse * engine.scale
    weighted = (query * (grad_lse * engine.scale)[..., None]).to(query.dtype)
    into_key = engine.backward(weighted, query, key, key, torch.zeros_like(weighted), lse)[2]
    into_query = (mean_key * share[..., None]).to(query.dtype)
    return grads[0] + into_query, grads[1] + into_key, grads[2]


def _sink_gradient(grad: Tensor, grad_lse: Tensor | None, sink_logits: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """ds_h = -sum over b, t of exp(s_h - l') * (rowsum(dO * O') - dlse)."""
    delta = torch.linalg.vecdot(grad.to(lse.dtype), out.to(lse.dtype))
    if grad_lse is not None:
        delta = delta - grad_lse
    sink = sink_logits.to(lse.dtype)[:, None]
    # Where nothing was seen under a sink of -inf, lse is -inf too and the sink's share is 0.
    share = torch.exp(sink - lse.masked_fill(lse == -torch.inf, 0.0))
    total: Tensor = -(share * delta).sum(dim=(0, 2))
    return total.to(sink_logits.dtype)
