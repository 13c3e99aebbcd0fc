"""Telecom support: the operator's side is the agent's, the phone is the user's, a connection needs both."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import ClassVar

from sinkflex.envs.domains.telecom.agent_tools import AGENT_TOOLS
from sinkflex.envs.domains.telecom.consent import agreed_charge
from sinkflex.envs.domains.telecom.oracle import likely_slips, next_message, other_orders
from sinkflex.envs.domains.telecom.script import build_script
from sinkflex.envs.domains.telecom.state import PLAN_GB, UNFIXABLE, new_line, new_phone, new_session, speed
from sinkflex.envs.domains.telecom.tasks import TIERS, Case, TelecomTask, build_task, task_ids
from sinkflex.envs.domains.telecom.user_tools import USER_TOOLS
from sinkflex.envs.protocol import Domain
from sinkflex.envs.session import facts, note
from sinkflex.envs.tools import Side, Toolkit
from sinkflex.envs.users.scripted import Script
from sinkflex.envs.world import World
from sinkflex.types import JSONObject, Message

_BRIEF = (
    "telecom support. verify line and pin first. fix the line, then the phone. ask before any fee. "
    "end with a speed test. hand off only fraud or a dead sim."
)
_LINE_FAULTS: dict[str, JSONObject] = {
    "suspended": {"state": "suspended"},
    "unpaid": {"state": "unpaid"},
    "no_data": {"gb": 0},
    "sim_locked": {"sim": "locked"},
    "fraud": {"state": "fraud"},
    "dead_sim": {"sim": "dead"},
}
_PHONE_FAULTS: dict[str, JSONObject] = {
    "airplane": {"airplane": "on"},
    "data_off": {"data": "off"},
    "sim_loose": {"sim": "loose"},
    "stuck": {"network": "lost"},
    "vpn": {"vpn": "on"},
}
_NUMBER = re.compile(r"\d{4}")
_PIN = re.compile(r"\bpin\b\D{0,10}(\d{4})")


class TelecomDomain(Domain[TelecomTask]):
    """See ``policy.md`` for the rules and ``tasks`` for what goes wrong."""

    name: ClassVar[str] = "telecom"
    tiers: ClassVar[tuple[str, ...]] = TIERS
    max_steps: ClassVar[Mapping[str, int]] = {"easy": 16, "medium": 24, "long": 60}
    agent_tools: ClassVar[Toolkit] = AGENT_TOOLS
    user_tools: ClassVar[Toolkit] = USER_TOOLS
    rules: ClassVar[Mapping[str, str]] = {
        "unverified_write": "Check the PIN before you change a line or hand over.",
        "unconfirmed_charge": "Charge only what the customer agreed to.",
    }
    confirmation_rules: ClassVar[frozenset[str]] = frozenset({"unconfirmed_charge"})

    def tier_task_ids(self, split: str, tier: str) -> tuple[str, ...]:
        """Return the ids of one split and tier."""
        return task_ids(split, tier)

    def task(self, task_id: str) -> TelecomTask:
        """Return a task, rebuilt from its id."""
        return build_task(task_id)

    def system_prompt(self, style: str) -> str:
        """Return the policy, in short or in full."""
        return _BRIEF if style == "brief" else _policy()

    def user_prompt(self, task: TelecomTask) -> str:
        """Return the role of an LLM or a person playing the customer."""
        problems = "; ".join(f"line {case.line_id}: {_SYMPTOMS[case.symptom]}" for case in task.cases)
        wishes = "; ".join(f"line {case.line_id}: {_wish(case)}" for case in task.cases if "no_data" in case.faults)
        return (
            f"You are a customer of a phone operator. Your lines: {', '.join(_owned(task))}. Your PIN: {task.pin}. "
            f"Your problems, one after the other: {problems}. "
            f"What you would pay for if asked: {wishes or 'nothing'}. "
            "Tell your line and PIN only when asked. Use your phone only as the agent instructs, and report what it "
            "shows. Stop when a speed test shows good speed for every problem."
        )

    def build_world(self, task: TelecomTask) -> World:
        """Return the start state: one customer, the lines and the phones of the lines with a problem."""
        lines = {name: new_line(task.customer_id, plan="basic", gb=3) for name in task.spare_lines}
        phones = {}
        for case in task.cases:
            lines[case.line_id] = new_line(task.customer_id, plan=case.plan, gb=case.gb)
            phones[case.line_id] = new_phone()
            for fault in case.faults:
                lines[case.line_id].update(_LINE_FAULTS.get(fault, {}))
                phones[case.line_id].update(_PHONE_FAULTS.get(fault, {}))
            if case.abroad:
                lines[case.line_id]["roaming"] = "off" if "line_roaming" in case.faults else "on"
                phones[case.line_id]["roaming"] = "off" if "phone_roaming" in case.faults else "on"
                phones[case.line_id]["place"] = "abroad"
        return World(
            {
                "customers": {task.customer_id: {"pin": task.pin, "lines": list(_owned(task))}},
                "lines": lines,
                "phones": phones,
                "session": new_session(task.cases[0].line_id),
            },
            bags=(("customers", "lines"),),
        )

    def script(self, task: TelecomTask) -> Script:
        """Return the scripted customer."""
        return build_script(task)

    def components(self, task: TelecomTask, world: World, *, handed_off: bool) -> Mapping[str, float | None]:
        """Grade the operator's lines, the tested phones and the hand-off."""
        fixable = [case for case in task.cases if not set(case.faults) & set(UNFIXABLE)]
        lines = all(_line_is_right(world, case) for case in task.cases) and all(
            dict(world.get("lines", name)) == new_line(task.customer_id, plan="basic", gb=3)
            for name in task.spare_lines
        )
        phones = all(
            world.get("phones", case.line_id)["tested"] and speed(world, case.line_id) == "good" for case in fixable
        )
        return {
            "lines": float(lines),
            "phones": float(phones) if fixable else None,
            "hand_off": float(handed_off) if task.hand_off else (0.0 if handed_off else None),
        }

    def oracle(self, task: TelecomTask, world: World) -> Message:
        """Return the best next message."""
        return next_message(task, world)

    def slips(self, task: TelecomTask, world: World) -> tuple[Message, ...]:
        """Return plausible mistakes."""
        return likely_slips(task, world)

    def alternatives(self, task: TelecomTask, world: World) -> tuple[Message, ...]:
        """Return the phone's repairs before the line's."""
        return other_orders(world)

    def observe(self, task: TelecomTask, world: World, *, speaker: Side, text: str) -> None:
        """Note ids, PIN and consent as the user says them."""
        text = text.lower()
        if speaker is Side.AGENT:
            note(world, last_agent=text[:200])
            return
        changes: JSONObject = {}
        pin = _PIN.search(text)
        if pin is not None:
            changes["said_pin"] = pin[1]
        lines = [name for name in _NUMBER.findall(text) if world.has("lines", name)]
        if lines:
            changes["said_lines"] = lines
        if len(lines) == 1:
            changes["said_line"] = lines[0]
            if world.has("phones", lines[0]) and lines[0] != facts(world)["phone"]:
                changes |= {"phone": lines[0], "consent": {}}
        agreed = agreed_charge(text, question=str(facts(world)["last_agent"]))
        if agreed is not None:
            changes["consent"] = agreed
        if changes:
            note(world, **changes)


