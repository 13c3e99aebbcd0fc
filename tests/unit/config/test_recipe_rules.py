"""Rules between sections, the schema's documentation, and the recipes that ship."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from sinkflex.config import Recipe, find_recipe, load_recipe, schema_keys, shipped_recipes
from sinkflex.config.learning import AlgoSection
from sinkflex.errors import ConfigError

RECIPES = Path(__file__).resolve().parents[3] / "recipes"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.tiny.heads=3"], r"model.tiny.heads = 3 is not a multiple of model.tiny.kv_heads = 2"),
        (["model.tiny.head_dim=31"], r"model.tiny.head_dim = 31 is odd"),
        (["model.tiny.experts_per_token=3"], r"experts_per_token = 3 exceeds model.tiny.experts = 2"),
        (["rollout.max_length=4096"], r"rollout.max_length = 4096 exceeds model.tiny.max_positions = 2048"),
        (["model.lora.enabled=true"], r"model.lora.enabled needs model.path"),
        (["rollout.group_size=1"], r"rollout.group_size = 1: a lone trajectory has no group"),
        (["rollout.max_new_tokens=512"], r"max_new_tokens = 512 leaves no room for a prompt"),
        (["algo.minibatches=999"], r"algo.minibatches = 999 exceeds the 128 trajectories"),
        (["algo.overlong=penalty", "algo.overlong_buffer=512"], r"overlong_buffer = 512 must be below"),
        (["algo.clip_low=0.2", "algo.clip_high=0.3"], r"'grpo' clips on both sides alike.*loss = 'dapo'"),
        (["algo.loss=gspo", "algo.dual_clip=3.0"], r"dual_clip = 3.0 has no meaning for algo.loss = 'gspo'"),
        (["optim.betas=[0.9, 1.0]"], r"optim.betas holds 1.0; each must lie in \[0, 1\)"),
        (["env.validation_split=train"], r"both 'train'; a score on the training tasks is not validation"),
        (["validation.pass_k=[1, 2]"], r"pass_k has 2, but validation.samples = 1"),
        (["validation.pass_k=[0]"], r"pass_k has 0"),
        (["validation.samples=4"], r"validation.temperature = 0 repeats one greedy episode"),
    ],
)
def test_sections_that_contradict_each_other_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(None, overrides)


def test_all_contradictions_are_named_at_once():
    with pytest.raises(ConfigError, match=r"group_size = 1.*both 'test'"):
        load_recipe(None, ["rollout.group_size=1", "env.train_split=test"])


@pytest.mark.parametrize(
    "overrides", [["model.path=m", "rollout.max_length=9999"], ["model.path=m", "model.lora.enabled=true"]]
)
def test_a_loaded_model_is_not_held_to_the_tiny_shape(overrides):
    assert load_recipe(None, overrides).model.path == "m"


def test_every_key_is_explained():
    keys = {key.name: key for key in schema_keys()}
    assert [name for name, key in keys.items() if not key.meaning.endswith((".", "!"))] == []
    assert (keys["rollout.slots"].type, keys["rollout.slots"].default) == ("int", "128")
    assert (keys["model.path"].type, keys["model.path"].default) == ("str", "unset")
    assert keys["env.mode"].type == "'inline' | 'threads'"
    assert (keys["env.tier"].type, keys["env.tier"].default) == ("list of texts", '["easy"]')
    assert (keys["optim.betas"].type, keys["optim.betas"].default) == ("two numbers", "[0.9, 0.95]")
    assert (keys["env.kwargs"].type, keys["env.kwargs"].default) == ("table", "{}")


def test_every_leaf_of_the_schema_is_listed():
    def leaves(value: object) -> int:
        return sum(leaves(item) for item in value.values()) if isinstance(value, dict) and value else 1

    assert len(schema_keys()) == leaves(Recipe().model_dump())


def test_the_algorithms_names_are_those_of_the_algorithms():
    from sinkflex.algo import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES

    def choices(name: str) -> set[str]:
        return set(get_args(AlgoSection.model_fields[name].annotation))

    assert choices("loss") == set(POLICY_LOSSES)
    assert choices("kl_kind") == set(KL_ESTIMATORS)
    # Dr. GRPO is the estimator "grpo" with scale_by_std = false.
    assert choices("estimator") == set(ADVANTAGE_ESTIMATORS) - {"dr_grpo"}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_is_valid(path):
    assert load_recipe(path).run.name == path.stem


def test_shipped_recipes_are_found_by_name_or_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {"quickstart", "retail", "telecom", "tau2-retail", "gpt-oss-20b-lora"} <= set(shipped_recipes())
    for name in ("quickstart", "quickstart.toml", "recipes/quickstart.toml", str(RECIPES / "quickstart.toml")):
        assert find_recipe(name) == RECIPES / "quickstart.toml"
    own = tmp_path / "quickstart.toml"
    own.write_text("", encoding="utf-8")
    assert find_recipe("quickstart.toml").resolve() == own


@pytest.mark.parametrize("name", ["quikstart", "elsewhere/quickstart"])
def test_an_unknown_recipe_names_those_that_ship(name):
    with pytest.raises(ConfigError, match=r"no file .* choose one of gpt-oss-20b-lora, quickstart"):
        find_recipe(name)
