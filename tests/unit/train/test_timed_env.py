"""Demonstrations and floors: a failing environment is named with its task, a hanging one is interrupted."""

from __future__ import annotations

import random
import time
from typing import Any

import gymnasium
import pytest

import sinkflex.envs  # noqa: F401
from sinkflex.errors import DeadlineError, EnvError
from sinkflex.train.demonstrations import play_oracle
from sinkflex.train.validation import measure_floors


class Failing(gymnasium.Wrapper[str, str, str, str]):
    """Does as told on the first step."""

    def __init__(self, env: gymnasium.Env[str, str], how: str) -> None:
        super().__init__(env)
        self.how = how

    def step(self, action: str) -> Any:
        if self.how == "raise":
            raise ZeroDivisionError("the meter is empty")
        time.sleep(5)


@pytest.fixture
def mock_env() -> gymnasium.Env[str, str]:
    return gymnasium.make("sinkflex/Mock-v0", disable_env_checker=True)


def test_a_raising_environment_is_named_with_its_task(mock_env: Any) -> None:
    task_id = mock_env.unwrapped.task_ids("train")[0]
    with pytest.raises(EnvError, match=rf"task '{task_id}': env.step raised ZeroDivisionError: the meter is empty"):
        play_oracle(
            Failing(mock_env, "raise"),
            task_id=task_id,
            split="train",
            group_seed=0,
            slip_rate=0.0,
            rng=random.Random(0),
        )


def test_a_hanging_environment_is_interrupted(mock_env: Any) -> None:
    task_id = mock_env.unwrapped.task_ids("train")[0]
    with pytest.raises(DeadlineError, match=rf"task '{task_id}': env.step"):
        measure_floors(Failing(mock_env, "hang"), [task_id], split="train", step_timeout_s=0.2)


def test_floors_are_those_of_three_agents() -> None:
    env = gymnasium.make("sinkflex/Telecom-v0", disable_env_checker=True, tier="medium")
    tasks = env.unwrapped.task_ids("test", "medium")[:40]  # type: ignore[attr-defined]
    floors = measure_floors(env, tasks, split="test")
    assert set(floors) == {"do_nothing", "random", "hand_off"}
    assert floors["do_nothing"].value == 0.0
    assert floors["hand_off"].value <= 0.1  # right on the few tasks that must be handed off
