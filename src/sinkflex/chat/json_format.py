"""A format for any tokenizer with an end token: a role on one line, a JSON value on the next.

::

    system
    "Be brief."
    user
    "Hi"
    assistant
    {"name":"get_line","arguments":{"line_id":"4783"}}<end>
    tool
    {"name":"get_line","content":"{\\"on\\":true}"}
    assistant

JSON escapes line ends, so no text from a user or a tool can open a turn of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sinkflex.chat.actions import call_json, check_parses_back, compact_json
from sinkflex.chat.parsing import ActionFormat
from sinkflex.chat.protocol import Piece, Tokenizer, assemble
from sinkflex.errors import ChatError
from sinkflex.types import Message, Role, ToolSchema


class JSONRenderer:
    """Renders messages as role lines and JSON lines.

    An action is ``{"content": ...}``, a call, or a list of calls. Reasoning has no place in this format.
    """

    name = "json"

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Find the end token.

        Args:
            tokenizer: any whose ``eos_id`` is set.

        Raises:
            ChatError: the tokenizer names no end token.
        """
        if tokenizer.eos_id is None:
            raise ChatError(
                "the tokenizer names no end token, which the 'json' renderer stops at; pass eos_token to FastTokenizer"
            )
        self._tokenizer = tokenizer
        self._eos = tokenizer.eos_id
        self.stop_ids = frozenset({self._eos})

    def prompt(self, *, system: str, tools: Sequence[ToolSchema], messages: Sequence[Message]) -> list[int]:
        """Render the start of an episode; see ``Renderer.prompt``."""
        head = f"system\n{compact_json(system)}\n"
        if tools:
            signatures = [
                {"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in tools
            ]
            head += f"tools\n{compact_json(signatures)}\n"
        return assemble(self._tokenizer, [head, *self._body(messages), "assistant\n"])

    def observation(self, messages: Sequence[Message], *, last_id: int) -> list[int]:
        """Render what came back after a sampled action; see ``Renderer.observation``."""
        closing: list[Piece] = ["\n"] if last_id in self.stop_ids else [self._eos, "\n"]
        return assemble(self._tokenizer, [*closing, *self._body(messages), "assistant\n"])

    def action_text(self, ids: Sequence[int]) -> str:
        """Return sampled ids as raw text without the end token, whose spelling differs."""
        kept = list(ids[:-1] if ids and ids[-1] == self._eos else ids)
        return self._tokenizer.decode(kept)

    def action_ids(self, message: Message) -> list[int]:
        """Render an assistant message as it would have been sampled; see ``Renderer.action_ids``."""
        ids = assemble(self._tokenizer, [_action(message), self._eos])
        check_parses_back(message, self.action_text(ids), action_format=ActionFormat.JSON)
        return ids

    def _body(self, messages: Iterable[Message]) -> list[Piece]:
        pieces: list[Piece] = []
        for message in messages:
            if message.role is Role.ASSISTANT:
                pieces += [f"assistant\n{_action(message)}", self._eos, "\n"]
            elif message.role is Role.TOOL:
                reply = {"name": message.name, "content": message.content}
                pieces.append(f"tool\n{compact_json(reply)}\n")
            else:
                pieces.append(f"{message.role}\n{compact_json(message.content)}\n")
        return pieces


def _action(message: Message) -> str:
    if not message.tool_calls or message.content:
        return compact_json({"content": message.content.strip()})
    calls = [call_json(call) for call in message.tool_calls]
    return calls[0] if len(calls) == 1 else f"[{','.join(calls)}]"
