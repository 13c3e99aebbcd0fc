"""Loading recipes: files, overrides, inheritance, and what a person reads when something is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sinkflex.config import Recipe, dump_recipe, load_recipe
from sinkflex.errors import ConfigError


@pytest.fixture
def write(tmp_path: Path):
    def _write(text: str, name: str = "recipe.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def test_an_empty_recipe_is_all_defaults(write):
    assert load_recipe(write("")) == load_recipe(None) == Recipe()


def test_values_come_from_the_file_and_later_overrides_win(write):
    path = write('[run]\nname = "mine"\nseed = 4\n[rollout]\ngroup_size = 4\n')
    recipe = load_recipe(path, ["rollout.group_size=6", "run.seed=5", "run.seed=6"])
    assert (recipe.run.name, recipe.run.seed, recipe.rollout.group_size) == ("mine", 6, 6)


@pytest.mark.parametrize(
    ("assignment", "read", "expected"),
    [
        ("run.name=plain words", lambda r: r.run.name, "plain words"),
        ("run.name=2024", lambda r: r.run.name, "2024"),
        ("run.name=true", lambda r: r.run.name, "true"),
        ('run.name="a=b"', lambda r: r.run.name, "a=b"),
        ("env.tier=long", lambda r: r.env.tier, ("long",)),
        ('env.tier=["easy", "long"]', lambda r: r.env.tier, ("easy", "long")),
        ("env.tier=[]", lambda r: r.env.tier, ()),
        ("optim.lr=1e-5", lambda r: r.optim.lr, 1e-5),
        ("optim.lr=1", lambda r: r.optim.lr, 1.0),
        ("optim.betas=[0.8, 0.9]", lambda r: r.optim.betas, (0.8, 0.9)),
        ("logging.wandb=true", lambda r: r.logging.wandb, True),
        ("env.kwargs.level=3", lambda r: r.env.kwargs, {"level": 3}),
        ("model.path=/models/gpt", lambda r: r.model.path, "/models/gpt"),
        (" model.tiny.layers = 2 ", lambda r: r.model.tiny.layers, 2),
    ],
)
def test_override_values_are_toml_and_text_needs_no_quotes(assignment, read, expected):
    assert read(load_recipe(None, [assignment])) == expected


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("run.seed", r"--set 'run.seed' is no assignment; write it as section.key=value"),
        ("=3", r"is no assignment"),
        ("run..seed=3", r"is no assignment"),
        ("run.name=", r"has no value; write run.name=\"\" for an empty text"),
        ("env.tier=[easy", r"the value is not TOML"),
        ("lr=3", r"--set lr=3: unknown key 'lr'. Did you mean 'warmstart.lr' or 'optim.lr'\?"),
        ("rollout.group=3", r"unknown key 'rollout.group'. Did you mean 'rollout.group_size'\?"),
        ("model.tiny.layer=3", r"unknown key 'model.tiny.layer'. Did you mean 'model.tiny.layers'\?"),
        ("rolout.slots=3", r"unknown key 'rolout'. Did you mean 'rollout'\?"),
        ("zzz=3", r"unknown key 'zzz'. The sections are algo, chat, "),
        ("checkpoint.zzz=3", r"unknown key 'checkpoint.zzz'. \[checkpoint\] has every, keep_best, keep_last"),
        ("train.steps=ten", r"--set train.steps=ten: train.steps = \"ten\"; expected a valid integer"),
        ("train.steps=3.5", r"train.steps = 3.5; expected a valid integer"),
        ("train.steps=true", r"train.steps = true; expected a valid integer"),
        ("env.mode=fast", r"env.mode = \"fast\"; expected 'inline' or 'threads'"),
        ("optim.lr=nan", r"optim.lr = nan; expected a finite number"),
        ("optim.betas=[0.9]", r"optim.betas.1"),
        ("run.name.deep=3", r"run.name is a table; expected a valid string"),
    ],
)
def test_a_wrong_override_is_explained(assignment, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(None, [assignment])


def test_every_wrong_value_is_listed_with_its_line(write):
    path = write(
        '[run]\nnam = "x"\n\n[rollout]  # sizes\ngroup_size = "8"\nslots = 0\n\n[model]\ntiny.heads = 3.5\nlora = 5\n'
    )
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load_recipe(path)
    assert set(str(caught.value).splitlines()) == {
        f"{path}:2: unknown key 'run.nam'. Did you mean 'run.name'?",
        f'{path}:5: rollout.group_size = "8"; expected a valid integer',
        f"{path}:6: rollout.slots = 0; expected greater than or equal to 1",
        f"{path}:9: model.tiny.heads = 3.5; expected a valid integer",
        f"{path}:10: model.lora = 5; expected a table",
    }


def test_the_line_named_is_the_table_when_the_key_stands_in_an_inline_table(write):
    path = write("[model]\n\ntiny = { heads = 3.5 }\n")
    with pytest.raises(ConfigError, match=re.escape(f"{path}:3: model.tiny.heads")):
        load_recipe(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run\n", r"is not TOML: .*line 1"),
        ("extends = 3\n", r"extends = 3 must be the name of one recipe file"),
        ('extends = "missing.toml"\n', r"missing.toml' does not exist; .* has recipe.toml"),
        ('extends = "recipe.toml"\n', r"extend each other in a circle: recipe.toml -> recipe.toml"),
    ],
)
def test_a_file_that_cannot_be_read_is_explained(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(write(text))


def test_a_missing_or_unreadable_file_is_explained(tmp_path):
    with pytest.raises(ConfigError, match=r"'.*nothing\.toml' does not exist"):
        load_recipe(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recipe(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'[run]\nname = "caf\xe9"\n')
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recipe(tmp_path / "latin.toml")


def test_a_recipe_extends_another_key_by_key(write):
    write('[run]\nname = "base"\nseed = 3\n[env]\ntier = ["easy", "long"]\n', "base.toml")
    write('extends = "base.toml"\n[rollout]\nslots = 7\n', "middle.toml")
    path = write('extends = "middle.toml"\n[run]\nname = "child"\n[env]\ntier = "medium"\n')
    recipe = load_recipe(path)
    assert (recipe.run.name, recipe.run.seed, recipe.rollout.slots) == ("child", 3, 7)
    assert recipe.env.tier == ("medium",)


def test_an_error_names_the_file_that_set_the_value(write):
    parent = write("[rollout]\nslots = 0\n", "base.toml")
    child = write('extends = "base.toml"\n[run]\nseed = 1\n')
    with pytest.raises(ConfigError, match=re.escape(f"{parent}:2: rollout.slots = 0")):
        load_recipe(child)


def test_a_dump_loads_equal(write):
    recipe = load_recipe(
        None,
        ["run.name=x", "env.tier=[]", "env.kwargs.deep.a=[1, 2]", "algo.dual_clip=3.0", "model.path=m", "run.out=r"],
    )
    assert load_recipe(write(dump_recipe(recipe))) == recipe


@given(
    seed=st.integers(min_value=0, max_value=2**40),
    lr=st.floats(min_value=0, max_value=10),
    name=st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1),
    samples=st.integers(min_value=2, max_value=9),
)
def test_any_values_survive_a_dump(tmp_path_factory, seed, lr, name, samples):
    base = load_recipe(None, [f"validation.samples={samples}", "validation.temperature=0.7"])
    recipe = Recipe.model_validate(base.model_dump() | {"run": {"seed": seed, "name": name}, "optim": {"lr": lr}})
    path = tmp_path_factory.mktemp("dump") / "recipe.toml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(path) == recipe


def test_a_recipe_cannot_be_changed_after_it_was_checked():
    with pytest.raises(ValidationError, match="frozen"):
        load_recipe(None).run.seed = 3
