"""A person plays a side of an environment in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium

from sinkflex.envs.checks.play import write_action
from sinkflex.envs.protocol import say
from sinkflex.envs.render import describe_components, describe_messages, describe_tools
from sinkflex.envs.users.person import read_line
from sinkflex.errors import ToolError
from sinkflex.types import Message, Role, ToolCall, ToolSchema

HELP = "/tool name=value calls a tool (Tab completes), /help lists them, /hint shows the oracle's move, /quit leaves."


class Player:
    """Runs one episode with a person on one side.

    Args:
        env: the environment.
        show: prints what the person reads.
        ask: shows a prompt and returns a line.
    """

    def __init__(
        self, env: gymnasium.Env[str, str], *, show: Callable[[str], Any], ask: Callable[[str], str] = input
    ) -> None:
        self._env = env
        self._show = show
        self._ask = ask

    def play_agent(self, *, seed: int | None, options: dict[str, Any]) -> float | None:
        """Let the person be the agent; returns the score, or None when the person left."""
        _, info = self._env.reset(seed=seed, options=options)
        tools: Sequence[ToolSchema] = info["tools"]
        self._show(f"task {info['task_id']}\n\n{info['system']}\n\n{describe_tools(tools)}\n\n{HELP}\n")
        self._show(describe_messages(info["messages"]))
        with tool_completion([tool.name for tool in tools]):
            while True:
                message = self._read_action(tools)
                if message is None:
                    self._show("left; no score")
                    return None
                _, _, terminated, truncated, info = self._env.step(write_action(message))
                self._show(describe_messages(info["messages"]))
                if terminated or truncated:
                    return self._show_score(info)

    def play_user(self, *, seed: int | None, options: dict[str, Any]) -> float:
        """Let the person be the user, against the oracle; the environment's user must be ``person``."""
        unwrapped: Any = self._env.unwrapped
        held: Any = unwrapped.domain.user_tools
        with tool_completion([tool.name for tool in getattr(held, "schemas", held)]):
            self._env.reset(seed=seed, options=options)
            while True:
                action = unwrapped.oracle_message()
                if action.tool_calls:
                    self._show("(the agent works)")
                _, _, terminated, truncated, info = self._env.step(write_action(action))
                if terminated or truncated:
                    return self._show_score(info)

    def _read_action(self, tools: Sequence[ToolSchema]) -> Message | None:
        while True:
            try:
                line = self._ask("agent> ").strip()
            except EOFError:
                return None
            if line == "/quit":
                return None
            if line == "/help":
                self._show(f"{describe_tools(tools)}\n{HELP}")
            elif line == "/hint":
                unwrapped: Any = self._env.unwrapped
                self._show(describe_messages([unwrapped.oracle_message()]))
            elif line:
                try:
                    said = read_line(line, tools)
                except ToolError as error:
                    self._show(str(error))
                    continue
                return Message(role=Role.ASSISTANT, tool_calls=(said,)) if isinstance(said, ToolCall) else say(said)

    def _show_score(self, info: dict[str, Any]) -> float:
        self._show(f"\n{info['stop_reason']}: score {info['score']:g} ({describe_components(info['components'])})")
        for code in info.get("breaches", ()):
            unwrapped: Any = self._env.unwrapped
            self._show(f"broken rule: {unwrapped.domain.rules[code]}")
        return float(info["score"])


@contextmanager
def tool_completion(names: Sequence[str]) -> Any:
    """Complete tool names after ``/`` while the context lasts, where the terminal's line editor is available."""
    try:
        import readline
    except ImportError:  # a platform without it has no completion, and no need to fail
        yield
        return
    words = [f"/{name} " for name in sorted(names)]

    def complete(text: str, state: int) -> str | None:
        fitting = [word for word in words if word.startswith(text)]
        return fitting[state] if state < len(fitting) else None

    before = (readline.get_completer(), readline.get_completer_delims())
    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_completer(before[0])
        readline.set_completer_delims(before[1])
