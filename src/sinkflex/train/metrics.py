"""The run's figures: one JSON line a step in ``metrics.jsonl``, and the trackers that mirror it.

``metrics.jsonl`` is the truth. A line is ``{"step": 3, "wall_s": 41.2, "critic/score/mean": 0.31, ...}``; several
lines may carry one step (a train step, then its validation) and belong together. A figure that is not finite is
written as ``null``. Each line is on disk before ``write`` returns, so a killed run loses none.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from sinkflex.config import Recipe
from sinkflex.errors import ConfigError
from sinkflex.train.trackers import Ending, MetricsSink, RunIdentity, open_sinks, require_trackers
from sinkflex.train.whole_file import refused, write_whole

FILE_NAME = "metrics.jsonl"

log = logging.getLogger(__name__)


class MetricsLog:
    """Writes a run's figures.

    Args:
        folder: the run folder; must exist.
        recipe: names the trackers and what they file the run under.
        resume_step: continue a run whose checkpoint has done this many steps: later lines (and a torn last one)
            are removed, because those steps are about to be done again. None starts the file afresh.
        sinks: trackers to mirror to; None opens those of ``recipe.logging``. One that raises is reported once, by
            name, and left out from then on.

    Raises:
        InfrastructureError: the folder cannot be written.
        MissingExtraError: a tracker's package is not installed.
    """

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        *,
        resume_step: int | None = None,
        sinks: Sequence[MetricsSink] | None = None,
    ) -> None:
        self.path = folder / FILE_NAME
        self._sinks = list(_recipe_sinks(folder, recipe, resume_step) if sinks is None else sinks)
        kept = _keep_lines(self.path, -1 if resume_step is None else resume_step)
        try:
            # Unbuffered: what a full disk refused must not turn up later, in the middle of the file.
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise refused(self.path, error) from error
        self._start = time.monotonic() - (kept[-1]["wall_s"] if kept else 0.0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line and mirror it.

        Call it before the step's checkpoint is written, so that no checkpoint is ahead of its figures.

        Args:
            step: train steps done; 0 before the first.
            metrics: figures by name.

        Raises:
            InfrastructureError: the disk refused the line, for example because it is full. Earlier lines are intact.
        """
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        record: dict[str, Any] = {"step": step, "wall_s": round(time.monotonic() - self._start, 3)}
        record |= {name: finite.get(name) for name in metrics}
        self._append(json.dumps(record) + "\n")
        for sink in tuple(self._sinks):
            try:
                sink.log(step, finite)
            except Exception as error:
                self._drop(sink, error)

    def close(self, ending: Ending = "finished") -> None:
        """Close the file and the trackers.

        Args:
            ending: how the run ended, for trackers that show it.
        """
        with suppress(OSError):
            # Every line is on disk already; what a full disk refused has been said.
            self._file.close()
        for sink in tuple(self._sinks):
            try:
                sink.close(ending)
            except Exception as error:
                self._drop(sink, error)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.close("killed" if issubclass(kind, KeyboardInterrupt) else "failed")

    def _append(self, line: str) -> None:
        before = os.fstat(self._file.fileno()).st_size
        rest = memoryview(line.encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            _truncate(self.path, before)
            raise refused(self.path, error) from error

    def _drop(self, sink: MetricsSink, error: Exception) -> None:
        self._sinks.remove(sink)
        log.warning(
            "%s failed and is left out from here on (%s: %s); %s has every figure",
            sink.name,
            type(error).__name__,
            error,
            self.path,
        )


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return a run's figures, one dict a step in rising order; lines that share a step are merged.

    Args:
        folder: a run folder. A torn last line (a run killed while writing) is left out.

    Raises:
        ConfigError: the folder has no ``metrics.jsonl``.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise ConfigError(f"{str(folder)!r} has no {FILE_NAME}; give the folder of a run, for example runs/quickstart")
    merged: dict[int, dict[str, Any]] = {}
    for record in _whole_lines(path):
        merged.setdefault(record["step"], {}).update(record)
    return [merged[step] for step in sorted(merged)]


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ConfigError(
                f"{path}, line {number} is no JSON ({error}); repair or delete that line, the others are kept"
            ) from error
    return records


def check_sinks(recipe: Recipe) -> None:
    """Find out before anything is trained whether the recipe's trackers are installed.

    Raises:
        MissingExtraError: one is not; the message has the command.
    """
    require_trackers(_tracker_names(recipe))


def _tracker_names(recipe: Recipe) -> list[str]:
    return [name for name in ("tensorboard", "wandb", "mlflow") if getattr(recipe.logging, name)]


def _recipe_sinks(folder: Path, recipe: Recipe, resume_step: int | None) -> list[MetricsSink]:
    identity = RunIdentity(
        folder=folder,
        project=recipe.logging.project,
        name=f"{recipe.run.name}-seed{recipe.run.seed}",
        settings=recipe.model_dump(mode="json"),
        resume_step=resume_step,
    )
    return open_sinks(_tracker_names(recipe), identity)


def _keep_lines(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Keep the lines up to ``last_step`` and return them; the file is replaced in one rename."""
    kept = [record for record in _whole_lines(path) if record["step"] <= last_step] if path.exists() else []
    write_whole(path, (json.dumps(record) + "\n" for record in kept))
    return kept


def _truncate(path: Path, size: int) -> None:
    try:
        os.truncate(path, size)
    except OSError as error:
        log.warning("%s may end in a torn line (%s); it is left out when read", path, error)
