"""Demonstrations: gold replays that ask and look up what they need, and their plausible mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from sinkflex.envs.tau2 import Tau2Env
from sinkflex.envs.tau2.lookups import ids_in
from sinkflex.types import Message

pytestmark = pytest.mark.tau2


def play_grounded(env: Tau2Env, task_id: str, say: Callable[[Message], str]) -> tuple[float, int, int]:
    """Return the reward and how many ids the agent used, and used without having read them."""
    _, info = env.reset(options={"task_id": task_id, "split": "base", "group_seed": 0})
    read = " ".join(message.content for message in info["messages"])
    used = unread = 0
    for _ in range(100):
        message = env.oracle_message(grounded=True)
        for call in message.tool_calls:
            ids = ids_in(json.dumps(dict(call.arguments)))
            used += len(ids)
            unread += len(ids - ids_in(read))
        _, reward, terminated, truncated, info = env.step(say(message))
        read += f" {say(message)} " + " ".join(news.content for news in info["messages"])
        if terminated or truncated:
            return reward, used, unread
    raise AssertionError(f"the grounded oracle is stuck on {task_id}")


@pytest.mark.parametrize(("domain", "most"), [("retail", 0.02), ("airline", 0.1), ("telecom", 0.0)])
def test_grounded_demonstrations_read_ids_before_they_use_them(
    domain: str, most: float, make_env: Callable[..., Tau2Env], say: Callable[[Message], str]
) -> None:
    env = make_env(domain)
    played = [play_grounded(env, task_id, say) for task_id in env.task_ids("base")]
    assert {reward for reward, _, _ in played} == {1.0}
    used, unread = sum(row[1] for row in played), sum(row[2] for row in played)
    assert used > 100
    assert unread / used <= most


def test_the_oracle_asks_who_the_user_is_before_it_guesses(make_env: Callable[..., Tau2Env]) -> None:
    env = make_env("retail")
    env.reset(options={"task_id": "0"})
    assert env.oracle_message().content.startswith("Could you please tell me your name")
    _, _, _, _, info = env.step(env.oracle_message().content)
    assert "Yusuf Rossi" in info["messages"][0].content
    assert env.oracle_message().tool_calls[0].name == "find_user_id_by_name_zip"


def test_the_oracle_goes_on_from_whatever_happened(
    make_env: Callable[..., Tau2Env], say: Callable[[Message], str]
) -> None:
    env = make_env("retail")
    env.reset(options={"task_id": "0"})
    env.step("What can I do for you?")
    env.step('{"name": "list_all_product_types", "arguments": {}}')
    reward = 0.0
    for _ in range(20):
        _, reward, terminated, _, _ = env.step(say(env.oracle_message()))
        if terminated:
            break
    assert reward == 1.0


def test_what_must_be_communicated_is_said_before_the_farewell_or_the_hand_off(
    make_env: Callable[..., Tau2Env], play_gold: Any
) -> None:
    env = make_env("retail")
    for task_id in env.task_ids("base"):
        wanted = env.domain.task(task_id).evaluation_criteria.communicate_info
        if wanted:
            sent, reward, info = play_gold(env, task_id)
            assert reward == 1.0
            assert info["components"]["COMMUNICATE"] == 1.0
            assert all(any(item.lower() in message.content.lower() for message in sent) for item in wanted)


def test_slips_are_wrong_and_of_the_kinds_promised(
    make_env: Callable[..., Tau2Env], say: Callable[[Message], str]
) -> None:
    env = make_env("retail")
    env.reset(options={"task_id": "0", "group_seed": 0})
    names, confused = set(), 0
    for _ in range(30):
        best = env.oracle_message()
        for slip in env.slip_messages():
            assert slip != best
            names.add(slip.tool_calls[0].name if slip.tool_calls else slip.content)
            confused += bool(best.tool_calls and slip.tool_calls and slip.tool_calls[0].name == best.tool_calls[0].name)
        if env.step(say(best))[2]:
            break
    assert {"transfer_to_human_agents", "Your request is complete."} <= names
    assert confused, "an id of the same kind is taken from the context"
