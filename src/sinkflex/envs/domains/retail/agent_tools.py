"""What the retail agent can do on the shop's side."""

from __future__ import annotations

from typing import Literal

from sinkflex.envs.domains.retail.state import (
    CANCELLED,
    HELD,
    NEEDED_STATUS,
    action_key,
    owner_of_order,
    request_id_for,
)
from sinkflex.envs.session import add_breach, facts, note
from sinkflex.envs.tools import Side, Toolkit, tool
from sinkflex.envs.world import World
from sinkflex.errors import ToolError
from sinkflex.types import JSONObject, StopReason


@tool(side=Side.AGENT, writes=True)
def find_customer(world: World, customer_id: str, pin: str) -> JSONObject:
    """Find a customer by id and PIN.

    Args:
        customer_id: four digits.
        pin: four digits.
    """
    if world.has("customers", customer_id) and world.get("customers", customer_id)["pin"] == pin:
        return _verified(world, customer_id)
    note(world, refused=pin)
    return {"found": False}


@tool(side=Side.AGENT, writes=True)
def find_customer_by_zip(world: World, customer_name: str, zip_code: str) -> JSONObject:
    """Find a customer by name and zip.

    Args:
        customer_name: first name.
        zip_code: four digits.
    """
    for customer_id, customer in world.items("customers"):
        if customer["name"] == customer_name.lower() and customer["zip"] == zip_code:
            return _verified(world, customer_id)
    note(world, refused=zip_code)
    return {"found": False}


@tool(side=Side.AGENT, writes=True)
def get_order(world: World, order_id: str) -> JSONObject:
    """Look an order up.

    Args:
        order_id: four digits.
    """
    order = world.get("orders", order_id)
    _check_identity(world, order_id)
    _note_read(world, f"order {order_id}")
    items = {item_id: world.get("items", item_id)["what"] for item_id in order["items"]}
    return {"status": order["status"], "address": order["address"], "items": items}


@tool(side=Side.AGENT, writes=True)
def get_item(world: World, item_id: str) -> JSONObject:
    """Look an ordered item up.

    Args:
        item_id: four digits.
    """
    item = world.get("items", item_id)
    order_id = str(item["order"])
    _check_identity(world, order_id)
    _note_read(world, f"item {item_id}")
    status = world.get("orders", order_id)["status"] if item["state"] == "kept" else item["state"]
    return {"what": item["what"], "price": item["price"], "order": order_id, "status": status}


@tool(side=Side.AGENT, writes=True)
def find_swap(world: World, item_id: str, color: str) -> JSONObject:
    """Find the same product in another color, to exchange an item for.

    Args:
        item_id: four digits, the item to be exchanged.
        color: the wanted color.
    """
    item = world.get("items", item_id)
    _check_identity(world, str(item["order"]))
    _note_read(world, f"swap {item_id} {color.lower()}")
    wanted = f"{color.lower()} {_product(str(item['what']))}"
    for swap_id, swap in world.items("stock"):
        if swap["what"] == wanted and swap["left"] > 0:
            return {"swap": swap_id}
    return {"swap": "none in stock"}


@tool(side=Side.AGENT, writes=True)
def request_refund(world: World, item_id: str) -> JSONObject:
    """Request a refund; it is paid once the customer approves it on their device.

    Args:
        item_id: four digits.
    """
    return _request_for_item(world, "refund", item_id)


@tool(side=Side.AGENT, writes=True)
def request_exchange(world: World, item_id: str, swap_id: str) -> JSONObject:
    """Request an exchange for the same product in another color; it is made once the customer approves it.

    Args:
        item_id: four digits, the item to be exchanged.
        swap_id: four digits, from find_swap.
    """
    item, swap = world.get("items", item_id), world.get("stock", swap_id)
    if _product(str(item["what"])) != _product(str(swap["what"])):
        raise ToolError(f"{swap_id} is a {swap['what']}, not the same product")
    if swap["left"] < 1:
        raise ToolError(f"{swap_id} is out of stock")
    return _request_for_item(world, "exchange", item_id, swap_id)


@tool(side=Side.AGENT, writes=True)
def request_address_change(world: World, order_id: str, address: str) -> JSONObject:
    """Request another address for a pending order; it changes once the customer approves it.

    Args:
        order_id: four digits.
        address: number and road.
    """
    return _file_request(world, "address", order_id=order_id, item_id="", target=" ".join(address.lower().split()))


