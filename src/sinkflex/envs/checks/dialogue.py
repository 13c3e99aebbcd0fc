"""Checks that other right orders are as good as the oracle's, and that users tell only what they may know."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sinkflex.envs import session
from sinkflex.envs.checks.play import Bench, domain_of, play_episode, write_action
from sinkflex.envs.tools import Side
from sinkflex.types import Message, Role

TAKEN = (1.0, 0.5)
"""How often an alternative is taken where there is one: whenever it can be, and by chance."""


def reorderings(bench: Bench) -> Iterator[str]:
    """Equally right alternatives of the oracle, such as repairs in another order, score 1.0 too."""
    domain = domain_of(bench)
    for task_id in bench.task_ids:
        task = domain.task(task_id)
        for share in TAKEN:
            rng = random.Random(f"reorderings/{task_id}/{share}")

            def policy(env: Any, step: int, rng: random.Random = rng, share: float = share, task: Any = task) -> str:
                others = domain.alternatives(task, env.episode.world)
                return write_action(rng.choice(others) if others and rng.random() < share else env.oracle_message())

            played = play_episode(bench.make(), task_id, policy=policy)
            if played.score != 1.0:
                yield (
                    f"{task_id}: a mix of the oracle and its alternatives scores {played.score:g} ({played.why()}); "
                    "grade the end state and not the order, or leave the message out of alternatives()"
                )
                break


def hearsay(bench: Bench) -> Iterator[str]:
    """Recorded values that the oracle uses and the user says first are in the user's role or its own tools' replies."""
    domain = domain_of(bench)
    for task_id in bench.task_ids:
        env, _ = bench.oracle(task_id)
        transcript = env.episode.transcript
        task = domain.task(task_id)
        role = domain.user_prompt(task).lower()
        tables = domain.build_world(task).to_dict()
        records = json.dumps([rows for table, rows in tables.items() if table != session.TABLE]).lower()
        for value in _oracle_values(transcript):
            # A value that no record holds, such as a PIN misremembered, is a slip of the tongue and gives nothing away.
            if _word(value).search(records) and _leaks(value, transcript, role):
                yield (
                    f"{task_id}: the user says {value!r} first, which neither user_prompt nor a reply of its own "
                    "tools holds; a real user could not know it: put it into the prompt or let the agent look it up"
                )
                break


def _oracle_values(transcript: Sequence[tuple[Side, Message]]) -> tuple[str, ...]:
    """Return the strings and numbers in the agent's calls, in order, once each."""
    found: dict[str, None] = {}
    for side, message in transcript:
        if side is Side.AGENT:
            for made in message.tool_calls:
                found.update(dict.fromkeys(_scalars(made.arguments)))
    return tuple(found)


def _scalars(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _scalars(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _scalars(item)
    elif isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
        yield str(value).lower()


def _leaks(value: str, transcript: Sequence[tuple[Side, Message]], role: str) -> bool:
    """Whether the user's words hold the value before anything else in the dialogue and its role does."""
    word = _word(value)
    if word.search(role):
        return False
    for side, message in transcript:
        if word.search(message.content.lower()):
            return side is Side.USER and message.role is Role.USER
        if side is Side.AGENT and value in _oracle_values(((side, message),)):
            return False
    return False


def _word(value: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(value)}(?!\w)")


CHECKS = (reorderings, hearsay)
