from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sinkflex.envs import session
from sinkflex.envs.domains.retail import RetailDomain
from sinkflex.envs.domains.retail.state import action_key, request_id_for
from sinkflex.envs.domains.retail.tasks import RetailTask
from sinkflex.envs.world import World

Caller = Callable[..., Any]
Picker = Callable[..., RetailTask]


def open_world(task: RetailTask, *, verified: bool = True) -> World:
    world = RetailDomain().build_world(task)
    if verified:
        session.note(world, verified=task.customer_id)
    return world


def consent(world: World, *keys: str) -> None:
    session.note(world, consent=list(keys))


def test_find_customer_needs_the_right_pair(pick_task: Picker, agent: Caller) -> None:
    task = pick_task("refund")
    world = open_world(task, verified=False)
    assert agent(world, "find_customer", customer_id=task.customer_id, pin="0000") == {"found": False}
    assert agent(world, "find_customer", customer_id="0000", pin=task.pin) == {"found": False}
    assert agent(world, "find_customer_by_zip", customer_name=task.customer_name, zip_code="0000") == {"found": False}
    assert session.facts(world)["verified"] == ""
    assert session.facts(world)["refused"] == "0000"
    found = agent(world, "find_customer_by_zip", customer_name=task.customer_name.upper(), zip_code=task.zip_code)
    assert task.wishes[0].order_id in found["orders"]
    assert session.facts(world)["verified"] == task.customer_id
    assert found == agent(world, "find_customer", customer_id=task.customer_id, pin=task.pin)


def test_reads_before_identity_are_breaches_and_work(pick_task: Picker, agent: Caller) -> None:
    task = pick_task("refund")
    wish = task.wishes[0]
    world = open_world(task, verified=False)
    assert agent(world, "get_order", order_id=wish.order_id)["items"][wish.item_id] == wish.what
    assert agent(world, "get_item", item_id=wish.item_id)["status"] == "delivered"
    assert session.breaches(world) == ("identify_first", "identify_first")


def test_other_customers_orders_are_refused(pick_task: Picker, agent: Caller) -> None:
    task = pick_task("refund")
    world = open_world(task)
    other = next(key for key, order in world.items("orders") if order["customer"] != task.customer_id)
    item = world.get("orders", other)["items"][0]
    assert agent(world, "get_order", order_id=other) == f"order {other} is another customer's"
    assert agent(world, "get_item", item_id=item) == f"order {other} is another customer's"
    assert agent(world, "request_refund", item_id=item) == f"order {other} is another customer's"
    assert session.breaches(world) == ()


def test_a_refund_is_paid_by_the_approval_alone(pick_task: Picker, agent: Caller, user: Caller) -> None:
    task = pick_task("refund")
    wish = task.wishes[0]
    world = open_world(task)
    consent(world, action_key("refund", wish.item_id))
    assert agent(world, "request_refund", item_id=wish.item_id) == {"request": wish.request_id}
    assert session.breaches(world) == ()
    assert world.get("items", wish.item_id)["state"] == "kept"
    assert user(world, "list_requests") == {wish.request_id: f"refund item {wish.item_id}"}
    assert user(world, "approve_request", request_id=wish.request_id)["state"] == "approved"
    assert world.get("items", wish.item_id)["state"] == "refunded"
    assert world.get("customers", task.customer_id)["credit"] == world.get("items", wish.item_id)["price"]
    assert user(world, "list_requests") == {}
    assert user(world, "approve_request", request_id=wish.request_id) == f"request {wish.request_id} is approved"
    assert agent(world, "get_item", item_id=wish.item_id)["status"] == "refunded"
    assert agent(world, "request_refund", item_id=wish.item_id) == (
        f"there is already request {wish.request_id}, it is approved"
    )
    assert agent(world, "withdraw_request", request_id=wish.request_id) == f"request {wish.request_id} is approved"


def test_a_declined_request_changes_nothing(pick_task: Picker, agent: Caller, user: Caller) -> None:
    task = pick_task("address")
    wish = task.wishes[0]
    world = open_world(task)
    before = world.get("orders", wish.order_id)["address"]
    agent(world, "request_address_change", order_id=wish.order_id, address=f"  {wish.target.upper()} ")
    assert user(world, "list_requests") == {wish.request_id: f"address order {wish.order_id} to {wish.target}"}
    assert user(world, "decline_request", request_id=wish.request_id)["state"] == "declined"
    assert world.get("orders", wish.order_id)["address"] == before
    assert session.breaches(world) == ("confirm_first",)


def test_an_exchange_takes_the_swap_from_stock(pick_task: Picker, agent: Caller, user: Caller) -> None:
    task = pick_task("exchange")
    wish = task.wishes[0]
    world = open_world(task)
    assert agent(world, "find_swap", item_id=wish.item_id, color=wish.color.upper()) == {"swap": wish.target}
    consent(world, action_key("exchange", wish.item_id, wish.color))
    agent(world, "request_exchange", item_id=wish.item_id, swap_id=wish.target)
    assert session.breaches(world) == ()
    left = world.get("stock", wish.target)["left"]
    user(world, "approve_request", request_id=wish.request_id)
    assert world.get("stock", wish.target)["left"] == left - 1
    assert dict(world.get("items", wish.item_id))["swap"] == wish.target


