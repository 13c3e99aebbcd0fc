"""Transformers' mask requests, answered with a ``SequenceLayout`` instead of a [B, 1, Tq, Tk] tensor.

Transformers describes a mask as a composition of small functions over (batch, head, query, key) indices, plus a 2-D
padding mask and cache offsets. The compositions it builds itself are read here for what they say (causal, window,
chunk, packed documents); any other one is evaluated as a dense mask, exactly, at eager's cost, and logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sinkflex.attention.layout import SequenceLayout

logger = logging.getLogger(__name__)

MaskFunction = Callable[..., Any]

EDITED_MASK_LAYERS = frozenset(
    {"indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse"}
)
"""Layer types whose modules add to the mask they are given (selected keys, compressed entries): it must be a tensor."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerMask:
    """What all layers of one type see in one forward; travels in transformers' ``attention_mask`` slot.

    Attributes:
        layout: documents, padding and where the queries lie; impls keep their plans on it.
        window: keys a query sees, its own included; None means all. It is the mask's, so it outranks the layer's.
        plain: neither padding nor a cache nor packing had a say, so ``position_ids`` may still mark documents.
        padded: the caller's ``attention_mask`` hides keys.
        evicted: a sliding cache has dropped the first keys.
    """

    layout: SequenceLayout
    window: int | None
    plain: bool
    padded: bool = False
    evicted: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, 1, Tq, Tk] of the mask this stands for; transformers tells a finished mask by its four dimensions."""
        return (self.layout.batch, 1, self.layout.num_queries, self.layout.num_keys)

    @property
    def ndim(self) -> int:
        """Always 4, see ``shape``."""
        return 4

    def packed(self, position_ids: Tensor) -> SequenceLayout:
        """Return the layout with documents cut where ``position_ids`` [1 or B, T] restart; computed once.

        Some models (gpt_oss) build their masks without position_ids, so packed rows only show in the layer's call.
        """
        return self.layout.cached("hf_packed", lambda: _from_position_ids(position_ids, self.layout.batch))


@dataclass(frozen=True, kw_only=True)
class _Pattern:
    window: int | None = None
    chunk: int | None = None
    documents: Tensor | None = None
    position_ids: Tensor | None = None


def sinkflex_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> LayerMask | Tensor:
    """Transformers' mask interface for every ``sinkflex`` attention; the signature is theirs.

    Args:
        batch_size: rows.
        q_length: queries of this forward.
        kv_length: key columns the layer will see.
        q_offset: absolute column of the first query (an int, or a 0-d tensor from a static cache).
        kv_offset: absolute column of the first key; above 0 once a sliding cache has dropped keys.
        mask_function: transformers' composed pattern; None means causal.
        attention_mask: [B, seen] True for real tokens, a mask made earlier in this forward, or None.
        **kwargs: what the dense mask needs (``config``, ``dtype``, ``device``, ...).

    Returns:
        A ``LayerMask``, or the additive dense tensor where a layer edits its mask or the pattern is not a layout's.
    """
    if isinstance(attention_mask, LayerMask):
        return attention_mask
    from transformers.masking_utils import causal_mask_function, eager_mask

    function: MaskFunction = mask_function or causal_mask_function
    pattern = read_pattern(function)
    if pattern is None or _edits_mask(kwargs.get("config")):
        if pattern is None:
            _log_dense(_describe(function))
        dense: Tensor = eager_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=function,
            attention_mask=attention_mask,
            **(kwargs | {"allow_is_bidirectional_skip": False}),
        )
        return dense
    start = int(q_offset) - kv_offset
    layout = _layout(batch_size, kv_length, kv_offset, pattern, attention_mask, kwargs.get("device", "cpu"))
    cached = q_length != kv_length or start != 0
    if cached:
        layout = replace(layout, num_queries=q_length, query_start=(start,) * batch_size, _cache={})
    padded = attention_mask is not None and not _fills(layout)
    return LayerMask(
        layout=layout.chunked(pattern.chunk) if pattern.chunk is not None else layout,
        window=pattern.window,
        plain=not (cached or padded) and pattern.documents is None and pattern.position_ids is None,
        padded=padded,
        evicted=kv_offset > 0,
    )


def read_pattern(mask_function: MaskFunction) -> _Pattern | None:
    """Return what a mask composed by transformers says, or None when a part of it is not a layout's to say."""
    parts: list[dict[str, Any]] = []
    if not _collect(mask_function, parts) or not any("causal" in part for part in parts):
        return None
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name == "window" and "window" in found:
                value = min(value, found["window"])
            found[name] = value
    return _Pattern(**{name: value for name, value in found.items() if name != "causal"})


