"""The one strict parser of an assistant's raw text.

An action is either tool calls or one message to the user. Everything else is a ``MalformedAction`` whose
reason the model can act on: text that was meant as a tool call must never reach the user as chat because a
brace was missing. Four formats are known; ``ActionFormat.AUTO`` picks one from the text's own marks:

==========  ===========================================================================================
harmony     ``<|channel|>commentary to=functions.get_line<|message|>{"line_id":"4783"}<|call|>``
            ``<|channel|>final<|message|>Hello<|return|>``
hermes      ``<tool_call>{"name":"get_line","arguments":{"line_id":"4783"}}</tool_call><|im_end|>``
json        ``{"name":"get_line","arguments":{}}``, a list of these, or ``{"content":"Hello"}``
plain       ``Hello``
==========  ===========================================================================================

``<|start|>assistant`` at the front and the stop mark at the end are optional. In every format a message to the
user that still holds a control token, the beginnings of a tool call or a thinking mark is malformed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from sinkflex.chat.strict_json import StrictJSONError, bad_character, strict_loads
from sinkflex.types import JSONValue, ToolCall

MAX_ACTION_CHARS = 100_000
"""Longest raw text that is looked at, in characters."""

MAX_TOOL_CALLS = 32
"""Most tool calls one action may hold."""

_TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_HARMONY_MARK = re.compile(r"<\|(?:start|channel|constrain|message|end|call|return)\|>")
_HARMONY_BODY_ENDS = frozenset({"<|end|>", "<|call|>", "<|return|>"})
_END_THE_BODY = "end the body with <|end|>, <|call|> or <|return|>."
_HERMES_MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_start|>")
_STOP_MARKS = ("<|im_end|>", "<|endoftext|>", "</s>")
_LEAKS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"</?think(?:ing)?>"), "holds thinking; close it before the message, in <think>...</think>"),
    (re.compile(r"<\|[^|<>\s]{1,64}\|>"), "holds a control token; write plain text and stop"),
    (re.compile(r"<tool_call|<function="), "holds a part of a tool call; send the call alone"),
    (re.compile(r"```json"), "holds a JSON block; send a tool call alone, without a fence"),
)
"""What a message to the user must not hold; each pattern is bounded, so that a search is linear in the text."""
_CALL_KEYS = (re.compile(r"""["']name["']\s{0,8}:"""), re.compile(r"""["']arguments["']\s{0,8}:"""))


class ActionFormat(StrEnum):
    """How an assistant's raw text is to be read."""

    AUTO = "auto"
    HARMONY = "harmony"
    HERMES = "hermes"
    JSON = "json"
    PLAIN = "plain"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedAction:
    """A well-formed action: either ``content`` or ``tool_calls``, never both and never neither.

    Attributes:
        content: the message to the user, stripped of surrounding white space.
        tool_calls: calls in the order given; arguments are JSON objects, not yet checked against a schema.
        reasoning: hidden thinking, None when there was none. It must not be shown to the user.
    """

    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MalformedAction:
    """Text that is no action.

    Attributes:
        reason: one sentence that says what is wrong and what to send instead.
    """

    reason: str


class _Malformed(Exception):
    """Carries the reason from where it is found to ``parse_action``."""


def parse_action(text: str, *, action_format: ActionFormat = ActionFormat.AUTO) -> ParsedAction | MalformedAction:
    """Read an assistant's raw text.

    Args:
        text: what was sampled, special tokens included, or what a person typed.
        action_format: the format to insist on; ``AUTO`` decides by the text's own marks.

    Returns:
        The action, or why there is none. No string makes this function raise.
    """
    try:
        if len(text) > MAX_ACTION_CHARS:
            raise _Malformed(f"The action has {len(text)} characters; send at most {MAX_ACTION_CHARS}.")
        found = bad_character(text)
        if found is not None:
            raise _Malformed(f"The action holds the control character {found}; send plain text.")
        chosen = _detect(text) if action_format is ActionFormat.AUTO else action_format
        return _checked(_PARSERS[chosen](text))
    except _Malformed as problem:
        return MalformedAction(reason=str(problem))


def _detect(text: str) -> ActionFormat:
    if _HARMONY_MARK.search(text):
        return ActionFormat.HARMONY
    if any(mark in text for mark in _HERMES_MARKS):
        return ActionFormat.HERMES
    if text.lstrip()[:1] in ("{", "["):
        return ActionFormat.JSON
    return ActionFormat.PLAIN


