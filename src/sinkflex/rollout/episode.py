"""The agent loop: one episode, token by token, from reset to its trajectory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from sinkflex.chat import ParsedAction, Renderer, parse_action
from sinkflex.errors import EnvError, RolloutError
from sinkflex.rollout.client import Generation, LLMClient, SamplingParams
from sinkflex.rollout.deadline import call_in_thread, call_with_deadline
from sinkflex.rollout.ledger import TokenLedger
from sinkflex.rollout.trajectory import Trajectory
from sinkflex.types import Message, Role, StopReason

_T = TypeVar("_T")
ENV_MODES = ("inline", "threads")
"""Where an environment's calls run: in the event loop, or each on a thread of its own."""


@runtime_checkable
class Environment(Protocol):
    """The part of the Gymnasium API that an episode uses; ``info`` carries the messages."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start the task named in ``options``."""
        ...

    def step(self, action: str) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take one assistant generation as raw text."""
        ...

    def close(self) -> None:
        """Free what the environment holds."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeLimits:
    """What one episode may cost.

    Attributes:
        max_length: tokens of the whole transcript; an episode that reaches it ends with ``context_length``.
        max_new_tokens: tokens of one assistant turn; a longer one is cut and reaches the environment as it is.
        step_timeout_s: seconds one ``env.reset`` or ``env.step`` may take.

    Raises:
        RolloutError: a limit is not positive.
    """

    max_length: int
    max_new_tokens: int
    step_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("max_length", "max_new_tokens", "step_timeout_s"):
            if getattr(self, name) <= 0:
                raise RolloutError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSpec:
    """Which episode to play.

    Attributes:
        task_id: the task.
        split: its split.
        group_id: shared by the episodes of one start state.
        episode_id: unique in a collection; the sampler's request id.
        group_seed: start state and user behaviour.
        sampling_seed: with ``episode_id`` it fixes the sampling noise.
        temperature: of sampling, 0 greedy.
        top_p: nucleus mass; below 1 for evaluation only.
    """

    task_id: str
    split: str
    group_id: str
    episode_id: str
    group_seed: int
    sampling_seed: int
    temperature: float
    top_p: float


