"""The scores are τ²'s: gold actions earn 1.0, and whatever else is played earns what its own evaluator says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from sinkflex.envs.tau2 import Tau2Env
from sinkflex.types import Message

pytestmark = pytest.mark.tau2

PERTURBATIONS = ("drop", "swap", "repeat", "wrong_argument", "early_stop", "invalid_call")


@pytest.mark.parametrize(
    ("domain", "count"), [("retail", 114), ("airline", 50), ("telecom", 114), ("telecom-workflow", 114)]
)
def test_gold_actions_score_one_on_every_task(
    domain: str, count: int, make_env: Callable[..., Tau2Env], play_gold: Callable[..., Any]
) -> None:
    env = make_env(domain)
    tasks = env.task_ids("base")
    missed = {}
    for task_id in tasks:
        _, reward, info = play_gold(env, task_id)
        if reward != 1.0:
            missed[task_id] = info["components"]
    assert len(tasks) == count
    assert missed == {}


def test_mock_gold_actions_score_one_where_the_package_lists_them(
    make_env: Callable[..., Tau2Env], play_gold: Callable[..., Any], own_evaluation: Callable[[Tau2Env], float]
) -> None:
    # One mock task asserts a state that its (empty) gold actions do not reach; τ² gives it 0 too.
    env = make_env("mock")
    scores = {}
    for task_id in env.task_ids("base"):
        scores[task_id] = play_gold(env, task_id)[1]
        assert own_evaluation(env) == scores[task_id]
    assert [task_id for task_id, score in scores.items() if score != 1.0] == [
        "update_task_with_history_and_env_assertions"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("domain", "count"), [("retail", 108), ("airline", 30), ("telecom", 174)])
def test_perturbed_episodes_score_what_the_packages_own_evaluator_says(
    domain: str,
    count: int,
    make_env: Callable[..., Tau2Env],
    play_gold: Callable[..., Any],
    play_open_loop: Callable[..., Any],
    perturb: Callable[[str, list[Message], random.Random], list[Message]],
    own_evaluation: Callable[[Tau2Env], float],
) -> None:
    env = make_env(domain)
    tasks = env.task_ids("base")
    rng = random.Random(20261201)
    outcomes: Counter[float] = Counter()
    for trial in range(count):
        task_id = tasks[trial * 7 % len(tasks)]
        kind = PERTURBATIONS[trial % len(PERTURBATIONS)]
        messages = perturb(kind, play_gold(env, task_id)[0], rng)
        score, _ = play_open_loop(env, task_id, messages)
        assert score == own_evaluation(env), (task_id, kind, messages)
        outcomes[score] += 1
    assert set(outcomes) == {0.0, 1.0}, "a test that only ever sees one score shows nothing"


def test_perturbed_mock_episodes_score_what_the_evaluator_says_or_zero_where_it_crashes(
    make_env: Callable[..., Tau2Env],
    play_gold: Callable[..., Any],
    play_open_loop: Callable[..., Any],
    perturb: Callable[[str, list[Message], random.Random], list[Message]],
    own_evaluation: Callable[[Tau2Env], float],
) -> None:
    env = make_env("mock")
    rng = random.Random(5)
    crashes = 0
    for trial in range(60):
        task_id = env.task_ids("base")[trial % 9]
        messages = perturb(PERTURBATIONS[trial % len(PERTURBATIONS)], play_gold(env, task_id)[0], rng)
        score, _ = play_open_loop(env, task_id, messages)
        try:
            theirs = own_evaluation(env)
        except ValueError:
            theirs = 0.0
            crashes += 1
        assert score == theirs, task_id
    assert crashes, "the assertion on a task that was never created makes the package's evaluator raise"
