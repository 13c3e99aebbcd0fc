"""A finished or running run, read back from its folder."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sinkflex.errors import ConfigError
from sinkflex.train.metrics import read_metrics

CONFIG_FILE = "config.toml"


@dataclass(frozen=True, kw_only=True)
class Validation:
    """One validation of a run.

    Attributes:
        step: train steps done.
        mean: mean@1 over held-out tasks, in [0, 1].
        low: lower end of its 95 % interval; equal to ``mean`` where none was recorded.
        high: upper end.
        tasks: number of held-out tasks.
    """

    step: int
    mean: float
    low: float
    high: float
    tasks: int


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """What a run folder says about its run.

    Attributes:
        folder: the run folder.
        settings: the resolved recipe as plain tables.
        records: one dict a step, in rising order; a figure that was not finite is None.
        source: the name validation figures are filed under; None when nothing was validated.
        validations: in order of steps.
        floors: what agents that know nothing score on the same tasks, by name.
    """

    folder: Path
    settings: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    source: str | None
    validations: Sequence[Validation] = field(default=())
    floors: Mapping[str, float] = field(default_factory=dict)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps at which a figure was recorded as a finite number, and its values."""
        found = [(record["step"], record[name]) for record in self.records if record.get(name) is not None]
        return [step for step, _ in found], [value for _, value in found]


def read_run(folder: Path) -> RunHistory:
    """Read a run folder.

    Args:
        folder: holds ``config.toml`` and ``metrics.jsonl``.

    Raises:
        ConfigError: one of them is missing or unreadable, or no step has been recorded yet.
    """
    config = folder / CONFIG_FILE
    try:
        settings = tomllib.loads(config.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"{str(folder)!r} is no run folder: {CONFIG_FILE} cannot be read ({error}); "
            "give the folder that `sinkflex train` named at its end"
        ) from error
    records = read_metrics(folder)
    if not records:
        raise ConfigError(f"{str(folder)!r} has no figures yet; wait for its first step")
    source = _validation_source(records)
    return RunHistory(
        folder=folder,
        settings=settings,
        records=records,
        source=source,
        validations=[] if source is None else _validations(records, source),
        floors={} if source is None else _floors(records, source),
    )


def _validation_source(records: Sequence[Mapping[str, Any]]) -> str | None:
    for record in records:
        for name in record:
            if name.startswith("val-core/") and name.endswith("/reward/mean@1"):
                return name.removeprefix("val-core/").removesuffix("/reward/mean@1")
    return None


def _validations(records: Sequence[Mapping[str, Any]], source: str) -> list[Validation]:
    name = f"val-core/{source}/reward/mean@1"
    return [
        Validation(
            step=record["step"],
            mean=record[name],
            low=record.get(f"{name}/low", record[name]),
            high=record.get(f"{name}/high", record[name]),
            tasks=int(record.get(f"{name}/n", 0)),
        )
        for record in records
        if record.get(name) is not None
    ]


def _floors(records: Sequence[Mapping[str, Any]], source: str) -> dict[str, float]:
    prefix = f"val-core/{source}/floor/"
    return {
        name.removeprefix(prefix): value
        for record in records
        for name, value in record.items()
        if name.startswith(prefix) and value is not None
    }
