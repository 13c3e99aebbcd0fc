"""A step's groups: refills until enough differ, lone groups left out, and what is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sinkflex.rollout.collector import GroupSpec
from sinkflex.rollout.ledger import TokenLedger
from sinkflex.rollout.trajectory import Group, Trajectory
from sinkflex.train.sampling import GroupSource
from sinkflex.train.tasks import TaskSampler
from sinkflex.train.trainer import Schedule
from sinkflex.types import StopReason


def episode(spec: GroupSpec, score: float) -> Trajectory:
    return Trajectory(
        task_id=spec.task_id,
        split=spec.split,
        tier="easy",
        group_id=spec.group_id,
        episode_id=spec.group_id,
        group_seed=spec.group_seed,
        sampling_seed=0,
        temperature=1.0,
        top_p=1.0,
        ledger=TokenLedger(),
        messages=(),
        reward=score,
        score=score,
        components={},
        stop_reason=StopReason.USER_STOP,
        turns=1,
        invalid_actions=0,
        metrics={},
    )


class Scripted:
    """Collects groups whose scores are given, one list of scores a group, in order."""

    def __init__(self, scores: Sequence[Sequence[float]]) -> None:
        self.scores = list(scores)
        self.calls: list[tuple[list[GroupSpec], int]] = []

    def __call__(self, specs: Sequence[GroupSpec], seed: int) -> list[Group]:
        self.calls.append((list(specs), seed))
        groups = []
        for spec in specs:
            trajectories = tuple(episode(spec, score) for score in self.scores.pop(0))
            groups.append(Group(group_id=spec.group_id, trajectories=trajectories))
        return groups


@pytest.fixture
def make_source() -> Callable[..., tuple[GroupSource, Scripted]]:
    def make(scores: Sequence[Sequence[float]], **changes: Any) -> tuple[GroupSource, Scripted]:
        collect = Scripted(scores)
        settings = {"dynamic_sampling": True, "max_refills": 2, "groups_per_step": 2, "group_size": 2, **changes}
        sampler = TaskSampler([f"task-{i}" for i in range(9)], seed=0)
        return GroupSource(collect, sampler, split="train", seed=3, **settings), collect

    return make


MIXED, CONSTANT = [0.0, 1.0], [1.0, 1.0]


def test_constant_groups_are_replaced_by_further_tasks(make_source: Callable[..., Any]) -> None:
    source, collect = make_source([MIXED, CONSTANT, CONSTANT, MIXED])
    step = source.next(1)
    assert len(step.groups) == 2
    assert (step.rounds, step.constant_groups, step.lone_groups) == (2, 2, 0)
    assert len(step.sampled) == 8
    dealt = [spec.task_id for specs, _ in collect.calls for spec in specs]
    assert len(dealt) == len(set(dealt)) == 4
    assert collect.calls[0][1] != collect.calls[1][1]


def test_a_round_asks_for_as_many_as_the_share_so_far_needs(make_source: Callable[..., Any]) -> None:
    source, collect = make_source([CONSTANT, CONSTANT, CONSTANT, MIXED, MIXED, MIXED, MIXED, MIXED], groups_per_step=4)
    step = source.next(1)
    # One of four was informative and three are missing: four times three, but no more than a whole step's worth.
    assert [len(specs) for specs, _ in collect.calls] == [4, 4]
    assert len(step.groups) == 5


def test_refills_end_and_the_step_takes_what_there_is(make_source: Callable[..., Any]) -> None:
    source, collect = make_source([CONSTANT] * 6)
    step = source.next(1)
    assert (len(collect.calls), step.groups, step.constant_groups) == (3, (), 6)


def test_without_dynamic_sampling_constant_groups_stay(make_source: Callable[..., Any]) -> None:
    source, collect = make_source([MIXED, CONSTANT], dynamic_sampling=False)
    step = source.next(1)
    assert (len(step.groups), len(collect.calls), step.constant_groups) == (2, 1, 1)


def test_a_lone_survivor_is_no_group(make_source: Callable[..., Any]) -> None:
    source, _ = make_source([[1.0], MIXED], dynamic_sampling=False)
    step = source.next(1)
    assert (len(step.groups), step.lone_groups, len(step.sampled)) == (1, 1, 3)


def test_a_resumed_source_deals_the_next_task(make_source: Callable[..., Any]) -> None:
    source, collect = make_source([MIXED] * 4)
    source.next(1)
    state = source.state()
    source.next(2)
    again, replayed = make_source([MIXED] * 2)
    again.restore(state)
    again.next(2)
    assert replayed.calls == collect.calls[1:]


@pytest.mark.parametrize(
    ("step", "kind", "rate"), [(1, "constant", 0.5), (2, "constant", 1.0), (9, "constant", 1.0), (10, "cosine", 0.1)]
)
def test_the_rate_rises_then_holds_or_falls_to_a_tenth(step: int, kind: str, rate: float) -> None:
    assert Schedule(lr=1.0, warmup_steps=2, steps=10, kind=kind).at(step) == pytest.approx(rate)
