"""Checks that a domain's tasks can be solved, cannot be had for nothing, and need both sides where they say so."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from sinkflex.chat.parsing import ParsedAction, parse_action
from sinkflex.envs.checks.play import Bench, Played, domain_of, play_episode, write_action
from sinkflex.envs.protocol import Domain, Task, call, say
from sinkflex.envs.tools import Side
from sinkflex.types import StopReason, ToolCall

MAX_HAND_OFF_SHARE = 0.05
_FEW_TASKS = 20


def solvable(bench: Bench) -> Iterator[str]:
    """The oracle scores 1.0 on every task, with no refused call and no breach."""
    for task_id in bench.task_ids:
        _, played = bench.oracle(task_id)
        if played.score != 1.0:
            yield f"{task_id}: the oracle scores {played.score:g} ({played.why()}); {_oracle_cause(played)}"
            continue
        metrics = played.infos[-1]["metrics"]
        for name in ("invalid_calls", "tool_errors", "invalid_actions"):
            if metrics.get(name):
                yield f"{task_id}: the oracle has {metrics[name]:g} {name}; it should know the tools and the state"


def _oracle_cause(played: Played) -> str:
    components = played.infos[-1]["components"]
    if played.truncated and len(played.actions) > 2 and len(set(played.actions[-3:])) == 1:
        return f"it repeats {played.actions[-1][:80]}: the user does not understand it, or the session forgets it"
    if played.truncated:
        return "it runs out of budget: raise max_steps or shorten the oracle"
    failed = [name for name, value in components.items() if value is not None and value < 1.0]
    if failed == ["policy"]:
        return f"it breaks a rule itself: {played.infos[-1].get('breaches')}"
    return f"look at {failed}: the oracle or the grader has the wrong end state"


def floors(bench: Bench) -> Iterator[str]:
    """Nothing comes of doing nothing, of claiming success, or of handing everything over."""
    domain = domain_of(bench)
    hand_off = _hand_off_call(domain)
    for task_id in bench.task_ids:
        task = domain.task(task_id)
        for name, text in (("an agent that only greets", "Hello."), ("an agent that only claims", _CLAIM)):
            played = _constant(bench, task_id, write_action(say(text)))
            if played.score > 0.0:
                yield (
                    f"{task_id}: {name} scores {played.score:g} ({played.why()}); the start state already satisfies "
                    "the grader, or the user stops satisfied without a check of its own"
                )
        if hand_off is not None and not task.hand_off:
            played = _constant(bench, task_id, hand_off)
            if played.score > 0.0:
                yield (
                    f"{task_id}: handing over at once scores {played.score:g}; give tasks that a human need not see "
                    "a component that is 0 after a hand-off, or declare hand_off=True"
                )


_CLAIM = "It is all done now and works. Anything else? Goodbye."


def hand_off_share(bench: Bench) -> Iterator[str]:
    """At most one task in twenty may be ended rightly by a hand-off."""
    domain = domain_of(bench)
    for split in domain.splits:
        for tier in domain.tiers:
            ids = domain.task_ids(split, tier)
            count = sum(domain.task(task_id).hand_off for task_id in ids)
            if len(ids) >= _FEW_TASKS and count > MAX_HAND_OFF_SHARE * len(ids):
                yield f"{split}/{tier}: {count} of {len(ids)} tasks end in a hand-off; more than 5 % reward giving up"


def both_sides(bench: Bench) -> Iterator[str]:
    """On a dual task neither side's actions alone satisfy the grader."""
    domain = domain_of(bench)
    for task_id in bench.task_ids:
        task = domain.task(task_id)
        if not task.dual:
            continue
        env, _ = bench.oracle(task_id)
        transcript = env.episode.transcript
        for side in Side:
            calls = [made for who, message in transcript if who is side for made in message.tool_calls]
            value = grade_calls(domain, task, side, calls)
            if value > 0.0:
                yield (
                    f"{task_id}: the {side}'s calls alone satisfy the grader ({value:g}) though dual=True; make the "
                    "success predicate read a fact the other side must change, or set dual=False"
                )


def grade_calls(domain: Domain[Any], task: Task, side: Side, calls: list[ToolCall]) -> float:
    """Return the grade after one side's calls of an episode on a fresh world.

    Args:
        domain: the domain.
        task: one of its tasks.
        side: who made the calls.
        calls: in the order they were made.
    """
    world = domain.build_world(task)
    tools = domain.agent_tools if side is Side.AGENT else domain.user_tools
    handed_off = False
    for made in calls:
        reply = tools.call(world, made)
        handed_off |= reply.tool is not None and reply.error is None and reply.tool.stops is StopReason.HAND_OFF
    return _product(domain.components(task, world, handed_off=handed_off))


