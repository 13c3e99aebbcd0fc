from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from sinkflex.envs.wrappers import EpisodeTimeout, RecordTrajectories
from sinkflex.errors import EnvError
from sinkflex.types import Message

Play = Callable[..., tuple[float, int, dict[str, Any]]]


def test_an_episode_past_its_time_is_truncated_with_score_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("sinkflex.envs.wrappers.time.monotonic", lambda: now[0])
    env = EpisodeTimeout(gymnasium.make("sinkflex/Mock-v0"), timeout_s=5.0)
    env.reset(options={"task_id": "mock-both"})
    now[0] = 4.9
    assert env.step("hello")[2:4] == (False, False)
    now[0] = 5.1
    _, reward, terminated, truncated, info = env.step("hello")
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert (info["stop_reason"], info["score"]) == ("episode_timeout", 0.0)
    assert (info["metrics"]["steps"], info["metrics"]["user_turns"]) == (2.0, 2.0)
    env.reset(options={"task_id": "mock-both"})
    assert env.step("hello")[2:4] == (False, False)
    with pytest.raises(EnvError, match="timeout_s must be positive, got 0"):
        EpisodeTimeout(gymnasium.make("sinkflex/Mock-v0"), timeout_s=0)


def test_a_success_on_the_last_moment_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("sinkflex.envs.wrappers.time.monotonic", lambda: now[0])
    env = EpisodeTimeout(gymnasium.make("sinkflex/Mock-v0"), timeout_s=5.0)
    env.reset(options={"task_id": "mock-switch"})
    env.step("please turn the switch on")
    now[0] = 9.0
    _, reward, terminated, truncated, info = env.step("look at the lamp")
    assert (reward, terminated, truncated, info["stop_reason"]) == (1.0, True, False, "user_stop")


def test_every_ended_episode_leaves_one_line(tmp_path: Path, play_oracle: Play) -> None:
    path = tmp_path / "episodes.jsonl"
    env = RecordTrajectories(gymnasium.make("sinkflex/Mock-v0"), path=path)
    env.reset(options={"task_id": "mock-both"})
    env.step("left unfinished")
    for task_id in ("mock-switch", "mock-both"):
        play_oracle(env, task_id)
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["task_id"], first["split"], first["tier"], first["score"]) == ("mock-switch", "train", "easy", 1.0)
    assert first["components"] == {"mains": 1.0, "seen": 1.0, "policy": 1.0, "ended": 1.0}
    assert first["stop_reason"] == "user_stop"
    assert [step["action"] for step in second["steps"]][1] == '{"content": "may i turn the mains on?"}'
    assert Message.from_dict(second["steps"][0]["messages"][0]).name == "read_mains"
    assert Message.from_dict(second["opening"][0]).content in ("my lamp is dark", "the lamp does not shine")
    with pytest.raises(EnvError, match="its folder does not exist"):
        RecordTrajectories(gymnasium.make("sinkflex/Mock-v0"), path=tmp_path / "no" / "x.jsonl")


def test_wrapped_environments_are_described_by_their_spec(tmp_path: Path) -> None:
    env = RecordTrajectories(EpisodeTimeout(gymnasium.make("sinkflex/Mock-v0"), timeout_s=5.0), path=tmp_path / "x")
    assert env.spec is not None
    again = gymnasium.make(env.spec)
    assert isinstance(again, RecordTrajectories)
