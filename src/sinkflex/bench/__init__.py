"""Measurements: attention and train steps side by side, and a model under sinkflex against eager."""
