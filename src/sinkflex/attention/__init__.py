"""Sink-aware attention."""

from sinkflex.attention.api import sink_attention
from sinkflex.attention.layout import SequenceLayout

__all__ = ["SequenceLayout", "sink_attention"]
