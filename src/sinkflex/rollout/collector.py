"""Collecting groups of episodes: concurrency, pooled environments, failures that never become a reward."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sinkflex.chat import Renderer
from sinkflex.errors import ModelError, RolloutError, unknown_name
from sinkflex.rollout.client import LLMClient, SamplingParams
from sinkflex.rollout.deadline import call_with_deadline
from sinkflex.rollout.episode import ENV_MODES, Environment, EpisodeLimits, EpisodeRunner, EpisodeSpec
from sinkflex.rollout.trajectory import EpisodeFailure, Group, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """Which group to collect.

    Attributes:
        task_id: the task.
        split: its split.
        group_seed: start state and user behaviour, shared by the group.
        size: trajectories wanted, at least 1.
    """

    task_id: str
    split: str
    group_seed: int
    size: int

    @property
    def group_id(self) -> str:
        """Names the group; unique within a collection."""
        return f"{self.split}/{self.task_id}/{self.group_seed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FailurePolicy:
    """What to do about episodes that infrastructure ended.

    Attributes:
        retries: times such an episode is started over, with the same seeds.
        max_share: share of a collection's episodes in [0, 1] that may fail for good before it is given up.
    """

    retries: int = 1
    max_share: float = 0.5

    def __post_init__(self) -> None:
        if self.retries < 0 or not 0.0 <= self.max_share <= 1.0:
            raise RolloutError(
                f"retries must be >= 0 and max_share lie in [0, 1], got {self.retries} and {self.max_share}"
            )


class Collector:
    """Plays groups of episodes with one policy.

    The result depends on the specs, the seed and the weights, not on timing: each episode's sampling noise comes from
    (seed, episode id, position), and groups and members come back in the order asked for.
    """

    def __init__(
        self,
        *,
        make_env: Callable[[], Environment],
        renderer: Renderer,
        client: LLMClient,
        limits: EpisodeLimits,
        max_concurrent: int = 128,
        with_tools: bool = True,
        env_mode: str = "inline",
        failures: FailurePolicy | None = None,
    ) -> None:
        """Set up; environments are made when first needed and reused.

        Args:
            make_env: makes an environment that follows the info contract; called up to ``max_concurrent`` times.
            renderer: chat format of the policy.
            client: samples the policy's turns.
            limits: budgets of one episode.
            max_concurrent: episodes in flight at once.
            with_tools: put the tools' schemas into the prompt.
            env_mode: ``"inline"`` or ``"threads"``; see ``EpisodeRunner``.
            failures: retries and tolerated share; the default retries once and tolerates half.

        Raises:
            RolloutError: ``max_concurrent`` is below 1, or ``env_mode`` is unknown.
        """
        if max_concurrent < 1:
            raise RolloutError(f"max_concurrent must be at least 1, got {max_concurrent}")
        if env_mode not in ENV_MODES:
            raise RolloutError(unknown_name("env_mode", env_mode, ENV_MODES))
        self._make_env = make_env
        self._renderer = renderer
        self._client = client
        self._limits = limits
        self._max_concurrent = max_concurrent
        self._with_tools = with_tools
        self._env_mode = env_mode
        self._failures = failures or FailurePolicy()
        self._idle_envs: list[Environment] = []

    def run(
        self, groups: Sequence[GroupSpec], *, seed: int, temperature: float = 1.0, top_p: float = 1.0
    ) -> list[Group]:
        """``collect`` for callers outside an event loop."""
        return asyncio.run(self.collect(groups, seed=seed, temperature=temperature, top_p=top_p))

    async def collect(
        self, groups: Sequence[GroupSpec], *, seed: int, temperature: float = 1.0, top_p: float = 1.0
    ) -> list[Group]:
        """Play all episodes of ``groups``.

        Args:
            groups: what to play; two of them must not be equal in task, split and seed.
            seed: sampling noise of this collection.
            temperature: 0 is greedy.
            top_p: nucleus mass; below 1 the trajectories say so and are for evaluation only.

        Returns:
            One group for each spec, in order.

        Raises:
            RolloutError: specs repeat, a size is below 1, or more than the tolerated share of episodes failed; the
                message then names the most common cause.
            ModelError: the model failed.
        """
        self._check(groups)
        specs = [self._episodes(group, seed=seed, temperature=temperature, top_p=top_p) for group in groups]
        gate = asyncio.Semaphore(self._max_concurrent)
        tasks = [asyncio.ensure_future(self._play(spec, gate)) for group in specs for spec in group]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._judge(results)
        collected = []
        rest = iter(results)
        for group in groups:
            members = [next(rest) for _ in range(group.size)]
            collected.append(
                Group(
                    group_id=group.group_id,
                    trajectories=tuple(item for item in members if isinstance(item, Trajectory)),
                    failures=tuple(item for item in members if isinstance(item, EpisodeFailure)),
                )
            )
        return collected

    def close(self) -> None:
        """Close the pooled environments."""
        while self._idle_envs:
            self._idle_envs.pop().close()

    def _check(self, groups: Sequence[GroupSpec]) -> None:
        counts = Counter(group.group_id for group in groups)
        repeated = [group_id for group_id, count in counts.items() if count > 1]
        if repeated:
            raise RolloutError(
                f"group {repeated[0]!r} is asked for {counts[repeated[0]]} times in one collection; its episodes would "
                "be identical, so raise size or change group_seed"
            )
        for group in groups:
            if group.size < 1:
                raise RolloutError(f"group {group.group_id!r} has size {group.size}; expected at least 1")

    def _episodes(self, group: GroupSpec, *, seed: int, temperature: float, top_p: float) -> list[EpisodeSpec]:
        # Checks temperature and top_p before anything is played.
        SamplingParams(temperature=temperature, top_p=top_p, max_new_tokens=1, stop_ids=frozenset(), seed=seed)
        return [
            EpisodeSpec(
                task_id=group.task_id,
                split=group.split,
                group_id=group.group_id,
                episode_id=f"{group.group_id}/{member}",
                group_seed=group.group_seed,
                sampling_seed=seed,
                temperature=temperature,
                top_p=top_p,
            )
            for member in range(group.size)
        ]

    async def _play(self, spec: EpisodeSpec, gate: asyncio.Semaphore) -> Trajectory | EpisodeFailure:
        """Play one episode, starting over after a failure that is not the policy's."""
        async with gate:
            attempt = 0
            while True:
                attempt += 1
                outcome = await self._attempt(spec, attempt)
                if isinstance(outcome, Trajectory) or attempt > self._failures.retries:
                    return outcome

    async def _attempt(self, spec: EpisodeSpec, attempt: int) -> Trajectory | EpisodeFailure:
        env: Environment | None = None
        runner: EpisodeRunner | None = None
        try:
            env = self._idle_envs.pop() if self._idle_envs else self._make_env()
            runner = EpisodeRunner(
                spec,
                env=env,
                renderer=self._renderer,
                client=self._client,
                limits=self._limits,
                with_tools=self._with_tools,
                env_mode=self._env_mode,
            )
            trajectory = await runner.run()
        except BaseException as error:
            self._discard(env)
            # A failing model or a misuse concerns every episode, and whoever stops the run means it.
            if isinstance(error, ModelError | RolloutError) or not isinstance(error, Exception):
                raise
            return EpisodeFailure(
                episode_id=spec.episode_id,
                kind=type(error).__name__,
                message=str(error),
                turn=runner.turns if runner else 0,
                attempts=attempt,
            )
        finally:
            self._client.release(spec.episode_id)
        self._idle_envs.append(env)
        return trajectory

    def _discard(self, env: Environment | None) -> None:
        """Drop an environment that failed; what its close raises adds nothing to what is recorded already."""
        if env is not None:
            with suppress(Exception):
                call_with_deadline(env.close, timeout_s=self._limits.step_timeout_s, what="env.close")

    def _judge(self, results: Sequence[Trajectory | EpisodeFailure]) -> None:
        failed = [item for item in results if isinstance(item, EpisodeFailure)]
        if not failed or len(failed) <= self._failures.max_share * len(results):
            return
        (kind, message), count = Counter((item.kind, item.message) for item in failed).most_common(1)[0]
        raise RolloutError(
            f"{len(failed)} of {len(results)} episodes failed (tolerated share: {self._failures.max_share:g}); the "
            f"most common cause, {count} times, is {kind}: {message}"
        )
