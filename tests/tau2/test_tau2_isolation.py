"""What one τ² episode does stays in it, and what the package would never come back from is refused."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest

from sinkflex.envs.tau2 import Tau2Env
from sinkflex.envs.tau2.catalogue import load_domain
from sinkflex.envs.tau2.records import Access, SharedDatabase, SharedTable, delta

pytestmark = pytest.mark.tau2


@pytest.fixture
def shared() -> SharedDatabase:
    from tau2.domains.retail.data_model import RetailDB
    from tau2.domains.retail.utils import RETAIL_DB_PATH

    return SharedDatabase(RetailDB.load(RETAIL_DB_PATH))


def test_a_view_behaves_as_the_dict_it_stands_for(shared: SharedDatabase) -> None:
    users: SharedTable = shared.view(Access()).users
    key = next(iter(users))
    row = users[key]
    assert users.get(key) is users[key] is row
    assert users.get("nobody", 3) == 3
    assert len(users) == len(users.values()) == len(users.items()) == 500
    assert "nobody" not in users
    with pytest.raises(KeyError, match="nobody"):
        users["nobody"]
    assert users.pop(key) is row
    assert key not in users
    assert users.pop("nobody", None) is None
    with pytest.raises(KeyError, match="nobody"):
        users.pop("nobody")
    assert users.setdefault(key, row) is row
    assert users.popitem() == (key, row)
    users.update({key: row})
    assert users[key] is row
    users.clear()
    assert not users
    assert pickle.loads(pickle.dumps(users)) == copy.deepcopy(users) == {}


def test_changes_stay_in_their_view_and_are_told_apart_from_the_origin(shared: SharedDatabase) -> None:
    before = shared.fingerprints()
    one, two = shared.view(Access()), shared.view(Access())
    key = next(iter(one.users))
    one.users[key].email = "new@example.com"
    assert two.users[key].email != "new@example.com"
    assert delta(two) == {}, "a row that was only looked at is no change"
    assert list(delta(one)) == [("users", key)]
    del two.users[key]
    assert delta(two) == {("users", key): None}
    one.users[key].email = shared.view(Access()).users[key].email
    assert delta(one) == {}, "a change undone is no change"
    assert list(shared.damaged(before)) == []


def test_a_write_under_a_reading_tool_is_found(shared: SharedDatabase) -> None:
    before = shared.fingerprints()
    access = Access()
    view = shared.view(access)
    key = next(iter(view.users))
    access.reading = True
    view.users[key].email = "leaked"
    assert list(shared.damaged(before)) == [("users", key)]


@pytest.mark.parametrize("domain", ["retail", "airline"])
def test_equal_deltas_mean_equal_database_hashes(domain: str, make_env: Callable[..., Tau2Env], play_gold: Any) -> None:
    env = make_env(domain)
    states = []
    for task_id in env.task_ids("base")[:12]:
        play_gold(env, task_id)
        database = env.episode.environment.tools.db
        states.append((delta(database), env.episode.environment.tools.get_db_hash()))
    for left, left_hash in states:
        for right, right_hash in states:
            assert (left == right) == (left_hash == right_hash)


@pytest.mark.parametrize("domain", ["retail", "airline"])
def test_shared_rows_survive_every_tool(domain: str, make_env: Callable[..., Tau2Env], play_gold: Any) -> None:
    catalogue = load_domain(domain)
    originals = [shared.fingerprints() for shared in catalogue.store.shared_databases()]
    env = make_env(domain)
    for task_id in env.task_ids("base"):
        play_gold(env, task_id)
    for shared, original in zip(catalogue.store.shared_databases(), originals, strict=True):
        assert list(shared.damaged(original)) == []


def test_a_broken_vpn_breaks_it_in_its_own_episode_only(make_env: Callable[..., Tau2Env]) -> None:
    from tau2.domains.telecom.user_tools import TelecomUserTools

    env = make_env("telecom")
    broken = next(task_id for task_id in env.task_ids("base") if "vpn" in task_id)
    other = next(task_id for task_id in env.task_ids("base") if "vpn" not in task_id)
    env.reset(options={"task_id": broken})
    phone = env.episode.environment.user_tools
    assert phone.device.vpn_details.server_performance.value == "poor"
    assert phone.device.vpn_details is phone.default_vpn_details, "reconnecting in that task is as bad, as in τ²"
    env.reset(options={"task_id": other})
    phone = env.episode.environment.user_tools
    phone.connect_vpn()
    assert phone.device.vpn_details.server_performance.value == "excellent"
    assert TelecomUserTools.default_vpn_details.server_performance.value == "excellent"


def test_new_bills_get_the_same_id_every_time(make_env: Callable[..., Tau2Env]) -> None:
    env = make_env("telecom")
    replies = []
    for _ in range(2):
        env.reset(options={"task_id": env.task_ids("base")[0]})
        refuel = {"customer_id": "C1002", "line_id": "L1004", "gb_amount": 1.0}
        env.step(json.dumps({"name": "refuel_data", "arguments": refuel}))
        bills = env.step(json.dumps({"name": "get_bills_for_customer", "arguments": {"customer_id": "C1002"}}))
        replies.append(bills[4]["messages"][0].content)
    assert replies[0] == replies[1]
    assert "Draft" in replies[0]


@pytest.mark.parametrize("expression", ["9**9**9", "9**(9)", "2**100", "(" * 2000, "1" + "+1" * 600])
def test_an_endless_calculation_is_refused(expression: str, make_env: Callable[..., Tau2Env]) -> None:
    env = make_env("retail")
    env.reset(seed=0)
    _, _, _, _, info = env.step(json.dumps({"name": "calculate", "arguments": {"expression": expression}}))
    assert info["messages"][0].content.startswith("Error: expression too expensive: at most 1000 characters")


@pytest.mark.parametrize(("expression", "result"), [("2**10", "1024.0"), ("(1 + 2) * 3", "9.0"), ("10 / 4", "2.5")])
def test_an_honest_calculation_is_not(expression: str, result: str, make_env: Callable[..., Tau2Env]) -> None:
    env = make_env("airline")
    env.reset(seed=0)
    _, _, _, _, info = env.step(json.dumps({"name": "calculate", "arguments": {"expression": expression}}))
    assert info["messages"][0].content == result


def test_interleaved_episodes_do_not_see_each_other(make_env: Callable[..., Tau2Env]) -> None:
    rng = random.Random(3)
    envs = [Tau2Env(domain="retail", split="base") for _ in range(4)]
    tasks = rng.sample(envs[0].task_ids("base"), 4)
    for env, task_id in zip(envs, tasks, strict=True):
        env.reset(options={"task_id": task_id, "group_seed": 0})
    scores: dict[str, float] = {}
    while len(scores) < 4:
        for env, task_id in zip(envs, tasks, strict=True):
            if task_id in scores:
                continue
            message = env.oracle_message()
            call = message.tool_calls[0] if message.tool_calls else None
            action = json.dumps({"name": call.name, "arguments": dict(call.arguments)}) if call else message.content
            _, reward, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                scores[task_id] = reward
    assert set(scores.values()) == {1.0}
