"""Assistant messages as text: what every renderer needs to write an action that the parser reads back."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sinkflex.chat.parsing import ActionFormat, ParsedAction, parse_action
from sinkflex.errors import ChatError
from sinkflex.types import JSONValue, Message, Role, ToolCall


def compact_json(value: JSONValue) -> str:
    """Write JSON without spaces or ASCII escapes; "<" is escaped where it could open a control token.

    Args:
        value: what ``json.dumps`` accepts.
    """
    return _escape_marks(json.dumps(value, separators=(",", ":"), ensure_ascii=False))


def spaced_json(value: JSONValue) -> str:
    """Write JSON as ``compact_json`` does, with a space after each comma and colon."""
    return _escape_marks(json.dumps(value, ensure_ascii=False))


def _escape_marks(text: str) -> str:
    for opening in ("<|", "</", "<t"):
        text = text.replace(opening, "\\u003c" + opening[1:])
    return text


def call_json(call: ToolCall) -> str:
    """Write a tool call as ``{"name":...,"arguments":{...}}``."""
    return compact_json({"name": call.name, "arguments": dict(call.arguments)})


def check_parses_back(message: Message, text: str, *, action_format: ActionFormat) -> None:
    """Make sure that an assistant message survives being written and parsed.

    Args:
        message: what was written.
        text: how it was written.
        action_format: the format it was written in.

    Raises:
        ChatError: the message is not the assistant's, is empty or mixed, or its text would be read
            differently.
    """
    if message.role is not Role.ASSISTANT:
        raise ChatError(f"message.role is {str(message.role)!r}; only an assistant's message can be an action")
    parsed = parse_action(text, action_format=action_format)
    if not isinstance(parsed, ParsedAction):
        raise ChatError(f"message cannot be written as a {action_format} action: {parsed.reason}")
    wanted = (message.content.strip(), _calls(message.tool_calls), (message.reasoning or "").strip())
    if (parsed.content, _calls(parsed.tool_calls), parsed.reasoning or "") != wanted:
        raise ChatError(
            f"message would be read back differently as a {action_format} action; its text spells the format's "
            "own marks, or its arguments are not plain JSON"
        )


def _calls(calls: Sequence[ToolCall]) -> list[tuple[str, dict[str, JSONValue]]]:
    return [(call.name, dict(call.arguments)) for call in calls]