class EpisodeRunner:
    """Plays one episode in an environment.

    Args:
        spec: which episode.
        env: where; it may be in any state.
        renderer: chat format of the policy.
        client: samples the policy's turns.
        limits: budgets.
        with_tools: put the tools' schemas into the prompt.
        env_mode: ``"inline"`` runs the environment in the event loop; ``"threads"`` gives each call a thread, for
            environments that wait on a network.
    """

    def __init__(
        self,
        spec: EpisodeSpec,
        *,
        env: Environment,
        renderer: Renderer,
        client: LLMClient,
        limits: EpisodeLimits,
        with_tools: bool,
        env_mode: str,
    ) -> None:
        self.spec = spec
        self.turns = 0
        self._env = env
        self._renderer = renderer
        self._client = client
        self._limits = limits
        self._with_tools = with_tools
        self._env_mode = env_mode
        self._ledger = TokenLedger()
        self._messages: list[Message] = []
        self._reward = 0.0
        self._invalid_actions = 0
        self._env_s = 0.0
        self._generate_s = 0.0

    async def run(self) -> Trajectory:
        """Play to the end.

        Raises:
            EnvError: the environment broke its contract; whatever else it raises comes through as it is.
            DeadlineError: a reset or step took too long.
            ModelError: the model failed; that is no episode's fault.
        """
        info = await self._reset()
        while True:
            generation = await self._generate()
            if generation.finish == "length" and len(self._ledger) == self._limits.max_length:
                # The context cut the action short: what it would have been, nobody knows.
                return self._finish(info, StopReason.CONTEXT_LENGTH)
            info, ended = await self._step(self._renderer.action_text(generation.token_ids))
            if ended:
                return self._finish(info, self._stop_reason(info))
            observation = self._renderer.observation(info["messages"], last_id=generation.token_ids[-1])
            if len(self._ledger) + len(observation) >= self._limits.max_length:
                return self._finish(info, StopReason.CONTEXT_LENGTH)
            self._ledger.append_observation(observation)

    async def _reset(self) -> dict[str, Any]:
        spec = self.spec
        options = {"task_id": spec.task_id, "split": spec.split, "group_seed": spec.group_seed}
        _, info = await self._call(lambda: self._env.reset(seed=spec.group_seed, options=options), "env.reset")
        missing = [key for key in ("tier", "system", "tools", "messages") if key not in info]
        if missing:
            raise EnvError(f"reset's info lacks {', '.join(missing)}; see the environment contract")
        self._messages = [Message(role=Role.SYSTEM, content=info["system"]), *info["messages"]]
        prompt = self._renderer.prompt(
            system=info["system"], tools=info["tools"] if self._with_tools else (), messages=info["messages"]
        )
        if len(prompt) >= self._limits.max_length:
            raise EnvError(
                f"task {spec.task_id!r}: its prompt of {len(prompt)} tokens leaves no room in max_length="
                f"{self._limits.max_length}; raise max_length or use a shorter prompt"
            )
        self._ledger.append_prompt(prompt)
        self._tier = str(info["tier"])
        return dict(info)

    async def _generate(self) -> Generation:
        started = time.perf_counter()
        room = self._limits.max_length - len(self._ledger)
        generation = await self._client.generate(
            self.spec.episode_id,
            prompt_ids=self._ledger.ids,
            sampling=SamplingParams(
                temperature=self.spec.temperature,
                top_p=self.spec.top_p,
                max_new_tokens=min(self._limits.max_new_tokens, room),
                stop_ids=self._renderer.stop_ids,
                seed=self.spec.sampling_seed,
            ),
        )
        self._generate_s += time.perf_counter() - started
        self._ledger.append_sampled(generation.token_ids, generation.logprobs)
        self.turns += 1
        return generation

    async def _step(self, text: str) -> tuple[dict[str, Any], bool]:
        parsed = parse_action(text)
        self._messages.append(
            Message(
                role=Role.ASSISTANT,
                content=parsed.content,
                tool_calls=parsed.tool_calls,
                reasoning=parsed.reasoning,
            )
            if isinstance(parsed, ParsedAction)
            else Message(role=Role.ASSISTANT, content=text)
        )
        _, reward, terminated, truncated, info = await self._call(lambda: self._env.step(text), "env.step")
        if "messages" not in info:
            raise EnvError("step's info lacks messages; see the environment contract")
        if not math.isfinite(reward):
            raise EnvError(
                f"task {self.spec.task_id!r}: the environment's reward is {reward}; expected a finite number"
            )
        self._reward += float(reward)
        self._invalid_actions += info.get("invalid_action") is not None
        self._messages.extend(info["messages"])
        return dict(info), bool(terminated or truncated)

    async def _call(self, call: Callable[[], _T], what: str) -> _T:
        started = time.perf_counter()
        try:
            if self._env_mode == "threads":
                return await call_in_thread(call, timeout_s=self._limits.step_timeout_s, what=what)
            return call_with_deadline(call, timeout_s=self._limits.step_timeout_s, what=what)
        finally:
            self._env_s += time.perf_counter() - started

    def _stop_reason(self, info: Mapping[str, Any]) -> StopReason:
        reason = info.get("stop_reason")
        if reason is None or "score" not in info:
            raise EnvError("the last step's info lacks stop_reason or score; see the environment contract")
        return StopReason(reason)

    def _finish(self, info: Mapping[str, Any], stop_reason: StopReason) -> Trajectory:
        spec = self.spec
        return Trajectory(
            task_id=spec.task_id,
            split=spec.split,
            tier=self._tier,
            group_id=spec.group_id,
            episode_id=spec.episode_id,
            group_seed=spec.group_seed,
            sampling_seed=spec.sampling_seed,
            temperature=spec.temperature,
            top_p=spec.top_p,
            ledger=self._ledger,
            messages=tuple(self._messages),
            reward=self._reward,
            score=float(info.get("score", 0.0)),
            components=dict(info.get("components", {})),
            stop_reason=stop_reason,
            turns=self.turns,
            invalid_actions=self._invalid_actions,
            metrics=dict(info.get("metrics", {})),
            timing={"env_s": self._env_s, "generate_s": self._generate_s},
        )
