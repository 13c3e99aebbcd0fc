"""What a policy that has learned nothing may send: nonsense, wrong types, endless text."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from sinkflex.envs.tau2 import Tau2Env

pytestmark = pytest.mark.tau2


def test_fuzzed_actions_never_raise_and_always_get_an_answer(make_env: Callable[..., Tau2Env]) -> None:
    rng = random.Random(7)
    for domain in ("retail", "airline", "telecom"):
        env = make_env(domain, max_steps=40)
        names = [tool.name for tool in env.domain.agent_tools if tool.name != "transfer_to_human_agents"]
        junk: list[Any] = [
            None,
            "",
            "x" * 5000,
            -1,
            1e300,
            [],
            {},
            [[1]],
            {"a": [None]},
            "###STOP###",
            "\U0001f642",
            True,
        ]
        env.reset(seed=1)
        for number in range(250):
            name = rng.choice([*names, "nope"])
            schema = next((tool for tool in env.domain.agent_tools if tool.name == name), None)
            known = list(schema.parameters.get("properties", {})) if schema else ["q"]
            action = json.dumps({"name": name, "arguments": {key: rng.choice(junk) for key in known}})
            _, reward, terminated, truncated, info = env.step(action if number % 5 else action[: len(action) // 2])
            assert info["messages"]
            assert info["messages"][0].content
            if terminated or truncated:
                assert reward in (0.0, 1.0)
                env.reset(seed=number)


def test_a_long_message_takes_the_user_no_time_to_speak_of(make_env: Callable[..., Tau2Env]) -> None:
    env = make_env("telecom")
    env.reset(seed=0)
    started = time.process_time()
    env.step("turn off " * 10_000)
    assert time.process_time() - started < 1.0
