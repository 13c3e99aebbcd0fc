"""The harmony format of gpt-oss and of the tiny policies shaped like it.

``style="compact"`` spends as few tokens as it can and is what the embedded policies learn. ``style="full"``
is what the released gpt-oss models were trained on: a system message with knowledge cutoff, reasoning effort
and valid channels, and a developer message with the policy as instructions and the tools as a TypeScript
namespace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from sinkflex.chat.actions import check_parses_back, compact_json
from sinkflex.chat.parsing import ActionFormat
from sinkflex.chat.protocol import Piece, Tokenizer, assemble, control_ids, end_of_text_ids
from sinkflex.chat.typescript import tool_namespace
from sinkflex.errors import ChatError, unknown_name
from sinkflex.types import Message, Role, ToolSchema

HarmonyStyle: TypeAlias = Literal["compact", "full"]
ReasoningEffort: TypeAlias = Literal["low", "medium", "high"]

_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
_CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
_TOOL_CHANNEL = "Calls to these tools must go to the commentary channel: 'functions'."


class HarmonyRenderer:
    """Renders harmony over a tokenizer that has its control tokens.

    A turn that was sampled ends in ``<|return|>`` or ``<|call|>`` and stays so; a harmony library that
    renders the history anew would write ``<|end|>`` for the former and drop earlier analysis. That would
    change sampled tokens.
    """

    name = "harmony"
    stop_ids: frozenset[int]

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        style: HarmonyStyle = "compact",
        reasoning_effort: ReasoningEffort = "medium",
        current_date: str | None = None,
        knowledge_cutoff: str = "2024-06",
    ) -> None:
        """Look up the control tokens.

        Args:
            tokenizer: has ``<|start|> <|channel|> <|message|> <|end|> <|call|> <|return|>``; ``full`` also
                wants ``<|constrain|>``.
            style: ``"compact"`` for the embedded policies, ``"full"`` for released gpt-oss models.
            reasoning_effort: stated in the system message (``full`` only).
            current_date: ``YYYY-MM-DD`` for the system message, None leaves the line out so that a run does
                not depend on the day (``full`` only).
            knowledge_cutoff: ``YYYY-MM`` for the system message (``full`` only).

        Raises:
            ChatError: a control token is missing, or ``style`` or ``reasoning_effort`` is unknown.
        """
        if style not in ("compact", "full"):
            raise ChatError(unknown_name("harmony style", style, ("compact", "full")))
        if reasoning_effort not in ("low", "medium", "high"):
            raise ChatError(unknown_name("reasoning effort", reasoning_effort, ("low", "medium", "high")))
        self._tokenizer = tokenizer
        self._full = style == "full"
        self._start, self._channel, self._message, self._end, self._call, self._return = control_ids(
            tokenizer, _TOKENS, renderer=self.name
        )
        self._constrain: tuple[Piece, ...] = ()
        if self._full:
            self._constrain = (" ", *control_ids(tokenizer, ("<|constrain|>",), renderer=self.name), "json")
        self.stop_ids = frozenset((self._call, self._return, *end_of_text_ids(tokenizer)))
        date = "" if current_date is None else f"\nCurrent date: {current_date}"
        self._preamble = (
            f"{_IDENTITY}\nKnowledge cutoff: {knowledge_cutoff}{date}\n\nReasoning: {reasoning_effort}\n\n{_CHANNELS}"
        )

    def prompt(self, *, system: str, tools: Sequence[ToolSchema], messages: Sequence[Message]) -> list[int]:
        """Render the start of an episode; see ``Renderer.prompt``."""
        head = self._full_head(system, tools) if self._full else self._compact_head(system, tools)
        return assemble(self._tokenizer, [*head, *self._body(messages), *self._generation_prompt()])

    def observation(self, messages: Sequence[Message], *, last_id: int) -> list[int]:
        """Render what came back after a sampled action; see ``Renderer.observation``."""
        closing: list[Piece] = [] if last_id in self.stop_ids else [self._end]
        return assemble(self._tokenizer, [*closing, *self._body(messages), *self._generation_prompt()])

    def action_text(self, ids: Sequence[int]) -> str:
        """Return sampled ids as raw text, control tokens included."""
        return self._tokenizer.decode(ids)

    def action_ids(self, message: Message) -> list[int]:
        """Render an assistant message as it would have been sampled; see ``Renderer.action_ids``."""
        ids = assemble(self._tokenizer, self._action(message))
        check_parses_back(message, self.action_text(ids), action_format=ActionFormat.HARMONY)
        return ids

    def _generation_prompt(self) -> list[Piece]:
        return [self._start, "assistant"]

    def _framed(self, header: str, body: str) -> list[Piece]:
        return [self._start, header, self._message, body, self._end]

    def _compact_head(self, system: str, tools: Sequence[ToolSchema]) -> list[Piece]:
        head = self._framed("system", system)
        if tools:
            lines = [f"{tool.name}({', '.join(tool.parameters.get('properties', {}))})" for tool in tools]
            head += self._framed("developer", "\n".join(["# Tools", *lines]))
        return head

    def _full_head(self, system: str, tools: Sequence[ToolSchema]) -> list[Piece]:
        head = self._framed("system", f"{self._preamble}\n{_TOOL_CHANNEL}" if tools else self._preamble)
        sections = [f"# Instructions\n\n{system}"] if system else []
        if tools:
            sections.append(f"# Tools\n\n{tool_namespace('functions', tools)}")
        return head + (self._framed("developer", "\n\n".join(sections)) if sections else [])

    def _body(self, messages: Iterable[Message]) -> list[Piece]:
        pieces: list[Piece] = []
        for message in messages:
            if message.role is Role.ASSISTANT:
                # Said before the policy's first action, so it is history and not a sampled turn.
                action = self._action(message)
                ending = self._call if message.tool_calls else self._end
                pieces += [*self._generation_prompt(), *action[:-1], ending]
            elif message.role is Role.TOOL:
                pieces += self._tool_reply(message)
            else:
                pieces += self._framed(str(message.role), message.content)
        return pieces

    def _tool_reply(self, message: Message) -> list[Piece]:
        if not message.name:
            raise ChatError("a tool message has no name; harmony writes it as the reply's author, so set Message.name")
        author: list[Piece] = [self._start, f"functions.{message.name} to=assistant", self._channel, "commentary"]
        return [*author, self._message, message.content, self._end]

    def _action(self, message: Message) -> list[Piece]:
        pieces: list[Piece] = []
        if message.reasoning:
            pieces += [self._channel, "analysis", self._message, message.reasoning.strip(), self._end]
            pieces += self._generation_prompt()
        if message.content or not message.tool_calls:
            return [*pieces, self._channel, "final", self._message, message.content.strip(), self._return]
        for number, call in enumerate(message.tool_calls):
            if number:
                pieces += self._generation_prompt()
            recipient = f" to=functions.{call.name}"
            if self._full:
                pieces += [recipient, self._channel, "commentary", *self._constrain]
            else:
                pieces += [self._channel, "commentary" + recipient]
            pieces += [self._message, compact_json(dict(call.arguments)), self._call]
        return pieces
