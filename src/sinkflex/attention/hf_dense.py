"""Layers whose visibility or scores no kernel takes: computed as eager does, with eager's memory."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
from torch import Tensor

from sinkflex.attention.reference import reference_attention
from sinkflex.errors import AttentionError, UnsupportedError

logger = logging.getLogger(__name__)


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    visible: Tensor,
    *,
    scale: float | None,
    bias: Tensor | None,
) -> Tensor:
    """Attention over a mask held whole.

    Args:
        query: [B, Hq, Tq, D].
        key: [B, Hkv, Tk, D].
        value: [B, Hkv, Tk, Dv].
        sinks: [Hq] logits, [B, Hq, Tq, 1] logits of each query's own sink, or None.
        visible: [B, 1 or Hq, Tq, Tk] True where visible.
        scale: factor on the raw scores; None takes 1 / sqrt(D).
        bias: added to the scaled scores, [B, Hq, Tq, Tk] or one that broadcasts to it, or None.
    """
    if bias is not None:
        bias = _full_bias(bias, (*query.shape[:3], key.shape[2]))
    if sinks is not None and sinks.dim() == 4:
        sinks = sinks.squeeze(-1)
    out, _ = reference_attention(
        query, key, value, sinks, visible, scale=query.shape[-1] ** -0.5 if scale is None else scale, bias=bias
    )
    return out


def _full_bias(bias: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    try:
        return bias.expand(shape)
    except RuntimeError as error:
        raise AttentionError(
            f"position_bias has shape {tuple(bias.shape)}; expected [batch, heads, queries, keys] = {shape}, or one "
            "that broadcasts to it"
        ) from error


def visible_by_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Turn a boolean or additive [B, 1 or H, Tq, Tk] mask into True where visible."""
    wanted = (query.shape[0], query.shape[2], key.shape[2])
    if mask.dim() != 4 or (mask.shape[0], *mask.shape[2:]) not in (wanted, (1, *wanted[1:])):
        raise AttentionError(
            f"attention_mask has shape {tuple(mask.shape)}; expected [batch, 1 or heads, queries, keys] with batch, "
            f"queries, keys = {wanted}"
        )
    if mask.dtype == torch.bool:
        return mask.expand(query.shape[0], -1, -1, -1)
    # Eager adds finfo.min, of whatever dtype the mask was made in, or -inf.
    visible = mask > torch.finfo(torch.float16).min / 2
    if bool((mask.masked_fill(~visible, 0.0) != 0).any()):
        raise UnsupportedError("attention_mask carries additive biases other than hide-or-show; use eager for those")
    return visible.expand(query.shape[0], -1, -1, -1)


def select_keys(visible: Tensor, indices: Tensor | None) -> Tensor:
    """Keep only the keys named in ``indices`` [B, Tq, k] (sparse attention by an indexer)."""
    if indices is None:
        return visible
    batch, _, queries, keys = visible.shape
    chosen = torch.zeros(batch, queries, keys, dtype=torch.bool, device=visible.device)
    return visible & chosen.scatter_(-1, indices.long(), True)[:, None]


@lru_cache(maxsize=64)
def log_dense(module: str) -> None:
    """Say once for each kind of layer that it is computed densely."""
    logger.warning(
        "%s has a mask that is no layout's (4-D, edited by the layer, or bidirectional), or a bias or sink for each "
        "query; sinkflex computes it densely (exact, memory grows with the square of the length as in eager)",
        module,
    )
