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
from sinkflex.errors import ConfigError, InfrastructureError
from sinkflex.train.trackers import MetricsSink, RunIdentity, open_sinks, require_trackers

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
        try:
            kept = _keep_lines(self.path, -1 if resume_step is None else resume_step)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise _refusal(self.path, error) from error
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

    def close(self) -> None:
        """Close the file and the trackers."""
        with suppress(OSError):
            # A line that a full disk refused may still be buffered; what was refused has been said already.
            self._file.close()
        for sink in tuple(self._sinks):
            try:
                sink.close()
            except Exception as error:
                self._drop(sink, error)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, line: str) -> None:
        before = self._file.tell()
        try:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            _truncate(self.path, before)
            raise _refusal(self.path, error) from error

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
    staging = path.with_suffix(".tmp")
    with staging.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    staging.replace(path)
    return kept


def _truncate(path: Path, size: int) -> None:
    try:
        os.truncate(path, size)
    except OSError as error:
        log.warning("%s may end in a torn line (%s); it is left out when read", path, error)


def _refusal(path: Path, error: OSError) -> InfrastructureError:
    return InfrastructureError(
        f"cannot write {path}: {error.strerror or error}; what was written before is intact. "
        "Free disk space or fix the permissions, then run again with --resume"
    )
