"""Registration with Hugging Face transformers: ``attn_implementation="sinkflex"``.

    from sinkflex.attention import hf
    hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sinkflex")

Padding masks, packed ``position_ids`` and caches are understood as they are. A packing that transformers has no word
for (shared prefixes) goes in as ``model(..., position_ids=layout.q_position, layout=layout)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from sinkflex.attention.api import sink_attention
from sinkflex.attention.diagnostics import SinkStatistics, sink_statistics
from sinkflex.attention.hf_dense import dense_attention, log_dense, select_keys, visible_by_mask
from sinkflex.attention.hf_masks import LayerMask, from_document_ids, sinkflex_mask
from sinkflex.attention.layout import SequenceLayout
from sinkflex.attention.masks import visible
from sinkflex.errors import AttentionError, UnsupportedError

_T = TypeVar("_T")

_RECORD: ContextVar[dict[int, SinkStatistics] | None] = ContextVar("sinkflex_record", default=None)

IMPLEMENTATIONS: dict[str, str] = {
    "sinkflex": "auto",
    "sinkflex_reference": "reference",
    "sinkflex_flex": "flex",
    # Not "..._flash": transformers takes every name with "flash" in it for one of its own kernels and swaps it.
    "sinkflex_fa": "flash",
}
"""Registered ``attn_implementation`` names and the ``impl`` each forces."""

INERT_KWARGS = frozenset(
    {
        "cache_position",
        "max_length_q",
        "max_length_k",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "use_cache",
    }
)
"""Keyword arguments that models pass through to attention though they mean nothing to it."""


def register() -> None:
    """Make ``sinkflex`` and its variants known to transformers, as attention and as mask function. Idempotent."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name, impl in IMPLEMENTATIONS.items():
        AttentionInterface.register(name, _outside_graphs(_attention_function(name, impl)))
        AttentionMaskInterface.register(name, _outside_graphs(sinkflex_mask))


@contextmanager
def record_sinks() -> Iterator[dict[int, SinkStatistics]]:
    """Collect what the sinks of a model do, for a trainer's log.

    Yields:
        A dict that fills as layers run inside the block: layer index to its statistics. A later forward replaces an
        earlier one. Layers without sinks, and those with a dense mask, are not in it.
    """
    record: dict[int, SinkStatistics] = {}
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


@dataclass(frozen=True, kw_only=True)
class _Visibility:
    """Exactly one of ``layout`` and ``dense`` says what is visible; the rest refines the layout."""

    layout: SequenceLayout | None = None
    dense: Tensor | None = None
    window: int | None = None

    def held_whole(self) -> _Visibility:
        """The same as a mask."""
        if self.layout is None:
            return self
        return _Visibility(dense=visible(self.layout, window=self.window)[:, None])


