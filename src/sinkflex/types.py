"""The words every layer shares: messages, tool calls and why an episode ended.

Nothing here imports anything but the standard library, so environments, chat formats and rollouts can pass
these objects to each other without depending on one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

JSONValue: TypeAlias = Any
"""A value that ``json.dumps`` accepts: None, bool, int, float, str, list or dict of these."""

JSONObject: TypeAlias = dict[str, JSONValue]
"""A JSON object, for example a tool's arguments or an OpenAI-style tool schema."""


class Role(StrEnum):
    """Who a message is from. ``USER`` and ``ASSISTANT`` are the two acting sides; ``TOOL`` replies to a call."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class StopReason(StrEnum):
    """Why an episode ended. The first three terminate it (the world decided); the others truncate it (a budget did)."""

    USER_STOP = "user_stop"
    HAND_OFF = "hand_off"
    SUCCESS = "success"
    MAX_STEPS = "max_steps"
    MAX_INVALID_ACTIONS = "max_invalid_actions"
    CONTEXT_LENGTH = "context_length"
    EPISODE_TIMEOUT = "episode_timeout"

    @property
    def is_termination(self) -> bool:
        """True when the world ended the episode, False when a budget cut it short."""
        return self in (StopReason.USER_STOP, StopReason.HAND_OFF, StopReason.SUCCESS)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One request to run a tool.

    Attributes:
        name: the tool's declared name.
        arguments: JSON object passed to it by keyword.
        call_id: pairs the call with its reply; empty when the chat format has no ids.
    """

    name: str
    arguments: Mapping[str, JSONValue] = field(default_factory=dict)
    call_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One chat message.

    Attributes:
        role: who speaks.
        content: text; for ``Role.TOOL`` the tool's reply as text (JSON where the tool returns structure).
        tool_calls: calls the assistant (or user) makes in this message.
        name: for ``Role.TOOL`` the tool that replied, otherwise None.
        call_id: for ``Role.TOOL`` the id of the call answered; empty when the format has none.
        reasoning: hidden thinking; never shown to the other side.
    """

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    call_id: str = ""
    reasoning: str | None = None

    def to_dict(self) -> JSONObject:
        """Return a JSON-ready dict that omits empty fields; ``from_dict`` restores an equal message."""
        record: JSONObject = {"role": str(self.role), "content": self.content}
        if self.tool_calls:
            record["tool_calls"] = [
                {"name": call.name, "arguments": dict(call.arguments), "call_id": call.call_id}
                for call in self.tool_calls
            ]
        if self.name is not None:
            record["name"] = self.name
        if self.call_id:
            record["call_id"] = self.call_id
        if self.reasoning is not None:
            record["reasoning"] = self.reasoning
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, JSONValue]) -> Message:
        """Build a message from ``to_dict``'s output.

        Raises:
            KeyError: ``role`` is missing.
            ValueError: ``role`` is not one of ``Role``.
        """
        return cls(
            role=Role(record["role"]),
            content=record.get("content", ""),
            tool_calls=tuple(ToolCall(**call) for call in record.get("tool_calls", ())),
            name=record.get("name"),
            call_id=record.get("call_id", ""),
            reasoning=record.get("reasoning"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSchema:
    """What a model is told about a tool.

    Attributes:
        name: unique within its side's toolkit.
        description: first paragraph of the tool's docstring.
        parameters: JSON schema of the arguments (``{"type": "object", "properties": ..., "required": ...}``).
    """

    name: str
    description: str
    parameters: JSONObject

    def to_openai(self) -> JSONObject:
        """Return the ``{"type": "function", "function": {...}}`` form used by chat templates and endpoints."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.parameters,
            },
        }
