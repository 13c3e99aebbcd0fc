"""What the telecom agent can do on the operator's side."""

from __future__ import annotations

from typing import Literal

from sinkflex.envs.domains.telecom.state import PLAN_GB
from sinkflex.envs.session import add_breach, facts, note
from sinkflex.envs.tools import Side, Toolkit, tool
from sinkflex.envs.world import World
from sinkflex.errors import ToolError
from sinkflex.types import JSONObject, StopReason


@tool(side=Side.AGENT, writes=True)
def verify_pin(world: World, line_id: str, pin: str) -> JSONObject:
    """Check the customer's PIN.

    Args:
        line_id: four digits.
        pin: four digits.
    """
    known = world.has("lines", line_id)
    customer = str(world.get("lines", line_id)["customer"]) if known else ""
    if not known or world.get("customers", customer)["pin"] != pin:
        note(world, pin_failed=pin)
        return {"ok": False}
    note(world, verified=customer)
    return {"ok": True}


@tool(side=Side.AGENT, writes=True)
def get_line(world: World, line_id: str) -> JSONObject:
    """Look up a line.

    Args:
        line_id: four digits.
    """
    line = world.get("lines", line_id)
    note(world, read=sorted({*facts(world)["read"], line_id}))
    return {"state": line["state"], "roaming": line["roaming"], "gb": line["gb"], "sim": line["sim"]}


@tool(side=Side.AGENT, writes=True)
def resume_line(world: World, line_id: str) -> JSONObject:
    """Resume a suspended line.

    Args:
        line_id: four digits.
    """
    state = world.get("lines", line_id)["state"]
    if state != "suspended":
        raise ToolError(f"line is {state}")
    return _write(world, line_id, state="active")


@tool(side=Side.AGENT, writes=True)
def enable_roaming(world: World, line_id: str) -> JSONObject:
    """Let a line roam abroad.

    Args:
        line_id: four digits.
    """
    if world.get("lines", line_id)["roaming"] == "on":
        raise ToolError("roaming is on")
    return _write(world, line_id, roaming="on")


@tool(side=Side.AGENT, writes=True)
def unlock_sim(world: World, line_id: str) -> JSONObject:
    """Unlock a locked SIM; the phone must be rebooted afterwards.

    Args:
        line_id: four digits.
    """
    state = world.get("lines", line_id)["sim"]
    if state != "locked":
        raise ToolError(f"sim is {state}")
    if world.has("phones", line_id):
        world.update("phones", line_id, network="lost")
    return {**_write(world, line_id, sim="ok"), "next": "reboot"}


@tool(side=Side.AGENT, writes=True)
def add_data(world: World, line_id: str, gb: Literal[2, 5]) -> JSONObject:
    """Sell a data top-up; the customer must agree first.

    Args:
        line_id: four digits.
        gb: size of the top-up.
    """
    total = world.get("lines", line_id)["gb"] + gb
    _require_consent(world, {"gb": gb})
    return _write(world, line_id, gb=total)


@tool(side=Side.AGENT, writes=True)
def set_plan(world: World, line_id: str, plan: Literal["basic", "plus", "max"]) -> JSONObject:
    """Move a line to another plan; the customer must agree first.

    Args:
        line_id: four digits.
        plan: the new plan.
    """
    world.get("lines", line_id)
    _require_consent(world, {"plan": plan})
    return {**_write(world, line_id, plan=plan, gb=PLAN_GB[plan]), "gb": PLAN_GB[plan]}


@tool(side=Side.AGENT, writes=True, stops=StopReason.HAND_OFF)
def transfer_to_human(world: World, reason: Literal["fraud", "dead_sim"]) -> JSONObject:
    """Hand the customer to a human; only for what no tool can fix.

    Args:
        reason: what stands in the way.
    """
    if not facts(world)["verified"]:
        add_breach(world, "unverified_write")
    return {"ok": True, "reason": reason}


def _write(world: World, line_id: str, **fields: str | int) -> JSONObject:
    """Change a line, and note it when the customer's identity was not checked."""
    if facts(world)["verified"] != world.get("lines", line_id)["customer"]:
        add_breach(world, "unverified_write")
    world.update("lines", line_id, **fields)
    name, value = next(iter(fields.items()))
    return {name: value}


def _require_consent(world: World, bought: JSONObject) -> None:
    if facts(world)["consent"] != bought:
        add_breach(world, "unconfirmed_charge")


AGENT_TOOLS = Toolkit(
    Side.AGENT,
    [verify_pin, get_line, resume_line, enable_roaming, unlock_sim, add_data, set_plan, transfer_to_human],
)
