"""The policy itself, or another checkpoint, plays the user."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from sinkflex.chat.parsing import MalformedAction, parse_action
from sinkflex.envs.protocol import Domain, Task, User
from sinkflex.envs.users.modelled import ModelUser
from sinkflex.errors import EnvError
from sinkflex.types import Message, Role, ToolSchema

Sampler: TypeAlias = Callable[[Sequence[Message], Sequence[ToolSchema], int], str]
"""(messages with the user as assistant, tools on offer, seed) to raw sampled text, control tokens included."""

FALLBACK = "sorry, can you say that again?"
"""Said when the policy could not be brought to a well-formed move: it is the player's fault, so the game goes on."""


def selfplay_user(*, sample: Sampler, max_attempts: int = 3) -> Callable[[Domain[Any], Task, random.Random], User]:
    """Return the factory of users played by a policy.

    Args:
        sample: renders, samples and decodes; it may raise ``InfrastructureError``.
        max_attempts: samples drawn for one move before ``FALLBACK`` is said instead.

    Raises:
        EnvError: ``max_attempts`` is below 1.
    """
    if max_attempts < 1:
        raise EnvError(f"max_attempts must be at least 1, got {max_attempts}")

    def build(domain: Domain[Any], task: Task, rng: random.Random) -> User:
        player = _Player(sample, max_attempts=max_attempts, rng=rng)
        return ModelUser(
            player.complete,
            system=domain.user_prompt(task),
            tools=domain.user_tools.schemas,
            read_metrics=player.metrics,
        )

    return build


class _Player:
    def __init__(self, sample: Sampler, *, max_attempts: int, rng: random.Random) -> None:
        self._sample = sample
        self._max_attempts = max_attempts
        self._rng = rng
        self._malformed = 0

    def complete(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Message:
        known = {tool.name for tool in tools}
        for _ in range(self._max_attempts):
            action = parse_action(self._sample(messages, tools, self._rng.getrandbits(31)))
            if not isinstance(action, MalformedAction) and {call.name for call in action.tool_calls} <= known:
                return Message(role=Role.ASSISTANT, content=action.content, tool_calls=action.tool_calls)
            self._malformed += 1
        return Message(role=Role.ASSISTANT, content=FALLBACK)

    def metrics(self) -> dict[str, float]:
        return {"user_malformed": float(self._malformed)}
