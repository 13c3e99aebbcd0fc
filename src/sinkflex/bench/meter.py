"""What a measurement is made with: time, peak memory, the machine's matmul peak, and what machine it was."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sinkflex.errors import InfrastructureError

_CLEAR_PEAK = "5"
"""Written to clear_refs, it resets VmHWM (see the kernel's documentation of /proc)."""

_M_MMAP_THRESHOLD = -3
_SMALLEST_MAPPED_BYTES = 1 << 16
"""Larger blocks get their own mapping and go back to the system when freed, so that the resident set is what is alive;
glibc otherwise keeps freed blocks of up to 32 MiB, twice what a linear-memory kernel needs (mallopt(3))."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One measurement of a function.

    Attributes:
        seconds: wall clock, the best of the repeats; other load on the machine only ever adds to it.
        peak_bytes: most memory alive at once during a call, over what was alive before it.
    """

    seconds: float
    peak_bytes: int


def measure(function: Callable[[], object], *, device: torch.device, repeats: int) -> Reading:
    """Time a function and take its peak memory, after one call that is not measured.

    Args:
        function: what to measure; keeps nothing alive between calls.
        device: cpu or cuda.
        repeats: timed calls; the best counts.

    Raises:
        InfrastructureError: peak memory cannot be read on this machine.
    """
    function()
    times = []
    reset_peak(device)
    before = current_bytes(device)
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        function()
        _wait(device)
        times.append(time.perf_counter() - start)
    return Reading(seconds=min(times), peak_bytes=max(peak_bytes(device) - before, 0))


def reset_peak(device: torch.device) -> None:
    """Forget earlier peaks, give back memory that is free but cached, and have freed memory given back from now on.

    Raises:
        InfrastructureError: the kernel does not let this process reset its peak.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _SMALLEST_MAPPED_BYTES)
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK)
    except (OSError, AttributeError) as error:
        raise InfrastructureError(
            "peak memory on CPU is read from Linux's /proc/self, which cannot be reset here; run on Linux with a "
            "writable /proc, or on a GPU"
        ) from error


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes in use at once since the last ``reset_peak`` (CPU: resident set of this process)."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def current_bytes(device: torch.device) -> int:
    """Return the bytes in use now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _status("VmRSS")


def matmul_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s that a large square matmul reaches here; the yardstick for everything else."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    best = min(_timed(lambda: torch.mm(a, b, out=out), device) for _ in range(5))
    return 2 * size**3 / best


def machine(device: torch.device) -> dict[str, str | int | list[float]]:
    """Describe where a measurement ran: processor, threads, versions, others' load, and the command that repeats it."""
    processor = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return {
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "load_average": [round(x, 1) for x in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()}",
        "command": " ".join([_program(), *sys.argv[1:]]),
    }


def _program() -> str:
    """How a reader starts what is running: the command, or a script of ``benchmarks/``."""
    script = Path(sys.argv[0])
    return f"python benchmarks/{script.name}" if script.parent.name == "benchmarks" else "sinkflex"


def _timed(function: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    function()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _status(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError as error:
        raise InfrastructureError("memory on CPU is read from Linux's /proc/self/status, which is not here") from error
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
