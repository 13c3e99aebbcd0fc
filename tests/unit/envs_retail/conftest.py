from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest

import sinkflex.envs  # noqa: F401  registers the ids
from sinkflex.envs.domains.retail import RetailDomain
from sinkflex.envs.domains.retail.tasks import RetailTask, build_task, task_ids
from sinkflex.envs.world import World
from sinkflex.types import Message, ToolCall


def raw_action(message: Message) -> str:
    """Write an assistant message as JSON text, the format that needs no tokenizer."""
    if message.tool_calls:
        return json.dumps([{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls])
    return json.dumps({"content": message.content})


def raw_call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


@pytest.fixture
def env() -> Iterator[gymnasium.Env[str, str]]:
    made = gymnasium.make("sinkflex/Retail-v0")
    yield made
    made.close()


@pytest.fixture
def pick_task() -> Callable[..., RetailTask]:
    """Return the first task whose first wish is of the form asked for, with a plain user."""

    def pick(
        kind: str, *, twist: str = "", tier: str = "easy", reference: str = "id", knows_id: bool | None = None
    ) -> RetailTask:
        for task_id in (*task_ids("train", tier), *task_ids("test", tier)):
            task = build_task(task_id)
            form = task.wishes[0].form
            fits = (form.kind, form.twist, form.reference, form.vague) == (kind, twist, reference, False)
            plain = task.wrong_secret is None and not task.persona.hesitant
            if fits and plain and knows_id in (None, task.knows_id):
                return task
        raise AssertionError("no such task")

    return pick


@pytest.fixture
def play() -> Callable[..., tuple[float, dict[str, Any]]]:
    """Play a task with ``actions`` first and the oracle for the rest."""

    def run(env: gymnasium.Env[str, str], task_id: str, *actions: str) -> tuple[float, dict[str, Any]]:
        env.reset(options={"task_id": task_id, "group_seed": 0})
        queue = list(actions)
        for _ in range(100):
            action = queue.pop(0) if queue else raw_action(env.unwrapped.oracle_message())
            _, reward, terminated, truncated, info = env.step(action)
            if terminated or truncated:
                return float(reward), info
        raise AssertionError("the episode never ended")

    return run


@pytest.fixture
def agent() -> Callable[..., Any]:
    """Call one of the agent's tools; returns the result, or the error as text."""
    return _caller(RetailDomain.agent_tools)


@pytest.fixture
def user() -> Callable[..., Any]:
    """Call one of the user's tools; returns the result, or the error as text."""
    return _caller(RetailDomain.user_tools)


def _caller(tools: Any) -> Callable[..., Any]:
    def run(world: World, name: str, **arguments: Any) -> Any:
        reply = tools.call(world, ToolCall(name=name, arguments=arguments))
        return reply.result if reply.error is None else reply.error

    return run
