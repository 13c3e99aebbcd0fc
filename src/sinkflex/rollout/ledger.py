"""The token ledger: what was sampled is what is trained on, so tokens are only ever appended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from sinkflex.errors import RolloutError
from sinkflex.types import JSONObject, JSONValue

Segment = Literal["prompt", "sampled", "observation"]

# Which segment may follow which: a transcript is prompt, then sampled and observation in turns.
_MAY_FOLLOW: Mapping[Segment | None, tuple[Segment, ...]] = {
    None: ("prompt",),
    "prompt": ("sampled",),
    "sampled": ("observation",),
    "observation": ("sampled",),
}
# Rounding in a log-softmax may leave a certain token a hair above zero.
_LOGPROB_SLACK = 1e-4


class TokenLedger:
    """An episode's tokens with, for each, whether the policy sampled it, its log-probability and its turn.

    Example, with prompt ``[7, 8]``, action ``[3, 1]``, observation ``[9]`` and action ``[4]``::

        ids        7   8   3     1     9   4
        loss_mask  F   F   T     T     F   T
        logprobs   0.  0.  -1.2  -0.1  0.  -0.7
        turn_ids   0   0   1     1     1   2

    ``loss_mask`` True means sampled by the policy and trained. ``logprobs`` is 0.0 where nothing was sampled. Turn 0 is
    the prompt, turn k the k-th action with the observation that answers it.
    """

    __slots__ = ("_ids", "_last", "_logprobs", "_loss_mask", "_turn", "_turn_ids")

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._loss_mask: list[bool] = []
        self._logprobs: list[float] = []
        self._turn_ids: list[int] = []
        self._turn = 0
        self._last: Segment | None = None

    def __len__(self) -> int:
        return len(self._ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenLedger):
            return NotImplemented
        return self.to_record() == other.to_record()

    __hash__ = None  # type: ignore[assignment]  # it grows, so it must not be a key

    def __repr__(self) -> str:
        return f"TokenLedger(tokens={len(self)}, sampled={self.num_sampled}, turns={self._turn})"

    @property
    def ids(self) -> tuple[int, ...]:
        """All token ids so far."""
        return tuple(self._ids)

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """True where the policy sampled the token."""
        return tuple(self._loss_mask)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The sampler's log-probability of each sampled token, 0.0 elsewhere."""
        return tuple(self._logprobs)

    @property
    def turn_ids(self) -> tuple[int, ...]:
        """0 for the prompt, k for the k-th action and the observation after it."""
        return tuple(self._turn_ids)

    @property
    def num_sampled(self) -> int:
        """How many tokens the policy sampled."""
        return sum(self._loss_mask)

    @property
    def turns(self) -> int:
        """How many actions were sampled."""
        return self._turn

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one."""
        return self._loss_mask.index(True) if self._turn else len(self._ids)

    def append_prompt(self, ids: Sequence[int]) -> None:
        """Start the transcript.

        Raises:
            RolloutError: the ledger is not empty, or ``ids`` is empty or holds a negative id.
        """
        self._append("prompt", ids, [0.0] * len(ids))

    def append_sampled(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append one sampled action.

        Args:
            ids: the sampled ids, stop id included.
            logprobs: one finite natural-log probability (at most 0) for each id.

        Raises:
            RolloutError: the previous segment was sampled too, the lengths differ, or a log-probability is not finite
                or is positive.
        """
        if len(ids) != len(logprobs):
            raise RolloutError(f"append_sampled: {len(ids)} ids but {len(logprobs)} logprobs; give one for each id")
        for offset, value in enumerate(logprobs):
            if not math.isfinite(value) or value > _LOGPROB_SLACK:
                raise RolloutError(
                    f"append_sampled: logprob {value} of sampled token {offset} (id {ids[offset]}, ledger position "
                    f"{len(self) + offset}) must be finite and <= 0"
                )
        self._append("sampled", ids, logprobs)

    def append_observation(self, ids: Sequence[int]) -> None:
        """Append what the environment answered to the last action, up to the next generation prompt.

        Raises:
            RolloutError: no action precedes it, or ``ids`` is empty or holds a negative id.
        """
        self._append("observation", ids, [0.0] * len(ids))

    def _append(self, kind: Segment, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        if kind not in _MAY_FOLLOW[self._last]:
            previous = f"a {self._last} segment" if self._last else "an empty ledger"
            expected = " or ".join(_MAY_FOLLOW[self._last])
            raise RolloutError(f"append_{kind} after {previous}: expected append_{expected}")
        if not ids:
            raise RolloutError(f"append_{kind}: ids is empty; every segment has at least one token")
        plain = [int(token) for token in ids]
        if min(plain) < 0:
            raise RolloutError(f"append_{kind}: token ids must be >= 0, got {min(plain)}")
        sampled = kind == "sampled"
        self._turn += sampled
        self._last = kind
        self._ids.extend(plain)
        self._loss_mask.extend([sampled] * len(plain))
        self._logprobs.extend(float(value) for value in logprobs)
        self._turn_ids.extend([self._turn] * len(plain))

    def segments(self) -> list[tuple[Segment, slice]]:
        """Return the segments in order, each with the slice of the ledger it covers."""
        found: list[tuple[Segment, slice]] = []
        start = 0
        for end in range(1, len(self) + 1):
            if (
                end == len(self)
                or self._loss_mask[end] != self._loss_mask[start]
                or (self._turn_ids[end] != self._turn_ids[start])
            ):
                kind: Segment = "sampled" if self._loss_mask[start] else "observation"
                found.append(("prompt" if start == 0 else kind, slice(start, end)))
                start = end
        return found

    def to_record(self) -> JSONObject:
        """Return a JSON-ready dict; ``from_record`` restores an equal ledger."""
        return {
            "ids": list(self._ids),
            "loss_mask": [int(flag) for flag in self._loss_mask],
            "logprobs": list(self._logprobs),
            "turn_ids": list(self._turn_ids),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, JSONValue]) -> TokenLedger:
        """Rebuild a ledger from ``to_record``'s output, checking it as if it were appended again.

        Raises:
            RolloutError: a field is missing, lengths differ, or the fields contradict each other.
        """
        fields = ("ids", "loss_mask", "logprobs", "turn_ids")
        missing = [name for name in fields if name not in record]
        if missing:
            raise RolloutError(f"ledger record lacks {', '.join(missing)}; expected {', '.join(fields)}")
        ids, mask, logprobs, turn_ids = (list(record[name]) for name in fields)
        if not len(ids) == len(mask) == len(logprobs) == len(turn_ids):
            raise RolloutError(
                f"ledger record has {len(ids)} ids, {len(mask)} loss_mask, {len(logprobs)} logprobs and "
                f"{len(turn_ids)} turn_ids entries; they must be equally many"
            )
        ledger = cls()
        start = 0
        for end in range(1, len(ids) + 1):
            if end < len(ids) and mask[end] == mask[start]:
                continue
            if mask[start]:
                ledger.append_sampled(ids[start:end], logprobs[start:end])
            elif start == 0:
                ledger.append_prompt(ids[start:end])
            else:
                ledger.append_observation(ids[start:end])
            start = end
        if ledger._turn_ids != turn_ids or ledger._logprobs != logprobs:
            raise RolloutError(
                "ledger record contradicts itself: turn_ids must count the sampled segments and logprobs must be 0.0 "
                "where loss_mask is 0"
            )
        return ledger
