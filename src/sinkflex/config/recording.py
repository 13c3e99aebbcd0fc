"""Recipe sections that say what is measured and kept: validation, checkpoints, logging."""

from __future__ import annotations

from pydantic import Field

from sinkflex.config.section import Counts, Section


class ValidationSection(Section):
    """Held-out evaluation during the run."""

    every: int = Field(default=5, ge=1)
    """Train steps between validations; the last step is always validated."""

    tasks: int = Field(default=128, ge=1)
    """Held-out tasks; the same ones each time."""

    samples: int = Field(default=1, ge=1)
    """Episodes a task (k of mean@k and pass^k)."""

    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""

    at_start: bool = True
    """Validate before the first train step, so that the curve shows where it began."""

    floors: bool = True
    """Measure the do-nothing and random floors once and show them beside the scores."""

    pass_k: Counts = (1,)
    """Values of k for which pass^k (all k of k episodes succeed) is reported; none above ``samples``."""


class CheckpointSection(Section):
    """What is kept to resume from and to use."""

    every: int = Field(default=5, ge=1)
    """Train steps between checkpoints; the last step is always kept."""

    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""

    keep_best: bool = True
    """Keep the checkpoint of the best validation score as well."""


class LoggingSection(Section):
    """Where metrics go beside ``metrics.jsonl``, which is always written."""

    tensorboard: bool = True
    """Event files in the run folder."""

    wandb: bool = False
    """Weights & Biases (extra ``wandb``)."""

    mlflow: bool = False
    """MLflow (extra ``mlflow``)."""

    project: str = "sinkflex"
    """Project or experiment name in those two."""

    trajectories_every: int = Field(default=1, ge=0)
    """Train steps between written ``trajectories/step_*.jsonl``; 0 writes none."""
