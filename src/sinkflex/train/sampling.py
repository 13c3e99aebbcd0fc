"""The groups of a train step: dealing tasks, collecting, and replacing groups that teach nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sinkflex.algo.filtering import is_informative
from sinkflex.rollout.collector import GroupSpec
from sinkflex.rollout.trajectory import EpisodeFailure, Group, Trajectory
from sinkflex.train.tasks import TaskSampler, derive_seed

Collect = Callable[[Sequence[GroupSpec], int], list[Group]]
"""``(specs, sampling seed) -> groups``, in the order of the specs."""


@dataclass(frozen=True, kw_only=True)
class StepGroups:
    """What one train step trains on, and what it cost.

    Attributes:
        groups: to train on, each with at least two trajectories.
        sampled: every trajectory sampled in this step, also of groups that were left out.
        failures: episodes lost to infrastructure.
        constant_groups: groups sampled whose members all had the same outcome.
        lone_groups: groups that failures left with fewer than two members.
        rounds: rounds of sampling, 1 without refills.
        seconds: wall time of sampling.
    """

    groups: tuple[Group, ...]
    sampled: tuple[Trajectory, ...]
    failures: tuple[EpisodeFailure, ...]
    constant_groups: int
    lone_groups: int
    rounds: int
    seconds: float


class GroupSource:
    """Gives each train step its groups.

    With dynamic sampling (DAPO, arXiv 2503.14476 eq. 11) groups of one outcome are replaced by further tasks for up to
    ``max_refills`` rounds. A round that brings more informative groups than were missing trains on all of them: keeping
    them for the next step would make them off-policy, throwing them away would waste them.

    Args:
        collect: samples the groups of some specs.
        sampler: deals the tasks.
        split: split of the tasks.
        group_size: trajectories a group.
        groups_per_step: groups a step wants.
        dynamic_sampling: replace groups of one outcome.
        max_refills: further rounds a step may spend on it.
        seed: with step and round it seeds the sampling noise.
    """

    def __init__(
        self,
        collect: Collect,
        sampler: TaskSampler,
        *,
        split: str,
        group_size: int,
        groups_per_step: int,
        dynamic_sampling: bool,
        max_refills: int,
        seed: int,
    ) -> None:
        self._collect = collect
        self._sampler = sampler
        self._split = split
        self._group_size = group_size
        self._wanted = groups_per_step
        self._dynamic = dynamic_sampling
        self._max_refills = max_refills
        self._seed = seed

    def next(self, step: int) -> StepGroups:
        """Sample one step's groups.

        Args:
            step: the train step, for the sampling noise.

        Raises:
            RolloutError: too large a share of the episodes failed; from the collector.
        """
        start = time.perf_counter()
        kept: list[Group] = []
        sampled: list[Group] = []
        rounds = lone = constant = 0
        while len(kept) < self._wanted and rounds <= (self._max_refills if self._dynamic else 0):
            rounds += 1
            share = len(kept) / len(sampled) if sampled else 1.0
            specs = self._specs(_refill_size(self._wanted - len(kept), share, self._wanted))
            for group in self._collect(specs, derive_seed(self._seed, "rollout", step, rounds)):
                sampled.append(group)
                informative = len(group.trajectories) > 1 and is_informative(
                    [trajectory.score for trajectory in group.trajectories]
                )
                lone += len(group.trajectories) < 2
                constant += len(group.trajectories) > 1 and not informative
                if informative or (not self._dynamic and len(group.trajectories) > 1):
                    kept.append(group)
        return StepGroups(
            groups=tuple(kept),
            sampled=tuple(trajectory for group in sampled for trajectory in group.trajectories),
            failures=tuple(failure for group in sampled for failure in group.failures),
            constant_groups=constant,
            lone_groups=lone,
            rounds=rounds,
            seconds=time.perf_counter() - start,
        )

    def state(self) -> dict[str, int]:
        """JSON-ready state: the data position. Sampling seeds come from the step, so there is nothing else."""
        return {"position": self._sampler.position}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from ``state()``'s output."""
        self._sampler.position = int(state["position"])

    def _specs(self, count: int) -> list[GroupSpec]:
        return [
            GroupSpec(task_id=task_id, split=self._split, group_seed=group_seed, size=self._group_size)
            for task_id, group_seed in self._sampler.take(count)
        ]


def _refill_size(missing: int, informative_share: float, most: int) -> int:
    """Groups to sample for ``missing`` informative ones at the share seen so far, at most ``most``."""
    return min(most, math.ceil(missing / max(informative_share, 1 / most)))