def _collect(function: MaskFunction, parts: list[dict[str, Any]]) -> bool:
    """Append what each factor of ``function`` says; False at the first one that is unknown."""
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return False
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    inside = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)} if code else {}
    match function.__qualname__.split(".")[0]:
        case "causal_mask_function":
            parts.append({"causal": True})
        case "and_masks":
            return all(_collect(part, parts) for part in inside["mask_functions"])
        case "sliding_window_overlay":
            parts.append({"window": int(inside["sliding_window"])})
        case "chunked_overlay":
            parts.append({"chunk": int(inside["chunk_size"])})
        case "packed_sequence_mask_function":
            parts.append({"documents": inside["packed_sequence_mask"]})
        case "remap_positions_for_packed_sequence":
            parts.append({"position_ids": inside["position_ids"]})
            return _collect(inside["mask_function"], parts)
        case _:
            return False
    return True


def _layout(
    batch: int, keys: int, kv_offset: int, pattern: _Pattern, padding: Tensor | None, device: Any
) -> SequenceLayout:
    if pattern.position_ids is not None:
        return _from_position_ids(pattern.position_ids, batch)
    if pattern.documents is not None:
        return from_document_ids(pattern.documents, batch)
    if padding is None:
        layout = SequenceLayout.causal(batch, keys, device=device)
        before = [kv_offset] * batch
    else:
        # A static cache is longer than the padding mask: its unused columns are no tokens yet.
        seen = torch.nn.functional.pad(padding, (0, max(kv_offset + keys - padding.shape[1], 0)))
        layout = SequenceLayout.from_padding(seen[:, kv_offset : kv_offset + keys])
        before = padding[:, :kv_offset].sum(1).tolist() if kv_offset else [0] * batch
    if not any(before):
        return layout
    # Keep logical positions counted from the first token, though a sliding cache has dropped it.
    shifted = tuple(node._replace(position=node.position + before[node.row]) for node in layout.nodes)
    return replace(layout, nodes=shifted, _cache={})


def _fills(layout: SequenceLayout) -> bool:
    """Whether every column of every row is a token."""
    return sum(node.length for node in layout.nodes) == layout.batch * layout.num_keys


def _from_position_ids(position_ids: Tensor, batch: int) -> SequenceLayout:
    return SequenceLayout.from_position_ids(position_ids.expand(batch, -1))


def from_document_ids(documents: Tensor, batch: int) -> SequenceLayout:
    """A document for each run of equal numbers in ``documents`` [1 or B, T]."""
    rows = [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in documents.expand(batch, -1)]
    return SequenceLayout.from_documents(rows, device=documents.device)


def _edits_mask(config: Any) -> bool:
    return not EDITED_MASK_LAYERS.isdisjoint(getattr(config, "layer_types", None) or ())


def _describe(mask_function: Any) -> str:
    return f"{getattr(mask_function, '__module__', '?')}.{getattr(mask_function, '__qualname__', mask_function)}"


@lru_cache(maxsize=64)
def _log_dense(name: str) -> None:
    logger.warning(
        "mask %s is neither causal, windowed, chunked nor packed; sinkflex evaluates it densely (exact, memory grows "
        "with the square of the length as in eager)",
        name,
    )
