"""What the telecom customer can do on the phone in hand."""

from __future__ import annotations

from sinkflex.envs.domains.telecom.state import held_phone, speed
from sinkflex.envs.session import facts, note
from sinkflex.envs.tools import Side, Toolkit, tool
from sinkflex.envs.world import World
from sinkflex.errors import ToolError
from sinkflex.types import JSONObject

SWITCH_NAMES = {"airplane": "airplane mode", "data": "mobile data", "roaming": "roaming", "vpn": "vpn"}
"""What the phone calls its switches."""


@tool(side=Side.USER, writes=True)
def check_status(world: World) -> JSONObject:
    """Read the phone's status screen."""
    phone = world.get("phones", held_phone(world))
    note(world, seen=sorted({*facts(world)["seen"], held_phone(world)}))
    return {name: value for name, value in phone.items() if name != "tested"}


@tool(side=Side.USER, writes=True)
def run_speed_test(world: World) -> JSONObject:
    """Test the mobile connection."""
    result = speed(world, held_phone(world))
    world.update("phones", held_phone(world), tested=result == "good")
    return {"speed": result}


@tool(side=Side.USER, writes=True)
def toggle_airplane_mode(world: World, on: bool) -> JSONObject:
    """Turn airplane mode on or off.

    Args:
        on: True turns it on.
    """
    return _switch(world, "airplane", on)


@tool(side=Side.USER, writes=True)
def toggle_data(world: World, on: bool) -> JSONObject:
    """Turn mobile data on or off.

    Args:
        on: True turns it on.
    """
    return _switch(world, "data", on)


@tool(side=Side.USER, writes=True)
def toggle_roaming(world: World, on: bool) -> JSONObject:
    """Turn data roaming on or off on the phone.

    Args:
        on: True turns it on.
    """
    return _switch(world, "roaming", on)


@tool(side=Side.USER, writes=True)
def toggle_vpn(world: World, on: bool) -> JSONObject:
    """Turn the VPN on or off.

    Args:
        on: True turns it on.
    """
    return _switch(world, "vpn", on)


@tool(side=Side.USER, writes=True)
def reseat_sim(world: World) -> JSONObject:
    """Take the SIM out and put it back."""
    return _repair(world, "sim")


@tool(side=Side.USER, writes=True)
def reboot(world: World) -> JSONObject:
    """Restart the phone."""
    return _repair(world, "network")


@tool(side=Side.USER, writes=True)
def pay_bill(world: World) -> JSONObject:
    """Pay the open bill of the line in the operator's app."""
    line_id = held_phone(world)
    if world.get("lines", line_id)["state"] != "unpaid":
        raise ToolError("no open bill")
    world.update("lines", line_id, state="suspended")
    return {"bill": "paid"}


def _switch(world: World, name: str, on: bool) -> JSONObject:
    value = "on" if on else "off"
    if world.get("phones", held_phone(world))[name] == value:
        raise ToolError(f"{SWITCH_NAMES[name]} is already {value}")
    world.update("phones", held_phone(world), **{name: value})
    return {name: value}


def _repair(world: World, name: str) -> JSONObject:
    """Set a part of the phone to ok; ``changed`` says whether that was needed."""
    changed = world.get("phones", held_phone(world))[name] != "ok"
    world.update("phones", held_phone(world), **{name: "ok"})
    return {name: "ok", "changed": changed}


USER_TOOLS = Toolkit(
    Side.USER,
    [
        check_status,
        run_speed_test,
        toggle_airplane_mode,
        toggle_data,
        toggle_roaming,
        toggle_vpn,
        reseat_sim,
        reboot,
        pay_bill,
    ],
)
