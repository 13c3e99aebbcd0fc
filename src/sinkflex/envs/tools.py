"""Tools as typed functions: the schema comes from signature and docstring, the checks from the types.

A tool's first parameter is the world; the others are its JSON arguments::

    @tool(side=Side.AGENT, writes=True)
    def resume_line(world: World, line_id: str) -> JSONObject:
        \"\"\"Resume a suspended line.

        Args:
            line_id: four digits.
        \"\"\"
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, TypeAlias

from sinkflex.envs.world import World
from sinkflex.errors import EnvError, ToolError, unknown_name
from sinkflex.types import JSONObject, JSONValue, StopReason, ToolCall, ToolSchema

Checker: TypeAlias = Callable[[JSONValue], bool]

MAX_ECHO_CHARS = 60
"""How much of a refused value is quoted back, so that a huge argument does not flood the context."""


class Side(StrEnum):
    """Who holds a tool."""

    AGENT = "agent"
    USER = "user"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """One declared tool.

    Attributes:
        name: the function's name.
        side: who may call it.
        writes: whether it may change the world.
        stops: the reason with which a successful call ends the episode, or None.
        schema: what the model is told.
        function: the implementation, ``function(world, **arguments)``.
        parameters: argument name to (type in words, check, whether required).
    """

    name: str
    side: Side
    writes: bool
    stops: StopReason | None
    schema: ToolSchema
    function: Callable[..., JSONValue]
    parameters: Mapping[str, tuple[str, Checker, bool]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolReply:
    """What came of a call.

    Attributes:
        text: what the caller reads: compact JSON, ``{"error": ...}`` on failure.
        result: the tool's own result, None on failure.
        error: why it failed, None on success.
        invalid: True when the name or the arguments did not fit the schema, so the tool never ran.
        tool: the tool called, None when there is no such tool.
    """

    text: str
    result: JSONValue = None
    error: str | None = None
    invalid: bool = False
    tool: Tool | None = None


def tool(*, side: Side, writes: bool, stops: StopReason | None = None) -> Callable[[Callable[..., JSONValue]], Tool]:
    """Declare a function as a tool.

    Args:
        side: who holds it.
        writes: whether it may change the world.
        stops: for a hand-off tool, the reason with which it ends the episode.

    Returns:
        A decorator that turns the function into a ``Tool``.

    Raises:
        EnvError: no docstring, no world parameter, or an argument whose type has no JSON schema.
    """

    def declare(function: Callable[..., JSONValue]) -> Tool:
        name = function.__name__
        doc = inspect.getdoc(function)
        if not doc:
            raise EnvError(f"tool {name!r} has no docstring; its first paragraph is what the model reads")
        hints = typing.get_type_hints(function)
        arguments = list(inspect.signature(function).parameters.values())
        if not arguments or hints.get(arguments[0].name) is not World:
            raise EnvError(f"tool {name!r} must take the World as its first parameter")
        described = _argument_docs(doc)
        properties: JSONObject = {}
        parameters: dict[str, tuple[str, Checker, bool]] = {}
        for argument in arguments[1:]:
            schema, words, check = _describe(hints.get(argument.name), where=f"{name}({argument.name})")
            if argument.name in described:
                schema = {**schema, "description": described[argument.name]}
            properties[argument.name] = schema
            parameters[argument.name] = (words, check, argument.default is inspect.Parameter.empty)
        required = [key for key, (_, _, needed) in parameters.items() if needed]
        return Tool(
            name=name,
            side=side,
            writes=writes,
            stops=stops,
            schema=ToolSchema(
                name=name,
                description=" ".join(doc.split("\n\n", 1)[0].split()),
                parameters={
                    "type": "object",
                    "properties": properties,
                    "required": required,
                    "additionalProperties": False,
                },
            ),
            function=function,
            parameters=parameters,
        )

    return declare


class Toolkit:
    """The tools of one side.

    Args:
        side: who holds them.
        tools: declared with ``tool``; every one must be of this side and its name unique.

    Raises:
        EnvError: a tool of the other side, or a name used twice.
    """

    def __init__(self, side: Side, tools: Iterable[Tool]) -> None:
        self.side = side
        self.tools: dict[str, Tool] = {}
        for item in tools:
            if item.side is not side:
                raise EnvError(f"tool {item.name!r} belongs to the {item.side}, not to the {side} toolkit")
            if item.name in self.tools:
                raise EnvError(f"tool {item.name!r} is declared twice in the {side} toolkit")
            self.tools[item.name] = item
        self._schemas = json.dumps([item.schema.to_openai()["function"] for item in self.tools.values()])

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """Fresh schemas in declaration order; callers may change them."""
        return tuple(ToolSchema(**record) for record in json.loads(self._schemas))

    def call(self, world: World, call: ToolCall) -> ToolReply:
        """Run one call; a refused or failed one leaves the world as it was.

        Raises:
            EnvError: the tool itself broke (any exception but ToolError) or returned what JSON cannot hold.
        """
        item = self.tools.get(call.name)
        if item is None:
            return _failure(unknown_name("tool", _echo(call.name), self.tools), invalid=True)
        refusal = _refusal(item, call.arguments)
        if refusal is not None:
            return _failure(refusal, invalid=True, item=item)
        before = world.snapshot()
        try:
            result = item.function(world, **call.arguments)
        except ToolError as error:
            world.restore(before)
            return _failure(str(error), item=item)
        except Exception as error:
            world.restore(before)
            raise EnvError(f"tool {item.name!r} broke on {_echo(dict(call.arguments))}: {error!r}") from error
        if not item.writes and world.writes != before.position:
            raise EnvError(f"tool {item.name!r} is declared writes=False but changed the world")
        try:
            text = json.dumps(result, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise EnvError(f"tool {item.name!r} returned {_echo(result)}, which is not JSON: {error}") from error
        return ToolReply(text=text, result=result, tool=item)


def _failure(reason: str, *, invalid: bool = False, item: Tool | None = None) -> ToolReply:
    text = json.dumps({"error": reason}, separators=(",", ":"))
    return ToolReply(text=text, error=reason, invalid=invalid, tool=item)


def _refusal(item: Tool, arguments: Mapping[str, JSONValue]) -> str | None:
    for name, value in arguments.items():
        known = item.parameters.get(name)
        if known is None:
            return f"{item.name}: {unknown_name('argument', _echo(name), item.parameters)}"
        if not known[1](value):
            return f"{item.name}: argument {name!r} must be {known[0]}, got {_echo(value)}"
    for name, (_, _, required) in item.parameters.items():
        if required and name not in arguments:
            return f"{item.name}: argument {name!r} is missing"
    return None


def _echo(value: JSONValue) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_ECHO_CHARS else text[: MAX_ECHO_CHARS - 3] + "..."


def _argument_docs(doc: str) -> dict[str, str]:
    """Read the ``Args:`` section of a Google-style docstring."""
    _, _, section = doc.partition("Args:\n")
    described: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if not line.strip() or not line.startswith("    "):
            break
        head, colon, text = line.strip().partition(": ")
        if colon and head.isidentifier() and not line.startswith("     "):
            name = head
            described[name] = text
        elif name:
            described[name] += " " + line.strip()
    return described


_PLAIN: dict[Any, tuple[str, Checker]] = {
    str: ("string", lambda value: isinstance(value, str)),
    bool: ("boolean", lambda value: isinstance(value, bool)),
    int: ("integer", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    float: ("number", lambda value: isinstance(value, int | float) and not isinstance(value, bool)),
}


def _describe(hint: Any, *, where: str) -> tuple[JSONObject, str, Checker]:
    """Return the JSON schema of a type hint, its name in words and its check."""
    if hint in _PLAIN:
        word, check = _PLAIN[hint]
        return {"type": word}, f"a {word}", check
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        choices = list(inner)
        kinds = {type(choice) for choice in choices}
        return (
            {"type": _PLAIN[kinds.pop()][0], "enum": choices} if len(kinds) == 1 else {"enum": choices},
            "one of " + ", ".join(map(repr, choices)),
            lambda value: any(value == choice and type(value) is type(choice) for choice in choices),
        )
    if origin is list:
        schema, words, check_item = _describe(inner[0], where=where)
        return (
            {"type": "array", "items": schema},
            f"a list, each item {words}",
            lambda value: isinstance(value, list) and all(check_item(item) for item in value),
        )
    if origin in (typing.Union, types.UnionType) and type(None) in inner and len(inner) == 2:
        schema, words, check_some = _describe(next(kind for kind in inner if kind is not type(None)), where=where)
        return schema, f"{words} or null", lambda value: value is None or check_some(value)
    raise EnvError(f"{where} has type {hint!r}; use str, int, float, bool, Literal, list[...] or one of them | None")
