"""What the retail customer can do on their own device."""

from __future__ import annotations

from sinkflex.envs.domains.retail.state import carry_out, owner_of_order
from sinkflex.envs.session import facts, note
from sinkflex.envs.tools import Side, Toolkit, tool
from sinkflex.envs.world import Record, World
from sinkflex.errors import ToolError
from sinkflex.types import JSONObject


@tool(side=Side.USER, writes=False)
def list_requests(world: World) -> JSONObject:
    """List the requests that wait for your approval."""
    return {
        name: _describe(request)
        for name, request in world.items("requests")
        if request["state"] == "open" and request["customer"] == _owner(world)
    }


@tool(side=Side.USER, writes=True)
def approve_request(world: World, request_id: str) -> JSONObject:
    """Approve a request, so that it is carried out.

    Args:
        request_id: four digits.
    """
    request = _open_request(world, request_id)
    carry_out(world, request)
    world.update("requests", request_id, state="approved")
    return {"state": "approved", "request": _describe(request)}


@tool(side=Side.USER, writes=True)
def decline_request(world: World, request_id: str) -> JSONObject:
    """Decline a request, so that nothing changes.

    Args:
        request_id: four digits.
    """
    request = _open_request(world, request_id)
    world.update("requests", request_id, state="declined")
    return {"state": "declined", "request": _describe(request)}


@tool(side=Side.USER, writes=True)
def check_order(world: World, order_id: str) -> JSONObject:
    """See the state and the address of one of your orders.

    Args:
        order_id: four digits.
    """
    if owner_of_order(world, order_id) != _owner(world):
        raise ToolError(f"you have no order {order_id}")
    order = world.get("orders", order_id)
    entry = f"{order_id} {order['status']}"
    checked = facts(world)["checked"]
    if entry not in checked:
        note(world, checked=[*checked, entry])
    return {"status": order["status"], "address": order["address"]}


def _owner(world: World) -> str:
    return str(world.get("device", "owner")["customer"])


def _open_request(world: World, request_id: str) -> Record:
    known = world.has("requests", request_id)
    if not known or world.get("requests", request_id)["customer"] != _owner(world):
        raise ToolError(f"there is no request {request_id}")
    request = world.get("requests", request_id)
    if request["state"] != "open":
        raise ToolError(f"request {request_id} is {request['state']}")
    return request


def _describe(request: Record) -> str:
    subject = f"item {request['item']}" if request["item"] else f"order {request['order']}"
    target = f" to {request['target']}" if request["target"] else ""
    return f"{request['kind']} {subject}{target}"


USER_TOOLS = Toolkit(Side.USER, [list_requests, approve_request, decline_request, check_order])
