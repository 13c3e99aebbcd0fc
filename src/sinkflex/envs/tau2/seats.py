"""The two seats at τ²'s table, filled by objects its orchestrator can drive without a thread.

The orchestrator asks a participant for its next message and waits. ``AgentSeat`` therefore answers with a message put
there beforehand; the environment only lets the orchestrator take the agent's turn once there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sinkflex.envs.protocol import User, UserMove
from sinkflex.errors import InfrastructureError
from sinkflex.types import Message, Role, ToolCall

STOP_WORDS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""Any of these in the user's text ends the dialogue, by τ²'s own rule."""


class AgentSeat:
    """The policy's seat: hands over the message that the environment's ``step`` put there."""

    def __init__(self) -> None:
        self.pending: Any = None

    def get_init_state(self, message_history: Any = None) -> None:
        """Keep no state; the environment holds the transcript."""

    def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
        """Return the pending message."""
        reply, self.pending = self.pending, None
        return reply, state

    def is_stop(self, message: Any) -> bool:
        """Return False: only the user or a hand-off ends a dialogue, whatever the policy writes."""
        return False

    def set_seed(self, seed: int) -> None:
        """Ignore the seed; the policy samples elsewhere."""


class UserSeat:
    """The user's seat: a ``User`` behind the interface the orchestrator expects.

    Args:
        user: plays the user.
        messages: the package's message module.
    """

    def __init__(self, user: User, messages: Any) -> None:
        self._user = user
        self._messages = messages
        self._opened = False
        self._calls: dict[str, ToolCall] = {}

    def get_init_state(self, message_history: Any = None) -> None:
        """Keep no state; the user was told its scenario when it was made."""

    def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
        """Let the user open the dialogue, answer the agent or read its tools' replies.

        Raises:
            InfrastructureError: the user returned neither text nor a tool call, or its backend failed for good.
        """
        if not self._opened:
            self._opened = True
            return self._spoken(UserMove(message=self._user.open())), state
        parts = getattr(message, "tool_messages", None) or [message]
        return self._spoken(self._user.act([to_message(part, self._calls) for part in parts])), state

    def set_seed(self, seed: int) -> None:
        """Ignore the seed; the user got it when it was made."""

    def _spoken(self, move: UserMove) -> Any:
        text, calls = move.message.content, []
        if not (text.strip() or move.message.tool_calls):
            raise InfrastructureError("the user returned an empty message; it must speak or call one of its tools")
        for call in move.message.tool_calls:
            identity = f"user_{len(self._calls)}"
            self._calls[identity] = call
            calls.append(
                self._messages.ToolCall(id=identity, name=call.name, arguments=dict(call.arguments), requestor="user")
            )
        if calls:
            return self._messages.UserMessage(role="user", tool_calls=calls)
        if move.stops and not any(word in text for word in STOP_WORDS):
            text = f"{text} {STOP_WORDS[0]}"
        return self._messages.UserMessage(role="user", content=text)


def to_message(message: Any, calls: Mapping[str, ToolCall]) -> Message:
    """Translate one of the package's messages; stop words are taken out of the text.

    Args:
        message: an assistant, user or tool message.
        calls: the package's tool-call id to the call as its side made it, to label replies.
    """
    text = message.content or ""
    if message.role == "tool":
        call = calls.get(message.id)
        return Message(
            role=Role.TOOL,
            content=text,
            name=call.name if call else None,
            call_id=call.call_id if call else message.id,
        )
    if message.role == "user":
        for word in STOP_WORDS:
            text = text.replace(word, "")
    return Message(
        role=Role(message.role),
        content=text.strip(),
        tool_calls=tuple(
            calls.get(call.id) or ToolCall(name=call.name, arguments=call.arguments, call_id=call.id)
            for call in message.tool_calls or ()
        ),
    )
