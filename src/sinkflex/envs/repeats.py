"""Which calls were made in vain: the same call, the same answer, and the world as it was."""

from __future__ import annotations

import json
from collections.abc import Hashable

from sinkflex.types import ToolCall


class RepeatedCalls:
    """Counts calls that told nothing new and changed nothing.

    A call counts when its last twin (same name and arguments) got the same answer and left the same state behind. A
    read after a write is therefore none, even one that shows the write was of no use.

    Attributes:
        count: how many so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last: dict[tuple[str, str], tuple[str, Hashable]] = {}

    def note(self, call: ToolCall, *, answer: str, state: Hashable) -> None:
        """Take in a call that was answered.

        Args:
            call: the call.
            answer: what its caller read.
            state: the state afterwards, equal if and only if nothing changed.
        """
        key = (call.name, json.dumps(dict(call.arguments), sort_keys=True, default=repr))
        self.count += self._last.get(key) == (answer, state)
        self._last[key] = (answer, state)
