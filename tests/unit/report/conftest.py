"""A run folder made of known figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sinkflex.config import dump_recipe, load_recipe

NAME = "val-core/Telecom-v0/reward/mean@1"


def validation(mean: float, low: float, high: float) -> dict[str, float]:
    return {NAME: mean, f"{NAME}/low": low, f"{NAME}/high": high, f"{NAME}/n": 128.0}


@pytest.fixture
def write_run(tmp_path):
    """Return a function that writes a run folder from ``{step: figures}``."""

    def _write(figures: dict[int, dict[str, float | None]]) -> Path:
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        recipe = load_recipe(None, ["run.name=demo", "run.seed=2", "train.steps=20", "rollout.group_size=4"])
        (folder / "config.toml").write_text(dump_recipe(recipe))
        lines = [json.dumps({"step": step, "wall_s": step * 10.0 + 5, **more}) for step, more in figures.items()]
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return folder

    return _write


@pytest.fixture
def learned(write_run):
    """A run of twenty steps whose score rises from 0.1 to 0.5, with its validations and floors."""
    figures: dict[int, dict[str, float | None]] = {
        0: {**validation(0.25, 0.2, 0.3), "val-core/Telecom-v0/floor/do_nothing": 0.0}
    }
    for step in range(1, 21):
        figures[step] = {
            "critic/score/mean": 0.1 + 0.02 * step,
            "critic/rewards/mean": 0.1 + 0.02 * step - 0.05,
            "actor/entropy": 0.5,
            "actor/kl_loss": 0.001 * step,
            "actor/grad_norm": None if step == 3 else 1.0,
            "response_length/mean": 90.0 + step,
            "num_turns/mean": 6.0,
            "perf/throughput": 4000.0 + step,
            "training/rollout_logprobs_diff_max": 1e-5 * step,
            "training/constant_groups": 2.0,
            "training/trajectories": 32.0,
            "training/failed_episodes": 1.0 if step == 7 else 0.0,
        }
    figures[10] |= validation(0.625, 0.55, 0.7)
    figures[20] |= {**validation(0.5, 0.45, 0.55), "val-core/Telecom-v0/reward/pass^1": 0.5}
    return write_run(figures)


@pytest.fixture
def with_trajectories(learned):
    """The same run with two recorded episodes."""
    folder = learned / "trajectories"
    folder.mkdir()
    record = {
        "task_id": "t-1",
        "split": "train",
        "tier": "easy",
        "group_id": "g-1",
        "temperature": 1.0,
        "score": 1.0,
        "reward": 0.75,
        "components": {"world": 1.0, "told": None},
        "stop_reason": "success",
        "turns": 2,
        "invalid_actions": 1,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "My phone is [dead]."},
            {
                "role": "assistant",
                "content": "",
                "reasoning": "Look it up.",
                "tool_calls": [{"name": "get_line", "arguments": {"line_id": "4783", "full": True}, "call_id": ""}],
            },
            {"role": "tool", "name": "get_line", "content": "x" * 700},
            {"role": "assistant", "content": "Done.\nBye."},
        ],
        "text": [
            {"kind": "prompt", "turn": 0, "text": "<|start|>user"},
            {"kind": "sampled", "turn": 1, "text": "<|channel|>final"},
        ],
    }
    lines = [json.dumps(record), json.dumps({**record, "task_id": "t-2", "score": 0.0, "components": {}})]
    (folder / "step_000020.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "validation_000020.jsonl").write_text(f"{lines[1]}\n")
    return learned
