"""``sinkflex train`` and ``report``: which folder, which recipe, and what is left when a run ends."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types
from pathlib import Path

import pytest

import sinkflex.cli as cli
import sinkflex.train
from sinkflex.cli.train import choose_folder
from sinkflex.config import Recipe, dump_recipe, load_recipe


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv(cli.TRACEBACK, raising=False)
    monkeypatch.chdir(tmp_path)

    def _run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        out, err = capsys.readouterr()
        return (0 if caught.value.code is None else int(caught.value.code)), out, err

    return _run


@pytest.fixture
def loop(monkeypatch):
    """Replace the training loop by one that records its arguments and writes a one-step run."""
    calls: list[dict] = []

    def fake(recipe: Recipe, *, out: Path, **options: object) -> Path:
        calls.append({"recipe": recipe, "out": out, **options})
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.toml").write_text(dump_recipe(recipe))
        (out / "metrics.jsonl").write_text(json.dumps({"step": 1, "wall_s": 2.0, "critic/score/mean": 0.5}) + "\n")
        return out

    replace_loop(monkeypatch, fake)
    return calls


def replace_loop(monkeypatch, function) -> None:
    """Stand in for the real loop, whose import alone takes seconds; one slow test runs the real one."""
    module = types.SimpleNamespace(run=function)
    monkeypatch.setitem(sys.modules, "sinkflex.train.loop", module)
    monkeypatch.setattr(sinkflex.train, "loop", module, raising=False)


def test_a_run_ends_with_its_report(run, loop):
    status, out, _ = run("train", "quickstart", "--set", "train.steps=1")
    assert status == 0
    assert "run folder: runs/quickstart-seed0" in out
    assert "1 of 1 steps" in out
    assert {path.name for path in Path("runs/quickstart-seed0").iterdir()} >= {"curves.png", "summary.json"}
    assert (loop[0]["resume"], loop[0]["resume_from"]) == (False, None)


def test_a_second_run_gets_its_own_folder_and_resume_takes_the_newest(run, loop):
    for _ in range(3):
        run("train")
    run("train", "--resume")
    assert [str(call["out"]) for call in loop] == [
        "runs/quickstart-seed0",
        "runs/quickstart-seed0-2",
        "runs/quickstart-seed0-3",
        "runs/quickstart-seed0-3",
    ]
    assert [call["resume"] for call in loop] == [False, False, False, True]


def test_resuming_a_named_folder_takes_its_own_recipe(run, loop):
    run("train", "retail", "--set", "run.seed=9", "--out", "here")
    run("train", "--resume", "--out", "here")
    run("train", "--resume-from", "step_000010", "--out", "here")
    assert [call["recipe"].run.seed for call in loop] == [9, 9, 9]
    assert loop[2]["resume_from"] == "step_000010"


def test_an_interrupted_run_says_how_to_go_on(run, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    replace_loop(monkeypatch, interrupt)
    status, out, _ = run("train", "--out", "there")
    assert (status, "stopped; continue with: sinkflex train --resume --out there" in out) == (130, True)


def test_a_dry_run_writes_the_resolved_recipe_and_nothing_else(run, loop):
    status, out, err = run("train", "quickstart", "--set", "run.seed=4", "--dry-run", "--out", "plan")
    assert (status, loop) == (0, [])
    assert load_recipe("plan/config.toml").run.seed == 4
    assert [path.name for path in Path("plan").iterdir()] == ["config.toml"]
    assert "wrote plan/config.toml" in out
    assert "nothing was run" in err


def test_a_dry_run_leaves_a_run_alone(run, loop):
    run("train", "--out", "here")
    Path("here/checkpoints/step_000001").mkdir(parents=True)
    stored = Path("here/config.toml").read_text()
    status, _, err = run("train", "--set", "run.seed=7", "--dry-run", "--out", "here")
    assert (status, Path("here/config.toml").read_text()) == (2, stored)
    assert "here holds a run, whose config.toml is not overwritten" in err


def test_a_changed_recipe_is_passed_on_when_asked_for(run, loop):
    run("train", "--out", "here")
    run("train", "--resume", "--out", "here", "--set", "optim.lr=1e-5", "--allow-changes")
    assert [call["allow_changes"] for call in loop] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "quikstart"], "no file 'quikstart'"),
        (["train", "--set", "env.id=sinkflex/Telecon-v0", "--dry-run"], "env.id: unknown environment"),
        (["train", "--set", "env.id=sinkflex/Telecon-v0", "--dry-run"], "Did you mean 'sinkflex/Telecom-v0'?"),
        (["train", "--set", "run.sed=1"], "Did you mean 'run.seed'?"),
        (["train", "--set", "env.train_split=trian", "--dry-run"], "unknown telecom split 'trian'"),
        (["train", "--set", "env.tier=eazy", "--dry-run"], "unknown telecom tier 'eazy'"),
        (["train", "--set", "env.user=scriptd", "--dry-run"], "Did you mean 'scripted'?"),
        (["train", "--set", "env.kwargs.mood=1", "--dry-run"], "mood"),
        (["train", "--set", "chat.renderer=harmny", "--dry-run"], "chat.renderer: unknown chat format 'harmny'"),
        (["train", "--set", "model.attention=sinkflx", "--dry-run"], "Did you mean 'sinkflex'?"),
        (["train", "--set", "model.path=./models/none", "--dry-run"], "there is no folder './models/none'"),
        (["train", "--set", "run.device=cuda"], "torch sees no CUDA device"),
        (["report", "nowhere"], "'nowhere' is no run folder"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(run, loop, monkeypatch, arguments, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, _, err = run(*arguments)
    assert (status, loop) == (2, [])
    assert message in err


@pytest.mark.parametrize(("missing", "setting"), [("peft", "model.lora.enabled=true"), ("wandb", "logging.wandb=true")])
def test_a_missing_extra_is_said_before_anything_runs(run, loop, monkeypatch, missing, setting):
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == missing else real(name, *rest))
    monkeypatch.setitem(sys.modules, missing, None)
    status, _, err = run("train", "--set", "model.path=some/model", "--set", setting)
    assert (status, loop) == (2, [])
    assert re.search(rf"needs {missing}; install it with: pip install 'sinkflex\[", err)


def test_an_environment_of_ones_own_is_imported_from_its_module(run, tmp_path, monkeypatch):
    arguments = ("train", "--set", "env.id=my_lamps:MyLamps-v0", "--set", "env.tier=easy", "--dry-run")
    status, _, err = run(*arguments)
    assert status == 2
    assert re.search(r"env\.id = 'my_lamps:MyLamps-v0' cannot be made: .*my_lamps", err)
    (tmp_path / "my_lamps.py").write_text(
        "import gymnasium\n"
        "from sinkflex.envs.gym import DualControlEnv\n"
        "gymnasium.register('MyLamps-v0', lambda **options: DualControlEnv(domain='mock', **options))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    status, _, err = run(*arguments)
    assert status == 0
    assert "on my_lamps:MyLamps-v0 (2 training tasks), validated on 1 of 1 held-out tasks; nothing was run" in err


def test_the_folder_is_what_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(None, ["run.name=x"])
    assert choose_folder(recipe, Path("mine"), resuming=False) == Path("mine")
    assert choose_folder(load_recipe(None, ["run.out=yours"]), None, resuming=True) == Path("yours")
    assert choose_folder(recipe, None, resuming=True) == Path("runs/x-seed0")


def test_report_redraws_and_shows_a_dialogue(run, loop):
    run("train", "--out", "r")
    Path("r/curves.png").unlink()
    status, _, _ = run("report", "r")
    assert (status, Path("r/curves.png").exists()) == (0, True)
    Path("r/trajectories").mkdir()
    record = {
        **dict.fromkeys(("task_id", "split", "tier", "group_id"), "a"),
        **dict.fromkeys(("score", "reward", "temperature"), 1.0),
        "turns": 1,
        "invalid_actions": 0,
        "stop_reason": "success",
        "components": {},
        "messages": [{"role": "user", "content": "Hello there."}],
        "text": [{"kind": "prompt", "turn": 0, "text": "<|start|>"}],
    }
    Path("r/trajectories/step_000001.jsonl").write_text(json.dumps(record) + "\n")
    assert "Hello there." in run("report", "r", "--trajectory", "1")[1]
    assert "<|start|>" in run("report", "r", "--trajectory", "1", "--step", "step_000001", "--tokens")[1]
