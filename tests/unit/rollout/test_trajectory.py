"""Trajectories survive JSON exactly, and show people what was said."""

from __future__ import annotations

import dataclasses
import json

import pytest

from sinkflex.errors import RolloutError
from sinkflex.rollout import TokenLedger, Trajectory
from sinkflex.types import Message, Role, StopReason, ToolCall


@pytest.fixture
def trajectory() -> Trajectory:
    ledger = TokenLedger()
    ledger.append_prompt([7, 8])
    ledger.append_sampled([3, 1], [-1.2345678901234567, -0.1])
    ledger.append_observation([9])
    ledger.append_sampled([4], [-0.7])
    return Trajectory(
        task_id="t1",
        split="train",
        tier="easy",
        group_id="train/t1/5",
        episode_id="train/t1/5/0",
        group_seed=5,
        sampling_seed=11,
        temperature=1.0,
        top_p=1.0,
        ledger=ledger,
        messages=(
            Message(role=Role.SYSTEM, content="Be kind."),
            Message(role=Role.ASSISTANT, tool_calls=(ToolCall(name="look", arguments={"id": "47"}),)),
        ),
        reward=1.0,
        score=1.0,
        components={"world": 1.0, "payment": None},
        stop_reason=StopReason.SUCCESS,
        turns=2,
        invalid_actions=0,
        metrics={"steps": 2.0},
        timing={"env_s": 0.1, "generate_s": 0.2},
    )


def test_record_round_trip_through_json(trajectory: Trajectory) -> None:
    restored = Trajectory.from_record(json.loads(json.dumps(trajectory.to_record())))
    assert restored == trajectory
    assert restored.timing == trajectory.timing
    assert restored.ledger.logprobs[2] == -1.2345678901234567


def test_text_is_for_people_and_the_tokens_decide(trajectory: Trajectory) -> None:
    record = trajectory.to_record(decode=lambda ids: " ".join(map(str, ids)))
    assert record["text"] == [
        {"kind": "prompt", "turn": 0, "text": "7 8"},
        {"kind": "sampled", "turn": 1, "text": "3 1"},
        {"kind": "observation", "turn": 1, "text": "9"},
        {"kind": "sampled", "turn": 2, "text": "4"},
    ]
    record["text"] = "edited by hand"
    assert Trajectory.from_record(record) == trajectory


def test_timing_is_no_part_of_equality(trajectory: Trajectory) -> None:
    assert dataclasses.replace(trajectory, timing={}) == trajectory
    assert dataclasses.replace(trajectory, reward=0.5) != trajectory


def test_truncated_follows_the_stop_reason(trajectory: Trajectory) -> None:
    assert not trajectory.truncated
    assert dataclasses.replace(trajectory, stop_reason=StopReason.CONTEXT_LENGTH).truncated


def test_missing_fields_are_named(trajectory: Trajectory) -> None:
    record = trajectory.to_record()
    del record["score"], record["tokens"]
    with pytest.raises(RolloutError, match="trajectory record lacks score, tokens"):
        Trajectory.from_record(record)
