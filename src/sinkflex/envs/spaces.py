"""A Gymnasium space of any Unicode text.

``gymnasium.spaces.Text`` lists its characters, refuses emoji by default and is slow with a full charset; an
agent's text is bounded in length only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import create_shared_memory

from sinkflex.errors import EnvError

_SAMPLE_ALPHABET = 'abcdefghijklmnopqrstuvwxyz 0123456789{}":,?é中🙂'
_SAMPLE_CHARS = 64


class UnicodeText(gymnasium.Space[str]):
    """All strings up to a length that UTF-8 can encode (no lone surrogates).

    Args:
        max_length: longest member, in characters.
        seed: seeds ``sample``.

    Raises:
        EnvError: ``max_length`` is below 1.
    """

    def __init__(self, max_length: int = 1_000_000, *, seed: int | np.random.Generator | None = None) -> None:
        if max_length < 1:
            raise EnvError(f"max_length must be at least 1, got {max_length}")
        self.max_length = max_length
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no fixed-size array form."""
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """Return random short text.

        Args:
            mask: must be None; text cannot be masked.
            probability: must be None.

        Raises:
            EnvError: a mask or a probability was given.
        """
        if mask is not None or probability is not None:
            raise EnvError("UnicodeText.sample takes neither mask nor probability")
        length = int(self.np_random.integers(1, min(self.max_length, _SAMPLE_CHARS) + 1))
        picks = self.np_random.integers(0, len(_SAMPLE_ALPHABET), size=length)
        return "".join(_SAMPLE_ALPHABET[pick] for pick in picks)

    def contains(self, x: Any) -> bool:
        """Return whether x is a string of this space."""
        if not isinstance(x, str) or len(x) > self.max_length:
            return False
        try:
            x.encode()
        except UnicodeEncodeError:
            return False
        return True

    def to_jsonable(self, sample_n: Iterable[str]) -> list[str]:
        """Return a batch of samples as JSON strings."""
        return list(sample_n)

    def from_jsonable(self, sample_n: list[Any]) -> list[str]:
        """Return JSON strings as a batch of samples."""
        return [str(sample) for sample in sample_n]

    def __repr__(self) -> str:
        return f"UnicodeText({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnicodeText) and other.max_length == self.max_length

    def __hash__(self) -> int:
        return hash((UnicodeText, self.max_length))


@create_shared_memory.register(UnicodeText)
def _refuse_shared_memory(space: UnicodeText, n: int = 1, ctx: Any = None) -> Any:
    raise EnvError(
        "text observations cannot live in shared memory (Gymnasium would return stale characters); "
        "pass shared_memory=False to AsyncVectorEnv, or vector_kwargs={'shared_memory': False} to make_vec"
    )
