"""Retail's promises, over whole splits: solvable, nothing for free, long enough, fast enough to train on."""

from __future__ import annotations

import json
from typing import Any

import gymnasium
import pytest

import sinkflex.envs  # noqa: F401  registers the ids
from sinkflex.envs.checker import check
from sinkflex.envs.domains.retail.tasks import TIERS, task_ids
from sinkflex.types import Message

STRIDE = {("train", "easy"): 4, ("train", "medium"): 8, ("train", "long"): 20}
"""Train tasks are sampled evenly; test tasks are all played."""


def raw(message: Message) -> str:
    if not message.tool_calls:
        return message.content
    return json.dumps([{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls])


def play(env: Any, task_id: str, action: str | None = None) -> tuple[float, int, dict[str, Any]]:
    env.reset(options={"task_id": task_id, "group_seed": 7})
    for step in range(1, 200):
        _, reward, terminated, truncated, info = env.step(action or raw(env.oracle_message()))
        if terminated or truncated:
            return float(reward), step, info
    raise AssertionError("the episode never ended")


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("tier", TIERS)
def test_the_oracle_solves_the_split(split: str, tier: str) -> None:
    env: Any = gymnasium.make("sinkflex/Retail-v0").unwrapped
    turns = []
    for task_id in task_ids(split, tier)[:: STRIDE.get((split, tier), 1)]:
        score, steps, info = play(env, task_id)
        assert score == 1.0, (task_id, info)
        assert info["metrics"]["tool_errors"] == info["metrics"]["invalid_actions"] == 0.0
        turns.append(steps)
    assert min(turns) >= {"easy": 4, "medium": 7, "long": 20}[tier]
    assert max(turns) <= {"easy": 8, "medium": 24, "long": 48}[tier]


def test_nothing_is_scored_for_nothing() -> None:
    env: Any = gymnasium.make("sinkflex/Retail-v0").unwrapped
    hand_off = json.dumps({"name": "transfer_to_human", "arguments": {"reason": "held"}})
    for tier in TIERS:
        for task_id in task_ids("test", tier)[::4]:
            for action in ("hello", "i cannot do that", "it is done, bye", hand_off):
                score, _, info = play(env, task_id, action)
                assert score == 0.0, (task_id, action, info)


def test_the_checker_finds_nothing_wrong() -> None:
    check("sinkflex/Retail-v0", tasks=18, fuzzed_actions=400).raise_for_findings()
