"""Key/value slots of the local engine: one row of preallocated memory a request, and what each row holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache

IntArray = npt.NDArray[np.int64]


class SlotCache(Cache):  # type: ignore[misc]  # transformers ships no types
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
        """Write [m, Hkv, T, D] keys and values at the routed positions; return [m, Hkv, limit, D] of the routed rows."""
        while len(self.keys) <= layer_idx:
            _, heads, _, width = key_states.shape
            # Zeros, not empty: a masked key has weight 0, and 0 times leftover NaN memory would still be NaN.
            shape = (self.slots, heads, self.max_length + 1)
            self.keys.append(key_states.new_zeros((*shape, width)))
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


class SlotTable:
    """Which tokens each slot knows, how many of them have keys and values, and who owns the slot.

    Attributes:
        tokens: [slots, max_length + 1] transcript of each slot.
        known: [slots] valid entries of ``tokens``.
        computed: [slots] leading entries whose keys and values are in the cache; at most ``known``.
        owner: request id of each slot, or None. An ownerless slot keeps its contents for prefix sharing.
        last_used: [slots] engine clock, for eviction of the least recently used.
    """

    def __init__(self, *, slots: int, max_length: int) -> None:
        self.tokens: IntArray = np.zeros((slots, max_length + 1), dtype=np.int64)
        self.known: IntArray = np.zeros(slots, dtype=np.int64)
        self.computed: IntArray = np.zeros(slots, dtype=np.int64)
        self.owner: list[str | None] = [None] * slots
        self.last_used: IntArray = np.zeros(slots, dtype=np.int64)

    def common_prefix(self, tokens: IntArray) -> IntArray:
        """[slots] how many leading tokens each slot's transcript shares with ``tokens`` [n]."""
        differs = self.tokens[:, : tokens.size] != tokens
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), tokens.size)
        return np.minimum(first, self.known)

    def extend(self, slot: int, tokens: IntArray) -> None:
        """Make ``tokens`` [n] the slot's transcript, keeping what is computed of their common prefix.

        The last token is always left to compute, because its logits are what the caller wants.
        """
        kept = int(self.known[slot])
        shared = min(kept, tokens.size)
        if not np.array_equal(self.tokens[slot, :shared], tokens[:shared]):
            shared = int((self.tokens[slot, :shared] != tokens[:shared]).argmax())
        self.tokens[slot, shared : tokens.size] = tokens[shared:]
        self.known[slot] = tokens.size
        self.computed[slot] = min(int(self.computed[slot]), shared, tokens.size - 1)

    def missing(self, slot: int) -> int:
        """How many known tokens before the last one lack keys and values."""
        return int(self.known[slot] - 1 - self.computed[slot])

    def swap(self, first: int, second: int) -> None:
        """Exchange the records of two slots."""
        order, back = [first, second], [second, first]
        for array in (self.tokens, self.known, self.computed, self.last_used):
            array[order] = array[back]
        self.owner[first], self.owner[second] = self.owner[second], self.owner[first]

    def forget(self) -> None:
        """Mark every key and value as stale; transcripts and owners stay, to be computed again."""
        self.computed[:] = 0
        for slot, owner in enumerate(self.owner):
            if owner is None:
                self.known[slot] = 0
