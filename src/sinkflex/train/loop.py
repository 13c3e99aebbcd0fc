"""The run: warm start, validation, train steps, checkpoints, resume."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch

from sinkflex.config import Recipe
from sinkflex.rollout.trajectory import Trajectory
from sinkflex.train.build import Parts, build_parts
from sinkflex.train.checkpoint import CheckpointInfo, CheckpointStore, read_checkpoint
from sinkflex.train.determinism import repeatable
from sinkflex.train.metrics import MetricsLog, check_sinks
from sinkflex.train.policy_setup import pick_device
from sinkflex.train.progress import Progress
from sinkflex.train.run_folder import claim, locked
from sinkflex.train.validation import ValidationResult, measure_floors, validate
from sinkflex.train.whole_file import write_whole


def run(
    recipe: Recipe,
    *,
    out: Path,
    resume: bool = False,
    resume_from: str | None = None,
    allow_changes: bool = False,
) -> None:
    """Train a recipe to its end.

    Args:
        recipe: what to run.
        out: run folder; gets ``config.toml``, ``metrics.jsonl``, ``trajectories/`` and ``checkpoints/``.
        resume: continue from the newest checkpoint in the run folder, bit for bit.
        resume_from: continue from this checkpoint instead, for example ``"step_000010"``; later ones are kept in
            ``checkpoints/abandoned-*``.
        allow_changes: resume though the recipe differs from the stored one.

    Raises:
        ConfigError: the folder holds a run and ``resume`` is False, its recipe differs from this one, or another
            process runs in it.
        CheckpointError: there is nothing to resume, or the checkpoint is damaged.
        InfrastructureError: the disk refused a write; what was written before is whole.
    """
    resuming = resume or resume_from is not None
    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    store = CheckpointStore(
        out / "checkpoints", keep_last=recipe.checkpoint.keep_last, keep_best=recipe.checkpoint.keep_best
    )
    with locked(out), repeatable(pick_device(recipe)), Progress(recipe) as progress:
        claim(out, recipe, resuming=resuming, allow_changes=allow_changes)
        store.recover()
        checkpoint = store.choose(resume_from) if resuming else None
        check_sinks(recipe)
        parts = build_parts(recipe, on_warmstart_step=progress.warmstart)
        if checkpoint is not None:
            store.set_aside(after=checkpoint.step)
        session = _Session(recipe, out, store, parts, progress, checkpoint)
        session.run()


class _Session:
    """The loop's state between steps."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        store: CheckpointStore,
        parts: Parts,
        progress: Progress,
        checkpoint: CheckpointInfo | None,
    ) -> None:
        self.recipe = recipe
        self.folder = folder
        self.store = store
        self.parts = parts
        self.progress = progress
        self.source = recipe.env.id.split("/")[-1]
        self.step = 0
        if checkpoint is not None:
            tensors, state = read_checkpoint(checkpoint)
            parts.trainer.restore(policy_folder=checkpoint.path / "policy", tensors=tensors, state=state["trainer"])
            self.step = checkpoint.step
        self.log = MetricsLog(folder, recipe, resume_step=self.step if checkpoint is not None else None)
        self.fresh = checkpoint is None
        self.told_packing = False

    def run(self) -> None:
        """Go through the train steps that are left."""
        recipe, total = self.recipe, self.recipe.train.steps
        with self.log:
            if self.fresh:
                self._begin()
            while self.step < total:
                step = self.step + 1
                result = self.parts.trainer.step(step)
                metrics = result.metrics
                every = recipe.logging.trajectories_every
                if every and step % every == 0:
                    self._write_trajectories(f"step_{step:06d}", result.groups.sampled)
                validation = None
                if step % recipe.validation.every == 0 or step == total:
                    validation = self._validate(step)
                    metrics |= validation.metrics(self.source)
                self.log.write(step, metrics)
                self.progress.step(step, metrics)
                self._tell_packing()
                self.step = step
                if step % recipe.checkpoint.every == 0 or step == total:
                    self._save(None if validation is None else validation.mean_at_1.value)

    def _tell_packing(self) -> None:
        """Say once how batches are packed, and whether shared prefixes pay."""
        packing = self.parts.trainer.updater.packing
        if packing and not self.told_packing:
            self.progress.note(f"update: {packing}")
            self.told_packing = True

    def _begin(self) -> None:
        """Step 0: where the curve starts, the floors beside it, and a checkpoint to come back to."""
        recipe, parts = self.recipe, self.parts
        metrics: dict[str, float] = {}
        if parts.warmstart.loss is not None:
            metrics["warmstart/loss"] = parts.warmstart.loss
        if recipe.validation.floors:
            floors = measure_floors(parts.floor_env, parts.validation_tasks, split=recipe.env.validation_split)
            for name, estimate in floors.items():
                metrics[f"val-core/{self.source}/floor/{name}"] = estimate.value
        score = None
        if recipe.validation.at_start:
            validation = self._validate(0)
            metrics |= validation.metrics(self.source)
            score = validation.mean_at_1.value
        self.log.write(0, metrics)
        self.progress.step(0, metrics)
        self._save(score)

    def _validate(self, step: int) -> ValidationResult:
        recipe = self.recipe.validation
        self.progress.phase("validation")
        result = validate(
            self.parts.collect_validation,
            self.parts.validation_tasks,
            split=self.recipe.env.validation_split,
            samples=recipe.samples,
            pass_k=recipe.pass_k,
        )
        self._write_trajectories(f"validation_{step:06d}", result.trajectories)
        return result

    def _save(self, score: float | None) -> None:
        self.store.save(
            step=self.step,
            score=score,
            write_policy=self.parts.policy.save,
            tensors=self.parts.trainer.tensors(),
            state={"trainer": self.parts.trainer.state(), "warmstart": asdict(self.parts.warmstart)},
        )

    def _write_trajectories(self, name: str, trajectories: Iterable[Trajectory]) -> None:
        """One trajectory a line: dialogue, tokens, masks, rewards, stop reason."""
        decode = self.parts.renderer.action_text
        write_whole(
            self.folder / "trajectories" / f"{name}.jsonl",
            (json.dumps(trajectory.to_record(decode)) + "\n" for trajectory in trajectories),
        )
