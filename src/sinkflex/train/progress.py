"""What a person sees while a run goes on: a live panel in a terminal, plain lines in a pipe or a log file."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sinkflex.config import Recipe

_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_EVERY_S = 15.0


class Progress:
    """Shows a run's step, reward, validation, tokens a second and the time left.

    In a terminal one panel is redrawn in place. Elsewhere a plain line is printed for every validation and otherwise at
    most every 15 seconds, so that a log stays short and still proves life.

    Args:
        recipe: says how many train steps there are.
        console: where to write; None is standard output.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = Console() if console is None else console
        self._steps = recipe.train.steps
        self._step = 0
        self._clock = clock
        self._start: tuple[int, float] | None = None
        self._last_line = float("-inf")
        self._phase: tuple[str, int, int, str] | None = None
        self._latest: dict[str, float] = {}
        self._scores: list[float] = []
        self._validations: list[float] = []
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
            self._live.stop()

    def note(self, text: str) -> None:
        """Print one line that stays, above the panel."""
        self.console.print(text, highlight=False, markup=False)

    def phase(self, name: str, done: int = 0, total: int = 0, detail: str = "") -> None:
        """Show what goes on before or between train steps: a warm start, a validation.

        Args:
            name: what goes on.
            done: units done.
            total: units in all; 0 when nobody knows.
            detail: a figure worth seeing, for example ``"loss 0.31"``.
        """
        self._phase = (name, done, total, detail) if done < max(total, 1) else None
        count = f" {done}/{total}" if total else ""
        self._show(f"{name}{count} {detail}".rstrip(), important=done >= total)

    def warmstart(self, step: int, steps: int, loss: float) -> None:
        """Show the warm start's progress.

        Args:
            step: optimiser steps done.
            steps: optimiser steps planned.
            loss: in nats a trained token.
        """
        self.phase("warm start", step, steps, f"loss {loss:.3f}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step's figures.

        Args:
            step: train steps done; 0 for what was measured before the first.
            metrics: figures under their names in ``metrics.jsonl``.
        """
        if self._start is None:
            # A resumed run's first call is for a step already done; its own time says when it began.
            began = self._clock() - (metrics.get("timing_s/step", 0.0) if step else 0.0)
            self._start = (max(step - 1, 0), began)
        self._step = step
        self._phase = None
        self._latest.update({name: value for name, value in metrics.items() if math.isfinite(value)})
        validation = validation_name(metrics)
        for name, values in (("critic/score/mean", self._scores), (validation, self._validations)):
            if name is not None and name in metrics and name in self._latest:
                values.append(self._latest[name])
        self._show(self._line(), important=validation is not None or step == self._steps)

    def seconds_left(self) -> float | None:
        """Seconds to the last step at the pace so far, validations included; None before a step is done."""
        if self._start is None or self._step <= self._start[0]:
            return None
        first, began = self._start
        return (self._clock() - began) / (self._step - first) * (self._steps - self._step)

    def _show(self, line: str, *, important: bool) -> None:
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
        elif important or self._clock() - self._last_line >= _PLAIN_EVERY_S:
            self._last_line = self._clock()
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _line(self) -> str:
        parts = [f"step {self._step}/{self._steps}", *(f"{name} {value}" for name, value in self._figures())]
        return "  ".join(parts)

    def _figures(self) -> list[tuple[str, str]]:
        latest = self._latest
        figures = []
        if "critic/rewards/mean" in latest:
            figures.append(("reward", f"{latest['critic/rewards/mean']:.3f}"))
        name = validation_name(latest)
        if name is not None:
            interval = ""
            if f"{name}/low" in latest and f"{name}/high" in latest:
                interval = f" [{latest[f'{name}/low']:.3f}, {latest[f'{name}/high']:.3f}]"
            figures.append(("validation", f"{latest[name]:.3f}{interval}"))
        if "perf/throughput" in latest:
            figures.append(("tokens/s", f"{latest['perf/throughput']:,.0f}"))
        left = self.seconds_left()
        if left is not None:
            figures.append(("left", clock_text(left)))
        return figures

    def _panel(self) -> RenderableType:
        rows: list[RenderableType] = []
        if self._phase is not None:
            name, done, total, detail = self._phase
            rows.append(_bar_row(name, done, total, detail))
        rows.append(_bar_row("train", self._step, self._steps, ""))
        figures = Table.grid(padding=(0, 3))
        figures.add_row(*(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in self._figures()))
        rows.append(figures)
        for name, values in (("score", self._scores), ("validation", self._validations)):
            if len(values) > 1:
                rows.append(Text.assemble((f"{name:<11}", "dim"), (sparkline(values, width=48), "cyan")))
        return Group(*rows)


def validation_name(metrics: Mapping[str, float]) -> str | None:
    """Return the name of the validation score (mean@1) in ``metrics``, or None when there is none."""
    return next((name for name in metrics if name.startswith("val-core/") and name.endswith("/mean@1")), None)


def sparkline(values: list[float], *, width: int) -> str:
    """Draw the last ``width`` values, each in [0, 1], as a row of bars."""
    heights = [min(max(value, 0.0), 1.0) for value in values[-width:]]
    return "".join(_BARS[min(int(height * len(_BARS)), len(_BARS) - 1)] for height in heights)


def clock_text(seconds: float) -> str:
    """Write a duration as ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _bar_row(name: str, done: int, total: int, detail: str) -> Table:
    row = Table.grid(padding=(0, 1))
    cells: list[RenderableType] = [Text(f"{name:<11}", style="dim")]
    if total:
        cells += [ProgressBar(total=total, completed=done, width=40), Text(f"{done}/{total}")]
    row.add_row(*cells, Text(detail or ("" if total else "..."), style="dim"))
    return row
