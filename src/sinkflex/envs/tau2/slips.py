"""Plausible mistakes in place of the oracle's message, for demonstrations that leave something to learn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sinkflex.envs.tau2.catalogue import HAND_OFF_TOOL
from sinkflex.types import JSONValue, Message, Role, ToolCall

_TOKENS = re.compile(r"#?[A-Za-z0-9_]*\d[A-Za-z0-9_]*")
_EARLY_CLOSING = "Your request is complete."
_HAND_OFF = ToolCall(name=HAND_OFF_TOOL, arguments={"summary": "The user's request cannot be handled."})


def slips(best: Message, trajectory: Sequence[Any]) -> tuple[Message, ...]:
    """Return wrong alternatives: an id of the same kind from the context, an early end, a needless hand-off.

    Args:
        best: the oracle's message here.
        trajectory: the package's messages so far, where ids of the same kind are taken from.
    """
    wrong: list[Message] = []
    for call in best.tool_calls:
        seen = list(dict.fromkeys(_TOKENS.findall(" ".join(str(item.content or "") for item in trajectory))))
        for name, value in call.arguments.items():
            other = _confused(value, seen)
            if other is not None:
                arguments = {**call.arguments, name: other}
                wrong.append(_calling(ToolCall(name=call.name, arguments=arguments)))
    if best.tool_calls:
        wrong.append(Message(role=Role.ASSISTANT, content=_EARLY_CLOSING))
    return (*wrong, _calling(_HAND_OFF))


def _calling(call: ToolCall) -> Message:
    return Message(role=Role.ASSISTANT, tool_calls=(call,))


def _confused(value: JSONValue, seen: Sequence[str]) -> JSONValue:
    """Return another token of the same shape, in place of the value or of a list's first item; None for none."""
    if isinstance(value, list) and value:
        first = _confused(value[0], seen)
        return None if first is None else [first, *value[1:]]
    if not isinstance(value, str) or not _TOKENS.fullmatch(value):
        return None
    shape = _shape(value)
    return next((token for token in reversed(seen) if token != value and _shape(token) == shape), None)


def _shape(token: str) -> str:
    head = re.match(r"#?[A-Za-z_]*", token)
    return f"{head.group() if head else ''}{len(token)}" if "_" not in token else re.sub(r"\d+", "0", token)
