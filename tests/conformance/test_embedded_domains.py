"""What issue-sized promises say about the embedded domains: reorderings, fuzz, speed."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import pytest

from sinkflex.envs import ENV_IDS
from sinkflex.envs.checker import check
from sinkflex.envs.checks.dialogue import hearsay, reorderings
from sinkflex.envs.checks.fuzz import survival
from sinkflex.envs.checks.play import Bench, oracle_policy, play_episode, write_action
from sinkflex.envs.session import facts

BIG = ("sinkflex/Retail-v0", "sinkflex/Telecom-v0")


POOLS = [
    (env_id, split, tier)
    for env_id, tiers in (
        ("sinkflex/Mock-v0", ("easy",)),
        ("sinkflex/Retail-v0", ("easy", "medium", "long")),
        ("sinkflex/Telecom-v0", ("easy", "medium", "long")),
    )
    for split in ("train", "test")
    for tier in tiers
]


@pytest.mark.parametrize(("env_id", "split", "tier"), POOLS)
def test_other_right_orders_score_one_and_users_tell_only_what_they_know(env_id: str, split: str, tier: str) -> None:
    env: Any = gymnasium.make(env_id, disable_env_checker=True).unwrapped
    bench = Bench(
        make=lambda: gymnasium.make(env_id, disable_env_checker=True),
        task_ids=env.task_ids(split, tier)[:40],
        domain=env.domain,
        registered=True,
        env_id=env_id,
        fuzz=1,
    )
    assert list(reorderings(bench)) == []
    assert list(hearsay(bench)) == []


def test_telecom_has_alternatives_only_once_the_customer_is_verified() -> None:
    env: Any = gymnasium.make("sinkflex/Telecom-v0", disable_env_checker=True).unwrapped
    offered = 0
    for task_id in env.task_ids("train", "medium")[:30]:
        env.reset(options={"task_id": task_id, "group_seed": 0})
        ended = False
        while not ended:
            others = env.domain.alternatives(env.domain.task(task_id), env.episode.world)
            assert not others or facts(env.episode.world)["verified"]
            offered += len(others)
            _, _, terminated, truncated, _ = env.step(write_action(env.oracle_message()))
            ended = terminated or truncated
    assert offered > 30


def test_two_calls_in_one_action_are_as_good_as_two_actions() -> None:
    env = gymnasium.make("sinkflex/Telecom-v0")
    task_id = env.unwrapped.task_ids("train", "easy")[0]

    def joined(unwrapped: Any, step: int) -> str:
        best = unwrapped.oracle_message()
        if best.tool_calls and best.tool_calls[0].name == "verify_pin":
            line_id = best.tool_calls[0].arguments["line_id"]
            return (
                f'[{{"name":"verify_pin","arguments":{{"line_id":"{line_id}",'
                f'"pin":"{best.tool_calls[0].arguments["pin"]}"}}}},'
                f'{{"name":"get_line","arguments":{{"line_id":"{line_id}"}}}}]'
            )
        return write_action(best)

    assert play_episode(env, task_id, policy=joined).score == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "count"), [("sinkflex/Mock-v0", 4_000), ("sinkflex/Retail-v0", 8_000), ("sinkflex/Telecom-v0", 8_000)]
)
def test_twenty_thousand_fuzzed_actions_are_survived(env_id: str, count: int) -> None:
    env = gymnasium.make(env_id, disable_env_checker=True)
    ids = env.unwrapped.task_ids("train")
    ids = ids[:: -(-len(ids) // 12)]
    bench = Bench(
        make=lambda: gymnasium.make(env_id, disable_env_checker=True, max_invalid_actions=30, max_steps=60),
        task_ids=ids,
        domain=env.unwrapped.domain,
        registered=True,
        env_id=env_id,
        fuzz=count,
    )
    assert list(survival(bench)) == []


@pytest.mark.parametrize("env_id", BIG)
def test_two_thousand_agent_steps_a_second(env_id: str) -> None:
    env = gymnasium.make(env_id, disable_env_checker=True)
    ids = env.unwrapped.task_ids("train", "easy")[:60]
    scripts = [play_episode(env, task_id, policy=oracle_policy).actions for task_id in ids]
    best = 0.0
    for _ in range(5):
        started = time.process_time()
        for task_id, actions in zip(ids, scripts, strict=True):
            env.reset(options={"task_id": task_id, "group_seed": 0})
            for action in actions:
                env.step(action)
        best = max(best, sum(map(len, scripts)) / (time.process_time() - started))
    assert best > 2000, f"{env_id} does {best:.0f} steps/s at best"


@pytest.mark.slow
@pytest.mark.parametrize("env_id", sorted(ENV_IDS))
def test_many_tasks_pass_the_checker(env_id: str) -> None:
    check(env_id, tasks=60, fuzzed_actions=50, max_invalid_actions=5).raise_for_findings()
