"""A user played by a model, whichever way the model is reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from sinkflex.envs.protocol import UserMove
from sinkflex.types import Message, Role, ToolSchema

STOP_MARK = "###STOP###"
"""What the model writes to end the dialogue; it never reaches the agent."""

MANNER = (
    "\n\nYou play the user in a chat with a support agent. Write only what the user would say, one short message at a "
    "time. Do not tell what you were not asked for. Use your tools only when the agent asks you to, and never invent "
    f"their results. When your problem is solved, or you were handed over, or you give up, write {STOP_MARK}."
)
"""Put after a task's own description; says how to play and how to stop."""

GREETING = "Hi! How can I help you today?"
"""What the model hears first, so that it opens; it is no part of the dialogue."""

FAREWELL = "bye"
"""Said for a model that stops without a word."""

Completion: TypeAlias = Callable[[Sequence[Message], Sequence[ToolSchema]], Message]
"""(messages with the user as assistant, tools on offer) to the user's next message: text or tool calls."""


class ModelUser:
    """Holds the user's side of the conversation and asks a model for each move.

    Args:
        complete: asks the model.
        system: who the user is and what it wants; ``MANNER`` is put after it.
        tools: what the user may call.
        read_metrics: counts to report with the episode's metrics.
    """

    def __init__(
        self,
        complete: Completion,
        *,
        system: str,
        tools: Sequence[ToolSchema],
        read_metrics: Callable[[], Mapping[str, float]],
    ) -> None:
        self._complete = complete
        self._tools = tuple(tools)
        self._read_metrics = read_metrics
        self._messages = [
            Message(role=Role.SYSTEM, content=system + MANNER),
            Message(role=Role.USER, content=GREETING),
        ]

    def open(self) -> Message:
        """Return the opening; no tools are on offer yet, for nothing was instructed."""
        return self._move(()).message

    def act(self, incoming: Sequence[Message]) -> UserMove:
        """Return the model's next move; see ``User.act``."""
        for message in incoming:
            heard = message.role is Role.ASSISTANT
            self._messages.append(Message(role=Role.USER, content=message.content) if heard else message)
        return self._move(self._tools)

    def metrics(self) -> Mapping[str, float]:
        """Return what this user's episode has cost so far."""
        return self._read_metrics()

    def close(self) -> None:
        """Nothing to release."""

    def _move(self, tools: Sequence[ToolSchema]) -> UserMove:
        answer = self._complete(self._messages, tools)
        self._messages.append(answer)
        if answer.tool_calls:
            return UserMove(message=Message(role=Role.USER, tool_calls=answer.tool_calls))
        text, mark, _ = answer.content.partition(STOP_MARK)
        return UserMove(message=Message(role=Role.USER, content=text.strip() or FAREWELL), stops=bool(mark))
