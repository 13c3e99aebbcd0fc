"""``sinkflex eval``: which weights, played by which recipe, and what is printed."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest

import sinkflex.cli as cli
from sinkflex.algo.evaluation import Estimate
from sinkflex.cli.eval import find_weights
from sinkflex.config import dump_recipe, load_recipe
from sinkflex.errors import CheckpointError, ConfigError
from sinkflex.train.checkpoint import write_manifest


def write_checkpoint(run: Path, step: int, score: float | None) -> Path:
    folder = run / "checkpoints" / f"step_{step:06d}"
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "weights").write_text(str(step))
    write_manifest(folder, {"step": step, "score": score})
    return folder


@pytest.fixture
def run_folder(tmp_path):
    """A run folder of the retail recipe with three checkpoints, the middle one the best."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(dump_recipe(load_recipe(None, ["run.name=mine", "env.tier=long"])))
    for step, score in ((0, 0.25), (10, 0.75), (20, 0.5)):
        write_checkpoint(run, step, score)
    return run


@pytest.fixture
def played(monkeypatch):
    """Replace the building of parts and the playing by known figures; returns the recipes that were built."""
    recipes = []
    loaded = []

    def build_parts(recipe, *, on_warmstart_step):
        recipes.append(recipe)
        policy = types.SimpleNamespace(load_weights=loaded.append)
        return types.SimpleNamespace(collect_validation=None, validation_tasks=["a"] * 8, floor_env=None, policy=policy)

    def estimate(value, trials):
        return Estimate(value=value, low=value - 0.1, high=value + 0.1, tasks=8, trials=trials)

    def validate(collect, tasks, *, split, samples, pass_k):
        return types.SimpleNamespace(
            mean_at_1=estimate(0.5, 1),
            mean_at_k=estimate(0.625 if samples > 1 else 0.5, samples),
            pass_hat_k={k: 0.5 / k for k in pass_k},
            failures=("one",),
            seconds=1.5,
        )

    monkeypatch.setattr("sinkflex.train.build.build_parts", build_parts)
    monkeypatch.setattr("sinkflex.train.validation.validate", validate)
    monkeypatch.setattr(
        "sinkflex.train.validation.measure_floors", lambda env, tasks, split: {"do_nothing": estimate(0.125, 1)}
    )
    return types.SimpleNamespace(recipes=recipes, loaded=loaded)


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.delenv(cli.TRACEBACK, raising=False)

    def _run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(["eval", *arguments])
        out, err = capsys.readouterr()
        return (0 if caught.value.code is None else int(caught.value.code)), out, err

    return _run


def test_a_run_is_played_by_its_own_recipe_with_its_best_checkpoint(run, run_folder, played):
    status, out, err = run(str(run_folder))
    assert status == 0, err
    (recipe,) = played.recipes
    assert recipe.model.path == str(run_folder / "checkpoints" / "step_000010" / "policy")
    assert (recipe.env.tier, recipe.warmstart.enabled, recipe.validation.samples) == (("long",), False, 1)
    for part in ("(test, long), n = 8 tasks, temperature 0", "mean@1", "[0.400, 0.600]", "floor: do nothing", "0.125"):
        assert part in out
    assert "failed episodes" in out


def test_several_samples_are_drawn_warm_and_give_pass_k(run, run_folder, played):
    status, out, _ = run(str(run_folder), "--samples", "5", "--tasks", "7", "--json")
    figures = json.loads(out)
    assert status == 0
    assert (figures["samples"], figures["temperature"]) == (5, 1.0)
    assert figures["mean@5"] == {"value": 0.625, "low": 0.525, "high": 0.725}
    assert figures["pass^k"] == {"1": 0.5, "2": 0.25, "4": 0.125}
    assert played.recipes[0].validation.tasks == 7
    run(str(run_folder), "--samples", "2", "--set", "validation.temperature=0.5")
    assert played.recipes[1].validation.temperature == 0.5


def test_the_table_shows_both_means_when_there_are_several_samples(run, run_folder, played):
    out = run(str(run_folder), "--samples", "2")[1]
    assert out.index("mean@1") < out.index("mean@2") < out.index("pass^1") < out.index("pass^2")


def test_a_checkpoint_folder_finds_the_recipe_of_its_run(run, run_folder, played):
    chosen = run_folder / "checkpoints" / "step_000000"
    assert run(str(chosen))[0] == 0
    assert played.recipes[0].model.path == str(chosen / "policy")
    assert played.recipes[0].run.name == "mine"


def test_a_model_is_played_by_the_recipe_that_is_named(run, played):
    assert run("some/model", "--recipe", "retail", "--set", "env.id=sinkflex/Telecom-v0")[0] == 0
    recipe = played.recipes[0]
    assert (recipe.run.name, recipe.model.path, recipe.warmstart.enabled) == ("retail", "some/model", False)
    assert run("some/model")[0] == 0
    assert played.recipes[1].run.name == "quickstart"


def test_adapters_are_loaded_onto_the_base_model_of_the_run(run, run_folder, played):
    lora = load_recipe(None, ["model.path=base", "model.lora.enabled=true"])
    (run_folder / "config.toml").write_text(dump_recipe(lora))
    assert run(str(run_folder))[0] == 0
    assert (played.recipes[0].model.path, played.recipes[0].model.lora.enabled) == ("base", True)
    assert played.loaded == [run_folder / "checkpoints" / "step_000010" / "policy"]


def test_the_checkpoint_is_the_one_named_the_best_or_the_newest(run_folder, tmp_path):
    assert find_weights(run_folder, "step_000000").name == "step_000000"
    assert find_weights(run_folder, None).name == "step_000010"
    unscored = tmp_path / "unscored"
    unscored.mkdir()
    (unscored / "config.toml").write_text("")
    for step in (1, 2):
        write_checkpoint(unscored, step, None)
    assert find_weights(unscored, None).name == "step_000002"
    assert find_weights(Path("some/model"), None) is None


def test_weights_that_cannot_be_used_are_explained(run_folder):
    with pytest.raises(ConfigError, match=r"--checkpoint needs a run folder, but 'some/model' has no config.toml"):
        find_weights(Path("some/model"), "step_000001")
    with pytest.raises(CheckpointError, match=r"no checkpoint 'step_000007'"):
        find_weights(run_folder, "step_000007")
    broken = run_folder / "checkpoints" / "step_000020"
    (broken / "policy" / "weights").write_text("other")
    with pytest.raises(CheckpointError, match=r"is damaged \(.*\); evaluate another one of its run"):
        find_weights(broken, None)
