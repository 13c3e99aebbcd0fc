"""Retail's records, and the effects that a request has once the customer approves it.

``orders``, ``items``, ``stock`` and ``requests`` belong to the shop. The customer's device shows the
customer's own requests, and only an approval there carries one out: the agent asks, the customer decides, the
shop changes.
"""

from __future__ import annotations

import zlib

from sinkflex.envs.session import session_table
from sinkflex.envs.world import Record, World
from sinkflex.errors import ToolError
from sinkflex.types import JSONObject

DELIVERED, PENDING, SHIPPED, HELD, CANCELLED = "delivered", "pending", "shipped", "held", "cancelled"
"""States of an order. Held orders are a case for a human, as the policy document declares."""

NEEDED_STATUS = {"refund": DELIVERED, "exchange": DELIVERED, "address": PENDING, "cancel": PENDING}
"""Kind of request to the state its order must be in."""

_FIRST_ID, _ID_COUNT = 1000, 9000


def new_customer(*, name: str, pin: str, zip_code: str) -> JSONObject:
    """Return a customer's record."""
    return {"name": name, "pin": pin, "zip": zip_code, "credit": 0}


def new_order(customer_id: str, *, status: str, address: str, items: list[str]) -> JSONObject:
    """Return an order's record."""
    return {"customer": customer_id, "status": status, "address": address, "items": items}


def new_item(order_id: str, *, what: str, price: int) -> JSONObject:
    """Return an ordered item's record; ``what`` is its colour and product, for example ``red lamp``."""
    return {"order": order_id, "what": what, "price": price, "state": "kept", "swap": ""}


def new_session() -> dict[str, JSONObject]:
    """Return the session rows.

    Facts: ``verified`` the customer found by id and PIN or by name and zip, ``said_*`` what the user told of
        these,
    ``refused`` the PIN or zip that did not fit, ``heard`` what the user told of each wish, ``read`` what the
    agent looked up, ``proposed`` what its last question asked leave for, ``consent`` what the user said yes
    to, ``checked`` the order states the user saw on the device.
    """
    return session_table(
        verified="",
        said_id="",
        said_pin="",
        said_name="",
        said_zip="",
        refused="",
        heard=[],
        read=[],
        proposed=[],
        consent=[],
        checked=[],
    )


def action_key(kind: str, entity_id: str, target: str = "") -> str:
    """Return the name under which a change is proposed, agreed to and filed."""
    return f"{kind} {entity_id} {target}".rstrip()


def owner_of_order(world: World, order_id: str) -> str:
    """Return the customer id of an order.

    Raises:
        ToolError: there is no such order.
    """
    return str(world.get("orders", order_id)["customer"])


def request_id_for(world: World, key: str) -> str:
    """Return the id a new request gets: the one reserved for it, or a free one that depends only on its key.

    An id that does not depend on the order of requests keeps reordered episodes comparable.
    """
    if world.has("tickets", key):
        return str(world.get("tickets", key)["request"])
    reserved = {str(ticket["request"]) for _, ticket in world.items("tickets")}
    number = zlib.crc32(key.encode())
    while True:
        name = str(_FIRST_ID + number % _ID_COUNT)
        taken = name in reserved or any(world.has(table, name) for table in ("requests", "orders", "items", "stock"))
        if not taken:
            return name
        number += 1


def carry_out(world: World, request: Record) -> None:
    """Apply an approved request to the shop's records.

    Raises:
        ToolError: the order is no longer in the state the request needs.
    """
    kind, order_id, item_id, target = (str(request[key]) for key in ("kind", "order", "item", "target"))
    status = world.get("orders", order_id)["status"]
    if status != NEEDED_STATUS[kind]:
        raise ToolError(f"order {order_id} is {status}")
    if kind == "address":
        world.update("orders", order_id, address=target)
    elif kind == "refund":
        customer = world.get("customers", str(request["customer"]))
        price = world.get("items", item_id)["price"]
        world.update("items", item_id, state="refunded")
        world.update("customers", str(request["customer"]), credit=customer["credit"] + price)
    else:
        left = world.get("stock", target)["left"]
        world.update("items", item_id, state="exchanged", swap=target)
        world.update("stock", target, left=left - 1)
