"""Grouped-query attention over an op that wants equal head counts, without copying keys or values.

A key head is shown to its group of query heads through a stride of zero. That needs (row, key head) as one batch axis;
where memory does not allow it as a view, the key heads are taken one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from jaxtyping import Float
from torch import Tensor


class _How(Enum):
    EQUAL = auto()  # as many key heads as query heads
    FOLD = auto()  # one query a row: the group becomes the query axis
    MERGE = auto()  # (row, key head) is one axis
    LOOP = auto()  # one key head at a time


@dataclass(frozen=True, kw_only=True)
class HeadGroups:
    """How one call's heads are presented to the op.

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
    def of(cls, q: Tensor, k: Tensor, v: Tensor, *q_like: Tensor, per_row_bias: bool) -> HeadGroups:
        """Choose for these tensors [n, H, L, D].

        Args:
            q: queries.
            k: keys.
            v: values.
            *q_like: further tensors of the queries' shape.
            per_row_bias: the additive mask differs between sequences.
        """
        rows, key_heads = k.shape[:2]
        group = q.shape[1] // key_heads
        mergeable = rows == 1 or (
            not per_row_bias and all(x.stride(0) == x.stride(1) * x.shape[1] for x in (q, k, v, *q_like))
        )
        if group == 1:
            how = _How.EQUAL
        elif q.shape[2] == 1:
            how = _How.FOLD
        else:
            how = _How.MERGE if mergeable else _How.LOOP
        return cls(how=how, rows=rows, key_heads=key_heads, group=group)

    def queries(self, x: Float[Tensor, "n Hq L D"]) -> list[Tensor]:
        """Tensors to pass for the queries, the output or its gradient, one per op call."""
        if self.how is _How.EQUAL:
            return [x]
        if self.how is _How.FOLD:
            return [torch.unflatten(x.squeeze(2), 1, (self.key_heads, self.group))]
        if self.how is _How.MERGE:
            return [torch.unflatten(x.flatten(0, 1), 0, (-1, self.group))]
        return list(torch.unflatten(x, 1, (self.key_heads, self.group)).unbind(1))

    def keys(self, x: Float[Tensor, "n Hkv Lk D"]) -> list[Tensor]:
        """Tensors to pass for keys or values, one per op call."""
        if self.how in (_How.EQUAL, _How.FOLD):
            return [x]
        if self.how is _How.MERGE:
            return [x.flatten(0, 1).unsqueeze(1).expand(-1, self.group, -1, -1)]
        return [x[:, head, None].expand(-1, self.group, -1, -1) for head in range(self.key_heads)]

    def bias(self, bias: Float[Tensor, "n H L Lk"] | None) -> Tensor | None:
        """The additive mask for every op call."""
        if bias is None or bias.shape[1] == 1 or self.how is _How.EQUAL:
            return bias
        if self.how is _How.FOLD:
            return torch.unflatten(bias.squeeze(2), 1, (self.key_heads, self.group))
        return torch.unflatten(bias.flatten(0, 1), 0, (self.key_heads, self.group))

    def join_queries(self, parts: Sequence[Tensor]) -> Float[Tensor, "n Hq L D"]:
        """The op calls' outputs (or query gradients) as one tensor."""
        if self.how is _How.EQUAL:
            return parts[0]
        if self.how is _How.FOLD:
            return parts[0].flatten(1, 2).unsqueeze(2)
        if self.how is _How.MERGE:
            return torch.unflatten(parts[0], 0, (self.rows, self.key_heads)).flatten(1, 2)
        return torch.stack(list(parts), dim=1).flatten(1, 2)

    def join_keys(self, parts: Sequence[Tensor]) -> Float[Tensor, "n Hkv Lk D"]:
        """The op calls' key or value gradients as one tensor, summed over each group."""
        if self.how in (_How.EQUAL, _How.FOLD):
            return parts[0]
        if self.how is _How.MERGE:
            return torch.unflatten(parts[0].sum(1), 0, (self.rows, self.key_heads))
        return torch.stack([part.sum(1) for part in parts], dim=1)
