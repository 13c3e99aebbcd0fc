"""Chat formats: messages to token ids, sampled ids to actions.

``parse_action`` reads an assistant's raw text; ``get_renderer`` builds the renderer for a model's format over
a ``FastTokenizer``. An own format is a class with ``Renderer``'s methods, added to ``RENDERERS`` under its
name.
"""

from __future__ import annotations

from collections.abc import Callable

from sinkflex.chat.harmony import HarmonyRenderer
from sinkflex.chat.hermes import HermesRenderer
from sinkflex.chat.json_format import JSONRenderer
from sinkflex.chat.parsing import ActionFormat, MalformedAction, ParsedAction, parse_action
from sinkflex.chat.protocol import Renderer, Tokenizer
from sinkflex.chat.tokenizer import FastTokenizer
from sinkflex.errors import ChatError, unknown_name

RENDERERS: dict[str, Callable[[Tokenizer], Renderer]] = {
    "harmony": HarmonyRenderer,
    "hermes": HermesRenderer,
    "json": JSONRenderer,
}
"""The chat formats by name."""


def get_renderer(name: str, tokenizer: Tokenizer) -> Renderer:
    """Build a renderer with its default options.

    Args:
        name: a key of ``RENDERERS``.
        tokenizer: what it encodes with; wrap a Hugging Face tokenizer in ``FastTokenizer`` first.

    Raises:
        ChatError: the name is unknown, or the tokenizer lacks a control token.
    """
    if name not in RENDERERS:
        raise ChatError(unknown_name("chat format", name, RENDERERS))
    return RENDERERS[name](tokenizer)


__all__ = [
    "RENDERERS",
    "ActionFormat",
    "FastTokenizer",
    "HarmonyRenderer",
    "HermesRenderer",
    "JSONRenderer",
    "MalformedAction",
    "ParsedAction",
    "Renderer",
    "Tokenizer",
    "get_renderer",
    "parse_action",
]
