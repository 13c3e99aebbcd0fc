"""Playing whole episodes, for checks and benchmarks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import gymnasium

from sinkflex.envs.protocol import Domain
from sinkflex.errors import EnvError
from sinkflex.types import Message

Policy: TypeAlias = Callable[[Any, int], str]
"""(unwrapped environment, step from 0) to the next raw action."""

MAX_CHECK_STEPS = 400
"""An episode that has not ended by then never will."""


def write_action(message: Message) -> str:
    """Write an assistant message as JSON text, the action format that needs no tokenizer."""
    if message.tool_calls:
        return json.dumps([{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls])
    return json.dumps({"content": message.content})


def oracle_policy(env: Any, step: int) -> str:
    """Play what the oracle says."""
    return write_action(env.oracle_message())


@dataclass(kw_only=True, slots=True)
class Played:
    """One finished episode.

    Attributes:
        task_id: the task.
        actions: raw actions.
        observations: the opening's observation, then one a step.
        rewards: one a step.
        resets: info of ``reset``.
        infos: info of each step.
        terminated: the world ended it.
        truncated: a budget did.
    """

    task_id: str
    actions: list[str] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    resets: dict[str, Any] = field(default_factory=dict)
    infos: list[dict[str, Any]] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False

    @property
    def score(self) -> float:
        """The final score."""
        return float(self.infos[-1]["score"])

    @property
    def digest(self) -> str:
        """A hash of everything seen, done and measured."""
        last = self.infos[-1]
        graded = [last.get("components"), last.get("metrics"), last.get("stop_reason")]
        record = [self.task_id, self.actions, self.observations, self.rewards, graded]
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

    def why(self) -> str:
        """Say how it ended, for messages."""
        last = self.infos[-1]
        return f"stop {last.get('stop_reason')}, components {last.get('components')}, {len(self.actions)} steps"


def start_episode(env: gymnasium.Env[str, str], task_id: str, *, group_seed: int) -> Played:
    """Reset into a task."""
    observation, info = env.reset(seed=group_seed, options={"task_id": task_id, "group_seed": group_seed})
    return Played(task_id=task_id, observations=[observation], resets=info)


def play_step(env: gymnasium.Env[str, str], played: Played, action: str) -> bool:
    """Take one step and record it; returns whether the episode has ended."""
    observation, reward, terminated, truncated, info = env.step(action)
    played.actions.append(action)
    played.observations.append(observation)
    played.rewards.append(float(reward))
    played.infos.append(info)
    played.terminated, played.truncated = terminated, truncated
    return terminated or truncated


def play_episode(env: gymnasium.Env[str, str], task_id: str, *, policy: Policy, group_seed: int = 0) -> Played:
    """Play one episode to its end.

    Raises:
        EnvError: it never ends.
    """
    played = start_episode(env, task_id, group_seed=group_seed)
    for step in range(MAX_CHECK_STEPS):
        if play_step(env, played, policy(env.unwrapped, step)):
            return played
    raise EnvError(f"task {task_id!r} has not ended after {MAX_CHECK_STEPS} steps; give it a step budget")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What is under check.

    Attributes:
        make: builds a fresh environment; keywords are passed on.
        task_ids: the sampled tasks.
        domain: the domain, when the environment is one of ``sinkflex.envs``' own; None otherwise.
        registered: True when the target is a registered id, False for a domain under construction.
        env_id: that id when other processes build the same environment from it, else None.
        fuzz: how many fuzzed actions to send.
    """

    make: Callable[..., gymnasium.Env[str, str]]
    task_ids: Sequence[str]
    domain: Domain[Any] | None
    registered: bool
    env_id: str | None
    fuzz: int

    def oracle(self, task_id: str, *, group_seed: int = 0) -> tuple[Any, Played]:
        """Play a task with the oracle; returns the unwrapped environment too."""
        env = self.make()
        return env.unwrapped, play_episode(env, task_id, policy=oracle_policy, group_seed=group_seed)


def domain_of(bench: Bench) -> Domain[Any]:
    """Return the bench's domain.

    Raises:
        EnvError: the environment plays no ``Domain``.
    """
    if bench.domain is None:
        raise EnvError("this check needs an environment that plays a sinkflex.envs.Domain")
    return bench.domain
