"""Tables, JSON files and plots of benchmark reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from sinkflex.bench.attention import AttentionReport
from sinkflex.bench.train_step import GROWTH_BAR, LENGTH_BAR, TrainStepReport

_SIDE = (5.0, 3.6)


def attention_table(report: AttentionReport) -> Table:
    """Return one row per contender and length, with times relative to the sink-free floor of the same length."""
    shape = report.plan.shape
    table = Table(
        title=f"forward + backward, B {shape.batch}, Hq {shape.heads}, Hkv {shape.kv_heads}, D {shape.head_dim}, "
        f"window {shape.window or 'none'}, {report.plan.dtype}, {report.plan.device}"
    )
    for name in ("tokens", "contender", "seconds", "x sdpa", "peak MiB", "tokens/s", "of matmul peak", "note"):
        table.add_column(name, justify="left" if name in ("contender", "note") else "right")
    floor = {r.tokens: r.seconds for r in report.results if r.contender == "sdpa"}
    for result in report.results:
        lowest = floor.get(result.tokens)
        if result.seconds is None or result.peak_bytes is None:
            cells = [result.status, "", "", "", ""]
        else:
            cells = [
                f"{result.seconds:.3f}",
                f"{result.seconds / lowest:.2f}" if lowest else "",
                f"{result.peak_bytes / 2**20:,.0f}",
                f"{result.tokens_per_s:,.0f}",
                f"{result.peak_share:.0%}",
            ]
        table.add_row(f"{result.tokens:,}", result.contender, *cells, result.note)
    return table


def train_step_table(report: TrainStepReport) -> Table:
    """Return one row per length: peak memory, time, speed and share of the matmul peak of each implementation."""
    plan = report.plan
    table = Table(title=f"one training step, cap {plan.cap_bytes / 2**30:.1f} GiB, {plan.device}")
    table.add_column("tokens", justify="right")
    for name in plan.implementations:
        for column in ("MiB", "s", "tok/s", "of peak"):
            table.add_column(f"{name}\n{column}", justify="right")
    cells = {(r.implementation, r.tokens): r for r in report.results}
    for tokens in plan.lengths:
        row = []
        for name in plan.implementations:
            result = cells[name, tokens]
            ok = result.status == "ok" and result.peak_bytes is not None
            row.append(f"{result.peak_bytes / 2**20:,.0f}" if ok and result.peak_bytes else result.status)
            row.append(f"{result.seconds:.2f}" if result.seconds is not None else "")
            row.append(f"{result.tokens_per_s:,.0f}" if ok and result.tokens_per_s else "")
            row.append(f"{result.peak_share:.0%}" if ok and result.peak_share else "")
        table.add_row(f"{tokens:,}", *row)
    return table


def train_step_verdicts(report: TrainStepReport) -> list[str]:
    """Return one line for each bar that this run can speak about."""
    lines = []
    if (share := report.growth_share()) is not None:
        word = "meets" if share <= GROWTH_BAR else "misses"
        lines.append(f"memory growth 1,024 to 4,096 tokens: {share:.1%} of eager's; {word} the bar of {GROWTH_BAR:.0%}")
    if (ratio := report.length_ratio()) is not None:
        word = "meets" if ratio >= LENGTH_BAR else "misses"
        lines.append(f"trains at {ratio:g} times the length where eager first fails; {word} the bar of {LENGTH_BAR}")
    return lines


def write(report: AttentionReport | TrainStepReport, folder: Path, name: str) -> list[Path]:
    """Write ``name``.json and ``name``.png into a folder, made if missing; return both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / f"{name}.json", folder / f"{name}.png"
    data.write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    if isinstance(report, AttentionReport):
        series = {
            label: [(r.tokens, r.seconds, r.peak_bytes) for r in report.results if r.contender == label]
            for label in report.plan.contenders
        }
    else:
        series = {
            label: [(r.tokens, r.seconds, r.peak_bytes) for r in report.results if r.implementation == label]
            for label in report.plan.implementations
        }
    cap = report.plan.cap_bytes if isinstance(report, TrainStepReport) else None
    _plot(picture, series, cap)
    return [data, picture]


def _plot(path: Path, series: dict[str, list[tuple[int, float | None, int | None]]], cap_bytes: int | None) -> None:
    """Draw time and peak memory against length, both axes logarithmic, one line per contender."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 * _SIDE[0], _SIDE[1]), layout="constrained")
    seconds, memory = figure.subplots(1, 2)
    for label, points in series.items():
        timed = [(tokens, value) for tokens, value, _ in points if value is not None]
        held = [(tokens, peak / 2**20) for tokens, value, peak in points if value is not None and peak]
        for axes, line in ((seconds, timed), (memory, held)):
            if line:
                axes.plot(*zip(*line, strict=True), marker="o", label=label)
    if cap_bytes is not None:
        memory.axhline(cap_bytes / 2**20, linestyle="--", color="black", label="cap")
    for axes, title in ((seconds, "seconds"), (memory, "peak MiB")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens")
        axes.set_ylabel(title)
        axes.legend()
    figure.savefig(path, dpi=120)


def parse_lengths(text: str) -> Sequence[int]:
    """Turn ``"1024,4096"`` into ascending lengths.

    Raises:
        ValueError: a part is no positive number.
    """
    lengths = sorted({int(part) for part in text.split(",")})
    if lengths[0] < 1:
        raise ValueError(f"lengths are {text!r}; expected positive numbers, as in 1024,4096")
    return lengths
