"""The CUDA flash kernels behind the flash impl: torch's own, flash-attn 2, flash-attn 3.

All three work on packed tokens [N, H, D] with cumulative sequence lengths, align a causal mask at the end of each pair
of sequences, window natively, and return the log-sum-exp in natural log as [H, N]. Only what differs is here.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

MAX_HEAD_DIM = 256
"""The largest head dimension any of the kernels takes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """Which packed query sequence meets which packed key sequence.

    Attributes:
        cu_q: [n + 1] int32 cumulative query lengths.
        cu_k: [n + 1] int32 cumulative key lengths.
        max_q: longest query sequence.
        max_k: longest key sequence.
        causal: a query sees keys up to its own place counted from the end of both sequences.
        window: keys a query sees at most, its own included; None means all. Only with ``causal``.
    """

    cu_q: Int[Tensor, " n1"]
    cu_k: Int[Tensor, " n1"]
    max_q: int
    max_k: int
    causal: bool
    window: int | None = None

    @property
    def left(self) -> int:
        """How many keys before its own a query sees, -1 for all: the kernels' way to say a window."""
        return -1 if self.window is None else self.window - 1

    @property
    def right(self) -> int:
        """How many keys after its own a query sees, -1 for all."""
        return 0 if self.causal else -1


@runtime_checkable
class VarlenKernel(Protocol):
    """Attention over packed sequences, without a sink."""

    name: str

    def forward(
        self,
        q: Float[Tensor, "Nq Hq D"],
        k: Float[Tensor, "Nk Hkv D"],
        v: Float[Tensor, "Nk Hkv D"],
        sequences: Sequences,
        scale: float,
    ) -> tuple[Float[Tensor, "Nq Hq D"], Float[Tensor, "Hq Nq"]]:
        """Return (out, lse), lse natural and fp32; for a query without keys lse is infinite with either sign."""
        ...

    def backward(
        self,
        grad: Float[Tensor, "Nq Hq D"],
        q: Float[Tensor, "Nq Hq D"],
        k: Float[Tensor, "Nk Hkv D"],
        v: Float[Tensor, "Nk Hkv D"],
        out: Float[Tensor, "Nq Hq D"],
        lse: Float[Tensor, "Hq Nq"],
        sequences: Sequences,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v for weights ``exp(scores - lse)``; a query with lse +inf weighs nothing."""
        ...


class TorchFlash:
    """The flash kernel inside torch."""

    name = "torch's CUDA flash kernel"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float) -> tuple[Tensor, Tensor]:
        """See :class:`VarlenKernel`."""
        s = sequences
        out, lse = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            s.cu_q,
            s.cu_k,
            s.max_q,
            s.max_k,
            0.0,
            s.causal,
            False,
            scale=scale,
            window_size_left=s.left,
            window_size_right=s.right,
        )[:2]
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        sequences: Sequences,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`VarlenKernel`."""
        s = sequences
        # Without dropout the kernel reads neither random state, but wants tensors.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse,
            s.cu_q,
            s.cu_k,
            s.max_q,
            s.max_k,
            0.0,
            s.causal,
            state,
            unused,
            scale=scale,
            window_size_left=s.left,
            window_size_right=s.right,
        )
        return grads[0], grads[1], grads[2]


class FlashAttn2:
    """The flash-attn package, version 2.7 or newer."""

    name = "flash-attn 2"

    def __init__(self) -> None:
        from flash_attn import flash_attn_interface

        self._module: Any = flash_attn_interface

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float) -> tuple[Tensor, Tensor]:
        """See :class:`VarlenKernel`."""
        s = sequences
        out, lse = self._module._flash_attn_varlen_forward(
            q,
            k,
            v,
            s.cu_q,
            s.cu_k,
            s.max_q,
            s.max_k,
            0.0,
            scale,
            s.causal,
            window_size_left=s.left,
            window_size_right=s.right,
        )[:2]
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        sequences: Sequences,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`VarlenKernel`."""
        s = sequences
        grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        self._module._flash_attn_varlen_backward(
            grad,
            q,
            k,
            v,
            out,
            lse,
            *grads,
            s.cu_q,
            s.cu_k,
            s.max_q,
            s.max_k,
            0.0,
            scale,
            s.causal,
            s.left,
            s.right,
            0.0,
            None,
            False,
        )
        return grads[0], grads[1], grads[2]


class FlashAttn3:
    """The Hopper kernels of flash-attn 3."""

    name = "flash-attn 3"

    def __init__(self) -> None:
        import flash_attn_interface

        self._module: Any = flash_attn_interface
        # Releases differ: at first the window was one argument, a pair, since then it is two.
        self._window_is_pair = "window_size" in inspect.signature(flash_attn_interface._flash_attn_forward).parameters

    def _window(self, sequences: Sequences) -> tuple[Any, ...]:
        pair = (sequences.left, sequences.right)
        return (pair,) if self._window_is_pair else pair

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float) -> tuple[Tensor, Tensor]:
        """See :class:`VarlenKernel`."""
        s = sequences
        names = ("window_size",) if self._window_is_pair else ("window_size_left", "window_size_right")
        out, lse = self._module._flash_attn_forward(
            q,
            k,
            v,
            cu_seqlens_q=s.cu_q,
            cu_seqlens_k=s.cu_k,
            max_seqlen_q=s.max_q,
            max_seqlen_k=s.max_k,
            softmax_scale=scale,
            causal=s.causal,
            **dict(zip(names, self._window(s), strict=True)),
        )[:2]
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        sequences: Sequences,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`VarlenKernel`."""
        s = sequences
        grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        # By place: the name of the causal flag differs between releases, the order does not.
        self._module._flash_attn_backward(
            grad, q, k, v, out, lse, s.cu_q, s.cu_k, None, None, s.max_q, s.max_k, *grads, scale, s.causal,
            *self._window(s),
        )  # fmt: skip
        return grads[0], grads[1], grads[2]


@functools.cache
def kernel_for(device: torch.device) -> VarlenKernel:
    """The fastest installed kernel for a CUDA device: flash-attn 3 on Hopper, flash-attn 2, else torch's own."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9
    if hopper and importlib.util.find_spec("flash_attn_interface") is not None:
        return FlashAttn3()
    if torch.cuda.is_available() and importlib.util.find_spec("flash_attn_2_cuda") is not None:
        return FlashAttn2()
    return TorchFlash()
