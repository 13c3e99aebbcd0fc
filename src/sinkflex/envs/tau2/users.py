"""Who plays the user of a τ² task: the script, a language model, or the package's own simulator."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeAlias

from sinkflex.envs.tau2.catalogue import Domain
from sinkflex.envs.tau2.scripted import Tau2ScriptedUser
from sinkflex.envs.users.cassette import Cassette
from sinkflex.envs.users.endpoint import ChatEndpoint, EndpointConfig
from sinkflex.envs.users.llm import build_llm_user
from sinkflex.envs.users.person import PersonUser
from sinkflex.errors import EnvError, unknown_name

Factory: TypeAlias = Callable[[Domain, str, random.Random], Any]
"""Builds the user of one episode from domain, task id and the episode's only source of chance."""


def scripted_user() -> Factory:
    """Return the factory of scripted users; it has no options."""

    def build(domain: Domain, task_id: str, rng: random.Random) -> Tau2ScriptedUser:
        return Tau2ScriptedUser(
            domain.task(task_id), has_phone=bool(domain.user_tools), seed=f"{rng.getrandbits(32):08x}"
        )

    return build


def llm_user(*, cache: str | None = None, cache_mode: str = "record", **endpoint: Any) -> Factory:
    """Return the factory of users on an OpenAI-compatible endpoint, told what the package tells its own simulator.

    Args:
        cache: file of recorded answers, None for none.
        cache_mode: ``record`` reuses and adds, ``replay`` never asks the endpoint.
        **endpoint: fields of ``EndpointConfig``; ``model`` is required.

    Raises:
        EnvError: a limit is not positive, or the cache is missing or damaged.
        TypeError: an option that ``EndpointConfig`` does not have.
    """
    return Tau2LLMUserFactory(
        ChatEndpoint(
            config=EndpointConfig(**endpoint), cassette=None if cache is None else Cassette(cache, mode=cache_mode)
        )
    )


class Tau2LLMUserFactory:
    """Builds an episode's LLM user.

    Args:
        endpoint: shared by all users; its ``usage`` holds the totals.
    """

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self.endpoint = endpoint

    def __call__(self, domain: Domain, task_id: str, rng: random.Random) -> Any:
        """Return the user of one episode."""
        told = _simulator(domain, task_id, llm="", llm_args={}).system_prompt
        return build_llm_user(self.endpoint, system=told, tools=domain.user_tools, seed=rng.getrandbits(31))

    def close(self) -> None:
        """Close the endpoint's connections."""
        self.endpoint.close()


def person_user(*, ask: Callable[[str], str] = input, show: Callable[[str], None] = print) -> Factory:
    """Return the factory of users played by a person who reads the task's own scenario.

    Args:
        ask: shows a prompt and returns a line; it may raise ``EOFError``, which ends the dialogue.
        show: prints what the person reads.
    """

    def build(domain: Domain, task_id: str, rng: random.Random) -> PersonUser:
        return PersonUser(ask, show, brief=str(domain.task(task_id).user_scenario), tools=domain.user_tools)

    return build


def upstream_user(*, llm: str, llm_args: dict[str, Any] | None = None) -> Factory:
    """Return the factory of the package's own simulator.

    Args:
        llm: model name as LiteLLM spells it.
        llm_args: keyword arguments of its completion call.
    """

    def build(domain: Domain, task_id: str, rng: random.Random) -> Any:
        return _simulator(domain, task_id, llm=llm, llm_args=dict(llm_args or {}))

    return build


def _simulator(domain: Domain, task_id: str, *, llm: str, llm_args: dict[str, Any]) -> Any:
    # Tool schemas are all the simulator needs of the tools; the episode's own environment runs the calls.
    tools = domain.store.template.get_user_tools() if domain.user_tools else None
    instructions = domain.task(task_id).user_scenario
    return domain.package.user_simulator(tools=tools, instructions=instructions, llm=llm, llm_args=llm_args)


USERS: dict[str, Callable[..., Factory]] = {
    "llm": llm_user,
    "person": person_user,
    "scripted": scripted_user,
    "upstream": upstream_user,
}
"""Users by name: each takes its own plain options and returns a factory."""


def user_factory(name: str, options: dict[str, Any]) -> Factory:
    """Return the factory of a user.

    Raises:
        EnvError: unknown name, or options the user does not take.
    """
    if name not in USERS:
        raise EnvError(unknown_name("tau2 user", name, USERS))
    try:
        return USERS[name](**options)
    except TypeError as error:
        raise EnvError(f"tau2 user {name!r} does not take options {sorted(options)}: {error}") from error
