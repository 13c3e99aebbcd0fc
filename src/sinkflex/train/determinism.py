"""Equal seeds give equal runs: what torch must be told for that, for the length of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def repeatable(device: str) -> Iterator[None]:
    """Have CPU threads add up in a fixed order while inside, so that a run repeats and resumes bit for bit.

    The backward pass of a gather, which mixture-of-experts layers sort tokens by, otherwise adds atomically from
    several threads, in whatever order they come. In order is also faster: a tiny gpt-oss's train step takes 0.75 of the
    time on 2 threads. CUDA is left as the user set it: there it costs speed, and some kernels have no such form.

    Args:
        device: the run's torch device; only ``"cpu"`` changes anything.
    """
    if device != "cpu":
        yield
        return
    asked = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory is there to expose reads of it; it changes no result that is right.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(asked[0], warn_only=asked[1])
        memory.fill_uninitialized_memory = filled
