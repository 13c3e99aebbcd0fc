"""A person at a terminal plays a side; the line syntax is the same for both sides.

``/tool name=value`` calls a tool, anything else is said. Values are words or quoted text; for arguments that are no
strings they are JSON.
"""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from sinkflex.envs.protocol import Domain, Task, User, UserMove
from sinkflex.envs.render import describe_messages, describe_tools
from sinkflex.errors import ToolError, unknown_name
from sinkflex.types import JSONObject, JSONValue, Message, Role, ToolCall, ToolSchema

STOP_LINE = "/stop"
"""What a person types to end the dialogue as the user."""


def read_line(line: str, tools: Sequence[ToolSchema]) -> ToolCall | str:
    """Read what a person typed.

    Args:
        line: a ``/tool name=value`` call, or text.
        tools: what the person may call.

    Returns:
        The call, or the text stripped.

    Raises:
        ToolError: the call cannot be read, or there is no such tool; the person may try again.
    """
    line = line.strip()
    if not line.startswith("/"):
        return line
    try:
        name, *pairs = shlex.split(line[1:])
    except ValueError as error:
        raise ToolError(f"cannot read {line!r}: {error}; write /tool name=value") from error
    schemas = {tool.name: tool for tool in tools}
    if name not in schemas:
        raise ToolError(unknown_name("tool", name, schemas))
    properties: JSONObject = schemas[name].parameters.get("properties", {})
    arguments: JSONObject = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ToolError(f"{pair!r} is no argument; write name=value, for example {key or 'name'}=...")
        arguments[key] = _read_value(value, properties.get(key, {}))
    return ToolCall(name=name, arguments=arguments)


def _read_value(value: str, schema: JSONObject) -> JSONValue:
    if schema.get("type") == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def person_user(
    *, ask: Callable[[str], str] = input, show: Callable[[str], None] = print
) -> Callable[[Domain[Any], Task, random.Random], User]:
    """Return the factory of users played by a person.

    Args:
        ask: shows a prompt and returns a line; it may raise ``EOFError``, which ends the dialogue.
        show: prints what the person reads.
    """

    def build(domain: Domain[Any], task: Task, rng: random.Random) -> User:
        return PersonUser(ask, show, brief=domain.user_prompt(task), tools=domain.user_tools.schemas)

    return build


class PersonUser:
    """Asks a person for the user's moves.

    Args:
        ask: shows a prompt and returns a line.
        show: prints what the person reads.
        brief: who the user is and what it wants.
        tools: what the user may call.
    """

    def __init__(
        self, ask: Callable[[str], str], show: Callable[[str], None], *, brief: str, tools: Sequence[ToolSchema]
    ) -> None:
        self._ask = ask
        self._show = show
        self._tools = tools
        held = f"Your tools, called as /tool name=value:\n{describe_tools(tools)}" if tools else "You have no tools."
        show(f"You are the user.\n{brief}\n\n{held}")
        show(f"{STOP_LINE} ends the dialogue; put it after your last words.")

    def open(self) -> Message:
        """Return the person's opening words."""
        return self._next(opening=True).message

    def act(self, incoming: Sequence[Message]) -> UserMove:
        """Show what came in and return the person's next move; see ``User.act``."""
        for message in incoming:
            spoken = message.role is Role.ASSISTANT
            self._show(f"agent: {message.content}" if spoken else describe_messages([message]))
        return self._next(opening=False)

    def metrics(self) -> dict[str, float]:
        """Nothing to count."""
        return {}

    def close(self) -> None:
        """Nothing to release."""

    def _next(self, *, opening: bool) -> UserMove:
        while True:
            try:
                line = self._ask("you> ").strip()
            except EOFError:
                return UserMove(message=Message(role=Role.USER, content="bye"), stops=not opening)
            stops = line.endswith(STOP_LINE)
            line = line.removesuffix(STOP_LINE).strip()
            if not line and not stops:
                continue
            try:
                said = read_line(line, () if opening else self._tools)
            except ToolError as error:
                self._show(str(error))
                continue
            if isinstance(said, ToolCall):
                return UserMove(message=Message(role=Role.USER, tool_calls=(said,)))
            return UserMove(message=Message(role=Role.USER, content=said or "bye"), stops=stops)
