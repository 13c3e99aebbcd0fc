"""Telecom's records and the facts both sides share.

``lines`` belong to the operator and change by agent tools, ``phones`` to the customer and change by user tools. A
connection works only when both agree: see ``speed``.
"""

from __future__ import annotations

from typing import Literal

from sinkflex.envs.session import facts, session_table
from sinkflex.envs.world import World
from sinkflex.types import JSONObject

Speed = Literal["good", "slow", "none"]

PLAN_GB = {"basic": 4, "plus": 9, "max": 20}
"""Plan name to the gigabytes it starts a month with."""

TOP_UP_GB = (2, 5)
"""Top-ups on sale, in gigabytes."""

UNFIXABLE = ("fraud", "dead_sim")
"""Faults that the policy document declares a case for a human."""


def new_line(customer: str, *, plan: str, gb: int) -> JSONObject:
    """Return a healthy line's record."""
    return {"customer": customer, "state": "active", "roaming": "off", "gb": gb, "sim": "ok", "plan": plan}


def new_phone() -> JSONObject:
    """Return a healthy phone's record."""
    return {
        "airplane": "off",
        "data": "on",
        "roaming": "off",
        "sim": "ok",
        "network": "ok",
        "vpn": "off",
        "place": "home",
        "tested": False,
    }


def new_session(phone: str) -> dict[str, JSONObject]:
    """Return the session rows.

    Facts: ``verified`` the customer whose PIN was checked, ``said_lines``/``said_line``/``said_pin`` what the user
    told, ``pin_failed`` the PIN that was refused, ``read`` lines the agent looked up, ``seen`` phones whose status the
    user reported, ``consent`` what the user agreed to pay for, ``last_agent`` the agent's latest words, ``phone`` the
    line whose phone the user holds.
    """
    return session_table(
        verified="",
        said_lines=[],
        said_line="",
        said_pin="",
        pin_failed="",
        read=[],
        seen=[],
        consent={},
        last_agent="",
        phone=phone,
    )


def speed(world: World, line_id: str) -> Speed:
    """Return what a speed test on the line's phone shows; it takes both sides to make it good."""
    line, phone = world.get("lines", line_id), world.get("phones", line_id)
    line_works = line["state"] == "active" and line["gb"] > 0 and line["sim"] == "ok"
    phone_works = (phone["airplane"], phone["data"], phone["sim"], phone["network"]) == (
        "off",
        "on",
        "ok",
        "ok",
    )
    roams = phone["place"] == "home" or (line["roaming"] == "on" and phone["roaming"] == "on")
    if not (line_works and phone_works and roams):
        return "none"
    return "slow" if phone["vpn"] == "on" else "good"


def held_phone(world: World) -> str:
    """Return the line id of the phone in the user's hand."""
    return str(facts(world)["phone"])
