"""Seconds of a step's parts, under verl's names."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up wall-clock seconds by part.

    Args:
        device: waited for at either end of a part, so that a GPU's work counts where it was asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what runs inside under ``name``; parts may come again and are added up."""
        started = self._now()
        try:
            yield
        finally:
            self._seconds[name] += self._now() - started

    def metrics(self) -> dict[str, float]:
        """Return ``timing_s/<name>`` of each part."""
        return {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