def _outside_graphs(function: Callable[..., _T]) -> Callable[..., _T]:
    """Keep torch.compile out: layouts and plans are Python objects built from tensor values."""
    return cast("Callable[..., _T]", torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def _attention_function(name: str, impl: str) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        sinks, bias = _taken_sinks(module, kwargs), kwargs.pop("position_bias", None)
        scale = kwargs.pop("scaling", None)
        num_sink_tokens = kwargs.pop("num_sink_tokens", 0)
        mask_mod = kwargs.pop("mask_mod", None)
        _refuse(name, module, sinks, kwargs)
        seen = _visibility(module, query, key, attention_mask, kwargs)
        if kwargs:
            raise UnsupportedError(
                f"attn_implementation={name!r} does not know the keyword argument(s) {sorted(kwargs)} that "
                f"{type(module).__name__} passes to attention; it would have to ignore them. Use eager for this model, "
                "or do not pass them."
            )
        if bias is not None or (sinks is not None and sinks.dim() > 1):
            seen = seen.held_whole()
        if seen.dense is not None:
            if num_sink_tokens or mask_mod is not None:
                raise UnsupportedError("num_sink_tokens and mask_mod cannot be combined with a dense attention_mask")
            if impl not in ("auto", "reference"):
                raise UnsupportedError(
                    f"attn_implementation={name!r} forces the {impl} kernels, which take no dense mask, score bias or "
                    f'sink for each query as {type(module).__name__} has here; use "sinkflex", which computes such '
                    "layers as eager does"
                )
            log_dense(type(module).__name__)
            out = dense_attention(query, key, value, sinks, seen.dense, scale=scale, bias=bias)
        else:
            if num_sink_tokens and isinstance(attention_mask, LayerMask) and attention_mask.evicted:
                raise UnsupportedError(
                    f"num_sink_tokens={num_sink_tokens} needs the first keys, which this sliding cache has dropped; "
                    "use a cache without eviction (DynamicCache() without a config)"
                )
            record = _RECORD.get() if sinks is not None else None
            result = sink_attention(
                query,
                key,
                value,
                sinks,
                layout=seen.layout,
                window=seen.window,
                num_sink_tokens=num_sink_tokens,
                mask_mod=mask_mod,
                scale=scale,
                impl=impl,
                return_lse=record is not None,
            )
            if isinstance(result, tuple):
                out, lse = result
                if record is not None and sinks is not None:
                    record[getattr(module, "layer_idx", len(record))] = sink_statistics(lse, sinks, layout=seen.layout)
            else:
                out = result
        return out.transpose(1, 2).contiguous(), None

    attention.__name__ = attention.__qualname__ = name
    return attention


def _taken_sinks(module: nn.Module, kwargs: dict[str, Any]) -> Tensor | None:
    """Take the sinks out: ``s_aux`` [Hq], or ``sinks``, which some models compute anew for each query."""
    learned, own = kwargs.pop("s_aux", None), kwargs.pop("sinks", None)
    if learned is not None and own is not None:
        raise UnsupportedError(f"{type(module).__name__} passes both s_aux and sinks; sinkflex takes one of them")
    sinks: Tensor | None = learned if own is None else own
    return sinks


def _refuse(name: str, module: nn.Module, sinks: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Drop keyword arguments that mean nothing here; raise for those that would change the result."""
    if kwargs.pop("dropout", 0.0):
        raise UnsupportedError(
            f"attn_implementation={name!r} has no attention dropout; set attention_dropout=0.0 in the config"
        )
    if (softcap := kwargs.pop("softcap", None)) is not None:
        raise UnsupportedError(
            f"attn_implementation={name!r} has no soft-cap on attention scores, but {type(module).__name__} asks for "
            f"softcap={softcap}; use eager for this model"
        )
    if kwargs.pop("output_attentions", None):
        raise UnsupportedError(
            f"attn_implementation={name!r} never holds the attention weights; call with output_attentions=False or "
            "use eager"
        )
    if sinks is None and isinstance(getattr(module, "sinks", None), Tensor):
        raise AttentionError(
            f"{type(module).__name__} has learned sinks but passed s_aux=None, so they would be left out; pass "
            "s_aux=self.sinks to the attention function"
        )
    for inert in INERT_KWARGS & kwargs.keys():
        del kwargs[inert]
    for absent in [key for key, value in kwargs.items() if value is None]:
        del kwargs[absent]


@dataclass(frozen=True, kw_only=True)
class _Packing:
    """The keyword arguments by which a caller may mark the documents of packed rows; see ``_documents``."""

    layout: SequenceLayout | None
    position_ids: Tensor | None
    boundaries: Tensor | None
    documents: Tensor | None

    @classmethod
    def taken_from(cls, kwargs: dict[str, Any]) -> _Packing:
        kwargs.pop("cu_seq_lens_k", None)
        return cls(
            layout=kwargs.pop("layout", None),
            position_ids=kwargs.pop("position_ids", None),
            boundaries=kwargs.pop("cu_seq_lens_q", None),
            documents=kwargs.pop("seq_idx", None),
        )


def _visibility(module: nn.Module, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]) -> _Visibility:
    """Say what is visible, from the mask slot and the keyword arguments that describe it (which it removes)."""
    window = kwargs.pop("sliding_window", None)
    indices = kwargs.pop("indices", None)
    causal = kwargs.pop("is_causal", getattr(module, "is_causal", True))
    packing = _Packing.taken_from(kwargs)
    if isinstance(mask, Tensor):
        if packing.layout is not None:
            raise UnsupportedError(
                f"{type(module).__name__} edits its mask, or attention_mask is 4-D, so layout= cannot describe it; "
                "pass one of the two"
            )
        return _Visibility(dense=select_keys(visible_by_mask(mask, query, key), indices))
    if mask is None and not causal:
        return _Visibility(dense=select_keys(_everything(module, query, key, window, packing), indices))
    if isinstance(mask, SequenceLayout):
        mask = LayerMask(layout=mask, window=window, plain=False)
    elif mask is None:
        plain = SequenceLayout.causal(query.shape[0], key.shape[2], num_queries=query.shape[2], device=query.device)
        mask = LayerMask(layout=plain, window=window, plain=query.shape[2] == key.shape[2])
    elif not isinstance(mask, LayerMask):
        raise AttentionError(
            f"attention_mask is a {type(mask).__name__}; expected a 2-D or 4-D tensor, a SequenceLayout or None"
        )
    layout = _documents(module, query, key, mask, packing)
    if indices is not None:
        return _Visibility(dense=select_keys(visible(layout, window=mask.window)[:, None], indices))
    return _Visibility(layout=layout, window=mask.window)


def _documents(module: nn.Module, query: Tensor, key: Tensor, mask: LayerMask, packing: _Packing) -> SequenceLayout:
    """The layout of a causal layer: the caller's own, or the mask's with the documents that the caller marked."""
    if packing.layout is not None:
        _check_padding(packing.layout, mask)
        _check_positions(module, packing.layout, packing.position_ids)
        return packing.layout
    if packing.boundaries is not None:
        _check_unpadded("cu_seq_lens_q", mask)
        return _from_boundaries(packing.boundaries, query, key)
    if packing.documents is not None:
        _check_unpadded("seq_idx", mask)
        documents, batch = packing.documents, mask.layout.batch
        return mask.layout.cached("hf_seq_idx", lambda: from_document_ids(documents, batch))
    if mask.plain and packing.position_ids is not None:
        return mask.packed(packing.position_ids)
    return mask.layout


def _everything(module: nn.Module, query: Tensor, key: Tensor, window: int | None, packing: _Packing) -> Tensor:
    """The mask of a bidirectional layer that was given none: all keys, in unpacked rows."""
    packed = packing.position_ids is not None and bool((packing.position_ids.diff(dim=-1) < 0).any())
    marks = {
        "sliding_window": window is not None,
        "layout": packing.layout is not None,
        "cu_seq_lens_q": packing.boundaries is not None,
        "seq_idx": packing.documents is not None,
        "position_ids that restart": packed,
    }
    if given := [name for name, present in marks.items() if present]:
        raise UnsupportedError(
            f"{type(module).__name__} is bidirectional (is_causal=False) and got no mask, so it sees every key; that "
            f"contradicts {', '.join(given)}. Pass a 4-D attention_mask that says what it may see."
        )
    everything = torch.ones((), dtype=torch.bool, device=query.device)
    return everything.expand(query.shape[0], 1, query.shape[2], key.shape[2])


def _check_padding(layout: SequenceLayout, mask: LayerMask) -> None:
    """``layout=`` replaces the mask, so it must leave out whatever ``attention_mask`` leaves out."""
    if not mask.padded:
        return
    same_shape = (layout.batch, layout.num_keys) == (mask.layout.batch, mask.layout.num_keys)
    if not same_shape or bool(((layout.enter >= 0) & (mask.layout.enter.to(layout.device) < 0)).any()):
        raise AttentionError(
            "attention_mask hides tokens that layout= holds as real ones; leave attention_mask out and build the "
            "padding into the layout (SequenceLayout.from_padding, or length= of the other constructors)"
        )


def _check_unpadded(name: str, mask: LayerMask) -> None:
    if mask.padded or mask.layout.num_queries != mask.layout.num_keys:
        raise UnsupportedError(
            f"{name} marks packed documents, which goes with neither a padding attention_mask nor a cache; pass layout="
        )


def _check_positions(module: nn.Module, layout: SequenceLayout, position_ids: Tensor | None) -> None:
    """RoPE must see the layout's positions; looked at in the first layer only, as it may wait for the device."""
    if position_ids is None or getattr(module, "layer_idx", 0) != 0:
        return
    real = layout.q_enter >= 0
    shift = position_ids.to(layout.device) - layout.q_position
    first = shift.masked_fill(~real, torch.iinfo(shift.dtype).max).amin(1, keepdim=True)
    if bool(((shift != first) & real).any()):
        raise AttentionError(
            "position_ids do not follow the layout, so RoPE would place tokens elsewhere than the mask does; call the "
            "model with position_ids=layout.q_position"
        )


def _from_boundaries(boundaries: Tensor, query: Tensor, key: Tensor) -> SequenceLayout:
    """Documents from flash-attention's cumulative lengths [documents + 1] of one flattened row."""
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise UnsupportedError(
            f"cu_seq_lens_q describes one flattened row without a cache; got batch {query.shape[0]}, "
            f"{query.shape[2]} queries and {key.shape[2]} keys. Use position_ids or layout= instead."
        )
    return SequenceLayout.from_documents(boundaries.diff().tolist(), length=query.shape[2], device=query.device)
