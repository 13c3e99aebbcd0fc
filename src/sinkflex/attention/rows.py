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
    """

    n: int
    length: int
    start: int = 0
    step: int = 0
    gather: Tensor | None = None
    scatter: Tensor | None = None

    @classmethod
    def span(cls, start: int, length: int) -> Rows:
        """One sequence of neighbouring tokens."""
        return cls(n=1, length=length, start=start, step=length)

    @classmethod
    def of(cls, index: NDArray[np.int64], num_tokens: int, device: torch.device) -> Rows:
        """Rows for an index array, regular if it can be.

        Args:
            index: [n, L] flat tokens, -1 for an empty slot.
            num_tokens: flat tokens in all.
            device: where gathers happen.
        """
        n, length = index.shape
        start = int(index[0, 0])
        step = int(index[1, 0]) - start if n > 1 else length
        regular = start + np.arange(n)[:, None] * step + np.arange(length)
        if step > 0 and start >= 0 and np.array_equal(index, regular):
            return cls(n=n, length=length, start=start, step=step)
        flat = torch.from_numpy(np.ascontiguousarray(index).reshape(-1))
        empty = flat < 0
        return cls(
            n=n,
            length=length,
            gather=flat.masked_fill(empty, 0).to(device),
            scatter=flat.masked_fill(empty, num_tokens).to(device),
        )

    def covers(self, x: Tensor) -> bool:
        """Whether these rows are exactly ``x`` [B, H, T, ...], so that it can be used as it is."""
        return self.gather is None and self.start == 0 and (self.n, self.length, self.step) == (
            x.shape[0],
            x.shape[2],
            x.shape[2],
        )

    def read(self, flat: Float[Tensor, "H N *D"]) -> Float[Tensor, "n H L *D"]:
        """Take the slots out of flat tokens [H, N] or [H, N, D]; a view when regular."""
        if self.gather is not None:
            picked = flat.index_select(1, self.gather)
            return torch.unflatten(picked, 1, (self.n, self.length)).transpose(0, 1)
        stop = self.start + (self.n - 1) * self.step + self.length
        window = flat[:, self.start : stop]
        if self.n == 1:
            return window.unsqueeze(0)
        if self.step == self.length:
            return torch.unflatten(window, 1, (self.n, self.length)).transpose(0, 1)
        size = (flat.shape[0], self.n, self.length, *flat.shape[2:])
        stride = (flat.stride(0), flat.stride(1) * self.step, *flat.stride()[1:])
        return window.as_strided(size, stride).transpose(0, 1)

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


def flatten_tokens(x: Float[Tensor, "B H T *D"]) -> Float[Tensor, "H N *D"]:
    """[B, H, T, D] as flat tokens [H, B * T, D]: a view unless B > 1 and heads lie outside tokens in memory."""
    return x.transpose(0, 1).flatten(1, 2)


def pad_flat(lse: Float[Tensor, "B H T"]) -> Float[Tensor, "H N"]:
    """Flat log-sum-exps [H, B * T + 1] for a backward: +inf, that is weight zero, where nothing was seen.

    Empty slots of a gather then weigh nothing, whatever token they read.
    """
    flat = flatten_tokens(lse)
    flat = flat.masked_fill(flat == -torch.inf, torch.inf)
    return torch.nn.functional.pad(flat, (0, 1), value=torch.inf)
