"""One episode: whose turn it is, what each side's tools do, when it ends, and what it is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

from sinkflex.chat.parsing import MalformedAction, ParsedAction
from sinkflex.envs import session
from sinkflex.envs.protocol import Domain, TaskT, User, UserMove
from sinkflex.envs.repeats import RepeatedCalls
from sinkflex.envs.tools import Side, ToolReply
from sinkflex.errors import EnvError, InfrastructureError
from sinkflex.types import Message, Role, StopReason, ToolCall

MAX_USER_CALLS_PER_TURN = 10
"""A user that still calls tools after this many in one turn is broken, not busy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What an episode may cost.

    Attributes:
        max_steps: assistant generations, malformed ones included.
        max_invalid_actions: malformed generations and calls that did not fit a schema.
    """

    max_steps: int
    max_invalid_actions: int

    def __post_init__(self) -> None:
        if self.max_steps < 1 or self.max_invalid_actions < 1:
            raise EnvError(f"budgets must be at least 1, got {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What one assistant generation brought about.

    Attributes:
        messages: what the assistant reads next: tool replies, the user's utterance, or why its action was malformed.
        invalid_action: why the action did not count as one, None if it did.
        stop_reason: why the episode ended with it, None while it goes on.
    """

    messages: tuple[Message, ...]
    invalid_action: str | None = None
    stop_reason: StopReason | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The episode's worth.

    Attributes:
        score: product of the components that apply, in [0, 1].
        components: name to value; None where the task has nothing to grade under that name.
        metrics: counts that describe how it went; they do not enter the score.
        breaches: the policy rules the agent broke, in order.
    """

    score: float
    components: dict[str, float | None]
    metrics: dict[str, float]
    breaches: tuple[str, ...]


@dataclass(slots=True)
class _Counts:
    steps: int = 0
    invalid_actions: int = 0
    counts: Counter[str] = field(default_factory=Counter)


class Episode(Generic[TaskT]):
    """Runs one task from its opening to its score.

    Args:
        domain: what is played.
        task: which task of it.
        user: the other side.
        budget: when to cut it short.
    """

    def __init__(self, *, domain: Domain[TaskT], task: TaskT, user: User, budget: Budget) -> None:
        self.domain = domain
        self.task = task
        self.user = user
        self.budget = budget
        self.world = domain.build_world(task)
        self.stop_reason: StopReason | None = None
        self.transcript: list[tuple[Side, Message]] = []
        self._counts = _Counts()
        self._repeats = RepeatedCalls()

    def start(self) -> tuple[Message, ...]:
        """Let the user open; returns what the assistant reads first."""
        opening = self.user.open()
        self._hear(Side.USER, opening)
        return (opening,)

    def act(self, action: ParsedAction | MalformedAction) -> Turn:
        """Take one assistant generation and let the world and the user answer it.

        A stop by the user or a hand-off outranks a budget that is used up by the same step.

        Raises:
            EnvError: the episode is over, or a tool is broken.
            InfrastructureError: the user's backend failed for good, or the user never yields the turn.
        """
        if self.stop_reason is not None:
            raise EnvError(f"the episode ended with {self.stop_reason}; call reset before the next step")
        self._counts.steps += 1
        invalid: str | None = None
        if isinstance(action, MalformedAction):
            invalid = action.reason
            messages: tuple[Message, ...] = (Message(role=Role.SYSTEM, content=action.reason),)
        elif action.tool_calls:
            messages, invalid = self._agent_calls(action)
        else:
            self._hear(Side.AGENT, Message(role=Role.ASSISTANT, content=action.content, reasoning=action.reasoning))
            messages = (self._user_turn(Message(role=Role.ASSISTANT, content=action.content)),)
        if invalid is not None:
            self._counts.invalid_actions += 1
        self._apply_budget()
        return Turn(messages=messages, invalid_action=invalid, stop_reason=self.stop_reason)

    def outcome(self) -> Outcome:
        """Grade the world as it is now; 0 until the episode has terminated."""
        broken = session.breaches(self.world)
        ended = self.stop_reason is not None and self.stop_reason.is_termination
        handed_off = self.stop_reason is StopReason.HAND_OFF
        components: dict[str, float | None] = dict(self.domain.components(self.task, self.world, handed_off=handed_off))
        components["policy"] = 0.0 if broken else 1.0
        components["ended"] = float(ended)
        score = 1.0
        for name, value in components.items():
            if value is None:
                continue
            if not 0.0 <= value <= 1.0:
                raise EnvError(f"{self.domain.name}: component {name!r} is {value!r}; it must lie in [0, 1]")
            score *= value
        return Outcome(score=score, components=components, metrics=self._metrics(broken), breaches=broken)

    def _metrics(self, broken: Sequence[str]) -> dict[str, float]:
        counts = self._counts.counts
        unconfirmed = sum(code in self.domain.confirmation_rules for code in broken)
        return {
            "steps": float(self._counts.steps),
            "agent_calls": float(counts["agent_calls"]),
            "user_calls": float(counts["user_calls"]),
            "user_turns": float(counts["user_turns"]),
            "invalid_actions": float(self._counts.invalid_actions),
            "invalid_calls": float(counts["invalid_calls"]),
            "tool_errors": float(counts["tool_errors"]),
            "repeated_calls": float(self._repeats.count),
            "policy_breaches": float(len(broken)),
            "writes_before_confirmation": float(unconfirmed),
            **self.user.metrics(),
        }

    def _agent_calls(self, action: ParsedAction) -> tuple[tuple[Message, ...], str | None]:
        message = Message(role=Role.ASSISTANT, tool_calls=action.tool_calls, reasoning=action.reasoning)
        self.transcript.append((Side.AGENT, message))
        replies: list[Message] = []
        invalid: str | None = None
        for call in action.tool_calls:
            reply = self.domain.agent_tools.call(self.world, call)
            self._repeats.note(call, answer=reply.text, state=self.world.hash())
            self._counts.counts["agent_calls"] += 1
            self._counts.counts["invalid_calls"] += reply.invalid
            self._counts.counts["tool_errors"] += reply.error is not None and not reply.invalid
            if reply.invalid and invalid is None:
                invalid = reply.error
            replies.append(self._reply(Side.AGENT, call, reply))
            if reply.error is None and reply.tool is not None and reply.tool.stops is not None:
                self.stop_reason = reply.tool.stops
                break
        return tuple(replies), invalid

    def _user_turn(self, spoken: Message) -> Message:
        incoming: tuple[Message, ...] = (spoken,)
        for _ in range(MAX_USER_CALLS_PER_TURN + 1):
            move = self.user.act(incoming)
            if not move.message.tool_calls:
                return self._user_speaks(move)
            self.transcript.append((Side.USER, move.message))
            incoming = tuple(self._user_call(call) for call in move.message.tool_calls)
        raise InfrastructureError(
            f"the user made more than {MAX_USER_CALLS_PER_TURN} rounds of tool calls without a word to the agent"
        )

    def _user_call(self, call: ToolCall) -> Message:
        self._counts.counts["user_calls"] += 1
        return self._reply(Side.USER, call, self.domain.user_tools.call(self.world, call))

    def _user_speaks(self, move: UserMove) -> Message:
        self._counts.counts["user_turns"] += 1
        said = Message(role=Role.USER, content=move.message.content)
        self._hear(Side.USER, said)
        if move.stops:
            self.stop_reason = StopReason.USER_STOP
        return said

    def _hear(self, side: Side, message: Message) -> None:
        self.transcript.append((side, message))
        self.domain.observe(self.task, self.world, speaker=side, text=message.content)

    def _reply(self, side: Side, call: ToolCall, reply: ToolReply) -> Message:
        message = Message(role=Role.TOOL, content=reply.text, name=call.name, call_id=call.call_id)
        self.transcript.append((side, message))
        return message

    def _apply_budget(self) -> None:
        if self.stop_reason is not None:
            return
        if self._counts.invalid_actions >= self.budget.max_invalid_actions:
            self.stop_reason = StopReason.MAX_INVALID_ACTIONS
        elif self._counts.steps >= self.budget.max_steps:
            self.stop_reason = StopReason.MAX_STEPS
