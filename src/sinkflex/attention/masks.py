"""Masks over a layout: the dense one that defines visibility, and small ``mask_mod`` factories that compose.

A ``mask_mod`` has FlexAttention's signature ``(b, h, q, k) -> bool``: batch row, query head, query column and key
column, each a scalar index tensor; True means visible. Join several with torch's ``and_masks``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor

from sinkflex.attention.layout import SequenceLayout

MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``(b, h, q, k) -> bool``: True where query column ``q`` of row ``b``, head ``h`` may see key column ``k``."""


def visible(
    layout: SequenceLayout,
    *,
    window: int | None = None,
    num_sink_tokens: int = 0,
    rows: slice = slice(None),
    columns: slice = slice(None),
) -> Bool[Tensor, "B Tq Tk"]:
    """The definition of visibility, as a dense mask.

    Args:
        layout: documents, padding and prefixes.
        window: keys a query sees at most, its own included, counted in logical positions; None means all.
        num_sink_tokens: keys at positions below this stay visible outside the window.
        rows: the batch rows wanted.
        columns: the query columns wanted.

    Returns:
        [rows wanted, queries wanted, Tk] True where the query may see the key.
    """
    q_enter, q_position = layout.q_enter[rows, columns, None], layout.q_position[rows, columns, None]
    enter, leave, position = layout.enter[rows, None], layout.exit[rows, None], layout.position[rows, None]
    seen = (enter <= q_enter) & (q_enter < leave) & (position <= q_position)
    if window is not None:
        seen &= (q_position - position < window) | (position < num_sink_tokens)
    return seen


def dense_mask(
    layout: SequenceLayout,
    *,
    num_heads: int,
    window: int | None = None,
    num_sink_tokens: int = 0,
    mask_mod: MaskMod | None = None,
    rows: slice = slice(None),
    columns: slice = slice(None),
) -> Bool[Tensor, "B H Tq Tk"]:
    """:func:`visible` joined with the caller's own ``mask_mod``.

    Args:
        layout: documents, padding and prefixes.
        num_heads: query heads, each shown to ``mask_mod``.
        window: see :func:`visible`.
        num_sink_tokens: see :func:`visible`.
        mask_mod: the caller's mask; it can only hide keys, never reveal them.
        rows: the batch rows wanted.
        columns: the query columns wanted.

    Returns:
        [B, 1, queries, Tk] without ``mask_mod``, [B, num_heads, queries, Tk] with it.
    """
    seen = visible(layout, window=window, num_sink_tokens=num_sink_tokens, rows=rows, columns=columns)[:, None]
    if mask_mod is None:
        return seen
    over_k = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    over_q = torch.vmap(over_k, in_dims=(None, None, 0, None))
    over_h = torch.vmap(over_q, in_dims=(None, 0, None, None))
    over_b = torch.vmap(over_h, in_dims=(0, None, None, None))

    def index(size: int) -> Tensor:
        return torch.arange(size, device=layout.device)

    q_columns = index(layout.num_queries)[columns]
    allowed: Tensor = over_b(index(layout.batch)[rows], index(num_heads), q_columns, index(layout.num_keys))
    return seen & allowed


def sliding_window(layout: SequenceLayout, window: int, num_sink_tokens: int = 0) -> MaskMod:
    """Keys less than ``window`` logical positions back, and the first ``num_sink_tokens`` of the sequence.

    Args:
        layout: gives the logical positions.
        window: keys a query sees at most, its own included.
        num_sink_tokens: keys at positions below this stay visible.
    """
    q_position, position = layout.q_position, layout.position

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q_position[b, q] - position[b, k] < window) | (position[b, k] < num_sink_tokens)

    return mask


def chunked_local(layout: SequenceLayout, chunk: int) -> MaskMod:
    """Keys in the query's own block of ``chunk`` logical positions.

    ``layout.chunked(chunk)`` says the same as structure, which every impl runs at cost linear in the length; use this
    mask to give single heads a different pattern.

    Args:
        layout: gives the logical positions.
        chunk: positions a block.
    """
    q_position, position = layout.q_position, layout.position

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q_position[b, q] // chunk == position[b, k] // chunk

    return mask
