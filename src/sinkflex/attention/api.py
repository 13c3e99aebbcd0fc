"""``sink_attention``: checks its arguments, chooses an impl, and runs it."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from sinkflex.attention.cpu import CpuEngine
from sinkflex.attention.flash import flash_attention
from sinkflex.attention.layout import SequenceLayout
from sinkflex.attention.masks import MaskMod, dense_mask
from sinkflex.attention.plan import build_plan
from sinkflex.attention.reference import reference_attention
from sinkflex.errors import AttentionError


def sink_attention(
    query: Float[Tensor, "B Hq Tq D"],
    key: Float[Tensor, "B Hkv Tk D"],
    value: Float[Tensor, "B Hkv Tk Dv"],
    sink_logits: Float[Tensor, " Hq"] | None = None,
    *,
    layout: SequenceLayout | None = None,
    window: int | None = None,
    num_sink_tokens: int = 0,
    mask_mod: MaskMod | None = None,
    scale: float | None = None,
    impl: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    batch, heads, tq, dim = query.shape
    if layout is None:
        layout = SequenceLayout.causal(batch, key.shape[2], num_queries=tq, device=query.device)
    scale = dim**-0.5 if scale is None else scale
    if impl == "reference":
        seen = dense_mask(layout, num_heads=heads, window=window, num_sink_tokens=num_sink_tokens, mask_mod=mask_mod)
        out, lse = reference_attention(query, key, value, sink_logits, seen, scale=scale)
    else:
        plan = build_plan(layout, device=query.device, num_heads=heads, window=window,
                          num_sink_tokens=num_sink_tokens, mask_mod=mask_mod)
        out, lse = flash_attention(query, key, value, sink_logits, CpuEngine(plan, scale))
    return (out, lse) if return_lse else out