def _checked(action: ParsedAction) -> ParsedAction:
    if action.content and action.tool_calls:
        raise _Malformed("The action mixes a message to the user with tool calls; send one now, the other next turn.")
    if not action.content and not action.tool_calls:
        raise _Malformed("The action is empty; call a tool or write a message to the user.")
    if len(action.tool_calls) > MAX_TOOL_CALLS:
        raise _Malformed(f"The action makes {len(action.tool_calls)} calls; make at most {MAX_TOOL_CALLS}.")
    _refuse_leaks(action.content)
    return action


def _refuse_leaks(content: str) -> None:
    """Refuse a message that holds what was meant for the machine, not for the user."""
    for pattern, problem in _LEAKS:
        if pattern.search(content):
            raise _Malformed(f"The message to the user {problem}.")
    if "{" in content and all(key.search(content) for key in _CALL_KEYS):
        raise _Malformed("The message to the user holds a tool call; send the call alone, without text.")


def _without_stop(text: str) -> str:
    text = text.strip()
    for mark in _STOP_MARKS:
        text = text.removesuffix(mark).rstrip()
    return text


def _parse_plain(text: str) -> ParsedAction:
    reasoning, rest = _split_thinking(_without_stop(text))
    return ParsedAction(content=rest.strip(), reasoning=reasoning)


# --- JSON -------------------------------------------------------------------------------------------------


def _load(text: str, *, what: str) -> JSONValue:
    try:
        return strict_loads(text)
    except StrictJSONError as error:
        raise _Malformed(f"{what} {error}; send complete, valid JSON.") from None


def _tool_name(name: JSONValue) -> str:
    if not isinstance(name, str) or _TOOL_NAME.fullmatch(name) is None:
        raise _Malformed(f"{str(name)[:40]!r} is not a tool name; use the name of a tool you were given.")
    return name


def _call_from(record: JSONValue, *, what: str) -> ToolCall:
    if not isinstance(record, dict):
        raise _Malformed(f'{what} is not a JSON object; send {{"name": "TOOL", "arguments": {{...}}}}.')
    unknown = sorted(record.keys() - {"name", "arguments"})
    if unknown:
        raise _Malformed(
            f'{what} has the unknown key {unknown[0][:40]!r}; use "name" and "arguments" (or "content" alone).'
        )
    missing = sorted({"name", "arguments"} - record.keys())
    if missing:
        raise _Malformed(f'{what} lacks {missing[-1]!r}; send {{"name": "TOOL", "arguments": {{...}}}}.')
    arguments = record["arguments"]
    if not isinstance(arguments, dict):
        raise _Malformed('The "arguments" are not a JSON object; send {"key": value}, or {} for none.')
    return ToolCall(name=_tool_name(record["name"]), arguments=arguments)


def _parse_json(text: str) -> ParsedAction:
    body = _without_stop(text)
    value = _load(body, what="The action") if body else {}
    if isinstance(value, list):
        calls = tuple(_call_from(item, what="A tool call in the list") for item in value)
        return ParsedAction(tool_calls=calls)
    if isinstance(value, dict) and (not value or value.keys() == {"content"}):
        content = value.get("content", "")
        if not isinstance(content, str):
            raise _Malformed('The "content" is not a string; send {"content": "text to the user"}.')
        return ParsedAction(content=content.strip())
    return ParsedAction(tool_calls=(_call_from(value, what="The tool call"),))


# --- Hermes -----------------------------------------------------------------------------------------------


def _split_thinking(text: str) -> tuple[str | None, str]:
    """Split ``<think>..</think>`` off the front; the opening mark may stand in the prompt instead."""
    head, closing, rest = text.partition("</think>")
    if not closing:
        if "<think>" in text:
            raise _Malformed("The action opens <think> and never closes it; write </think> and then act.")
        return None, text
    thought = head.strip().removeprefix("<think>").strip()
    if any(mark in thought or mark in rest for mark in ("<think>", "</think>")):
        raise _Malformed("The action thinks more than once; write one <think>...</think> at its start.")
    return thought or None, rest


def _parse_hermes(text: str) -> ParsedAction:
    body = _without_stop(text).removeprefix("<|im_start|>assistant")
    if "<|im_start|>" in body or "<|im_end|>" in body:
        raise _Malformed("The action goes on after its end; write one turn and stop.")
    reasoning, rest = _split_thinking(body)
    outside: list[str] = []
    calls: list[ToolCall] = []
    while rest:
        before, opening, rest = rest.partition("<tool_call>")
        outside.append(before)
        if not opening:
            break
        block, closing, rest = rest.partition("</tool_call>")
        if not closing:
            raise _Malformed("A <tool_call> is never closed; end it with </tool_call>.")
        value = _load(block, what="The text inside <tool_call>")
        calls.append(_call_from(value, what="The tool call"))
    content = "".join(outside).strip()
    if "</tool_call>" in content:
        raise _Malformed("A </tool_call> has no <tool_call> before it; write both around the JSON.")
    if content.startswith("{"):
        raise _Malformed("The action is bare JSON; write <tool_call> before it and </tool_call> after it.")
    return ParsedAction(content=content, tool_calls=tuple(calls), reasoning=reasoning)


