"""``sink_attention``: checks its arguments, chooses an impl, and runs it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from sinkflex.attention.dispatch import choose_impl
from sinkflex.attention.flash import flash_attention
from sinkflex.attention.flex import flex_sink_attention
from sinkflex.attention.layout import SequenceLayout
from sinkflex.attention.masks import MaskMod, dense_mask
from sinkflex.attention.reference import reference_attention
from sinkflex.errors import AttentionError


def sink_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink_logits: Tensor | None = None,
    *,
    layout: SequenceLayout | None = None,
    window: int | None = None,
    num_sink_tokens: int = 0,
    mask_mod: MaskMod | None = None,
    scale: float | None = None,
    impl: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention whose denominator holds a learned sink: ``softmax([scores, sink])`` without the sink's column.

    A query sees the keys that ``layout``, ``window`` and ``mask_mod`` all allow. One that sees nothing gets 0.

    Args:
        query: [B, Hq, Tq, D].
        key: [B, Hkv, Tk, D]; Hq is a multiple of Hkv, query head ``h`` reads key head ``h // (Hq / Hkv)``.
        value: [B, Hkv, Tk, Dv].
        sink_logits: [Hq] learned logit of each head's sink, in the units of the scaled scores. None is plain softmax,
            as is -inf.
        layout: padding, packed documents, prefix trees, caches. None means causal, and with Tq < Tk that the queries
            are the last Tq keys.
        window: keys a query sees at most, its own included, counted in logical positions (gpt-oss: 128). None: all.
        num_sink_tokens: keys at logical positions below this stay visible outside the window.
        mask_mod: hides more keys; FlexAttention's ``(b, h, q, k) -> bool`` over columns, True means visible.
        scale: factor on the raw scores; None means ``D ** -0.5``.
        impl: "reference", "flex", "flash" or "auto"; see :func:`sinkflex.attention.explain_impl`.
        return_lse: also return the log-sum-exp.

    Returns:
        out [B, Hq, Tq, Dv]; with ``return_lse`` also lse [B, Hq, Tq]: natural log, the sink included, fp32 (fp64 for
        fp64 input), -inf where a query sees nothing and has no sink. Both carry gradient to all four tensors.

    Raises:
        AttentionError: shapes, dtypes or devices do not fit together, ``window`` is below 1, ``num_sink_tokens`` is
            negative, ``impl`` is unknown, or ``layout`` is for other shapes or another device.
        UnsupportedError: the ``impl`` asked for cannot run this; the message says what can.
    """
    _check_tensors(query, key, value, sink_logits)
    _check_options(window, num_sink_tokens)
    batch, num_heads, num_queries, dim = query.shape
    if layout is None:
        layout = _causal(batch, key.shape[2], num_queries, query.device)
    else:
        _check_layout(layout, query, key)
    scale = dim**-0.5 if scale is None else float(scale)
    chosen = choose_impl(impl, query, key, value, sink_logits, mask_mod=mask_mod)
    if chosen == "reference":
        seen = dense_mask(
            layout, num_heads=num_heads, window=window, num_sink_tokens=num_sink_tokens, mask_mod=mask_mod
        )
        out, lse = reference_attention(query, key, value, sink_logits, seen, scale=scale)
    else:
        run = flex_sink_attention if chosen == "flex" else flash_attention
        out, lse = run(
            query,
            key,
            value,
            sink_logits,
            layout=layout,
            window=window,
            num_sink_tokens=num_sink_tokens,
            mask_mod=mask_mod,
            scale=scale,
        )
    return (out, lse) if return_lse else out


@functools.lru_cache(maxsize=16)
def _causal(batch: int, num_keys: int, num_queries: int, device: torch.device) -> SequenceLayout:
    """The default layout, kept so that all layers of a model share its plan."""
    return SequenceLayout.causal(batch, num_keys, num_queries=num_queries, device=device)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, sink_logits: Tensor | None) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise AttentionError(f"{name} has shape {tuple(x.shape)}; expected [batch, heads, tokens, head dim]")
        if not x.is_floating_point() or x.dtype != query.dtype or x.device != query.device:
            raise AttentionError(
                f"{name} is {x.dtype} on {x.device}; query is {query.dtype} on {query.device}. "
                "All three must share one floating dtype and device."
            )
    if key.shape[:3] != value.shape[:3]:
        raise AttentionError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must agree in batch, heads and tokens"
        )
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise AttentionError(f"query {tuple(query.shape)} and key {tuple(key.shape)} must agree in batch and head dim")
    heads, key_heads = query.shape[1], key.shape[1]
    if heads % key_heads:
        raise AttentionError(f"query has {heads} heads, no multiple of key's {key_heads}; see grouped-query attention")
    if not 1 <= query.shape[2] <= key.shape[2]:
        raise AttentionError(
            f"query has {query.shape[2]} tokens and key {key.shape[2]}; expected 1 <= queries <= keys, "
            "since the queries' own keys are part of key"
        )
    if sink_logits is not None and (sink_logits.shape != (heads,) or sink_logits.device != query.device):
        raise AttentionError(
            f"sink_logits has shape {tuple(sink_logits.shape)} on {sink_logits.device}; expected one logit per query "
            f"head, ({heads},) on {query.device}"
        )


def _check_options(window: int | None, num_sink_tokens: int) -> None:
    if window is not None and window < 1:
        raise AttentionError(f"window is {window}; expected at least 1 (the query's own key), or None for no window")
    if num_sink_tokens < 0:
        raise AttentionError(f"num_sink_tokens is {num_sink_tokens}; expected 0 or more")


def _check_layout(layout: SequenceLayout, query: Tensor, key: Tensor) -> None:
    expected = (query.shape[0], query.shape[2], key.shape[2])
    got = (layout.batch, layout.num_queries, layout.num_keys)
    if got != expected:
        raise AttentionError(f"layout describes (batch, queries, keys) = {got}, but query and key have {expected}")
    if layout.device != query.device:
        raise AttentionError(
            f"layout is on {layout.device} and query on {query.device}; move it once per batch with layout.to(device)"
        )