def components(bench: Bench) -> Iterator[str]:
    """The grader's components are finite, in [0, 1], do not change the world and are not all vacuous."""
    domain = domain_of(bench)
    for task_id in bench.task_ids:
        task = domain.task(task_id)
        env, _ = bench.oracle(task_id)
        before = env.episode.world.writes
        graded = domain.components(task, env.episode.world, handed_off=task.hand_off)
        if env.episode.world.writes != before:
            yield f"{task_id}: components() writes to the world; grading must only read"
        values = [value for value in graded.values() if value is not None]
        if not values:
            yield f"{task_id}: every component is None; the task grades nothing, so any ending would score 1"
        if any(not math.isfinite(value) or not 0.0 <= value <= 1.0 for value in values):
            yield f"{task_id}: components {graded} must be finite and lie in [0, 1]"


def detours(bench: Bench) -> Iterator[str]:
    """The oracle still solves a task after a malformed action, an unknown tool or an idle remark at any early step."""
    stumbles = ("{", '{"name":"no_such_tool","arguments":{}}', write_action(say("One moment.")))
    for number, task_id in enumerate(bench.task_ids):
        at = number // len(stumbles) % 3

        def policy(env: Any, step: int, at: int = at, stumble: str = stumbles[number % len(stumbles)]) -> str:
            return stumble if step == at else write_action(env.oracle_message())

        played = play_episode(bench.make(), task_id, policy=policy)
        if played.score != 1.0:
            yield (
                f"{task_id}: after {stumbles[number % len(stumbles)]!r} at step {at} the oracle scores "
                f"{played.score:g} ({played.why()}); a harmless stumble must not doom an episode"
            )


def slips(bench: Bench) -> Iterator[str]:
    """The oracle and its slips are well-formed, do not change the world, and slips differ from the oracle."""
    domain = domain_of(bench)
    for task_id in bench.task_ids:
        found: list[str] = []

        def policy(env: Any, step: int, found: list[str] = found) -> str:
            before = env.episode.world.writes
            best, again, wrong = env.oracle_message(), env.oracle_message(), env.slip_messages()
            if env.episode.world.writes != before:
                found.append("oracle or slips write to the world; they must only read")
            if best != again:
                found.append("two calls of the oracle in one state differ; it must depend on the state alone")
            for message in wrong:
                if not isinstance(parse_action(write_action(message)), ParsedAction):
                    found.append(f"slip {message} is not an action")
                strays = [made.name for made in message.tool_calls if made.name not in domain.agent_tools.tools]
                found.extend(f"slip calls {name!r}, which is no agent tool" for name in strays)
            chosen = wrong[step % len(wrong)] if wrong and step % 4 == 3 else best
            return write_action(chosen)

        play_episode(bench.make(), task_id, policy=policy)
        yield from (f"{task_id}: {text}" for text in dict.fromkeys(found))


def rules(bench: Bench) -> Iterator[str]:
    """Every recorded breach is a declared rule."""
    domain = domain_of(bench)
    for task_id in bench.task_ids:

        def policy(env: Any, step: int) -> str:
            wrong = env.slip_messages()
            return write_action(wrong[step % len(wrong)] if wrong and step % 2 else env.oracle_message())

        played = play_episode(bench.make(), task_id, policy=policy)
        strays = set(played.infos[-1]["breaches"]) - domain.rules.keys()
        if strays:
            yield f"{task_id}: breaches {sorted(strays)} are not among the domain's rules; declare them there"
            return


def _constant(bench: Bench, task_id: str, action: str) -> Played:
    return play_episode(bench.make(), task_id, policy=lambda env, step: action)


def _hand_off_call(domain: Domain[Any]) -> str | None:
    """Return a hand-off with the first allowed arguments, or None when the domain has no such tool."""
    for item in domain.agent_tools.tools.values():
        if item.stops is StopReason.HAND_OFF:
            properties = item.schema.parameters["properties"]
            arguments = {name: kind["enum"][0] if "enum" in kind else "help" for name, kind in properties.items()}
            return write_action(call(item.name, **arguments))
    return None


def _product(values: Mapping[str, float | None]) -> float:
    return math.prod(value for value in values.values() if value is not None)


CHECKS = (solvable, floors, hand_off_share, both_sides, components, detours, slips, rules)