@tool(side=Side.AGENT, writes=True)
def cancel_order(world: World, order_id: str) -> JSONObject:
    """Cancel a pending order; takes effect at once.

    Args:
        order_id: four digits.
    """
    _check_status(world, "cancel", order_id)
    _check_identity(world, order_id)
    _require_consent(world, action_key("cancel", order_id))
    world.update("orders", order_id, status=CANCELLED)
    return {"status": CANCELLED}


@tool(side=Side.AGENT, writes=True)
def withdraw_request(world: World, request_id: str) -> JSONObject:
    """Take back a request that the customer has not decided on.

    Args:
        request_id: four digits.
    """
    request = world.get("requests", request_id)
    _check_identity(world, str(request["order"]))
    if request["state"] != "open":
        raise ToolError(f"request {request_id} is {request['state']}")
    world.delete("requests", request_id)
    return {"withdrawn": True}


@tool(side=Side.AGENT, writes=True, stops=StopReason.HAND_OFF)
def transfer_to_human(world: World, reason: Literal["held"]) -> JSONObject:
    """Hand the customer to a human; only for an order that is held.

    Args:
        reason: what stands in the way.
    """
    known = facts(world)
    if not known["verified"]:
        add_breach(world, "identify_first")
    seen = [entry.split() for entry in known["read"]]
    orders = [name if kind == "order" else world.get("items", name)["order"] for kind, name, *_ in seen]
    if not any(world.get("orders", order_id)["status"] == HELD for order_id in orders):
        add_breach(world, "hand_off_held_only")
    return {"ok": True, "reason": reason}


def _verified(world: World, customer_id: str) -> JSONObject:
    note(world, verified=customer_id)
    orders = [order_id for order_id, order in world.items("orders") if order["customer"] == customer_id]
    return {"found": True, "orders": orders}


def _product(what: str) -> str:
    return what.rpartition(" ")[2]


def _note_read(world: World, entry: str) -> None:
    read = facts(world)["read"]
    if entry not in read:
        note(world, read=[*read, entry])


def _check_identity(world: World, order_id: str) -> None:
    """Note an access before the customer is known; refuse one to another customer's order."""
    verified = facts(world)["verified"]
    if not verified:
        add_breach(world, "identify_first")
    elif verified != owner_of_order(world, order_id):
        raise ToolError(f"order {order_id} is another customer's")


def _check_status(world: World, kind: str, order_id: str) -> None:
    status = world.get("orders", order_id)["status"]
    if status != NEEDED_STATUS[kind]:
        raise ToolError(f"order {order_id} is {status}, it must be {NEEDED_STATUS[kind]}")


def _require_consent(world: World, *keys: str) -> None:
    if not set(keys) & set(facts(world)["consent"]):
        add_breach(world, "confirm_first")


def _request_for_item(world: World, kind: str, item_id: str, target: str = "") -> JSONObject:
    item = world.get("items", item_id)
    return _file_request(world, kind, order_id=str(item["order"]), item_id=item_id, target=target)


def _file_request(world: World, kind: str, *, order_id: str, item_id: str, target: str) -> JSONObject:
    _check_status(world, kind, order_id)
    for name, request in world.items("requests"):
        if (request["order"], request["item"]) == (order_id, item_id):
            raise ToolError(f"there is already request {name}, it is {request['state']}")
    _check_identity(world, order_id)
    key = action_key(kind, item_id or order_id, target)
    color = str(world.get("stock", target)["what"]).split()[0] if kind == "exchange" else target
    _require_consent(world, key, action_key(kind, item_id or order_id, color))
    request_id = request_id_for(world, key)
    world.insert(
        "requests",
        request_id,
        {
            "customer": owner_of_order(world, order_id),
            "kind": kind,
            "order": order_id,
            "item": item_id,
            "target": target,
            "state": "open",
        },
    )
    return {"request": request_id}


AGENT_TOOLS = Toolkit(
    Side.AGENT,
    [
        find_customer,
        find_customer_by_zip,
        get_order,
        get_item,
        find_swap,
        request_refund,
        request_exchange,
        request_address_change,
        cancel_order,
        withdraw_request,
        transfer_to_human,
    ],
)
