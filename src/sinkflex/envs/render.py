"""Dialogues as text, for ``render`` and for text observations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from sinkflex.envs.tools import Side
from sinkflex.types import Message, Role, ToolCall, ToolSchema


def describe_tools(schemas: Sequence[ToolSchema]) -> str:
    """Return one line a tool: name, arguments with their types, description."""
    return "\n".join(f"- {_signature(schema)}: {schema.description}" for schema in schemas)


def describe_messages(messages: Iterable[Message]) -> str:
    """Return the messages an assistant reads, one line each."""
    return "\n".join(_line(message) for message in messages)


def describe_transcript(transcript: Iterable[tuple[Side, Message]]) -> str:
    """Return a whole dialogue, with the user's own tool calls indented (the agent does not see them)."""
    return "\n".join(
        f"    [user's device] {_line(message)}" if side is Side.USER and _is_tool_talk(message) else _line(message)
        for side, message in transcript
    )


def describe_components(components: Mapping[str, float | None]) -> str:
    """Return components in one line; a vacuous one shows as a dash."""
    return " ".join(f"{name}={'-' if value is None else f'{value:g}'}" for name, value in components.items())


def _signature(schema: ToolSchema) -> str:
    required = schema.parameters.get("required", ())
    parts = [
        f"{name}{'' if name in required else '?'}: {_kind(kind)}"
        for name, kind in schema.parameters.get("properties", {}).items()
    ]
    return f"{schema.name}({', '.join(parts)})"


def _kind(schema: Mapping[str, object]) -> str:
    choices = schema.get("enum")
    if isinstance(choices, list):
        return "|".join(json.dumps(choice) for choice in choices)
    return str(schema.get("type", "any"))


def _is_tool_talk(message: Message) -> bool:
    return bool(message.tool_calls) or message.role is Role.TOOL


def _line(message: Message) -> str:
    if message.tool_calls:
        return f"{message.role} calls {', '.join(map(_call, message.tool_calls))}"
    if message.role is Role.TOOL:
        return f"tool {message.name}: {message.content}"
    return f"{message.role}: {message.content}"


def _call(call: ToolCall) -> str:
    arguments = ", ".join(f"{name}={json.dumps(value, default=repr)}" for name, value in call.arguments.items())
    return f"{call.name}({arguments})"
