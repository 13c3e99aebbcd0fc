"""Key/value slots of the local engine: one row of preallocated memory a request, and what each row holds."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache

IntArray = npt.NDArray[np.int64]


class SlotCache(Cache):
    """Keys and values of every layer as ``[slots, Hkv, max_length + 1, D]``, written at each row's own positions.

    A token's index in its row is its position, so a key is visible to a query exactly when its index is at most the
    query's position (and inside the layer's window): what a row held before is hidden by that rule alone. The extra
    last index takes writes of rows and padding that do not count.

    Call ``route`` before each forward pass; ``update`` then serves the layers.
    """

    def __init__(self, *, slots: int, max_length: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.max_length = max_length
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._positions = torch.zeros(0, 0, dtype=torch.long)
        self._rows: Tensor | None = None
        self._limit = 0
        self._flat_index: Tensor | None = None

    def route(self, *, rows: Tensor | None, positions: Tensor, limit: int) -> None:
        """Say where the next forward pass writes and how far it reads.

        Args:
            rows: [m] slot of each batch row, or None for the first m slots (which needs no gather).
            positions: [m, T] where each row's new tokens go.
            limit: keys [0, limit) are returned to the attention.
        """
        self._rows, self._positions, self._limit = rows, positions, limit
        self._flat_index = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [m, Hkv, T, D] keys and values where ``route`` said; return the rows' first ``limit`` of each."""
        while len(self.keys) <= layer_idx:
            # Zeros, not empty: a masked key has weight 0, and 0 times leftover NaN memory would still be NaN.
            shape = (self.slots, key_states.shape[1], self.max_length + 1)
            self.keys.append(key_states.new_zeros((*shape, key_states.shape[-1])))
            self.values.append(value_states.new_zeros((*shape, value_states.shape[-1])))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        index = self._write_index(heads=keys.shape[1])
        keys.view(-1, keys.shape[-1]).index_copy_(0, index, key_states.reshape(-1, keys.shape[-1]))
        values.view(-1, values.shape[-1]).index_copy_(0, index, value_states.reshape(-1, values.shape[-1]))
        if self._rows is None:
            count = self._positions.shape[0]
            return keys[:count, :, : self._limit], values[:count, :, : self._limit]
        return (
            keys[:, :, : self._limit].index_select(0, self._rows),
            values[:, :, : self._limit].index_select(0, self._rows),
        )

    def _write_index(self, *, heads: int) -> Tensor:
        """[m * heads * T] row numbers into the cache viewed as [slots * heads * (max_length + 1), D]."""
        if self._flat_index is None or self._flat_index.numel() != self._positions.numel() * heads:
            count = self._positions.shape[0]
            device = self._positions.device
            rows = self._rows if self._rows is not None else torch.arange(count, device=device)
            line = rows[:, None] * heads + torch.arange(heads, device=device)
            index = line[:, :, None] * (self.max_length + 1) + self._positions[:, None, :]
            self._flat_index = index.reshape(-1)
        return self._flat_index

    def copy_prefix(self, *, source: int, targets: list[int], length: int) -> None:
        """Copy the first ``length`` keys and values of one slot to others."""
        rows = torch.tensor(targets, device=self.keys[0].device) if len(targets) > 1 else targets[0]
        for store in (*self.keys, *self.values):
            store[rows, :, :length] = store[source, :, :length]

    def swap(self, first: int, second: int, *, length: int) -> None:
        """Exchange the first ``length`` keys and values of two slots."""
        order, back = [first, second], [second, first]
        for store in (*self.keys, *self.values):
            store[order, :, :length] = store[back, :, :length]

    def clear(self) -> None:
        """Zero everything, for after a pass that may have written NaN."""
        for store in (*self.keys, *self.values):
            store.zero_()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Length of the returned keys without the new tokens; transformers asks when it builds masks."""
        return max(self._limit - self._positions.shape[1], 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Key length and offset; transformers asks when it builds masks."""
        return self._limit, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the first new token in an unragged batch; transformers asks when it builds masks."""
        return self.get_seq_length(layer_idx)


class Claim(NamedTuple):
    """A slot given to a request; whether it is new to it; whether another request lost it."""

    slot: int
    is_new: bool
    evicts: bool


class SlotTable:
    """Which tokens each slot knows, how many of them have keys and values, and who owns the slot.

    A slot without owner keeps its contents, as a prefix for others, until it is claimed.

    Attributes:
        tokens: [slots, max_length + 1] transcript of each slot.
        known: [slots] valid entries of ``tokens``.
        computed: [slots] leading entries whose keys and values are in the cache; at most ``known``.
        slot_of: slot of each request that owns one.
    """

    def __init__(self, *, slots: int, max_length: int) -> None:
        self.tokens: IntArray = np.zeros((slots, max_length + 1), dtype=np.int64)
        self.known: IntArray = np.zeros(slots, dtype=np.int64)
        self.computed: IntArray = np.zeros(slots, dtype=np.int64)
        self.slot_of: dict[str, int] = {}
        self._owner: list[str | None] = [None] * slots
        self._last_used = [0] * slots
        self._clock = 0

    def claim(self, request_id: str, *, busy: Collection[int]) -> Claim | None:
        """Find the request's slot, else give it one: a free one, or that of the request idle for longest.

        Args:
            request_id: who asks.
            busy: slots that must not be taken.

        Returns:
            What was given; None when all slots are busy.
        """
        slot = self.slot_of.get(request_id)
        is_new = slot is None
        evicted: str | None = None
        if slot is None:
            idle = [index for index in range(len(self._owner)) if index not in busy]
            if not idle:
                return None
            free = [index for index in idle if self._owner[index] is None]
            slot = free[0] if free else min(idle, key=self._last_used.__getitem__)
            evicted = self._owner[slot]
            if evicted is not None:
                del self.slot_of[evicted]
            self._owner[slot] = request_id
            self.slot_of[request_id] = slot
        self._clock += 1
        self._last_used[slot] = self._clock
        return Claim(slot=slot, is_new=is_new, evicts=evicted is not None)

    def release(self, request_id: str) -> None:
        """Take the slot from its owner, if it has one."""
        slot = self.slot_of.pop(request_id, None)
        if slot is not None:
            self._owner[slot] = None

    def common_prefix(self, slot: int) -> IntArray:
        """[slots] how many leading tokens of each slot's transcript are also those of ``slot``, its last left out.

        The last is left out because it has to be computed in any case, for its logits.
        """
        wanted = self.tokens[slot, : self.known[slot] - 1]
        if not wanted.size:
            return np.zeros_like(self.known)
        differs = self.tokens[:, : wanted.size] != wanted
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), wanted.size)
        return np.minimum(first, self.known)

    def extend(self, slot: int, tokens: IntArray) -> None:
        """Make ``tokens`` [n] the slot's transcript, keeping what is computed of their common prefix.

        The last token is always left to compute, because its logits are what the caller wants.
        """
        shared = min(int(self.known[slot]), tokens.size)
        differs = self.tokens[slot, :shared] != tokens[:shared]
        if differs.any():
            shared = int(differs.argmax())
        self.tokens[slot, shared : tokens.size] = tokens[shared:]
        self.known[slot] = tokens.size
        self.computed[slot] = min(int(self.computed[slot]), shared, tokens.size - 1)

    def missing(self, slot: int) -> int:
        """How many known tokens before the last one lack keys and values."""
        return int(self.known[slot] - 1 - self.computed[slot])

    def swap(self, first: int, second: int) -> None:
        """Exchange the records of two slots."""
        order, back = [first, second], [second, first]
        for array in (self.tokens, self.known, self.computed):
            array[order] = array[back]
        self._owner[first], self._owner[second] = self._owner[second], self._owner[first]
        self._last_used[first], self._last_used[second] = self._last_used[second], self._last_used[first]
        for slot in order:
            owner = self._owner[slot]
            if owner is not None:
                self.slot_of[owner] = slot

    def forget(self) -> None:
        """Mark every key and value as stale; transcripts of owned slots stay, to be computed again."""
        self.computed[:] = 0
        for slot, owner in enumerate(self._owner):
            if owner is None:
                self.known[slot] = 0
