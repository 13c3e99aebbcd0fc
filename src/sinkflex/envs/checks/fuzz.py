"""Actions no sane agent sends."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

from sinkflex.chat.parsing import MalformedAction, parse_action
from sinkflex.envs.checks.play import Bench, Played, play_step, start_episode
from sinkflex.errors import EnvError
from sinkflex.types import JSONValue, ToolSchema

MAX_ACTION_CPU_S = 1.0
"""Processor seconds one action may take; the longest action is ``MAX_ACTION_CHARS`` characters."""

_REPEATED = ("x ", "airplane ", "pin and ", "?.", "turn off ", "reset ", "pay ")
_SCRAPS = (
    "###STOP###",
    "<|call|>",
    "<|start|>assistant<|channel|>final<|message|>",
    "<tool_call>",
    "</tool_call>",
    "\x00\x07\x1b[2J",
    "\ud83d",
    "🙂" * 40,
    "{" * 300,
    "[" * 2000,
    '"' * 99,
    "NaN",
    "\u202e\u200d",
    "bye",
    "null",
    "9" * 400,
)


def fuzzed_actions(rng: random.Random, tools: Sequence[ToolSchema], known: Sequence[str]) -> Iterator[str]:
    """Yield raw actions without end: broken JSON, wrong types, huge strings, unknown tools, stop words and worse.

    Args:
        rng: source of chance.
        tools: the agent's tools, so that some calls nearly fit.
        known: strings the environment has shown, so that some arguments are real ids.
    """
    while True:
        kind = rng.randrange(8)
        if kind == 0:
            yield rng.choice(_SCRAPS)
        elif kind == 1:
            yield "".join(chr(rng.randrange(1, 0xD7FF)) for _ in range(rng.randrange(60)))
        elif kind == 2:
            yield rng.choice(_REPEATED) * rng.randrange(1, 20_000)
        else:
            text = json.dumps(_calls(rng, tools, known, count=1 if kind < 7 else rng.randrange(1, 40)))
            if kind == 3:
                at = rng.randrange(len(text))
                text = text[:at] + rng.choice(("", "}", '"', "\\", "\x01")) + text[at + 1 :]
            elif kind == 4:
                text = f"<tool_call>{text}</tool_call>"
            elif kind == 5:
                name = rng.choice(tools).name if tools else "x"
                text = f"<|channel|>commentary to=functions.{name}<|message|>{text}<|call|>"
            yield text


def survival(bench: Bench) -> Iterator[str]:
    """No action raises, takes long or corrupts the world; each is answered, a malformed one with its reason."""
    rng = random.Random(f"fuzz/{bench.task_ids[0]}")
    env = bench.make()
    sent = 0
    while sent < bench.fuzz:
        task_id = rng.choice(list(bench.task_ids))
        played = start_episode(env, task_id, group_seed=sent)
        if bench.domain is not None:
            env.unwrapped.episode.world.hash()  # type: ignore[attr-defined]  # what the audits compare with
        tools = played.resets["tools"]
        known = [word for word in played.observations[0].split() if word.isalnum()]
        for action in fuzzed_actions(rng, tools, known):
            sent += 1
            started = time.process_time()
            try:
                ended = play_step(env, played, action)
            except Exception as error:  # anything raised is the finding
                yield f"{task_id}: action {action[:80]!r} raised {type(error).__name__}: {error}"
                return
            problem = _problem(bench, env, played, cpu_s=time.process_time() - started)
            if problem is not None:
                yield f"{task_id}: action {action[:80]!r} {problem}"
                return
            if ended or sent >= bench.fuzz:
                break


def _problem(bench: Bench, env: Any, played: Played, *, cpu_s: float) -> str | None:
    """Say what is wrong with the last step, None if nothing is."""
    action, info = played.actions[-1], played.infos[-1]
    if cpu_s > MAX_ACTION_CPU_S:
        return (
            f"({len(action)} characters) took {cpu_s:.1f} s of processor time; bound how much of a message is read, "
            "and look for two unbounded repeats in one pattern"
        )
    messages, reason = info["messages"], info["invalid_action"]
    if not messages or not all(message.content.strip() for message in messages):
        return "got no observation"
    malformed = isinstance(parse_action(action), MalformedAction)
    if malformed and reason is not None and reason not in played.observations[-1]:
        return f"is malformed, but the observation does not say why ({reason!r}); show the agent the reason"
    if bench.domain is not None:
        try:
            env.unwrapped.episode.world.audit()
        except EnvError as error:
            return f"corrupted the world: {error}"
    return None


def _calls(rng: random.Random, tools: Sequence[ToolSchema], known: Sequence[str], *, count: int) -> JSONValue:
    calls = [_call(rng, tools, known) for _ in range(count)]
    return calls[0] if count == 1 and rng.random() < 0.5 else calls


def _call(rng: random.Random, tools: Sequence[ToolSchema], known: Sequence[str]) -> dict[str, Any]:
    if not tools or rng.random() < 0.15:
        return {"name": rng.choice(("no_such_tool", "", "__class__", "a" * 500)), "arguments": _junk(rng, 0)}
    schema = rng.choice(list(tools))
    properties = schema.parameters.get("properties", {})
    arguments = {name: _argument(rng, kind, known) for name, kind in properties.items() if rng.random() < 0.95}
    if rng.random() < 0.1:
        arguments[rng.choice(("extra", "self", "world"))] = _junk(rng, 0)
    return {"name": schema.name, "arguments": arguments}


def _argument(rng: random.Random, kind: dict[str, Any], known: Sequence[str]) -> JSONValue:
    draw = rng.random()
    if draw < 0.3:
        return _junk(rng, 0)
    if "enum" in kind:
        return rng.choice(kind["enum"])
    if kind.get("type") == "array":
        return [_argument(rng, kind.get("items", {}), known) for _ in range(rng.randrange(4))]
    if kind.get("type") in ("integer", "number"):
        return rng.choice((-1, 0, 1, 2, 10**18))
    if kind.get("type") == "boolean":
        return rng.random() < 0.5
    return rng.choice(list(known)) if known and draw < 0.9 else f"{rng.randrange(10_000):04d}"


def _junk(rng: random.Random, depth: int) -> JSONValue:
    kind = rng.randrange(9 if depth < 4 else 6)
    if kind == 6:
        return [_junk(rng, depth + 1) for _ in range(rng.randrange(5))]
    if kind == 7:
        return {f"k{number}": _junk(rng, depth + 1) for number in range(rng.randrange(4))}
    if kind == 8:
        return "y" * rng.choice((1, 1000, 50_000))
    return rng.choice((None, True, -(10**30), 1e308, rng.choice(_SCRAPS[:5]), ""))


CHECKS = (survival,)
