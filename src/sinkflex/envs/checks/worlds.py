"""Checks of a domain's tasks, worlds, tools and user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sinkflex.envs import session
from sinkflex.envs.checks.play import Bench, domain_of, play_episode, write_action
from sinkflex.envs.protocol import PROMPT_STYLES, Domain, Task, say
from sinkflex.envs.tools import Side, Toolkit
from sinkflex.envs.world import World
from sinkflex.errors import EnvError
from sinkflex.types import JSONValue, Role, ToolCall

_GARBAGE = "~garbage~"


def tasks(bench: Bench) -> Iterator[str]:
    """Ids are unique, stable, disjoint between splits, and name the task they build."""
    domain = domain_of(bench)
    seen: dict[str, str] = {}
    for split in domain.splits:
        for tier in domain.tiers:
            ids = domain.task_ids(split, tier)
            if ids != domain.task_ids(split, tier):
                yield f"{split}/{tier}: task ids change from call to call; build them from a fixed seed or list"
            for task_id in ids:
                where = f"{split}/{tier}"
                if task_id in seen:
                    yield f"task {task_id!r} is in {seen[task_id]} and in {where}; a test task must not be trained on"
                    return
                seen[task_id] = where
            if tier not in domain.max_steps:
                yield f"max_steps lacks tier {tier!r}"
    for task_id in bench.task_ids:
        task = domain.task(task_id)
        if (task.task_id, f"{task.split}/{task.tier}") != (task_id, seen.get(task_id)):
            yield f"task({task_id!r}) returns {task.task_id!r} in {task.split}/{task.tier}, not {seen.get(task_id)}"
        if task != domain.task(task_id):
            yield f"task({task_id!r}) differs from call to call; derive everything from the id"
    for style in PROMPT_STYLES:
        if not domain.system_prompt(style).strip():
            yield f"system_prompt({style!r}) is empty"


def worlds(bench: Bench) -> Iterator[str]:
    """A task always starts from the same world, which playing does not change, and has a session."""
    domain = domain_of(bench)
    for task_id in bench.task_ids:
        task = domain.task(task_id)
        start = domain.build_world(task).hash()
        try:
            session.facts(domain.build_world(task))
        except EnvError:
            yield f"{task_id}: the world has no session table; add 'session': session_table(...) in build_world"
            return
        bench.oracle(task_id)
        if domain.build_world(task).hash() != start:
            yield (
                f"{task_id}: after an episode the same task starts from another world; build_world must make fresh "
                "records, not share a module's or the task's mutable ones"
            )
            return


def journal(bench: Bench) -> Iterator[str]:
    """Every write goes through the journal: audits hold at each step and a restore brings the start back."""
    for task_id in bench.task_ids:
        found: list[str] = []
        marks: list[tuple[World, Any, str]] = []

        def policy(env: Any, step: int, found: list[str] = found, marks: list[Any] = marks) -> str:
            world = env.episode.world
            if not marks:
                marks.append((world, world.snapshot(), world.hash()))
            found.extend(_audit(world))
            return write_action(env.oracle_message())

        play_episode(bench.make(), task_id, policy=policy)
        world, mark, digest = marks[0]
        found += _audit(world)
        world.restore(mark)
        if not found and world.hash() != digest:
            found.append("restoring the snapshot of the start gives another state; a write bypassed the journal")
        if found:
            yield f"{task_id}: {found[0]}"
            return


def _audit(world: World) -> list[str]:
    try:
        world.audit()
    except EnvError as error:
        return [str(error)]
    return []


def tools(bench: Bench) -> Iterator[str]:
    """Tools survive arguments that fit the schema but name nothing, and do not act on ids that do not exist."""
    domain = domain_of(bench)
    task = domain.task(bench.task_ids[0])
    for kit in (domain.agent_tools, domain.user_tools):
        for name in kit.tools:
            yield from _try_garbage(domain, task, kit, name)
    shared = domain.agent_tools.tools.keys() & domain.user_tools.tools.keys()
    if shared:
        yield f"tools {sorted(shared)} are in both toolkits; a transcript could not tell whose they are"


def _try_garbage(domain: Domain[Any], task: Task, kit: Toolkit, name: str) -> Iterator[str]:
    item = kit.tools[name]
    properties = item.schema.parameters["properties"]
    undescribed = [key for key, kind in properties.items() if "description" not in kind]
    if undescribed:
        yield f"tool {name!r}: arguments {undescribed} are not described in the docstring's Args section"
    world = domain.build_world(task)
    before = _outside_session(world)
    arguments = {key: _garbage(kind) for key, kind in properties.items()}
    try:
        reply = kit.call(world, ToolCall(name=name, arguments=arguments))
    except EnvError as error:
        yield f"{error}; raise ToolError for what the caller got wrong, so that it reads why"
        return
    takes_id = any(key == "id" or key.endswith("_id") for key in properties)
    if takes_id and reply.error is None and _outside_session(world) != before:
        yield f"tool {name!r} accepted {arguments} and changed the world; check that the id exists"
    if reply.text.strip() in ("", "null"):
        yield f"tool {name!r} replies with nothing; return what changed, so that the caller can go on"


def _outside_session(world: World) -> dict[str, Any]:
    return {table: rows for table, rows in world.to_dict().items() if table != session.TABLE}


def _garbage(kind: dict[str, Any]) -> JSONValue:
    if "enum" in kind:
        return kind["enum"][0]
    plain: dict[str, JSONValue] = {"integer": 1, "number": 1.5, "boolean": True, "array": []}
    return plain.get(kind.get("type", ""), _GARBAGE)


def user(bench: Bench) -> Iterator[str]:
    """The user speaks like a person: no tool names, no JSON, no act before it is instructed, nothing empty."""
    domain = domain_of(bench)
    names = domain.agent_tools.tools.keys() | domain.user_tools.tools.keys()
    for task_id in bench.task_ids:
        env, _ = bench.oracle(task_id)
        for side, message in env.episode.transcript:
            if side is not Side.USER or message.tool_calls or message.role is Role.TOOL:
                continue
            leaked = sorted(name for name in names if "_" in name and name in message.content)
            if leaked:
                yield f"{task_id}: the user says {leaked} ({message.content!r}); users must not know tool names"
                return
            if "{" in message.content:
                yield f"{task_id}: the user recites raw JSON ({message.content!r}); word the tool's result instead"
                return
            if not message.content.strip():
                yield f"{task_id}: the user says nothing in one of its turns; every turn needs words"
                return
        first = next(message for side, message in env.episode.transcript if side is Side.USER)
        if first.tool_calls:
            yield f"{task_id}: the user acts before it is instructed; its first move must be its opening"
        yield from _unasked_calls(bench, task_id)


def _unasked_calls(bench: Bench, task_id: str) -> Iterator[str]:
    env = bench.make()
    played = play_episode(env, task_id, policy=lambda _, step: write_action(say("Hello.")))
    unwrapped: Any = env.unwrapped
    if any(message.tool_calls for side, message in unwrapped.episode.transcript if side is Side.USER):
        yield (
            f"{task_id}: the user uses its own tools though the agent only said 'Hello.' ({played.why()}); run them "
            "only when a cue instructs it"
        )


CHECKS = (tasks, worlds, journal, tools, user)
