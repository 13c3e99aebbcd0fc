"""What goes wrong in a run ends in a message that says what to do, and what was written before stays whole."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sinkflex.config import Recipe
from sinkflex.envs.gym import DualControlEnv
from sinkflex.errors import InfrastructureError, ModelError, RolloutError
from sinkflex.train.loop import run
from sinkflex.train.metrics import read_metrics

QUICK = ("validation.floors=false", "validation.at_start=false", "train.steps=2", "validation.every=2")


def break_steps(patch: pytest.MonkeyPatch, share: float, how: Callable[[], None]) -> list[int]:
    """Let about a ``share`` of all environment steps fail; returns a counter of the failures."""
    original, calls, failures = DualControlEnv.step, [0], [0]

    def step(self: DualControlEnv, action: str) -> Any:
        calls[0] += 1
        if int(calls[0] * share) != int((calls[0] - 1) * share):
            failures[0] += 1
            how()
        return original(self, action)

    patch.setattr(DualControlEnv, "step", step)
    return failures


def raise_error() -> None:
    raise ConnectionResetError("the database went away")


def test_an_environment_that_raises_now_and_then_costs_episodes_not_the_run(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = tiny_recipe(*QUICK, "rollout.retries=0", "rollout.max_failed_share=1.0")
    with pytest.MonkeyPatch.context() as patch:
        # The warm start is in the session's cache, but its demonstrations are played before the cache is asked.
        from sinkflex.train import policy_setup

        original = policy_setup.prepare_policy

        def prepare(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            break_steps(patch, 0.04, raise_error)
            return result

        patch.setattr("sinkflex.train.build.prepare_policy", prepare)
        run(recipe, out=tmp_path / "run")
    records = [record for record in read_metrics(tmp_path / "run") if record["step"] > 0]
    assert [record["step"] for record in records] == [1, 2]
    assert sum(record["training/failed_episodes"] for record in records) > 0


def test_an_environment_that_always_raises_stops_the_run_with_the_cause(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    from sinkflex.train import policy_setup

    original = policy_setup.prepare_policy
    with pytest.MonkeyPatch.context() as patch:

        def prepare(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            break_steps(patch, 1.0, raise_error)
            return result

        patch.setattr("sinkflex.train.build.prepare_policy", prepare)
        with pytest.raises(RolloutError, match=r"episodes failed.*ConnectionResetError: the database went away"):
            run(tiny_recipe(*QUICK), out=tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "step_000000").is_dir()


def test_an_environment_that_hangs_is_given_up_at_its_deadline(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    from sinkflex.train import policy_setup

    original = policy_setup.prepare_policy
    recipe = tiny_recipe(*QUICK, "env.step_timeout_s=0.2", "rollout.retries=0", "rollout.max_failed_share=1.0")
    with pytest.MonkeyPatch.context() as patch:

        def prepare(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            break_steps(patch, 0.04, lambda: time.sleep(60))
            return result

        patch.setattr("sinkflex.train.build.prepare_policy", prepare)
        started = time.monotonic()
        run(recipe, out=tmp_path / "run")
    assert time.monotonic() - started < 60
    assert sum(record.get("training/failed_episodes", 0) for record in read_metrics(tmp_path / "run")) > 0


@pytest.mark.parametrize("full_at", ["trajectories", "checkpoints", "metrics"])
def test_a_full_disk_stops_the_run_and_resuming_ends_it(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path, full_at: str
) -> None:
    out, recipe = tmp_path / "run", tiny_recipe(*QUICK)
    original = os.fsync

    def fsync(descriptor: int) -> None:
        wanted = os.fstat(descriptor)
        late = (out / "checkpoints" / "step_000000").exists()
        files = [path for path in out.rglob("*") if str(path.relative_to(out)).startswith(full_at)] if late else []
        if any(os.path.samestat(path.stat(), wanted) for path in files):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(InfrastructureError, match=r"No space left on device.*--resume"):
            run(recipe, out=out)
    run(recipe, out=out, resume=True)
    assert [record["step"] for record in read_metrics(out)] == [0, 1, 2]


def test_weights_that_turn_nan_stop_the_run_by_name(tiny_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    from sinkflex.train import trainer

    original = trainer.Trainer.step

    def poisoned(self: trainer.Trainer, step: int) -> trainer.StepResult:
        if step == 2:
            next(iter(self.policy.trainable().values())).data.fill_(float("nan"))
            self._weights_changed()
        return original(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Trainer, "step", poisoned)
        with pytest.raises(
            ModelError, match=r"NaN or infinite logits for position \d+; the weights or the learning rate"
        ):
            run(tiny_recipe(*QUICK), out=tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "step_000001").is_dir()
