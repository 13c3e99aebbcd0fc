"""SinkFlex: reinforcement learning for long-horizon tool-use agents with sink-aware attention."""

__version__ = "0.1.0"