def test_what_the_policy_forbids_is_refused(pick_task: Picker, agent: Caller) -> None:
    task = pick_task("exchange")
    wish = task.wishes[0]
    world = open_world(task)
    world.insert("stock", "0001", {"what": "red boat", "left": 1})
    world.update("stock", wish.target, left=0)
    assert agent(world, "request_exchange", item_id=wish.item_id, swap_id="0001") == (
        "0001 is a red boat, not the same product"
    )
    assert agent(world, "request_exchange", item_id=wish.item_id, swap_id=wish.target) == (
        f"{wish.target} is out of stock"
    )
    assert agent(world, "find_swap", item_id=wish.item_id, color=wish.color) == {"swap": "none in stock"}
    assert agent(world, "cancel_order", order_id=wish.order_id) == (
        f"order {wish.order_id} is delivered, it must be pending"
    )
    assert agent(world, "withdraw_request", request_id="0001") == "requests has no '0001'"
    late = pick_task("refund", twist="too_late")
    assert agent(open_world(late), "request_refund", item_id=late.wishes[0].item_id) == (
        f"order {late.wishes[0].order_id} is shipped, it must be delivered"
    )


def test_a_request_for_an_order_cancelled_meanwhile_fails(pick_task: Picker, agent: Caller, user: Caller) -> None:
    task = pick_task("address")
    wish = task.wishes[0]
    world = open_world(task)
    agent(world, "request_address_change", order_id=wish.order_id, address=wish.target)
    agent(world, "cancel_order", order_id=wish.order_id)
    assert user(world, "approve_request", request_id=wish.request_id) == f"order {wish.order_id} is cancelled"
    assert world.get("requests", wish.request_id)["state"] == "open"


def test_a_withdrawn_request_can_be_made_anew(pick_task: Picker, agent: Caller) -> None:
    task = pick_task("exchange")
    wish = task.wishes[0]
    world = open_world(task)
    wrong = agent(world, "request_refund", item_id=wish.item_id)["request"]
    assert wrong == request_id_for(open_world(task), action_key("refund", wish.item_id))
    assert "there is already request" in agent(world, "request_exchange", item_id=wish.item_id, swap_id=wish.target)
    assert agent(world, "withdraw_request", request_id=wrong) == {"withdrawn": True}
    assert agent(world, "request_exchange", item_id=wish.item_id, swap_id=wish.target) == {"request": wish.request_id}


def test_request_ids_avoid_every_other_id(pick_task: Picker) -> None:
    task = pick_task("refund")
    world = open_world(task)
    key = action_key("exchange", "1234", "5678")
    first = request_id_for(world, key)
    for table in ("requests", "orders", "items", "stock"):
        taken = request_id_for(world, key)
        world.insert(table, taken, {})
        assert request_id_for(world, key) != taken
    world.insert("tickets", "other", {"request": request_id_for(world, key)})
    assert request_id_for(world, key) not in {first, str(world.get("tickets", "other")["request"])}


def test_the_device_shows_only_the_owners_affairs(pick_task: Picker, agent: Caller, user: Caller) -> None:
    task = pick_task("refund")
    world = open_world(task, verified=False)
    other = next(key for key, order in world.items("orders") if order["customer"] != task.customer_id)
    item = world.get("orders", other)["items"][0]
    request = agent(world, "request_refund", item_id=item)["request"]
    assert user(world, "list_requests") == {}
    assert user(world, "approve_request", request_id=request) == f"there is no request {request}"
    assert user(world, "decline_request", request_id="0000") == "there is no request 0000"
    assert user(world, "check_order", order_id=other) == f"you have no order {other}"


def test_hand_off_before_anything_was_read_is_a_breach(pick_task: Picker, agent: Caller) -> None:
    world = open_world(pick_task("refund"), verified=False)
    assert agent(world, "transfer_to_human", reason="held") == {"ok": True, "reason": "held"}
    assert session.breaches(world) == ("identify_first", "hand_off_held_only")
    held = pick_task("refund", twist="held")
    for read in (
        {"name": "get_order", "order_id": held.wishes[0].order_id},
        {"name": "get_item", "item_id": held.wishes[0].item_id},
    ):
        world = open_world(held)
        agent(world, **read)
        agent(world, "transfer_to_human", reason="held")
        assert session.breaches(world) == ()


@pytest.mark.parametrize("tool", ["get_order", "get_item", "find_swap", "request_refund", "cancel_order"])
def test_ids_that_name_nothing_are_refused(pick_task: Picker, agent: Caller, tool: str) -> None:
    world = open_world(pick_task("refund"))
    schema = RetailDomain.agent_tools.tools[tool].schema
    arguments = dict.fromkeys(schema.parameters["required"], "0000")
    assert "has no '0000'" in agent(world, tool, **arguments)
    assert session.breaches(world) == ()
