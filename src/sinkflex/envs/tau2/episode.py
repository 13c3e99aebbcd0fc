"""One τ² episode: the package's orchestrator driven step by step, without a thread, until the agent is to move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sinkflex.chat.parsing import MalformedAction, ParsedAction
from sinkflex.envs.dual_control import MAX_USER_CALLS_PER_TURN, Budget, Turn
from sinkflex.envs.repeats import RepeatedCalls
from sinkflex.envs.tau2.catalogue import HAND_OFF_TOOL, Domain
from sinkflex.envs.tau2.confirmation import confirms
from sinkflex.envs.tau2.seats import STOP_WORDS, AgentSeat, UserSeat, to_message
from sinkflex.errors import EnvError, InfrastructureError, SinkFlexError
from sinkflex.types import Message, Role, StopReason, ToolCall

_ENDLESS = 10**9
_MAX_USER_ROUNDS = 2 * MAX_USER_CALLS_PER_TURN + 2


class Tau2Episode:
    """Plays one task from the greeting to its end.

    Args:
        domain: the task's domain.
        task_id: the task.
        user: a ``User``, or the package's own user simulator.
        budget: assistant generations allowed, and malformed actions plus error replies to either side's calls.
        seed: handed to the package's own user simulator.
    """

    def __init__(self, *, domain: Domain, task_id: str, user: Any, budget: Budget, seed: int) -> None:
        self.domain = domain
        self.task_id = task_id
        self.budget = budget
        self.stop_reason: StopReason | None = None
        self.environment = domain.start(task_id)
        self.counts: Counter[str] = Counter()
        self._package = domain.package
        self._seat = AgentSeat()
        self._calls: dict[str, ToolCall] = {}
        self._seen = 0
        self._known_tools = {schema.name: schema for schema in domain.agent_tools}
        self._repeats = RepeatedCalls()
        self._writes = 0
        self._confirmed = False
        self._names: dict[str, str] = {}
        self._orchestrator = self._package.orchestrator(
            domain=domain.name,
            agent=self._seat,
            user=UserSeat(user, self._package.messages) if hasattr(user, "act") else user,
            environment=self.environment,
            task=_without_initialisation(domain.task(task_id)),
            max_steps=_ENDLESS,
            max_errors=_ENDLESS,
            seed=seed,
        )

    def start(self) -> tuple[Message, ...]:
        """Let the user open; return everything the agent has to know, the task's history included.

        Raises:
            InfrastructureError: the package or the user's backend failed.
        """
        try:
            self._orchestrator.initialize()
        except Exception as error:
            raise InfrastructureError(f"τ² could not start task {self.task_id!r}: {error!r}") from error
        self._run_to_agent()
        return self._news(own_turns=True)

    def act(self, action: ParsedAction | MalformedAction) -> Turn:
        """Take one assistant generation and let the tools and the user answer it.

        A stop by the user or a hand-off outranks a budget that the same step uses up.

        Raises:
            EnvError: the episode is over.
            InfrastructureError: a tool environment or the user's backend failed; never scored.
        """
        if self.stop_reason is not None:
            raise EnvError(f"the episode ended with {self.stop_reason}; call reset before the next step")
        self.counts["steps"] += 1
        if isinstance(action, MalformedAction):
            invalid: str | None = action.reason
            self.counts["malformed"] += 1
            news: tuple[Message, ...] = (Message(role=Role.SYSTEM, content=action.reason),)
        else:
            invalid = self._misfit(action)
            self._seat.pending = self._outgoing(action)
            self._run_to_agent()
            news = self._news(own_turns=False)
            self._find_stop(action)
        self.counts["invalid_actions"] += invalid is not None
        self._apply_budget()
        return Turn(messages=news, invalid_action=invalid, stop_reason=self.stop_reason)

    @property
    def trajectory(self) -> Sequence[Any]:
        """The package's messages so far, in the order they were exchanged."""
        return self._orchestrator.trajectory  # type: ignore[no-any-return]

    @property
    def transcript(self) -> list[Message]:
        """The same as ``Message`` objects, the user's own tool calls included."""
        return [to_message(item, self._calls) for item in self.trajectory]

    @property
    def tool_errors(self) -> int:
        """Replies marked as errors so far, of either side's calls."""
        return int(self._orchestrator.num_errors)

    def metrics(self) -> dict[str, float]:
        """Return counts that describe how it went; they do not enter the score."""
        names = (
            "steps",
            "agent_calls",
            "user_calls",
            "user_turns",
            "invalid_actions",
            "invalid_calls",
            "writes_before_confirmation",
        )
        return {
            **{name: float(self.counts[name]) for name in names},
            "repeated_calls": float(self._repeats.count),
            "tool_errors": float(self.tool_errors),
        }

    def _outgoing(self, action: ParsedAction) -> Any:
        messages = self._package.messages
        if not action.tool_calls:
            return messages.AssistantMessage(role="assistant", content=action.content)
        calls = []
        for call in action.tool_calls:
            identity = f"call_{len(self._calls)}"
            self._calls[identity] = call
            self._count(call)
            calls.append(
                messages.ToolCall(id=identity, name=call.name, arguments=dict(call.arguments), requestor="assistant")
            )
        return messages.AssistantMessage(role="assistant", tool_calls=calls)

    def _run_to_agent(self) -> None:
        """Step the orchestrator until it waits for the policy, or the dialogue is over."""
        rounds = 0
        while not self._orchestrator.done:
            turn = self._orchestrator.to_role.value
            if turn == "agent" and self._seat.pending is None:
                return
            rounds += turn == "user"
            if rounds > _MAX_USER_ROUNDS:
                raise InfrastructureError(f"the user made {_MAX_USER_ROUNDS} moves without a word to the agent")
            try:
                self._orchestrator.step()
            except SinkFlexError:
                raise
            except Exception as error:
                raise InfrastructureError(
                    f"τ² failed in task {self.task_id!r} on the {turn}'s turn: {error!r}"
                ) from error

    def _news(self, *, own_turns: bool) -> tuple[Message, ...]:
        """Return what the agent may read of what was said since last asked."""
        news = []
        for item in self.trajectory[self._seen :]:
            self._note(item)
            self.counts["user_calls"] += item.role == "user" and len(item.tool_calls or ())
            self.counts["user_turns"] += item.role == "user" and not item.tool_calls
            hidden = (item.role == "user" and item.tool_calls) or (item.role == "tool" and item.requestor == "user")
            if not hidden and (own_turns or item.role != "assistant"):
                news.append(to_message(item, self._calls))
        self._seen = len(self.trajectory)
        return tuple(news)

    def _find_stop(self, action: ParsedAction) -> None:
        last = self.trajectory[-1]
        if self._orchestrator.done:
            handed = last.content and STOP_WORDS[1] in last.content
            self.stop_reason = StopReason.HAND_OFF if handed else StopReason.USER_STOP
            return
        replies = self.trajectory[len(self.trajectory) - len(action.tool_calls) :]
        for call, reply in zip(action.tool_calls, replies, strict=True):
            if call.name == HAND_OFF_TOOL and not reply.error:
                self.stop_reason = StopReason.HAND_OFF

    def _apply_budget(self) -> None:
        if self.stop_reason is not None:
            return
        if self.counts["malformed"] + self.tool_errors >= self.budget.max_invalid_actions:
            self.stop_reason = StopReason.MAX_INVALID_ACTIONS
        elif self.counts["steps"] >= self.budget.max_steps:
            self.stop_reason = StopReason.MAX_STEPS

    def _misfit(self, action: ParsedAction) -> str | None:
        """Return why a call does not fit its schema by names alone; τ² still runs it and replies with an error."""
        for call in action.tool_calls:
            schema = self._known_tools.get(call.name)
            if schema is None:
                return f"there is no tool {call.name[:60]!r}"
            known = schema.parameters.get("properties", {})
            missing = [name for name in schema.parameters.get("required", ()) if name not in call.arguments]
            extra = [name for name in call.arguments if name not in known]
            if missing or extra:
                wrong = f"lacks {missing[0]!r}" if missing else f"does not take {extra[0][:60]!r}"
                return f"{call.name}: the call {wrong}; arguments are {', '.join(known) or 'none'}"
        return None

    def _count(self, call: ToolCall) -> None:
        self.counts["agent_calls"] += 1
        self.counts["invalid_calls"] += call.name not in self._known_tools

    def _note(self, item: Any) -> None:
        """Count what the package does not: answers that told nothing new, and writes without the user's yes."""
        if item.role != "tool":
            self._names |= {call.id: call.name for call in item.tool_calls or ()}
            if item.role == "user" and item.content:
                self._confirmed = confirms(item.content)
            return
        by_agent = item.requestor == "assistant" and item.id in self._calls
        wrote = not item.error and self._names.get(item.id) in self.domain.writing_tools
        self._writes += wrote
        if by_agent:
            self.counts["writes_before_confirmation"] += wrote and not self._confirmed
            self._repeats.note(self._calls[item.id], answer=item.content or "", state=self._writes)


def _without_initialisation(task: Any) -> Any:
    """Return the task with its initialisation taken out: the environment already is in that state."""
    initial = task.initial_state
    if initial is None:
        return task
    return task.model_copy(
        update={
            "initial_state": initial.model_copy(update={"initialization_data": None, "initialization_actions": None})
        }
    )
