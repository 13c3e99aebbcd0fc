from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest

import sinkflex.envs  # noqa: F401  registers the ids
from sinkflex.types import Message


def raw_action(message: Message) -> str:
    """Write an assistant message as JSON text, the format that needs no tokenizer."""
    if message.tool_calls:
        return json.dumps([{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls])
    return json.dumps({"content": message.content})


@pytest.fixture
def to_text() -> Callable[[Message], str]:
    return raw_action


@pytest.fixture
def play_oracle() -> Callable[..., tuple[float, int, dict[str, Any]]]:
    """Play a task with the oracle; ``override`` maps a step number to another action."""

    def play(
        env: gymnasium.Env[str, str], task_id: str, *, group_seed: int = 0, override: dict[int, str] | None = None
    ) -> tuple[float, int, dict[str, Any]]:
        env.reset(options={"task_id": task_id, "group_seed": group_seed})
        for step in range(200):
            action = (override or {}).get(step) or raw_action(env.unwrapped.oracle_message())
            _, reward, terminated, truncated, info = env.step(action)
            if terminated or truncated:
                return float(reward), step + 1, info
        raise AssertionError("the episode never ended")

    return play
