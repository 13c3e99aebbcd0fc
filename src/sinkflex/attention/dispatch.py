"""Which impl runs, and why."""

from __future__ import annotations

import torch
from torch import Tensor

from sinkflex.attention.kernels import MAX_HEAD_DIM, kernel_for
from sinkflex.attention.masks import MaskMod
from sinkflex.errors import AttentionError, UnsupportedError, unknown_name

IMPLS = ("auto", "flash", "flex", "reference")
"""What ``sink_attention(impl=...)`` accepts."""

_HALF = (torch.float16, torch.bfloat16)


def explain_impl(
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    head_dim: int = 64,
    mask_mod: bool = False,
) -> tuple[str, str]:
    """What ``impl="auto"`` runs in a given situation.

    Args:
        device: where the tensors live.
        dtype: of query, key and value.
        head_dim: the larger of the two head dimensions.
        mask_mod: whether a ``mask_mod`` is passed.

    Returns:
        (impl, reason): reason is one sentence.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return "flash", "torch's CPU flash kernel takes every mask, in linear memory, with exact gradients"
    if device.type != "cuda":
        return "reference", f"there is no flash or flex kernel with gradients for {device.type}; memory is quadratic"
    if mask_mod:
        return "flex", "flash kernels on CUDA take no mask_mod; FlexAttention compiles it in"
    if _older_than_ampere(device):
        return "flex", "flash kernels on CUDA need compute capability 8.0 (Ampere) or newer"
    if dtype not in _HALF:
        return "flex", f"flash kernels on CUDA want fp16 or bf16, not {dtype}; FlexAttention takes it"
    if head_dim > MAX_HEAD_DIM:
        return "flex", f"flash kernels on CUDA stop at head dim {MAX_HEAD_DIM}; FlexAttention takes {head_dim}"
    return "flash", f"{kernel_for(device).name} runs documents, windows and prefix trees without a mask tensor"


def choose_impl(
    impl: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink_logits: Tensor | None,
    *,
    mask_mod: MaskMod | None,
) -> str:
    """Resolve "auto" and refuse what the named impl cannot do.

    Args:
        impl: one of :data:`IMPLS`.
        query: [B, Hq, Tq, D].
        key: [B, Hkv, Tk, D].
        value: [B, Hkv, Tk, Dv].
        sink_logits: [Hq] or None.
        mask_mod: the caller's mask or None.

    Raises:
        AttentionError: ``impl`` is no impl.
        UnsupportedError: the impl cannot honour an argument, device or dtype.
    """
    if impl not in IMPLS:
        raise AttentionError(unknown_name("impl", impl, IMPLS))
    head_dim = max(query.shape[-1], value.shape[-1])
    if impl == "auto":
        return explain_impl(query.device, query.dtype, head_dim=head_dim, mask_mod=mask_mod is not None)[0]
    device = query.device.type
    tensors = (query, key, value, sink_logits)
    wants_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if impl == "flex":
        if device not in ("cpu", "cuda"):
            raise UnsupportedError(f'impl="flex" does not run on {device}; use impl="reference"')
        if device == "cpu" and wants_grad:
            raise UnsupportedError(
                'impl="flex" has no gradients on CPU (torch refuses requires_grad there); use impl="flash" or "auto"'
            )
    if impl == "flash":
        _check_flash(query, head_dim, mask_mod)
    return impl


def _older_than_ampere(device: torch.device) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] < 8


def _check_flash(query: Tensor, head_dim: int, mask_mod: MaskMod | None) -> None:
    device, dtype = query.device.type, query.dtype
    if device not in ("cpu", "cuda"):
        raise UnsupportedError(f'impl="flash" does not run on {device}; use impl="reference"')
    if device == "cpu":
        return
    if _older_than_ampere(query.device):
        raise UnsupportedError(
            'impl="flash" needs compute capability 8.0 (Ampere) or newer on CUDA; use impl="flex" or "auto"'
        )
    if mask_mod is not None:
        raise UnsupportedError('impl="flash" takes no mask_mod on CUDA; use impl="flex" or "auto"')
    if dtype not in _HALF:
        raise UnsupportedError(f'impl="flash" wants fp16 or bf16 on CUDA, not {dtype}; use impl="flex" or "auto"')
    if head_dim > MAX_HEAD_DIM:
        raise UnsupportedError(
            f'impl="flash" stops at head dim {MAX_HEAD_DIM} on CUDA, not {head_dim}; use impl="flex" or "auto"'
        )
