"""The two seats at τ²'s table, filled by objects its orchestrator can drive without a thread.

The orchestrator asks a participant for its next message and waits. ``AgentSeat`` therefore answers with a message put
there beforehand; the environment only lets the orchestrator take the agent's turn once there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from sinkflex.errors import InfrastructureError, SinkFlexError
from sinkflex.types import Message, Role, ToolCall

STOP_WORDS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""Any of these in the user's text ends the dialogue, by τ²'s own rule."""

UserModel: TypeAlias = Callable[[Sequence[Message]], Message]
"""Plays the user: reads the dialogue as the user sees it and returns the user's next message.

It sees the agent's texts (``ASSISTANT``), its own messages (``USER``, with tool calls) and the replies to its own calls
(``TOOL``); never the agent's calls or their replies. It ends the dialogue with one of ``STOP_WORDS`` in its text.
"""


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

    def stop(self, message: Any = None, state: Any = None) -> None:
        """Nothing to release."""


class UserSeat:
    """The user's seat: a ``UserModel`` behind the interface the orchestrator expects.

    Args:
        model: plays the user.
        messages: the package's message module.
    """

    def __init__(self, model: UserModel, messages: Any) -> None:
        self._model = model
        self._messages = messages
        self.heard: list[Message] = []
        self._calls = 0

    def get_init_state(self, message_history: Any = None) -> None:
        """Start with what was already said in the task's history."""
        self.heard = [to_message(message) for message in message_history or ()]

    def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
        """Let the model speak or act.

        Raises:
            InfrastructureError: the model failed, or returned neither text nor a tool call.
        """
        self.heard.extend(to_message(part) for part in getattr(message, "tool_messages", None) or [message])
        try:
            reply = self._model(tuple(self.heard))
        except SinkFlexError:
            raise
        except Exception as error:
            raise InfrastructureError(f"the user model failed: {error!r}") from error
        if reply.role is not Role.USER or not (reply.content.strip() or reply.tool_calls):
            raise InfrastructureError(
                f"the user model must return a USER message with text or tool calls, got {reply!r}"
            )
        calls = []
        for call in reply.tool_calls:
            self._calls += 1
            calls.append(
                self._messages.ToolCall(
                    id=f"user_call_{self._calls}", name=call.name, arguments=dict(call.arguments), requestor="user"
                )
            )
        spoken = self._messages.UserMessage(
            role="user", content=None if calls else reply.content, tool_calls=calls or None
        )
        self.heard.append(to_message(spoken))
        return spoken, state

    def is_stop(self, message: Any) -> bool:
        """Return whether the text holds a stop word."""
        return message.tool_calls is None and any(word in message.content for word in STOP_WORDS)

    def set_seed(self, seed: int) -> None:
        """Ignore the seed; the model got it when it was made."""

    def stop(self, message: Any = None, state: Any = None) -> None:
        """Nothing to release."""


def to_message(message: Any, *, names: dict[str, str] | None = None, ids: dict[str, str] | None = None) -> Message:
    """Translate one of the package's messages.

    Args:
        message: an assistant, user or tool message.
        names: tool-call id to tool name, to label tool replies.
        ids: the package's tool-call id to the id the policy used.
    """
    if message.role == "tool":
        return Message(
            role=Role.TOOL,
            content=message.content or "",
            name=(names or {}).get(message.id),
            call_id=(ids or {}).get(message.id, "") if ids is not None else message.id,
        )
    return Message(
        role=Role(message.role),
        content=message.content or "",
        tool_calls=tuple(
            ToolCall(name=call.name, arguments=call.arguments, call_id=call.id) for call in message.tool_calls or ()
        ),
    )
