"""Three tasks to read in a minute: a lamp that needs the mains (agent) and its switch (user) to shine.

The smallest complete domain: copy it to begin your own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from sinkflex.envs.protocol import Domain, Task, call, say
from sinkflex.envs.session import add_breach, facts, note, session_table
from sinkflex.envs.tools import Side, Toolkit, tool
from sinkflex.envs.users.scripted import Cue, Report, Script, Stage
from sinkflex.envs.world import World
from sinkflex.errors import TaskError, unknown_name
from sinkflex.types import JSONObject, Message, ToolCall

_POLICY = "You look after lamps. Read the mains first. Ask before you turn them on. Have the user look at the lamp."


@dataclass(frozen=True, kw_only=True, slots=True)
class MockTask(Task):
    """Attributes: ``mains`` and ``switch``, whether each is on at the start."""

    mains: bool
    switch: bool


_TASKS = {
    task.task_id: task
    for task in (
        MockTask(task_id="mock-both", split="train", tier="easy", dual=True, mains=False, switch=False),
        MockTask(task_id="mock-switch", split="train", tier="easy", dual=False, mains=True, switch=False),
        MockTask(task_id="mock-mains", split="test", tier="easy", dual=False, mains=False, switch=True),
    )
}


@tool(side=Side.AGENT, writes=True)
def read_mains(world: World) -> JSONObject:
    """Read whether the mains are on."""
    note(world, read=True)
    return {"mains": world.get("lamp", "l1")["mains"]}


@tool(side=Side.AGENT, writes=True)
def turn_on_mains(world: World) -> JSONObject:
    """Turn the mains on; the user must agree first."""
    if not facts(world)["agreed"]:
        add_breach(world, "unasked_mains")
    world.update("lamp", "l1", mains=True)
    return {"mains": True}


@tool(side=Side.USER, writes=True)
def flip_switch(world: World) -> JSONObject:
    """Turn the lamp's switch on."""
    world.update("lamp", "l1", switch=True)
    return {"switch": True}


@tool(side=Side.USER, writes=True)
def look_at_lamp(world: World) -> JSONObject:
    """See whether the lamp shines."""
    lamp = world.get("lamp", "l1")
    note(world, seen_shining=lamp["mains"] and lamp["switch"])
    return {"shines": lamp["mains"] and lamp["switch"]}


def _report(done: ToolCall, result: JSONObject) -> Report:
    if done.name == "flip_switch":
        return Report(phrases=("ok, it is on",))
    if result["shines"]:
        return Report(phrases=("it shines",), stage_done=True)
    return Report(phrases=("it is dark",), helpful=False)


_SCRIPT = Script(
    stages=(
        Stage(
            opening=("my lamp is dark", "the lamp does not shine"),
            cues=(
                Cue(name="may", pattern=re.compile(r"\bmay i\b|\bmains\b.*\?"), answer=("yes, please", "yes, do it")),
                Cue(name="flip", pattern=re.compile(r"\bswitch\b"), calls=(ToolCall(name="flip_switch"),)),
                Cue(name="look", pattern=re.compile(r"\blook\b|\bshines?\b"), calls=(ToolCall(name="look_at_lamp"),)),
            ),
        ),
    ),
    report=_report,
)


class MockDomain(Domain[MockTask]):
    """The lamp."""

    name: ClassVar[str] = "mock"
    tiers: ClassVar[tuple[str, ...]] = ("easy",)
    max_steps: ClassVar[Mapping[str, int]] = {"easy": 10}
    agent_tools: ClassVar[Toolkit] = Toolkit(Side.AGENT, [read_mains, turn_on_mains])
    user_tools: ClassVar[Toolkit] = Toolkit(Side.USER, [flip_switch, look_at_lamp])
    rules: ClassVar[Mapping[str, str]] = {"unasked_mains": "Ask before you turn the mains on."}
    confirmation_rules: ClassVar[frozenset[str]] = frozenset({"unasked_mains"})

    def tier_task_ids(self, split: str, tier: str) -> tuple[str, ...]:
        """Return the ids of one split and tier."""
        return tuple(task.task_id for task in _TASKS.values() if (task.split, task.tier) == (split, tier))

    def task(self, task_id: str) -> MockTask:
        """Return one of the three tasks."""
        if task_id not in _TASKS:
            raise TaskError(unknown_name("mock task", task_id, _TASKS))
        return _TASKS[task_id]

    def system_prompt(self, style: str) -> str:
        """Return the policy; it is short in both styles."""
        return _POLICY

    def user_prompt(self, task: MockTask) -> str:
        """Return the role of an LLM or a person playing the user."""
        return "Your lamp is dark. Do what the agent asks with your tools; stop when you have seen it shine."

    def build_world(self, task: MockTask) -> World:
        """Return the lamp as the task describes it."""
        return World(
            {
                "lamp": {"l1": {"mains": task.mains, "switch": task.switch}},
                "session": session_table(read=False, agreed=False, seen_shining=False),
            }
        )

    def script(self, task: MockTask) -> Script:
        """Return the scripted user; it is the same in every task."""
        return _SCRIPT

    def components(self, task: MockTask, world: World, *, handed_off: bool) -> Mapping[str, float | None]:
        """Grade both sides: the mains, and the lamp as the user saw it."""
        return {"mains": float(world.get("lamp", "l1")["mains"]), "seen": float(facts(world)["seen_shining"])}

    def oracle(self, task: MockTask, world: World) -> Message:
        """Read, ask, turn on, have the switch flipped, have it looked at."""
        known, lamp = facts(world), world.get("lamp", "l1")
        if not known["read"]:
            return call("read_mains")
        if not lamp["mains"]:
            return call("turn_on_mains") if known["agreed"] else say("may i turn the mains on?")
        return say("look at the lamp") if lamp["switch"] else say("please turn the switch on")

    def slips(self, task: MockTask, world: World) -> tuple[Message, ...]:
        """Turn the mains on unasked, or look too early."""
        return (call("turn_on_mains"), say("look at the lamp"))

    def alternatives(self, task: MockTask, world: World) -> tuple[Message, ...]:
        """Have the switch flipped before the mains are looked after."""
        lamp = world.get("lamp", "l1")
        return () if lamp["switch"] or lamp["mains"] else (say("please turn the switch on"),)

    def observe(self, task: MockTask, world: World, *, speaker: Side, text: str) -> None:
        """Note the user's yes."""
        if speaker is Side.USER and text.startswith("yes"):
            note(world, agreed=True)
