"""The record of an episode, and of the group of episodes that share one task and start state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sinkflex.errors import RolloutError
from sinkflex.rollout.ledger import TokenLedger
from sinkflex.types import JSONObject, JSONValue, Message, StopReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One finished episode.

    Attributes:
        task_id: the task played.
        split: the task's split, for example ``"train"``.
        tier: the task's difficulty tier.
        group_id: shared by the episodes of one task and start state.
        episode_id: unique within a collection; also the sampler's request id.
        group_seed: start state and user behaviour.
        sampling_seed: with ``episode_id`` and position it fixes the sampling noise.
        temperature: what the tokens were sampled at (0 greedy).
        top_p: nucleus mass; below 1 the trajectory must not be trained on.
        ledger: the exact tokens.
        messages: the dialogue as both sides saw it, system first; an action that could not be parsed is an assistant
            message whose content is the raw text.
        reward: sum of the environment's step rewards.
        score: the grader's output in [0, 1].
        components: the parts of the score; None where a part does not apply.
        stop_reason: why the episode ended.
        turns: assistant turns taken.
        invalid_actions: how many of them were malformed.
        metrics: the environment's own figures.
        timing: seconds spent, by ``"env_s"`` and ``"generate_s"``; not part of equality of two runs.
    """

    task_id: str
    split: str
    tier: str
    group_id: str
    episode_id: str
    group_seed: int
    sampling_seed: int
    temperature: float
    top_p: float
    ledger: TokenLedger
    messages: tuple[Message, ...]
    reward: float
    score: float
    components: Mapping[str, float | None]
    stop_reason: StopReason
    turns: int
    invalid_actions: int
    metrics: Mapping[str, float]
    timing: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def truncated(self) -> bool:
        """True when a budget ended the episode, False when the world did."""
        return not self.stop_reason.is_termination

    def to_record(self, decode: Callable[[Sequence[int]], str] | None = None) -> JSONObject:
        """Return a JSON-ready dict; ``from_record`` restores an equal trajectory.

        Args:
            decode: turns ids into text, special tokens included (``renderer.action_text``). When given, the record also
                holds ``"text"``: the segments in order as ``{"kind", "turn", "text"}``, for people to read.
        """
        record: JSONObject = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("ledger", "messages", "components", "metrics", "timing", "stop_reason")
        }
        record["stop_reason"] = str(self.stop_reason)
        record["components"] = dict(self.components)
        record["metrics"] = dict(self.metrics)
        record["timing"] = dict(self.timing)
        record["messages"] = [message.to_dict() for message in self.messages]
        record["tokens"] = self.ledger.to_record()
        if decode is not None:
            ids, turns = self.ledger.ids, self.ledger.turn_ids
            record["text"] = [
                {"kind": kind, "turn": turns[span.start], "text": decode(ids[span])}
                for kind, span in self.ledger.segments()
            ]
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, JSONValue]) -> Trajectory:
        """Rebuild a trajectory from ``to_record``'s output; ``"text"`` is ignored, the tokens decide.

        Raises:
            RolloutError: a field is missing or the tokens contradict themselves.
        """
        expected = [name for name in cls.__dataclass_fields__ if name != "ledger"]
        missing = [name for name in [*expected, "tokens"] if name not in record]
        if missing:
            raise RolloutError(f"trajectory record lacks {', '.join(missing)}")
        values = {name: record[name] for name in expected}
        values["stop_reason"] = StopReason(record["stop_reason"])
        values["messages"] = tuple(Message.from_dict(message) for message in record["messages"])
        return cls(ledger=TokenLedger.from_record(record["tokens"]), **values)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeFailure:
    """An episode that infrastructure, not the policy, ended. It has no reward.

    Attributes:
        episode_id: the episode that failed.
        kind: the exception's class name.
        message: its text.
        turn: assistant turns taken before it failed.
        attempts: how often it was tried.
    """

    episode_id: str
    kind: str
    message: str
    turn: int
    attempts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The episodes of one task and start state.

    Attributes:
        group_id: shared by all of them.
        trajectories: the finished ones, in episode order; fewer than asked for when some failed.
        failures: the others.
    """

    group_id: str
    trajectories: tuple[Trajectory, ...]
    failures: tuple[EpisodeFailure, ...] = ()
