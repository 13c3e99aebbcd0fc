"""What a chat format must offer, and the tokenizer it stands on.

Rendering is incremental. ``prompt`` is called once; after each sampled action ``observation`` gives the ids
up to the next generation. Their concatenation *is* the transcript: nothing is rendered twice, so what was
sampled is what is trained on. One call-and-answer exchange in harmony::

    prompt       <|start|>system<|message|>Be brief.<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant
    sampled      <|channel|>commentary to=functions.get_line<|message|>{"line_id":"4783"}<|call|>
    observation  <|start|>functions.get_line to=assistant<|channel|>commentary<|message|>{"on":true}<|end|>
                 <|start|>assistant
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from sinkflex.errors import ChatError
from sinkflex.types import Message, ToolSchema

Piece: TypeAlias = str | int
"""A stretch of a rendering: ordinary text (never read as special tokens) or one control token's id."""


@runtime_checkable
class Tokenizer(Protocol):
    """The part of a tokenizer that rendering needs."""

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a text, or None if the tokenizer names none."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode untrusted text; no id in the result is a control token's, whatever the text spells."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, control tokens included."""
        ...

    def token_to_id(self, token: str) -> int | None:
        """Return a control token's id, or None if the tokenizer has no such control token."""
        ...


@runtime_checkable
class Renderer(Protocol):
    """Turns messages into token ids and sampled ids back into text, for one chat format.

    Attributes:
        name: the format's name in ``RENDERERS``.
        stop_ids: sampling stops after one of these; it is kept as the last sampled id.
    """

    name: str
    stop_ids: frozenset[int]

    def prompt(self, *, system: str, tools: Sequence[ToolSchema], messages: Sequence[Message]) -> list[int]:
        """Render the start of an episode.

        Args:
            system: the policy the agent must follow.
            tools: the agent's tools; empty leaves the tool section out.
            messages: what was said before the first sampled action.

        Returns:
            Ids that end with the generation prompt.

        Raises:
            ChatError: a tool message has no name where the format needs one.
        """
        ...

    def observation(self, messages: Sequence[Message], *, last_id: int) -> list[int]:
        """Render what came back after a sampled action.

        Args:
            messages: tool replies, the user's utterance, or why the action was malformed.
            last_id: the last sampled id; the turn is closed first if it is not in ``stop_ids``.

        Returns:
            Ids that end with the generation prompt.

        Raises:
            ChatError: a tool message has no name where the format needs one.
        """
        ...

    def action_text(self, ids: Sequence[int]) -> str:
        """Return sampled ids as raw text, control tokens included, for ``env.step`` and ``parse_action``."""
        ...

    def action_ids(self, message: Message) -> list[int]:
        """Render an assistant message as it would have been sampled, its stop id included.

        ``parse_action(action_text(ids))`` gives the message's content (stripped), calls and reasoning back.

        Raises:
            ChatError: the message is not an assistant's, or cannot be written so that it parses back.
        """
        ...


def assemble(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> list[int]:
    """Encode a rendering; neighbouring text pieces are joined first, so that no token boundary is invented.

    Args:
        tokenizer: encodes the text pieces.
        pieces: text and control ids in order.
    """
    ids: list[int] = []
    run: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            run.append(piece)
            continue
        if run:
            ids += tokenizer.encode("".join(run))
            run.clear()
        ids.append(piece)
    if run:
        ids += tokenizer.encode("".join(run))
    return ids


def control_ids(tokenizer: Tokenizer, tokens: Sequence[str], *, renderer: str) -> list[int]:
    """Look up the control tokens a renderer cannot do without.

    Args:
        tokenizer: where to look.
        tokens: spelled as in the vocabulary, for example ``"<|start|>"``.
        renderer: the renderer's name, for the message.

    Raises:
        ChatError: the tokenizer lacks one of them.
    """
    found = [tokenizer.token_to_id(token) for token in tokens]
    missing = [token for token, token_id in zip(tokens, found, strict=True) if token_id is None]
    if missing:
        raise ChatError(
            f"the tokenizer has no control token {', '.join(missing)}, which the {renderer!r} renderer "
            "needs; choose the renderer the model was trained with ('json' works with any end token)"
        )
    return [token_id for token_id in found if token_id is not None]


def end_of_text_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the id of ``<|endoftext|>`` if the tokenizer has it; models may end a turn with it."""
    token_id = tokenizer.token_to_id("<|endoftext|>")
    return () if token_id is None else (token_id,)
