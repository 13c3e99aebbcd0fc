"""Trackers that mirror ``metrics.jsonl``: TensorBoard, Weights & Biases, MLflow, each behind its extra."""

from __future__ import annotations

import importlib
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from sinkflex.errors import MissingExtraError, unknown_name

log = logging.getLogger(__name__)

Ending: TypeAlias = Literal["finished", "failed", "killed"]
"""How a run ended: at its last step, by an error, or by the person who ran it."""


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """What a tracker files a run under.

    Attributes:
        folder: the run folder; event files and run ids are kept in it, so that a resumed run continues its own record.
        project: project or experiment.
        name: the run's name.
        settings: the resolved recipe as plain data.
        resume_step: steps done when the run is resumed; None for a new run.
    """

    folder: Path
    project: str
    name: str
    settings: Mapping[str, Any]
    resume_step: int | None = None


class MetricsSink(Protocol):
    """A tracker that mirrors ``metrics.jsonl``. It may fail; the run goes on without it."""

    name: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record finite figures of a step."""

    def close(self, ending: Ending) -> None:
        """Hand over what is buffered and say how the run ended."""


class TensorBoardSink:
    """Event files under ``tensorboard/`` in the run folder. Steps after a resume replace those of the lost run."""

    name = "TensorBoard"

    def __init__(self, identity: RunIdentity) -> None:
        tensorboard = _require("tensorboard")
        purge = None if identity.resume_step is None else identity.resume_step + 1
        self._writer = tensorboard.SummaryWriter(str(identity.folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add each figure as a scalar and flush."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, ending: Ending) -> None:
        """Close the event file; TensorBoard knows no endings."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run whose id is kept in the run folder."""

    name = "Weights & Biases"

    def __init__(self, identity: RunIdentity) -> None:
        wandb = _require("wandb")
        self._run = wandb.init(
            project=identity.project,
            name=identity.name,
            dir=str(identity.folder),
            config=dict(identity.settings),
            id=_kept_id(identity.folder / "wandb.id", lambda: uuid.uuid4().hex),
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the figures with the train step as a figure of its own, so that validation may share a step."""
        self._run.log({**metrics, "train_step": step})

    def close(self, ending: Ending) -> None:
        """Finish the run; any ending but ``finished`` marks it as crashed."""
        self._run.finish(exit_code=int(ending != "finished"))


class MlflowSink:
    """An MLflow run whose id is kept in the run folder.

    MLflow allows neither ``@`` nor ``^`` in names: ``mean@1`` becomes ``mean_at_1`` and ``pass^2`` ``pass_hat_2``.
    """

    name = "MLflow"

    def __init__(self, identity: RunIdentity) -> None:
        mlflow = _require("mlflow")
        self._client = mlflow.MlflowClient()
        experiment = mlflow.set_experiment(identity.project)
        self._run_id = _kept_id(
            identity.folder / "mlflow.id",
            lambda: self._client.create_run(experiment.experiment_id, run_name=identity.name).info.run_id,
        )
        if identity.resume_step is not None:
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            for key, value in _flat(identity.settings):
                self._client.log_param(self._run_id, key, str(value)[:500])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the figures under allowed names."""
        for name, value in metrics.items():
            allowed = name.replace("@", "_at_").replace("^", "_hat_")
            self._client.log_metric(self._run_id, allowed, value, step=step)

    def close(self, ending: Ending) -> None:
        """Mark the run ``FINISHED``, ``FAILED`` or ``KILLED``."""
        self._client.set_terminated(self._run_id, status=ending.upper())


SINKS: dict[str, Callable[[RunIdentity], MetricsSink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
}
"""Trackers by their name in ``[logging]``."""

PACKAGES: dict[str, tuple[str, str, str]] = {
    "tensorboard": ("torch.utils.tensorboard", "train", "tensorboard"),
    "wandb": ("wandb", "wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow", "mlflow"),
}
"""What each tracker needs: module, extra of sinkflex, package."""


def require_trackers(names: Sequence[str]) -> None:
    """Import the packages of trackers.

    Raises:
        MissingExtraError: one is not installed; the message has the command.
    """
    for name in names:
        _require(name)


def open_sinks(names: Sequence[str], identity: RunIdentity) -> list[MetricsSink]:
    """Open trackers by name; one that fails to open (its server is out of reach, say) is reported and left out.

    Args:
        names: keys of ``SINKS``.
        identity: what they file the run under.

    Raises:
        ValueError: a name is unknown.
        MissingExtraError: a tracker's package is not installed; the message has the command.
    """
    for name in names:
        if name not in SINKS:
            raise ValueError(unknown_name("tracker", name, SINKS))
    sinks: list[MetricsSink] = []
    for name in names:
        try:
            sinks.append(SINKS[name](identity))
        except MissingExtraError:
            raise
        except Exception as error:
            log.warning("%s cannot be opened and is left out (%s: %s)", name, type(error).__name__, error)
    return sinks


def _require(name: str) -> Any:
    module, extra, package = PACKAGES[name]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"logging.{extra if extra != 'train' else package} needs {package}; install it with: "
            f"pip install 'sinkflex[{extra}]', or set it to false"
        ) from error


def _kept_id(path: Path, create: Callable[[], str]) -> str:
    if not path.exists():
        path.write_text(create(), encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _flat(settings: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{above}{key}.")
        else:
            pairs.append((f"{above}{key}", value))
    return pairs
