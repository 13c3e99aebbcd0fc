"""What has happened in an episode, kept in the world itself so that snapshots, hashes and oracles see it.

A domain opens the session with the facts it tracks, tools and ``Domain.observe`` note them, and policy breaches
pile up beside them. Facts are declared when the session opens; a misspelt one is an error.
"""

from __future__ import annotations

from sinkflex.envs.world import Record, World
from sinkflex.types import JSONObject, JSONValue

TABLE = "session"
_FACTS, _BREACHES = "facts", "breaches"


def session_table(**facts: JSONValue) -> dict[str, JSONObject]:
    """Return the rows of the ``session`` table to put into a new world.

    Args:
        **facts: every fact the domain tracks, with its value at the start.
    """
    return {_FACTS: dict(facts), _BREACHES: {"codes": []}}


def facts(world: World) -> Record:
    """Return the session's facts, read-only."""
    return world.get(TABLE, _FACTS)


def note(world: World, **changes: JSONValue) -> None:
    """Change facts.

    Raises:
        EnvError: a fact was not declared when the session opened.
    """
    world.update(TABLE, _FACTS, **changes)


def add_breach(world: World, code: str) -> None:
    """Record that the agent broke a rule of the policy.

    Args:
        code: the rule's name, one of the domain's ``rules``.
    """
    world.update(TABLE, _BREACHES, codes=[*breaches(world), code])


def breaches(world: World) -> tuple[str, ...]:
    """Return the rules broken so far, in order, repeats included."""
    return tuple(world.get(TABLE, _BREACHES)["codes"])