_SYMPTOMS = {"signal": "no signal", "data": "no mobile data", "slow": "slow internet"}


def _wish(case: Case) -> str:
    return f"move to plan {case.wants_plan}" if case.wants_plan else f"add {case.wants_gb} gb"


def _owned(task: TelecomTask) -> tuple[str, ...]:
    return tuple(sorted((*task.spare_lines, *(case.line_id for case in task.cases))))


def _line_is_right(world: World, case: Case) -> bool:
    """Whether the operator's side holds exactly the changes the faults call for."""
    line = world.get("lines", case.line_id)
    if set(case.faults) & set(UNFIXABLE):
        state, sim = (
            "fraud" if "fraud" in case.faults else "active",
            "dead" if "dead_sim" in case.faults else "ok",
        )
        return (line["state"], line["sim"], line["plan"], line["gb"], line["roaming"]) == (
            state,
            sim,
            case.plan,
            case.gb,
            "off",
        )
    plan, gb = case.plan, case.gb
    if "no_data" in case.faults:
        plan = case.wants_plan or case.plan
        gb = PLAN_GB[plan] if case.wants_plan else case.wants_gb
    wanted = ("active", "ok", plan, gb, "on" if case.abroad else "off")
    return (line["state"], line["sim"], line["plan"], line["gb"], line["roaming"]) == wanted


@lru_cache(maxsize=1)
def _policy() -> str:
    return resources.files(__package__).joinpath("policy.md").read_text(encoding="utf-8")
