"""The whole loop on a two-layer policy: what a run leaves behind, and resuming bit for bit."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sinkflex.config import Recipe
from sinkflex.envs.dual_control import Episode, Outcome
from sinkflex.errors import CheckpointError, ConfigError
from sinkflex.rollout.trajectory import Trajectory
from sinkflex.train.loop import run
from sinkflex.train.metrics import read_metrics
from sinkflex.train.trainer import StepResult, Trainer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

VALIDATION = "val-core/Telecom-v0/reward/mean@1"


def weights_hash(folder: Path, step: int) -> str:
    weights = folder / "checkpoints" / f"step_{step:06d}" / "policy" / "model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.fixture
def finished(whole_run: Path, tiny_recipe: Callable[..., Recipe]) -> Path:
    """An undisturbed run of four steps, made once."""
    if not whole_run.exists():
        run(tiny_recipe(), out=whole_run)
    return whole_run


def test_the_run_folder_holds_everything(finished: Path) -> None:
    for name in ("config.toml", "metrics.jsonl"):
        assert (finished / name).stat().st_size > 0, name
    metrics = {record["step"]: record for record in read_metrics(finished)}
    assert sorted(metrics) == [0, 1, 2, 3, 4]
    assert [step for step in metrics if VALIDATION in metrics[step]] == [0, 2, 4]
    assert metrics[0]["val-core/Telecom-v0/floor/do_nothing"] == 0.0
    assert metrics[4]["training/trajectories"] == 6.0
    assert metrics[4][f"{VALIDATION}/n"] == 4.0


def test_rollout_and_trainer_agree_on_every_sampled_token(finished: Path) -> None:
    differences = [
        record["training/rollout_logprobs_diff_max"]
        for record in read_metrics(finished)
        if "training/rollout_logprobs_diff_max" in record
    ]
    assert all(value <= 1e-4 for value in differences)


def test_trajectories_are_written_whole(finished: Path) -> None:
    lines = (finished / "trajectories" / "step_000003.jsonl").read_text().splitlines()
    trajectories = [Trajectory.from_record(json.loads(line)) for line in lines]
    assert len(trajectories) == 6
    assert len({trajectory.group_id for trajectory in trajectories}) == 2
    assert all(trajectory.ledger.num_sampled > 0 for trajectory in trajectories)


def run_killed_and_resumed(recipe: Recipe, out: Path, *, stop: int) -> None:
    """Run until step ``stop`` is done, die there, and resume to the end."""

    class Killed(BaseException):
        """Stands for a kill between two steps."""

    original = Trainer.step

    def killed_step(self: Trainer, step: int) -> StepResult:
        if step > stop:
            raise Killed
        return original(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", killed_step)
        with pytest.raises(Killed):
            run(recipe, out=out)
    run(recipe, out=out, resume=True)


@pytest.mark.parametrize("stop", [1, 3])
def test_resuming_ends_in_the_same_bits(
    finished: Path, tiny_recipe: Callable[..., Recipe], tmp_path: Path, stop: int
) -> None:
    out = tmp_path / "run"
    run_killed_and_resumed(tiny_recipe(), out, stop=stop)
    assert weights_hash(out, 4) == weights_hash(finished, 4)
    scores = [[record.get("critic/score/mean") for record in read_metrics(folder)] for folder in (out, finished)]
    assert scores[0] == scores[1]


def test_resuming_keeps_reference_refills_minibatches_and_moments(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome_by_chance(self: Any) -> Outcome:
        """The policy solves nothing yet; what it says decides, so that some groups are mixed and others are not."""
        told = "".join(message.content for side, message in self.transcript if side == "agent")
        score = float(zlib.crc32(told.encode()) % 4 == 0)
        return Outcome(score=score, components={}, metrics={}, breaches=())

    monkeypatch.setattr(Episode, "outcome", outcome_by_chance)
    recipe = tiny_recipe(
        "algo.overlong=keep",
        "algo.dynamic_sampling=true",
        "algo.max_refills=2",
        "algo.kl_coef=0.05",
        "algo.entropy_coef=0.01",
        "algo.correction=tis",
        "algo.updates_per_batch=2",
        "algo.minibatches=2",
        "optim.schedule=cosine",
        "optim.warmup_steps=2",
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(recipe, out=whole)
    run_killed_and_resumed(recipe, killed, stop=2)
    records = read_metrics(whole)
    assert max(record.get("training/sampling_rounds", 0) for record in records) > 1
    assert any(record.get("actor/kl_loss", 0) > 0 for record in records)
    assert weights_hash(killed, 4) == weights_hash(whole, 4)
    for mine, theirs in zip(read_metrics(killed), records, strict=True):
        timed = ("timing_s/", "perf/", "wall_s")
        assert {k: v for k, v in mine.items() if not k.startswith(timed)} == {
            k: v for k, v in theirs.items() if not k.startswith(timed)
        }


def test_a_step_tells_its_parts_and_how_it_was_packed(
    finished: Path, tiny_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = read_metrics(finished)[4]
    parts = [record[f"timing_s/{name}"] for name in ("gen", "adv", "old_log_prob", "update_actor")]
    assert all(seconds > 0 for seconds in parts)
    assert sum(parts) <= record["timing_s/step"]
    # The penalty for length is part of what the estimator sees, and no part of the environment's reward.
    assert record["critic/returns/mean"] < record["critic/rewards/mean"]
    run(tiny_recipe("train.steps=2"), out=tmp_path / "told")
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("update: ")]
    assert len(told) == 1
    assert re.match(r"update: \d+ trajectories of [\d,]+ tokens in \d+ packed rows of [\d,]+: ", told[0])


def test_settings_that_change_on_a_resume_are_the_new_ones(
    finished: Path, tiny_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    changed = tiny_recipe("optim.betas=[0.8, 0.9]", "optim.weight_decay=0.25", "train.steps=5")
    run(changed, out=out, resume=True, allow_changes=True)
    saved = torch.load(out / "checkpoints" / "step_000005" / "trainer.pt", weights_only=True)["optimizer"]
    assert [(tuple(group["betas"]), group["weight_decay"]) for group in saved["param_groups"]] == [
        ((0.8, 0.9), 0.25),
        ((0.8, 0.9), 0.0),
    ]
    assert {float(state["step"]) for state in saved["state"].values()} == {5.0}


def test_resume_from_an_older_checkpoint_gives_the_same_end(
    finished: Path, tiny_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    before = weights_hash(finished, 4)
    shutil.rmtree(out / "checkpoints" / "step_000004")
    run(tiny_recipe(), out=out, resume_from="step_000002")
    assert weights_hash(out, 4) == before


def test_a_folder_with_a_run_is_not_overwritten(finished: Path, tiny_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(ConfigError, match=r"already holds a run; continue it with --resume or choose another --out"):
        run(tiny_recipe(), out=finished)


def test_resuming_with_another_recipe_names_what_differs(finished: Path, tiny_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(ConfigError, match=r"differs from the one it was started with in optim\.lr; resume with"):
        run(tiny_recipe("optim.lr=5e-4"), out=finished, resume=True)


def test_resuming_nothing_is_refused(tiny_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no run to resume"):
        run(tiny_recipe(), out=tmp_path / "empty", resume=True)


def test_lr_zero_leaves_the_weights_as_they_were(tiny_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    out = tmp_path / "flat"
    run(tiny_recipe("optim.lr=0.0", "train.steps=2"), out=out)
    assert weights_hash(out, 0) == weights_hash(out, 2)


def test_every_step_moves_the_weights(finished: Path) -> None:
    assert len({weights_hash(finished, step) for step in range(5)}) == 5
