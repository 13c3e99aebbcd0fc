"""One real run through the command line: train, report, evaluate, refuse to overwrite, resume to the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sinkflex.cli as cli

SMALL = [
    "model.tiny.hidden_size=32",
    "model.tiny.layers=2",
    "model.tiny.heads=2",
    "model.tiny.kv_heads=1",
    "model.tiny.head_dim=16",
    "model.tiny.intermediate_size=32",
    "warmstart.dialogues=20",
    "warmstart.steps=3",
    "rollout.tasks_per_step=2",
    "rollout.group_size=2",
    "rollout.max_new_tokens=8",
    "algo.dynamic_sampling=false",
    "env.max_steps=3",
    "train.steps=2",
    "validation.tasks=4",
    "checkpoint.every=1",
    "checkpoint.keep_last=3",
]


@pytest.mark.slow
def test_a_run_from_its_recipe_to_its_evaluation(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        return (int(caught.value.code or 0), *capsys.readouterr())

    settings = [part for setting in SMALL for part in ("--set", setting)]
    status, out, err = run("train", "quickstart", "--out", "r", *settings)
    assert status == 0, err
    assert "2 of 2 steps" in out
    expected = {"config.toml", "metrics.jsonl", "summary.json", "curves.png", "trajectories", "checkpoints"}
    assert {path.name for path in Path("r").iterdir()} >= expected
    assert json.loads(Path("r/summary.json").read_text())["floors"].keys() == {"do_nothing", "hand_off", "random"}

    assert "already holds a run" in run("train", "quickstart", "--out", "r", *settings)[2]

    final = Path("r/checkpoints/step_000002/policy/model.safetensors").read_bytes()
    status, _, err = run("train", "--resume-from", "step_000001", "--out", "r")
    assert status == 0, err
    assert Path("r/checkpoints/step_000002/policy/model.safetensors").read_bytes() == final
    assert [json.loads(line)["step"] for line in Path("r/metrics.jsonl").read_text().splitlines()] == [0, 1, 2]

    status, out, err = run("eval", "r", "--json", "--tasks", "3")
    assert status == 0, err
    assert json.loads(out)["tasks"] == 3
    assert "score" in run("report", "r", "--trajectory", "1")[1]
