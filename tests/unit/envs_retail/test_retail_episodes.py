from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest

from sinkflex.envs.domains.retail.tasks import RetailTask, build_task, task_ids

Env = gymnasium.Env[str, str]
Play = Callable[..., tuple[float, dict[str, Any]]]
Picker = Callable[..., RetailTask]


def call(name: str, **arguments: str) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def identify(task: RetailTask) -> str:
    return call("find_customer", customer_id=task.customer_id, pin=task.pin)


def test_a_benign_reordering_still_scores(env: Env, pick_task: Picker, play: Play) -> None:
    task = pick_task("refund")
    wish = task.wishes[0]
    read_item, read_order = call("get_item", item_id=wish.item_id), call("get_order", order_id=wish.order_id)
    propose = f"shall i refund item {wish.item_id}?"
    request = call("request_refund", item_id=wish.item_id)
    reorderings = (
        ("what is your pin?", "and your id?", identify(task)),
        ("what is your id and pin?", identify(task), propose, read_item, request),
        (propose, "what is your id and pin?", identify(task), read_order, request),
        ("hello", "what is your id and pin?", identify(task), identify(task), read_order, read_item, read_order),
        (f"[{identify(task)}, {read_order}, {read_item}]", propose, request),
        (identify(task), read_order, propose, request, "please look at your device"),
    )
    for actions in reorderings:
        score, info = play(env, task.task_id, *actions)
        assert (score, info["breaches"]) == (1.0, ()), actions


@pytest.mark.parametrize(
    ("skipped", "breach"),
    [("identity", "identify_first"), ("confirmation", "confirm_first"), ("hand_off", "hand_off_held_only")],
)
def test_breaking_a_rule_scores_nothing(env: Env, pick_task: Picker, play: Play, skipped: str, breach: str) -> None:
    task = pick_task("refund")
    wish = task.wishes[0]
    actions = {
        "identity": (call("get_item", item_id=wish.item_id),),
        "confirmation": (identify(task), call("request_refund", item_id=wish.item_id)),
        "hand_off": (identify(task), call("transfer_to_human", reason="held")),
    }[skipped]
    score, info = play(env, task.task_id, *actions)
    assert score == 0.0
    assert info["components"]["policy"] == 0.0
    assert breach in info["breaches"]
    assert info["metrics"]["writes_before_confirmation"] == (skipped == "confirmation")


def test_a_wrong_change_scores_nothing_even_if_all_wishes_are_met(env: Env, pick_task: Picker, play: Play) -> None:
    task = pick_task("refund")
    env.reset(options={"task_id": task.task_id, "group_seed": 0})
    world = env.unwrapped.episode.world
    item = next(key for key in world.get("orders", task.wishes[0].order_id)["items"] if key != task.wishes[0].item_id)
    score, info = play(env, task.task_id, identify(task), call("request_refund", item_id=item))
    assert score == 0.0
    assert info["components"]["records"] == 1.0, "the oracle takes the stray request back"
    assert info["components"]["policy"] == 0.0


def test_a_stray_request_left_open_is_graded(env: Env, pick_task: Picker) -> None:
    task = pick_task("refund")
    env.reset(options={"task_id": task.task_id, "group_seed": 0})
    world = env.unwrapped.episode.world
    item = next(key for key in world.get("orders", task.wishes[0].order_id)["items"] if key != task.wishes[0].item_id)
    env.step(call("request_refund", item_id=item))
    graded = env.unwrapped.domain.components(task, world, handed_off=False)
    assert graded == {"records": 0.0, "requests": 0.0, "informed": None, "hand_off": None}


def test_the_customer_must_be_told(env: Env, pick_task: Picker) -> None:
    for task in (pick_task("cancel"), pick_task("refund", twist="too_late")):
        env.reset(options={"task_id": task.task_id, "group_seed": 0})
        world = env.unwrapped.episode.world
        if task.wishes[0].possible:
            world.update("orders", task.wishes[0].order_id, status="cancelled")
        graded = env.unwrapped.domain.components(task, world, handed_off=False)
        assert graded == {"records": 1.0, "requests": None, "informed": 0.0, "hand_off": None}


def test_handing_over_instead_of_telling_scores_nothing(env: Env, pick_task: Picker, play: Play) -> None:
    task = pick_task("cancel")
    order = task.wishes[0].order_id
    actions = (identify(task), f"cancel order {order}?", call("cancel_order", order_id=order))
    score, info = play(env, task.task_id, *actions, call("transfer_to_human", reason="held"))
    assert score == 0.0
    assert info["components"]["records"] == 1.0
    assert info["components"]["hand_off"] == 0.0


def test_a_held_order_is_handed_over(env: Env, pick_task: Picker, play: Play) -> None:
    task = pick_task("refund", twist="held")
    assert task.hand_off
    assert play(env, task.task_id)[0] == 1.0
    score, info = play(env, task.task_id, "what is your id and pin?", *["sorry"] * 12)
    assert score == 0.0
    assert info["components"]["hand_off"] == 0.0


def test_a_wrong_secret_is_asked_for_again(env: Env, play: Play) -> None:
    tasks = (build_task(task_id) for task_id in task_ids("train", "medium"))
    chosen: dict[bool, RetailTask] = {}
    for task in tasks:
        if task.wrong_secret is not None:
            chosen.setdefault(task.knows_id, task)
        if len(chosen) == 2:
            break
    for knows_id, task in chosen.items():
        env.reset(options={"task_id": task.task_id, "group_seed": 0})
        score, info = play(env, task.task_id)
        said = [message.content for _, message in env.unwrapped.episode.transcript]
        assert score == 1.0
        assert info["metrics"]["tool_errors"] == 0.0
        assert f"wrong {'pin' if knows_id else 'zip'}, what is it?" in said


def test_after_any_single_slip_the_oracle_still_ends_the_episode(env: Env, play: Play) -> None:
    def raw(message: Any) -> str:
        if not message.tool_calls:
            return str(message.content)
        return json.dumps([{"name": made.name, "arguments": dict(made.arguments)} for made in message.tool_calls])

    outcomes: set[float] = set()
    for task_id in task_ids("train", "medium")[:12]:
        for at in range(8):
            env.reset(options={"task_id": task_id, "group_seed": 0})
            prefix = []
            for _ in range(at):
                prefix.append(raw(env.unwrapped.oracle_message()))
                _, _, terminated, truncated, _ = env.step(prefix[-1])
                if terminated or truncated:
                    break
            else:
                slips = env.unwrapped.slip_messages()
                assert slips
                for slip in slips:
                    score, info = play(env, task_id, *prefix, raw(slip))
                    outcomes.add(score)
                    assert info["stop_reason"] in ("user_stop", "hand_off"), (task_id, at, slip)
    assert outcomes == {0.0, 1.0}, "some slips can be made good, some cannot"
