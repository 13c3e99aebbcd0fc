"""Four-digit ids, split so that train and test share none.

Both halves of an id (its leading and trailing pair of digits) occur in both splits; only the combinations differ.
A policy that copies ids is therefore tested on ids it never saw, made of parts it knows.
"""

from __future__ import annotations

import random
from functools import lru_cache

_TEST_SHARE = 4
_FIRST, _LAST = 1000, 9999


def split_of(entity_id: str) -> str:
    """Return ``train`` or ``test`` for a four-digit id; one in four is ``test``."""
    mixed = int(entity_id) * 2654435761 % 2**32
    return "test" if (mixed >> 12) % _TEST_SHARE == 0 else "train"


@lru_cache(maxsize=2)
def entity_ids(split: str) -> tuple[str, ...]:
    """Return every id of a split, ascending."""
    return tuple(name for name in map(str, range(_FIRST, _LAST + 1)) if split_of(name) == split)


def draw_ids(rng: random.Random, split: str, count: int) -> list[str]:
    """Draw distinct ids of a split."""
    return rng.sample(entity_ids(split), count)
