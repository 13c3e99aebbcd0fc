"""``bench train-step``: how far each attention implementation trains before memory runs out.

Every (implementation, length) gets a process of its own under a cap on its resident memory. Going over the cap is a
result, not an error: it is where that implementation ends.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from sinkflex.bench.meter import machine
from sinkflex.bench.train_child import MODEL, SDPA_FLOOR
from sinkflex.errors import InfrastructureError
from sinkflex.types import JSONObject

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
"""The paper's four lengths and two beyond."""

IMPLEMENTATIONS = ("eager", SDPA_FLOOR, "sinkflex")
"""What is compared by default: transformers' exact one, transformers' fast one without the sink, and ours."""

GROWTH_BAR = 0.15
"""SinkFlex's growth in memory from 1,024 to 4,096 tokens, as a share of eager's, must not exceed this."""

LENGTH_BAR = 8
"""SinkFlex must train at this many times the length at which eager first fails."""

_POLL_S = 0.01


@dataclass(frozen=True, kw_only=True)
class TrainStepPlan:
    """What to measure.

    Attributes:
        implementations: transformers' ``attn_implementation`` names, or ``sink-free`` for the floor.
        lengths: tokens of the one row, ascending; an implementation stops at the first it cannot hold.
        cap_bytes: resident memory (on a GPU: allocated memory) a process may reach.
        device: "cpu" or "cuda".
        threads: torch's threads in each process.
        checkpointing: recompute each layer in backward, for all implementations alike.
        timeout_s: a step that takes longer is recorded as such.
    """

    implementations: Sequence[str] = IMPLEMENTATIONS
    lengths: Sequence[int] = LENGTHS
    cap_bytes: int
    device: str = "cpu"
    threads: int = 1
    checkpointing: bool = False
    timeout_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class TrainStepResult:
    """One implementation at one length.

    Attributes:
        implementation: its name.
        tokens: T.
        status: "ok", "out of memory", "timeout" or "not run" (a shorter length did not fit).
        seconds: forward, backward and optimizer step.
        peak_bytes: most memory the process held; for "out of memory" what it held when stopped.
        loss: to compare implementations, which start from equal weights.
        tokens_per_s: T / seconds.
        peak_share: the model's FLOP/s (no recomputation counted) as a share of the matmul peak of that process.
    """

    implementation: str
    tokens: int
    status: str
    seconds: float | None = None
    peak_bytes: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    peak_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrainStepReport:
    """All results of one run."""

    plan: TrainStepPlan
    results: tuple[TrainStepResult, ...]

    def growth_share(self) -> float | None:
        """SinkFlex's growth in peak memory from 1,024 to 4,096 tokens over eager's; None without all four figures."""
        peaks = {(r.implementation, r.tokens): r.peak_bytes for r in self.results if r.status == "ok"}
        ends = [peaks.get((name, tokens)) for name in ("sinkflex", "eager") for tokens in (1024, 4096)]
        if any(end is None for end in ends):
            return None
        own_low, own_high, low, high = (end for end in ends if end is not None)
        return (own_high - own_low) / (high - low)

    def length_ratio(self) -> float | None:
        """SinkFlex's longest step over the length at which eager first ran out of memory; None if eager never did."""
        failed = [r.tokens for r in self.results if r.implementation == "eager" and r.status == "out of memory"]
        fitted = [r.tokens for r in self.results if r.implementation == "sinkflex" and r.status == "ok"]
        return max(fitted) / min(failed) if failed and fitted else None

    def to_dict(self) -> JSONObject:
        """Return a JSON-ready record."""
        return {
            "kind": "train-step",
            "machine": machine(torch.device(self.plan.device)) | {"threads": self.plan.threads},
            "plan": asdict(self.plan),
            "model": MODEL,
            "results": [asdict(result) for result in self.results],
            "growth_share": self.growth_share(),
            "length_ratio": self.length_ratio(),
        }


def run_train_steps(
    plan: TrainStepPlan, *, progress: Callable[[TrainStepResult], None] = lambda result: None
) -> TrainStepReport:
    """Measure every implementation at every length.

    Args:
        plan: what to measure.
        progress: called with each result as it comes.

    Raises:
        InfrastructureError: a process failed for another reason than memory or time; the message carries its output.
    """
    results = []
    for implementation in plan.implementations:
        full = False
        for tokens in plan.lengths:
            if full:
                result = TrainStepResult(implementation=implementation, tokens=tokens, status="not run")
            else:
                result = _measure(plan, implementation, tokens)
                full = result.status != "ok"
            progress(result)
            results.append(result)
    return TrainStepReport(plan=plan, results=tuple(results))


def _measure(plan: TrainStepPlan, implementation: str, tokens: int) -> TrainStepResult:
    settings = {
        "implementation": implementation,
        "tokens": tokens,
        "device": plan.device,
        "threads": plan.threads,
        "cap_bytes": plan.cap_bytes,
        "checkpointing": plan.checkpointing,
    }
    command = [sys.executable, "-m", "sinkflex.bench.train_child", json.dumps(settings)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err)
        try:
            stopped, peak = _watch(process, plan)
        finally:
            process.kill()
            process.wait()
        out.seek(0)
        err.seek(0)
        if stopped is None and process.returncode == 0:
            result = TrainStepResult(
                implementation=implementation, tokens=tokens, **json.loads(out.read().splitlines()[-1])
            )
            # A peak between two looks of the watch is known to the process itself.
            over = plan.device == "cpu" and (result.peak_bytes or 0) > plan.cap_bytes
            return replace(result, status="out of memory", seconds=None) if over else result
        if stopped is None and process.returncode == -signal.SIGKILL:
            stopped = "out of memory"  # nobody else kills: the kernel ran out before the cap was seen
        if stopped is None:
            raise InfrastructureError(
                f"the {implementation} step at {tokens} tokens ended with status {process.returncode}:\n"
                f"{err.read()[-2000:]}"
            )
    return TrainStepResult(implementation=implementation, tokens=tokens, status=stopped, peak_bytes=peak)


def _watch(process: subprocess.Popen[Any], plan: TrainStepPlan) -> tuple[str | None, int]:
    """Wait for the process; return why it had to be stopped (None: it ended by itself) and its largest memory seen.

    An address-space limit would be simpler, but counts what torch reserves and never touches; the resident set is
    what fills a machine. A GPU's cap is set in the process itself.
    """
    import psutil

    watched, peak, start = psutil.Process(process.pid), 0, time.monotonic()
    while process.poll() is None:
        try:
            peak = max(peak, watched.memory_info().rss)
        except psutil.NoSuchProcess:
            break
        if plan.device == "cpu" and peak > plan.cap_bytes:
            return "out of memory", peak
        if time.monotonic() - start > plan.timeout_s:
            return "timeout", peak
        time.sleep(_POLL_S)
    process.wait()
    return None, peak
