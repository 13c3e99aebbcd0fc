"""The Hermes format of Qwen and its kin: ChatML turns, tool calls as JSON between ``<tool_call>`` marks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from sinkflex.chat.actions import check_parses_back, spaced_json
from sinkflex.chat.parsing import ActionFormat
from sinkflex.chat.protocol import Piece, Tokenizer, assemble, control_ids, end_of_text_ids
from sinkflex.types import Message, Role, ToolSchema

_TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within ",
    " XML tags:\n",
    '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
)


class HermesRenderer:
    """Renders ChatML over a tokenizer that has ``<|im_start|>`` and ``<|im_end|>``.

    ``<tool_call>``, ``<tool_response>`` and ``<think>`` are control tokens where the vocabulary has them and
    ordinary text where it has not.
    """

    name = "hermes"
    stop_ids: frozenset[int]

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool = True) -> None:
        """Look up the control tokens.

        Args:
            tokenizer: has ``<|im_start|>`` and ``<|im_end|>``.
            thinking: False ends every generation prompt with an empty ``<think>`` block, which is how Qwen3
                is told to answer at once.

        Raises:
            ChatError: a control token is missing.
        """
        self._tokenizer = tokenizer
        self._start, self._end = control_ids(tokenizer, ("<|im_start|>", "<|im_end|>"), renderer=self.name)
        self.stop_ids = frozenset((self._end, *end_of_text_ids(tokenizer)))
        self._no_thinking: list[Piece] = []
        if not thinking:
            self._no_thinking = [self._mark("<think>"), "\n\n", self._mark("</think>"), "\n\n"]

    def prompt(self, *, system: str, tools: Sequence[ToolSchema], messages: Sequence[Message]) -> list[int]:
        """Render the start of an episode; see ``Renderer.prompt``."""
        head = [self._start, "system\n", *self._system(system, tools), self._end, "\n"] if system or tools else []
        return assemble(self._tokenizer, [*head, *self._body(messages), *self._generation_prompt()])

    def observation(self, messages: Sequence[Message], *, last_id: int) -> list[int]:
        """Render what came back after a sampled action; see ``Renderer.observation``."""
        closing: list[Piece] = ["\n"] if last_id in self.stop_ids else [self._end, "\n"]
        return assemble(self._tokenizer, [*closing, *self._body(messages), *self._generation_prompt()])

    def action_text(self, ids: Sequence[int]) -> str:
        """Return sampled ids as raw text, control tokens included."""
        return self._tokenizer.decode(ids)

    def action_ids(self, message: Message) -> list[int]:
        """Render an assistant message as it would have been sampled; see ``Renderer.action_ids``."""
        ids = assemble(self._tokenizer, [*self._action(message), self._end])
        check_parses_back(message, self.action_text(ids), action_format=ActionFormat.HERMES)
        return ids

    def _mark(self, tag: str) -> Piece:
        token_id = self._tokenizer.token_to_id(tag)
        return tag if token_id is None else token_id

    def _generation_prompt(self) -> list[Piece]:
        return [self._start, "assistant\n", *self._no_thinking]

    def _system(self, system: str, tools: Sequence[ToolSchema]) -> list[Piece]:
        if not tools:
            return [system]
        opening, closing = self._mark("<tool_call>"), self._mark("</tool_call>")
        signatures = "".join("\n" + json.dumps(tool.to_openai(), ensure_ascii=False) for tool in tools)
        before, between, example = _TOOLS_AFTER
        head = f"{system}\n\n{_TOOLS_BEFORE}" if system else _TOOLS_BEFORE
        return [head + signatures + before, opening, closing, between, opening, example, closing]

    def _body(self, messages: Iterable[Message]) -> list[Piece]:
        pieces: list[Piece] = []
        in_replies = False
        for message in messages:
            is_reply = message.role is Role.TOOL
            if in_replies and not is_reply:
                pieces += [self._end, "\n"]
            if is_reply:
                # Replies to one action share a single user turn.
                pieces += [] if in_replies else [self._start, "user"]
                opening, closing = self._mark("<tool_response>"), self._mark("</tool_response>")
                pieces += ["\n", opening, "\n" + message.content + "\n", closing]
            else:
                content = self._action(message) if message.role is Role.ASSISTANT else [message.content]
                pieces += [self._start, f"{message.role}\n", *content, self._end, "\n"]
            in_replies = is_reply
        return [*pieces, self._end, "\n"] if in_replies else pieces

    def _action(self, message: Message) -> list[Piece]:
        pieces: list[Piece] = []
        if message.reasoning:
            thought = f"\n{message.reasoning.strip()}\n"
            pieces += [self._mark("<think>"), thought, self._mark("</think>"), "\n\n"]
        pieces.append(message.content.strip())
        for number, call in enumerate(message.tool_calls):
            pieces += ["\n"] if number else []
            body = spaced_json({"name": call.name, "arguments": dict(call.arguments)})
            pieces += [self._mark("<tool_call>"), f"\n{body}\n", self._mark("</tool_call>")]
        return pieces