# --- harmony ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _HarmonyMessage:
    channel: str
    recipient: str | None
    body: str


def _parse_harmony(text: str) -> ParsedAction:
    body = _without_stop(text)
    if not _HARMONY_MARK.search(body):
        raise _Malformed("The action has no channel; begin with <|channel|>final<|message|> or a tool call.")
    finals: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for message in _harmony_messages(body):
        if message.recipient is not None:
            calls.append(_harmony_call(message))
        elif message.channel == "final":
            finals.append(message.body.strip())
        elif message.body.strip():
            # A preamble on the commentary channel is not a turn of its own, so it is kept with the thinking.
            thoughts.append(message.body.strip())
    if len(finals) > 1:
        raise _Malformed("The action has more than one final message; send a single one.")
    if thoughts and not finals and not calls:
        raise _Malformed("The action only thinks; go on to the final channel or to a tool call.")
    return ParsedAction(content="".join(finals), tool_calls=tuple(calls), reasoning="\n\n".join(thoughts) or None)


def _harmony_messages(text: str) -> list[_HarmonyMessage]:
    """Split the text at its marks; headers lie before ``<|message|>``, bodies after it."""
    marks = list(_HARMONY_MARK.finditer(text))
    messages: list[_HarmonyMessage] = []
    header_start, body_start, header = 0, None, ""
    for mark in marks:
        token = mark.group()
        if token == "<|message|>":
            if body_start is not None:
                raise _Malformed(f"A message body holds {token}; {_END_THE_BODY}")
            header, body_start = text[header_start : mark.start()], mark.end()
        elif token in _HARMONY_BODY_ENDS:
            if body_start is None:
                raise _Malformed(f"{token} comes before <|message|>; write <|message|> and the text first.")
            messages.append(_harmony_message(header, text[body_start : mark.start()]))
            header_start, body_start = mark.end(), None
        elif body_start is not None:
            raise _Malformed(f"A message body holds {token}; {_END_THE_BODY}")
    if body_start is not None:
        messages.append(_harmony_message(header, text[body_start:]))
    elif text[header_start:].strip():
        raise _Malformed("The action ends inside a header; write <|message|> and the text after the channel.")
    return messages


def _harmony_message(header: str, body: str) -> _HarmonyMessage:
    role, opening, channel_part = header.partition("<|channel|>")
    if not opening:
        raise _Malformed("A message names no channel; write <|channel|> and analysis, commentary or final.")
    role_words = role.strip().removeprefix("<|start|>").removeprefix("assistant").split()
    channel_words = channel_part.replace("<|constrain|>", " ").split()
    channel = channel_words[0] if channel_words else ""
    if channel not in ("analysis", "commentary", "final"):
        raise _Malformed(f"{channel[:40]!r} is not a channel; use analysis, commentary or final.")
    rest = [*role_words, *(word for word in channel_words[1:] if word not in ("json", "code"))]
    recipients = [word.removeprefix("to=") for word in rest if word.startswith("to=")]
    strange = [word for word in rest if not word.startswith("to=")]
    if strange or len(recipients) > 1:
        shown = strange[0] if strange else f"to={recipients[1]}"
        raise _Malformed(f"The header holds {shown[:40]!r}; write the channel and, for a tool, to=functions.NAME.")
    if recipients and channel == "final":
        raise _Malformed("A tool call is on the final channel; put it on the commentary channel.")
    return _HarmonyMessage(channel=channel, recipient=recipients[0] if recipients else None, body=body)


def _harmony_call(message: _HarmonyMessage) -> ToolCall:
    recipient = message.recipient or ""
    if not recipient.startswith("functions."):
        raise _Malformed(f"The recipient {recipient[:40]!r} is no tool; write to=functions.NAME.")
    arguments = _load(message.body, what="The body of the tool call")
    if not isinstance(arguments, dict):
        raise _Malformed('The "arguments" are not a JSON object; send {"key": value}, or {} for none.')
    return ToolCall(name=_tool_name(recipient.removeprefix("functions.")), arguments=arguments)


_PARSERS = {
    ActionFormat.HARMONY: _parse_harmony,
    ActionFormat.HERMES: _parse_hermes,
    ActionFormat.JSON: _parse_json,
    ActionFormat.PLAIN: _parse_plain,
}
