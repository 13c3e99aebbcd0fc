"""The whole loop on a two-layer policy: what a run leaves behind, and resuming bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sinkflex.config import Recipe
from sinkflex.errors import CheckpointError, ConfigError
from sinkflex.rollout.trajectory import Trajectory
from sinkflex.train.loop import run
from sinkflex.train.metrics import read_metrics

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


@pytest.mark.parametrize("stop", [1, 3])
def test_resuming_ends_in_the_same_bits(
    finished: Path, tiny_recipe: Callable[..., Recipe], tmp_path: Path, stop: int
) -> None:
    out = tmp_path / "run"

    class Killed(BaseException):
        """Stands for a kill between two steps."""

    from sinkflex.train import trainer

    original = trainer.Trainer.step

    def killed_step(self: trainer.Trainer, step: int) -> trainer.StepResult:
        if step > stop:
            raise Killed
        return original(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Trainer, "step", killed_step)
        with pytest.raises(Killed):
            run(tiny_recipe(), out=out)
    run(tiny_recipe(), out=out, resume=True)
    assert weights_hash(out, 4) == weights_hash(finished, 4)
    scores = [[record.get("critic/score/mean") for record in read_metrics(folder)] for folder in (out, finished)]
    assert scores[0] == scores[1]


def test_resume_from_an_older_checkpoint_gives_the_same_end(
    finished: Path, tiny_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    import shutil

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
