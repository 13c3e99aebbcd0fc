"""A language model plays the user, over any OpenAI-compatible endpoint."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sinkflex.envs.protocol import Domain, Task, User
from sinkflex.envs.users.cassette import Cassette
from sinkflex.envs.users.endpoint import ChatEndpoint, EndpointConfig, Usage
from sinkflex.envs.users.modelled import ModelUser
from sinkflex.types import ToolSchema


def llm_user(
    *, cache: str | None = None, cache_mode: str = "record", **endpoint: Any
) -> Callable[[Domain[Any], Task, random.Random], User]:
    """Return the factory of LLM users; all of them share one endpoint and its limits.

    Args:
        cache: file of recorded answers, None for none.
        cache_mode: ``record`` reuses and adds, ``replay`` never asks the endpoint.
        **endpoint: fields of ``EndpointConfig``; ``model`` is required.

    Raises:
        EnvError: a limit is not positive, or the cache is missing or damaged.
        TypeError: an option that ``EndpointConfig`` does not have.
    """
    return LLMUserFactory(
        ChatEndpoint(
            config=EndpointConfig(**endpoint),
            cassette=None if cache is None else Cassette(cache, mode=cache_mode),
        )
    )


class LLMUserFactory:
    """Builds an episode's LLM user.

    Args:
        endpoint: shared by all users; its ``usage`` holds the totals.
    """

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self.endpoint = endpoint

    def __call__(self, domain: Domain[Any], task: Task, rng: random.Random) -> User:
        """Return the user of one episode."""
        return build_llm_user(
            self.endpoint, system=domain.user_prompt(task), tools=domain.user_tools.schemas, seed=rng.getrandbits(31)
        )

    def close(self) -> None:
        """Close the endpoint's connections."""
        self.endpoint.close()


def build_llm_user(endpoint: ChatEndpoint, *, system: str, tools: Sequence[ToolSchema], seed: int) -> ModelUser:
    """Return a user on an endpoint, from plain parts: environments of other kinds use this directly.

    Args:
        endpoint: where the model is.
        system: who the user is and what it wants.
        tools: what it may call.
        seed: members of a group share it, so that equal conversations get equal answers.
    """
    usage = Usage()
    return ModelUser(
        partial(endpoint.complete, seed=seed, usage=usage), system=system, tools=tools, read_metrics=usage.to_metrics
    )
