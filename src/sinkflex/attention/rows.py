"""Rows of tokens that a kernel call reads and writes: views where they can be, gathers where they must.

A kernel call works on ``[n, H, L, D]``. Its ``n * L`` slots are flat token numbers (row * T + column) given as an index
array ``[n, L]`` in which -1 is an empty slot. When the array is regular (slot ``(i, j)`` is ``start + i * step + j``)
the tokens are read through a view and nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Where ``n`` sequences of ``length`` slots lie among the flat tokens.

    Attributes:
        n: sequences.
        length: slots of each.
        start: flat token of slot (0, 0) when regular.
        step: flat distance from one sequence to the next when regular.
        gather: [n * length] flat token of each slot (empty slots read token 0); None when regular.
        scatter: [n * length] the same with empty slots pointing one past the last token; None when regular.
        columns: [n, length] the columns, when irregular and sequence ``i`` lies in batch row ``i`` without empty slots.
    """

    n: int
    length: int
    start: int = 0
    step: int = 0
    gather: Tensor | None = None
    scatter: Tensor | None = None
    columns: Tensor | None = None

    @classmethod
    def span(cls, start: int, length: int) -> Rows:
        """One sequence of neighbouring tokens."""
        return cls(n=1, length=length, start=start, step=length)

    @classmethod
    def of(cls, index: NDArray[np.int64], grid: tuple[int, int], device: torch.device) -> Rows:
        """Rows for an index array, regular if it can be.

        Args:
            index: [n, L] flat tokens, -1 for an empty slot.
            grid: (B, T) of the tensors these rows are read from.
            device: where gathers happen.
        """
        batch, columns = grid
        n, length = index.shape
        start = int(index[0, 0])
        step = int(index[1, 0]) - start if n > 1 else length
        regular = start + np.arange(n)[:, None] * step + np.arange(length)
        if step > 0 and start >= 0 and np.array_equal(index, regular):
            return cls(n=n, length=length, start=start, step=step)
        flat = torch.from_numpy(np.ascontiguousarray(index).reshape(-1))
        empty = flat < 0
        column = index - np.arange(n)[:, None] * columns
        by_row = n == batch and bool(((column >= 0) & (column < columns)).all())
        return cls(
            n=n,
            length=length,
            gather=flat.masked_fill(empty, 0).to(device),
            scatter=flat.masked_fill(empty, batch * columns).to(device),
            columns=torch.from_numpy(column).to(device) if by_row else None,
        )

    def write(self, target: Float[Tensor, "N ..."], slots: Float[Tensor, "n L ..."]) -> None:
        """Overwrite tokens with slots; the last of ``target`` takes the empty ones. Slots must not overlap."""
        if self.scatter is not None:
            target.index_copy_(0, self.scatter, slots.flatten(0, 1).to(target.dtype))
        else:
            self._targets(target, 0, self.length).copy_(slots)

    def add(self, target: Float[Tensor, "N ..."], slots: Float[Tensor, "n L ..."]) -> None:
        """Add slots to their tokens, as often as a token occurs; the last of ``target`` takes the empty ones."""
        if self.scatter is not None:
            target.index_add_(0, self.scatter, slots.flatten(0, 1).to(target.dtype))
            return
        for low in range(0, self.length, self.step):
            high = min(low + self.step, self.length)
            self._targets(target, low, high).add_(slots[:, low:high])

    def tokens(self, target: Tensor) -> Tensor:
        """The slots of a token-major tensor [N, ...] as [n, L, ...]; a view when regular."""
        if self.scatter is not None:
            return torch.unflatten(target.index_select(0, self.scatter), 0, (self.n, self.length))
        return self._targets(target, 0, self.length)

    def _targets(self, target: Tensor, low: int, high: int) -> Tensor:
        size = (self.n, high - low, *target.shape[1:])
        stride = (target.stride(0) * self.step, *target.stride())
        offset = target.storage_offset() + (self.start + low) * target.stride(0)
        return target.as_strided(size, stride, offset)


class Tokens:
    """Tokens [B, H, T] or [B, H, T, D] to be read by :class:`Rows`, flattened at most once and only when needed.

    Args:
        x: the tensor.
    """

    def __init__(self, x: Float[Tensor, "B H T *D"]) -> None:
        self._x = x
        self._flat: Tensor | None = None

    def read(self, rows: Rows) -> Float[Tensor, "n H L *D"]:
        """Take the slots of ``rows``: a view when they are regular, else a copy of just those slots."""
        batch, _, length = self._x.shape[:3]
        if rows.columns is not None:
            index = rows.columns[:, None, :, None].expand(-1, self._x.shape[1], -1, self._x.shape[3])
            return self._x.gather(2, index)
        if rows.gather is not None:
            return self._gathered(rows.gather, rows.n, rows.length)
        if rows.n == batch and rows.step == length:
            return self._x[:, :, rows.start : rows.start + rows.length]
        stop = rows.start + (rows.n - 1) * rows.step + rows.length
        window = self.flat[:, rows.start : stop]
        size = (window.shape[0], rows.n, rows.length, *window.shape[2:])
        stride = (window.stride(0), window.stride(1) * rows.step, *window.stride()[1:])
        return window.as_strided(size, stride).transpose(0, 1)

    def _gathered(self, index: Tensor, n: int, length: int) -> Tensor:
        """``index_select`` copies a source that is not contiguous as a whole, so it is given one that is."""
        by_token = self._x.transpose(1, 2)
        if by_token.is_contiguous():
            picked = by_token.flatten(0, 1).index_select(0, index)
            return torch.unflatten(picked, 0, (n, length)).transpose(1, 2)
        self._flat = self.flat.contiguous()
        return torch.unflatten(self._flat.index_select(1, index), 1, (n, length)).transpose(0, 1)

    @property
    def flat(self) -> Float[Tensor, "H N *D"]:
        """[H, B * T, ...]: a view unless B > 1 and heads lie outside tokens in memory."""
        if self._flat is None:
            self._flat = self._x.transpose(0, 1).flatten(1, 2)
        return self._flat


def read_lse(rows: Rows, flat_lse: Float[Tensor, "H N"]) -> Float[Tensor, "n H L"]:
    """Take the slots of ``rows`` out of :func:`weightless`; empty slots read +inf."""
    if rows.scatter is not None:
        picked = flat_lse.index_select(1, rows.scatter)
        return torch.unflatten(picked, 1, (rows.n, rows.length)).transpose(0, 1)
    size = (rows.n, flat_lse.shape[0], rows.length)
    stride = (flat_lse.stride(1) * rows.step, flat_lse.stride(0), flat_lse.stride(1))
    return flat_lse.as_strided(size, stride, flat_lse.storage_offset() + rows.start * flat_lse.stride(1))


def weightless(lse: Float[Tensor, "B H T"]) -> Float[Tensor, "H N"]:
    """Flat log-sum-exps [H, B * T + 1] for a backward: +inf, that is weight zero, where nothing was seen.

    The last one is for the empty slots of a gather: they then weigh nothing, whatever token they read.
    """
    flat = lse.transpose(0, 1).flatten(1, 2)
    flat = flat.masked_fill(flat == -torch.inf, torch.inf)
    return torch.nn.functional.pad(flat, (0, 1), value=torch.inf)
