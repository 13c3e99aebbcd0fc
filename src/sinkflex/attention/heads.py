"""Grouped-query attention over an op that wants equal head counts, without copying keys or values.

A key head is shown to its group of query heads through a stride of zero. That needs (row, key head) as one batch axis;
where memory does not allow it as a view, the key heads are taken one after the other, each an op call of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor


class _How(Enum):
    EQUAL = auto()  # as many key heads as query heads
    FOLD = auto()  # one query a row: the group becomes the query axis
    MERGE = auto()  # (row, key head) is one axis
    LOOP = auto()  # one key head at a time


@dataclass(frozen=True, kw_only=True)
class HeadGroups:
    """How one call's heads are presented to the op, and where its results belong.

    The op's results are handed on as *slots* [n, L, *heads, ...], and belong into the part of a token-major total
    [N, H, ...] that ``query_place`` or ``key_place`` gives: a view [N, *heads, ...] of the same heads.

    Attributes:
        how: which of the four ways.
        rows: sequences n in the call.
        key_heads: Hkv.
        group: query heads a key head serves.
    """

    how: _How
    rows: int
    key_heads: int
    group: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, *others: Tensor, per_row_bias: bool) -> HeadGroups:
        """Choose for these tensors [n, H, L, D].

        Args:
            q: queries.
            k: keys.
            *others: values, outputs and gradients that the op is given beside them.
            per_row_bias: the additive mask differs between sequences.
        """
        rows, key_heads = k.shape[:2]
        group = q.shape[1] // key_heads
        if group == 1:
            how = _How.EQUAL
        elif q.shape[2] == 1:
            how = _How.FOLD
        elif rows == 1 or (not per_row_bias and all(x.stride(0) == x.stride(1) * x.shape[1] for x in (q, k, *others))):
            how = _How.MERGE
        else:
            how = _How.LOOP
        return cls(how=how, rows=rows, key_heads=key_heads, group=group)

    @property
    def calls(self) -> range:
        """The op calls to make."""
        return range(self.key_heads if self.how is _How.LOOP else 1)

    def queries(self, x: Float[Tensor, "n Hq L D"], call: int) -> Tensor:
        """What to pass for the queries, the output or its gradient."""
        if self.how is _How.EQUAL:
            return x
        if self.how is _How.FOLD:
            return torch.unflatten(x.squeeze(2), 1, (self.key_heads, self.group))
        if self.how is _How.MERGE:
            return torch.unflatten(x.flatten(0, 1), 0, (-1, self.group))
        return x[:, call * self.group : (call + 1) * self.group]

    def keys(self, x: Float[Tensor, "n Hkv Lk D"], call: int) -> Tensor:
        """What to pass for keys or values."""
        if self.how in (_How.EQUAL, _How.FOLD):
            return x
        if self.how is _How.MERGE:
            return x.flatten(0, 1).unsqueeze(1).expand(-1, self.group, -1, -1)
        return x[:, call, None].expand(-1, self.group, -1, -1)

    def bias(self, bias: Shaped[Tensor, "n H L Lk"] | None) -> Tensor | None:
        """The additive mask for every op call."""
        if bias is None or bias.shape[1] == 1 or self.how is _How.EQUAL:
            return bias
        if self.how is _How.FOLD:
            return torch.unflatten(bias.squeeze(2), 1, (self.key_heads, self.group))
        return torch.unflatten(bias.flatten(0, 1), 0, (self.key_heads, self.group))

    def dead(self, dead: Bool[Tensor, "n H L"] | None) -> Tensor | None:
        """Which queries see nothing, for every op call's log-sum-exp."""
        bias = self.bias(None if dead is None else dead[..., None])
        return None if bias is None else bias[..., 0]

    def query_slots(self, part: Tensor) -> Tensor:
        """The op's result on the query side, with or without a last axis D, as slots [n, L, *heads, ...]."""
        if self.how is _How.FOLD:
            return part.unsqueeze(1)
        if self.how is _How.MERGE:
            return torch.unflatten(part, 0, (self.rows, self.key_heads)).movedim(3, 1)
        return part.transpose(1, 2)

    def key_slots(self, part: Float[Tensor, "b H Lk D"]) -> Tensor:
        """The op's gradient of keys or values, summed over each group, as slots [n, Lk, Hkv or 1, D]."""
        if self.how is _How.MERGE:
            part = torch.unflatten(part.sum(1), 0, (self.rows, self.key_heads))
        elif self.how is _How.LOOP:
            part = part.sum(1, keepdim=True)
        return part.transpose(1, 2)

    def query_place(self, total: Float[Tensor, "N Hq *D"], call: int) -> Tensor:
        """Where an op call's query slots belong."""
        if self.how is _How.EQUAL:
            return total
        if self.how is _How.LOOP:
            return total[:, call * self.group : (call + 1) * self.group]
        return torch.unflatten(total, 1, (self.key_heads, self.group))

    def key_place(self, total: Float[Tensor, "N Hkv D"], call: int) -> Tensor:
        """Where an op call's key slots belong."""
        return total[:, call : call + 1] if self.how is _How.LOOP else total
