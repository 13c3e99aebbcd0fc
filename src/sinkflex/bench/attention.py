"""``bench attention``: one attention call, forward and backward, by every contender at every length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from sinkflex.bench.contenders import Attend, Shape, select
from sinkflex.bench.meter import machine, matmul_peak, measure
from sinkflex.types import JSONObject

_EAGER_COPIES = 6
"""[T, T] matrices per head that an eager forward and backward hold at once; used to leave out what cannot fit."""


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """What to measure.

    Attributes:
        shape: heads, width and window; its ``tokens`` is replaced by each length.
        lengths: T, ascending.
        contenders: names out of ``CONTENDERS``.
        dtype: of query, key and value.
        device: cpu or cuda.
        repeats: timed calls of each; the best counts.
    """

    shape: Shape
    lengths: Sequence[int]
    contenders: Sequence[str]
    dtype: torch.dtype
    device: torch.device
    repeats: int


@dataclass(frozen=True, kw_only=True)
class AttentionResult:
    """One contender at one length.

    Attributes:
        contender: its name.
        tokens: T.
        status: "ok", "unavailable", "too large" (not tried) or "out of memory".
        note: why there is no figure, or what to know about it.
        seconds: forward and backward.
        peak_bytes: over inputs and their gradients.
        tokens_per_s: B·T / seconds.
        peak_share: FLOP/s over the visible pairs, as a share of the measured matmul peak.
    """

    contender: str
    tokens: int
    status: str
    note: str = ""
    seconds: float | None = None
    peak_bytes: int | None = None
    tokens_per_s: float | None = None
    peak_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionReport:
    """All results of one run, with the machine they were taken on."""

    plan: AttentionPlan
    matmul_flops: float
    results: tuple[AttentionResult, ...]

    def to_dict(self) -> JSONObject:
        """Return a JSON-ready record."""
        plan = asdict(self.plan) | {"dtype": str(self.plan.dtype), "device": str(self.plan.device)}
        return {
            "kind": "attention",
            "machine": machine(self.plan.device),
            "plan": plan,
            "matmul_flops": self.matmul_flops,
            "results": [asdict(result) for result in self.results],
        }


def run_attention(
    plan: AttentionPlan, *, progress: Callable[[AttentionResult], None] = lambda result: None
) -> AttentionReport:
    """Measure every contender at every length, in one process and one run.

    Args:
        plan: what to measure.
        progress: called with each result as it comes.

    Raises:
        ConfigError: a contender is unknown.
        InfrastructureError: peak memory cannot be read on this machine.
    """
    peak = matmul_peak(plan.dtype, plan.device)
    results = []
    for result in _results(plan, peak):
        progress(result)
        results.append(result)
    return AttentionReport(plan=plan, matmul_flops=peak, results=tuple(results))


def _results(plan: AttentionPlan, peak: float) -> Iterator[AttentionResult]:
    chosen = select(list(plan.contenders))
    for tokens in plan.lengths:
        shape = replace(plan.shape, tokens=tokens)
        for name, contender in chosen.items():
            if (reason := contender.missing(plan.device, plan.dtype)) is not None:
                yield AttentionResult(contender=name, tokens=tokens, status="unavailable", note=reason)
                continue
            if contender.quadratic and (needed := _eager_bytes(plan, shape)) > 0.8 * _free_bytes(plan.device):
                note = f"would hold about {needed / 2**30:.0f} GiB of scores"
                yield AttentionResult(contender=name, tokens=tokens, status="too large", note=note)
                continue
            try:
                attend = contender.build(shape, plan.device)
                reading = measure(_step(plan, shape, attend), device=plan.device, repeats=plan.repeats)
            except torch.OutOfMemoryError as error:
                note = str(error).split(". ", 1)[0]
                yield AttentionResult(contender=name, tokens=tokens, status="out of memory", note=note)
                continue
            yield AttentionResult(
                contender=name,
                tokens=tokens,
                status="ok",
                note="" if contender.has_sink else "leaves the sink out",
                seconds=reading.seconds,
                peak_bytes=reading.peak_bytes,
                tokens_per_s=shape.batch * tokens / reading.seconds,
                peak_share=shape.flops(backward=True) / reading.seconds / peak,
            )


def _step(plan: AttentionPlan, shape: Shape, attend: Attend) -> Callable[[], None]:
    """Return a forward and backward whose inputs, gradients and output gradient are made beforehand."""
    made = torch.Generator(device=plan.device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=made, device=plan.device, dtype=plan.dtype)

    per_row = (shape.tokens, shape.head_dim)
    query = draw(shape.batch, shape.heads, *per_row).requires_grad_()
    key, value = (draw(shape.batch, shape.kv_heads, *per_row).requires_grad_() for _ in range(2))
    sink = draw(shape.heads).requires_grad_()
    grad = draw(shape.batch, shape.heads, *per_row)

    def step() -> None:
        torch.autograd.backward(attend(query, key, value, sink), grad)

    for leaf in (query, key, value):
        leaf.grad = torch.zeros_like(leaf)
    return step


def _eager_bytes(plan: AttentionPlan, shape: Shape) -> int:
    return _EAGER_COPIES * shape.batch * shape.heads * shape.tokens**2 * plan.dtype.itemsize


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return int(psutil.virtual_memory().available)
