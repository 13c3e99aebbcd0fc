"""The flash impl: any flash kernel, made sink-aware by a rescale in front and its own backward behind.

With ``l`` the kernel's log-sum-exp and ``s`` the sink logit, ``l' = logaddexp(l, s)`` and ``O' = O * exp(l - l')``. A
flash backward recomputes the weights as ``exp(scores - lse)`` and needs the output only for ``rowsum(dO * O)``, so run on
``(O', l')`` it yields the exact dQ, dK and dV; the sink's own gradient is ``-sum(exp(s - l') * rowsum(dO * O'))``.

A gradient of the returned log-sum-exp turns ``rowsum(dO * O')`` into ``rowsum(dO * O') - dlse``. No stock kernel takes
that, so the head dimension is widened: keys, queries and values get a zero column, the output a column of ones and its
gradient a column of ``-dlse``. The kernel then computes exactly that row sum.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


class FlashEngine(Protocol):
    """Attention without a sink, and its backward for a given output and log-sum-exp."""

    head_dim_multiple: int
    """Head dimensions the kernel takes are multiples of this."""

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
    value: Float[Tensor, "B Hkv Tk D"],
    sink_logits: Float[Tensor, " Hq"] | None,
    engine: FlashEngine,
) -> tuple[Float[Tensor, "B Hq Tq D"], Float[Tensor, "B Hq Tq"]]:
    """Sink-aware attention through a flash engine.

    Args:
        query: [B, Hq, Tq, D].
        key: [B, Hkv, Tk, D].
        value: [B, Hkv, Tk, D].
        sink_logits: [Hq], in the units of the scaled scores; None means no sink.
        engine: runs the kernel over one layout and mask.

    Returns:
        (out, lse): lse is natural, includes the sink, is at least fp32 and carries gradient, as do all inputs.
    """
    out, lse = _SinkFlash.apply(query, key, value, sink_logits, engine)
    return out, lse


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
    extra = engine.head_dim_multiple

    def widen(x: Tensor, column: Tensor | float) -> Tensor:
        wide = torch.nn.functional.pad(x, (0, extra))
        wide[..., dim] = column
        return wide

    grads = engine.backward(
        widen(grad, -grad_lse.to(grad.dtype)),
        widen(query, 0.0),
        widen(key, 0.0),
        widen(value, 0.0),
        widen(out, 1.0),
        lse,
    )
    return grads[0][..., :dim], grads[1][..., :dim], grads[2][..., :dim]


def _sink_gradient(
    grad: Tensor, grad_lse: Tensor | None, sink_logits: Tensor, out: Tensor, lse: Tensor
) -> Tensor:
    """ds_h = -sum over b, t of exp(s_h - l') * (rowsum(dO * O') - dlse)."""
    delta = torch.linalg.vecdot(grad.to(lse.dtype), out.to(lse.dtype))
    if grad_lse is not None:
        delta = delta - grad_lse
    sink = sink_logits.to(lse.dtype)[:, None]
    # Where nothing was seen under a sink of -inf, lse is -inf too and the sink's share is 0.
    share = torch.exp(sink - lse.masked_fill(lse == -torch.inf, 0.0))
    return -(share * delta).sum(dim=(0, 2)).to(sink_logits.dtype)
