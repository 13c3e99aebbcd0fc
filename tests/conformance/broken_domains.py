"""Domains that are wrong in one way each. ``CASES`` maps a name to (domain class, check that must fail, its cause)."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from sinkflex.envs.domains.mock import MockDomain, MockTask, read_mains, turn_on_mains
from sinkflex.envs.protocol import Domain, call, say
from sinkflex.envs.session import add_breach, facts, note
from sinkflex.envs.tools import Side, Toolkit, tool
from sinkflex.envs.users.scripted import Cue, Persona, Report, Script
from sinkflex.envs.world import World
from sinkflex.types import JSONObject, Message, StopReason, ToolCall

CASES: dict[str, tuple[type[Domain[Any]], str, str]] = {}


def expect(check: str, cause: str) -> Any:
    def register(kind: type[Domain[Any]]) -> type[Domain[Any]]:
        CASES[kind.__name__] = (kind, check, cause)
        return kind

    return register


def agent_kit(*extra: Any) -> Toolkit:
    return Toolkit(Side.AGENT, [read_mains, turn_on_mains, *extra])


def rescripted(script: Script, **changes: Any) -> Script:
    stage = script.stages[0]
    cues = changes.pop("cues", stage.cues)
    opening = changes.pop("opening", stage.opening)
    return dataclasses.replace(script, stages=(dataclasses.replace(stage, cues=cues, opening=opening),), **changes)


@expect("tasks", "a test task must not be trained on")
class SharedSplits(MockDomain):
    def tier_task_ids(self, split: str, tier: str) -> tuple[str, ...]:
        return ("mock-both",)


@expect("tasks", "task ids change from call to call")
class RestlessIds(MockDomain):
    def tier_task_ids(self, split: str, tier: str) -> tuple[str, ...]:
        ids = list(super().tier_task_ids(split, tier))
        self.calls = getattr(self, "calls", 0) + 1
        return tuple(ids if self.calls % 2 else ids[::-1])


@expect("tasks", "differs from call to call; derive everything from the id")
class RestlessTasks(MockDomain):
    def task(self, task_id: str) -> MockTask:
        self.calls = getattr(self, "calls", 0) + 1
        return dataclasses.replace(super().task(task_id), dual=bool(self.calls % 2))


@expect("worlds", "no session table")
class NoSession(MockDomain):
    def build_world(self, task: MockTask) -> World:
        return World({"lamp": {"l1": {"mains": task.mains, "switch": task.switch}}})


@expect("worlds", "starts from another world")
class SharedWorld(MockDomain):
    log: ClassVar[list[str]] = []

    def build_world(self, task: MockTask) -> World:
        world = super().build_world(task)
        world.update("lamp", "l1", switch=task.switch)
        world.insert("lamp", "log", {"mains": self.log, "switch": True})
        self.log.append("built")
        return world


@tool(side=Side.AGENT, writes=True)
def scribble(world: World) -> JSONObject:
    """Change a record in place."""
    world.get("lamp", "log")["mains"].append("x")
    return {"ok": True}


class _Scribbled(MockDomain):
    agent_tools = agent_kit(scribble)

    def build_world(self, task: MockTask) -> World:
        world = super().build_world(task)
        world.insert("lamp", "log", {"mains": [], "switch": True})
        return world


@expect("journal", "was changed in place; write with World.update")
class InPlaceWrite(_Scribbled):
    def oracle(self, task: MockTask, world: World) -> Message:
        if facts(world)["read"] and not world.get("lamp", "log")["mains"]:
            return call("scribble")
        return super().oracle(task, world)


@tool(side=Side.AGENT, writes=True)
def smash(world: World, lamp_id: str) -> JSONObject:
    """Smash a lamp.

    Args:
        lamp_id: which.
    """
    return {"lamp": dict({"l1": "broken"}[lamp_id])}


@expect("tools", "raise ToolError for what the caller got wrong")
class FragileTool(MockDomain):
    agent_tools = agent_kit(smash)


@tool(side=Side.AGENT, writes=True)
def conjure(world: World, lamp_id: str) -> JSONObject:
    """Make a lamp.

    Args:
        lamp_id: which.
    """
    world.insert("lamp", lamp_id, {"mains": True, "switch": True})
    return {"ok": True}


@expect("tools", "check that the id exists")
class CredulousTool(MockDomain):
    agent_tools = agent_kit(conjure)


@tool(side=Side.AGENT, writes=False)
def peek(world: World, lamp_id: str) -> JSONObject:
    """Peek at a lamp."""
    return dict(world.get("lamp", lamp_id))


@expect("tools", r"'peek': arguments \['lamp_id'\] are not described")
class UndescribedArgument(MockDomain):
    agent_tools = agent_kit(peek)


@tool(side=Side.AGENT, writes=False)
def shrug(world: World) -> None:
    """Do nothing."""


@expect("tools", "'shrug' replies with nothing")
class SilentTool(MockDomain):
    agent_tools = agent_kit(shrug)


@expect("user", "users must not know tool names")
class LeakyUser(MockDomain):
    def script(self, task: MockTask) -> Script:
        return rescripted(super().script(task), opening=("my lamp is dark, please turn_on_mains",))


@expect("user", "recites raw JSON")
class JsonUser(MockDomain):
    def script(self, task: MockTask) -> Script:
        report = super().script(task).report

        def recite(done: ToolCall, result: JSONObject) -> Report:
            return dataclasses.replace(report(done, result), phrases=(f"it says {{{result}}}",))

        return rescripted(super().script(task), report=recite)


@expect("user", "run them only when a cue instructs it")
class EagerUser(MockDomain):
    def script(self, task: MockTask) -> Script:
        script = super().script(task)
        eager = Cue(name="any", pattern=re.compile("hello"), calls=(ToolCall(name="flip_switch"),))
        return rescripted(script, cues=(*script.stages[0].cues, eager))


@expect("solvable", r"it breaks a rule itself: \('unasked_mains',\)")
class HastyOracle(MockDomain):
    def oracle(self, task: MockTask, world: World) -> Message:
        best = super().oracle(task, world)
        return call("turn_on_mains") if "may" in best.content else best


@expect("solvable", "the user does not understand it, or the session forgets it")
class MumblingOracle(MockDomain):
    def script(self, task: MockTask) -> Script:
        return rescripted(super().script(task), persona=Persona(patience=99))

    def oracle(self, task: MockTask, world: World) -> Message:
        best = super().oracle(task, world)
        return say("umm") if "may" in best.content else best


@expect("solvable", "raise max_steps or shorten the oracle")
class TightBudget(MockDomain):
    max_steps: ClassVar[Mapping[str, int]] = {"easy": 4}


@expect("solvable", r"\['mains'\]: the oracle or the grader has the wrong end state")
class WrongGrader(MockDomain):
    def components(self, task: MockTask, world: World, *, handed_off: bool) -> Mapping[str, float | None]:
        graded = dict(super().components(task, world, handed_off=handed_off))
        return {**graded, "mains": 1.0 - (graded["mains"] or 0.0)}


@expect("floors", "already satisfies the grader, or the user stops satisfied without a check")
class FreeLunch(MockDomain):
    def components(self, task: MockTask, world: World, *, handed_off: bool) -> Mapping[str, float | None]:
        return {"mains": 1.0}


@expect("floors", "an agent that only claims scores 1")
class TrustingUser(MockDomain):
    def script(self, task: MockTask) -> Script:
        script = super().script(task)
        claim = Cue(name="claim", pattern=re.compile("done"), calls=(ToolCall(name="believe"),))
        return rescripted(script, cues=(claim, *script.stages[0].cues), report=_believing(script))

    def build_world(self, task: MockTask) -> World:
        world = super().build_world(task)
        world.update("lamp", "l1", mains=True, switch=True)
        note(world, seen_shining=True)
        return world


def _believing(script: Script) -> Any:
    def report(done: ToolCall, result: JSONObject) -> Report:
        if done.name == "believe":
            return Report(phrases=("good",), stage_done=True)
        return script.report(done, result)

    return report


@tool(side=Side.AGENT, writes=True, stops=StopReason.HAND_OFF)
def give_up(world: World, reason: str) -> JSONObject:
    """Hand over.

    Args:
        reason: why.
    """
    return {"ok": True}


@expect("floors", "handing over at once scores 1")
class EasyWayOut(MockDomain):
    agent_tools = agent_kit(give_up)

    def components(self, task: MockTask, world: World, *, handed_off: bool) -> Mapping[str, float | None]:
        return {"x": 1.0} if handed_off else super().components(task, world, handed_off=handed_off)


@expect("hand_off_share", "more than 5 % reward giving up")
class MostlyHandOffs(MockDomain):
    def tier_task_ids(self, split: str, tier: str) -> tuple[str, ...]:
        return tuple(f"{split}-{number}" for number in range(20))

    def task(self, task_id: str) -> MockTask:
        task = super().task("mock-both")
        split, number = task_id.split("-")
        return dataclasses.replace(task, task_id=task_id, split=split, hand_off=int(number) < 2)


@expect("both_sides", "the agent's calls alone satisfy the grader")
class OneSided(MockDomain):
    def components(self, task: MockTask, world: World, *, handed_off: bool) -> Mapping[str, float | None]:
        return {"mains": float(world.get("lamp", "l1")["mains"])}


@expect("components", "every component is None")
class Vacuous(MockDomain):
    def components(self, task: MockTask, world: World, *, handed_off: bool) -> Mapping[str, float | None]:
        return {"mains": None}


@expect("components", r"components\(\) writes to the world")
class MeddlingGrader(MockDomain):
    def components(self, task: MockTask, world: World, *, handed_off: bool) -> Mapping[str, float | None]:
        note(world, read=True)
        return super().components(task, world, handed_off=handed_off)


@expect("components", r"component 'mains' is 3.0; it must lie in \[0, 1\]")
class Inflation(MockDomain):
    def components(self, task: MockTask, world: World, *, handed_off: bool) -> Mapping[str, float | None]:
        return {"mains": 3.0}


@expect("detours", "a harmless stumble must not doom an episode")
class ThinSkinned(MockDomain):
    def script(self, task: MockTask) -> Script:
        return rescripted(super().script(task), persona=Persona(patience=0))


@expect("slips", "oracle or slips write to the world")
class MeddlingOracle(MockDomain):
    def oracle(self, task: MockTask, world: World) -> Message:
        note(world, agreed=facts(world)["agreed"])
        return super().oracle(task, world)


@expect("slips", "two calls of the oracle in one state differ")
class MoodyOracle(MockDomain):
    def oracle(self, task: MockTask, world: World) -> Message:
        best = super().oracle(task, world)
        self.calls = getattr(self, "calls", 0) + 1
        return dataclasses.replace(best, content=best.content + " please" * (self.calls % 2)) if best.content else best


@expect("slips", "slip calls 'flip_switch', which is no agent tool")
class ForeignSlip(MockDomain):
    def slips(self, task: MockTask, world: World) -> tuple[Message, ...]:
        return (call("flip_switch"),)


@tool(side=Side.AGENT, writes=True)
def curse(world: World) -> JSONObject:
    """Break a rule nobody declared."""
    add_breach(world, "cursing")
    return {"ok": True}


@expect("rules", r"breaches \['cursing'\] are not among the domain's rules")
class SecretRule(MockDomain):
    agent_tools = agent_kit(curse)

    def slips(self, task: MockTask, world: World) -> tuple[Message, ...]:
        return (call("curse"),)


@expect("repeatability", "drew from a global random generator")
class GlobalDice(MockDomain):
    def script(self, task: MockTask) -> Script:
        return rescripted(super().script(task), opening=(random.choice(("my lamp is dark", "no light")),))


@expect("repeatability", "look for state kept between episodes")
class Remembering(MockDomain):
    def script(self, task: MockTask) -> Script:
        self.count = getattr(self, "count", 0) + 1
        return rescripted(super().script(task), opening=(f"my lamp is dark, {self.count}",))


@expect("isolation", "state is shared between instances")
class SharedDesk(MockDomain):
    """The agent reads whichever lamp was built last."""

    worlds: ClassVar[list[World]] = []

    def build_world(self, task: MockTask) -> World:
        world = super().build_world(task)
        self.worlds[:] = [world]
        return world

    def oracle(self, task: MockTask, world: World) -> Message:
        best = super().oracle(task, world)
        return best if self.worlds[0] is world or best.tool_calls else say(f"please: {best.content}")


@expect("reorderings", "a mix of the oracle and its alternatives scores 0")
class FalseAlternative(MockDomain):
    def alternatives(self, task: MockTask, world: World) -> tuple[Message, ...]:
        return () if world.get("lamp", "l1")["mains"] else (call("turn_on_mains"),)


@tool(side=Side.AGENT, writes=True)
def enter_code(world: World, code: str) -> JSONObject:
    """Enter the fuse box's code.

    Args:
        code: what it is.
    """
    note(world, read=True)
    return {"ok": code == "7731"}


@expect("hearsay", "the user says '7731' first, which neither user_prompt nor")
class Clairvoyant(MockDomain):
    """The user opens with a code that only the operator's records hold."""

    agent_tools = agent_kit(enter_code)

    def build_world(self, task: MockTask) -> World:
        world = super().build_world(task)
        world.insert("lamp", "box", {"mains": False, "switch": "7731"})
        return world

    def script(self, task: MockTask) -> Script:
        return rescripted(super().script(task), opening=("my lamp is dark, the code is 7731",))

    def oracle(self, task: MockTask, world: World) -> Message:
        return super().oracle(task, world) if facts(world)["read"] else call("enter_code", code="7731")
