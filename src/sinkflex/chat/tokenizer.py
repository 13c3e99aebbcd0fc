"""Adapter that makes a Hugging Face fast tokenizer, or a ``tokenizers.Tokenizer``, safe for untrusted text.

A plain ``encode`` turns the text "<|start|>" into the control token, so a user or a tool could forge a turn.
The adapter keeps a private copy of the tokenizer that does not know its control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from sinkflex.errors import ChatError
from sinkflex.types import JSONObject

_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
_USUAL_END_TOKENS = ("<|return|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>", "<eos>")


class FastTokenizer:
    """Encodes text without control tokens, decodes with them.

    Control tokens are the tokenizer's special tokens and every added token spelled like a tag
    (``<tool_call>``).
    """

    def __init__(self, tokenizer: Any, *, eos_token: str | None = None) -> None:
        """Wrap a tokenizer.

        Args:
            tokenizer: a ``tokenizers.Tokenizer``, or a ``transformers`` fast tokenizer around one. It is not
                changed.
            eos_token: the token that ends a text; by default the tokenizer's own, or the first of the usual
                ones that it has.

        Raises:
            ChatError: the object has no fast backend, or ``eos_token`` is not one of its control tokens.
        """
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not hasattr(backend, "to_str") or not hasattr(backend, "get_added_tokens_decoder"):
            raise ChatError(
                f"tokenizer is a {type(tokenizer).__name__}; expected a tokenizers.Tokenizer or a transformers "
                "fast tokenizer (AutoTokenizer loads the fast one where there is one)"
            )
        self._backend = backend
        state = json.loads(backend.to_str())
        # The unknown token stands for ordinary text, however it is declared.
        unknown = state["model"].get("unk_token")
        self._control: dict[str, int] = {
            token.content: token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if (token.special or _TAG.fullmatch(token.content)) and token.content != unknown
        }
        self._control_ids = frozenset(self._control.values())
        self._literals = re.compile("|".join(re.escape(token) for token in self._control) or r"(?!)")
        self._ordinary = self._without_control_tokens(state)
        self._eos_id = self._find_eos(eos_token or getattr(tokenizer, "eos_token", None), required=eos_token)

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a text, or None if the tokenizer names none."""
        return self._eos_id

    @property
    def control_tokens(self) -> dict[str, int]:
        """Each control token's spelling and id (a fresh dict)."""
        return dict(self._control)

    def encode(self, text: str) -> list[int]:
        """Encode untrusted text; no id in the result is a control token's, whatever the text spells.

        Args:
            text: any text without lone surrogates.
        """
        ids: list[int] = self._ordinary.encode(text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids):
            return ids
        # A word-level vocabulary may hold the control token as a word: cut each spelling after its first
        # character.
        cuts = [0, *(match.start() + 1 for match in self._literals.finditer(text)), len(text)]
        parts = [text[start:end] for start, end in pairwise(cuts)]
        ids = [i for part in parts for i in self._ordinary.encode(part, add_special_tokens=False).ids]
        if not self._control_ids.isdisjoint(ids):
            raise ChatError(
                "the tokenizer turns ordinary text into the control token "
                f"{self.decode(sorted(self._control_ids.intersection(ids))[:1])!r}; its vocabulary must give "
                "control tokens ids that no text reaches"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, control tokens included."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def token_to_id(self, token: str) -> int | None:
        """Return a control token's id, or None if the tokenizer has no such control token."""
        return self._control.get(token)

    def _without_control_tokens(self, state: JSONObject) -> Any:
        state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in self._control]
        # The post-processor only adds special tokens; truncation and padding belong to batches, not to chat.
        state.update(post_processor=None, truncation=None, padding=None)
        return type(self._backend).from_str(json.dumps(state))

    def _find_eos(self, token: str | None, *, required: str | None) -> int | None:
        if required is not None and required not in self._control:
            raise ChatError(
                f"eos_token {required!r} is not a control token of this tokenizer; choose one of "
                f"{', '.join(sorted(self._control)) or '(it has none)'}"
            )
        candidates = (token, *_USUAL_END_TOKENS) if token else _USUAL_END_TOKENS
        return next((self._control[name] for name in candidates if name in self._control), None)
