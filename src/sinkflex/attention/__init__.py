"""Attention with learned sinks: exact under every mask, in memory linear in the length.

:func:`sink_attention` is the operation, :class:`SequenceLayout` says who sees whom. ``reference.py`` is the
specification; ``flash`` and ``flex`` are two ways to run it. Imports torch only; ``hf`` adds transformers.
"""

from sinkflex.attention.api import sink_attention
from sinkflex.attention.diagnostics import SinkStatistics, sink_statistics
from sinkflex.attention.dispatch import IMPLS, explain_impl
from sinkflex.attention.layout import SequenceLayout
from sinkflex.attention.masks import MaskMod, chunked_local, dense_mask, sliding_window, visible

__all__ = [
    "IMPLS",
    "MaskMod",
    "SequenceLayout",
    "SinkStatistics",
    "chunked_local",
    "dense_mask",
    "explain_impl",
    "sink_attention",
    "sink_statistics",
    "sliding_window",
    "visible",
]
