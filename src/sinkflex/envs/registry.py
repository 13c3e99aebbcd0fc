"""Domains and users by name: one dict each, and the ``module:Class`` form for one's own domain."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

from sinkflex.envs.protocol import Domain, Task, User
from sinkflex.envs.users.llm import llm_user
from sinkflex.envs.users.person import person_user
from sinkflex.envs.users.scripted import ScriptedUser
from sinkflex.envs.users.selfplay import selfplay_user
from sinkflex.errors import EnvError, unknown_name

UserFactory: TypeAlias = Callable[[Domain[Any], Task, random.Random], User]
"""Builds the user of one episode; the generator is the episode's only source of chance."""

DOMAINS: dict[str, str] = {
    "mock": "sinkflex.envs.domains.mock:MockDomain",
    "retail": "sinkflex.envs.domains.retail:RetailDomain",
    "telecom": "sinkflex.envs.domains.telecom:TelecomDomain",
}
"""Embedded domains: name to ``module:Class``, imported on first use."""


def scripted_user() -> UserFactory:
    """Return the factory of scripted users; it has no options."""

    def build(domain: Domain[Any], task: Task, rng: random.Random) -> User:
        return ScriptedUser(domain.script(task), seed=f"{rng.getrandbits(32):08x}")

    return build


USERS: dict[str, Callable[..., UserFactory]] = {
    "llm": llm_user,
    "person": person_user,
    "scripted": scripted_user,
    "selfplay": selfplay_user,
}
"""Users by name: each takes its own plain options and returns a factory."""


@lru_cache(maxsize=64)
def get_domain(name: str) -> Domain[Any]:
    """Return a domain, one shared instance a name: domains hold no episode state.

    Args:
        name: a key of ``DOMAINS`` or ``"module:Class"``.

    Raises:
        EnvError: unknown name, or what was named is not a concrete ``Domain``.
    """
    path = DOMAINS.get(name, name)
    module, colon, attribute = path.partition(":")
    if not colon:
        raise EnvError(unknown_name("domain", name, DOMAINS) + " Or give 'module:Class' of your own.")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise EnvError(f"domain {name!r} cannot be imported: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Domain)):
        raise EnvError(f"domain {name!r} is {kind!r}, not a subclass of sinkflex.envs.Domain")
    return kind()


def get_user_factory(name: str, options: dict[str, Any]) -> UserFactory:
    """Return the factory of a user.

    Args:
        name: a key of ``USERS``.
        options: keyword options of that user.

    Raises:
        EnvError: unknown name, or options the user does not take.
    """
    if name not in USERS:
        raise EnvError(unknown_name("user", name, USERS))
    try:
        return USERS[name](**options)
    except TypeError as error:
        raise EnvError(f"user {name!r} does not take options {sorted(options)}: {error}") from error
