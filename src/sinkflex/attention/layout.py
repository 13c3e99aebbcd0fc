"""SequenceLayout: padding, packed documents, K/V caches and prefix trees as one structure.

Every packed token has a logical ``position`` (what RoPE and windows see) and belongs to a node of a forest, numbered so
that key ``k`` is visible to query ``q`` iff ``enter[k] <= enter[q] < exit[k]`` and ``position[k] <= position[q]``.
Padding belongs to no node: it sees nothing and nothing sees it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkflex.attention.forest import Node, cut_chunks, longest_path, preorder
from sinkflex.errors import AttentionError

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceLayout:
    """Which key each query may see, for any mix of padding, packing, caching and shared prefixes.

    Build one with a constructor (:meth:`causal`, :meth:`from_padding`, :meth:`from_documents`,
    :meth:`from_position_ids`, :meth:`from_prefix_tree`, :meth:`decode`), once per batch, and pass the same object to
    every layer: what an impl derives from it is cached on it.

    Attributes:
        batch: number of rows B.
        num_keys: key columns Tk.
        num_queries: query columns Tq; query ``j`` of row ``b`` is the token in key column ``query_start[b] + j``.
        nodes: the forest of token runs, parents before children.
        query_start: [B] key column of each row's first query.
        device: where the tensors live.
    """

    batch: int
    num_keys: int
    num_queries: int
    nodes: tuple[Node, ...]
    query_start: tuple[int, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Resolve "cuda" to the device that tensors made there report, "cuda:0"."""
        object.__setattr__(self, "device", _with_index(self.device))

    # -- constructors ---------------------------------------------------------------------------------------------

    @classmethod
    def causal(
        cls, batch: int, length: int, *, num_queries: int | None = None, device: torch.device | str = "cpu"
    ) -> SequenceLayout:
        """One document fills each row.

        Args:
            batch: rows.
            length: key columns.
            num_queries: queries are the last ones of each row (K/V cache); None means all.
            device: where the layout's tensors live.

        Raises:
            AttentionError: a size is below one, or ``num_queries`` exceeds ``length``.
        """
        _at_least("length", length, 1)
        nodes = tuple(Node(b, 0, length, 0, -1) for b in range(batch))
        return cls._last_columns(nodes, batch, length, num_queries, device)

    @classmethod
    def from_padding(
        cls, attention_mask: Bool[Tensor, "B Tk"] | Int[Tensor, "B Tk"], *, num_queries: int | None = None
    ) -> SequenceLayout:
        """One document a row with padding anywhere: left, right, both sides, or holes.

        Args:
            attention_mask: [B, Tk] True (non-zero) for a real token.
            num_queries: queries are the last columns of each row (K/V cache); None means all.

        Raises:
            AttentionError: ``attention_mask`` is not two-dimensional, or ``num_queries`` exceeds its columns.
        """
        if attention_mask.dim() != 2:
            raise AttentionError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; expected [batch, keys]. "
                "For a 4-D mask describe the rows with a SequenceLayout constructor instead."
            )
        batch, length = attention_mask.shape
        real = attention_mask.detach().cpu().numpy() != 0
        edges = np.diff(np.pad(real.astype(np.int8), ((0, 0), (1, 1))), axis=1)
        rows, starts = np.nonzero(edges == 1)
        stops = np.nonzero(edges == -1)[1]
        nodes: list[Node] = []
        for row, start, stop in zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True):
            follows = bool(nodes) and nodes[-1].row == row
            position = nodes[-1].position + nodes[-1].length if follows else 0
            nodes.append(Node(row, start, stop - start, position, len(nodes) - 1 if follows else -1))
        return cls._last_columns(tuple(nodes), batch, length, num_queries, attention_mask.device)

    @classmethod
    def from_documents(
        cls,
        lengths: Sequence[int] | Sequence[Sequence[int]],
        *,
        length: int | None = None,
        device: torch.device | str = "cpu",
    ) -> SequenceLayout:
        """Documents packed one after the other; none sees another.

        Args:
            lengths: document lengths of one row, or one such list per row.
            length: columns of a row; what the documents leave over is padding. None means the longest row.
            device: where the layout's tensors live.

        Raises:
            AttentionError: a document is empty, or a row's documents exceed ``length``.
        """
        rows = _as_rows("lengths", lengths)
        return cls.from_prefix_tree(rows, [[-1] * len(row) for row in rows], length=length, device=device)

    @classmethod
    def from_position_ids(cls, position_ids: Int[Tensor, "B T"]) -> SequenceLayout:
        """Packed rows as Hugging Face marks them: a document ends where the position does not go up by one.

        Args:
            position_ids: [B, T] positions, restarting at each document.

        Raises:
            AttentionError: ``position_ids`` is not two-dimensional.
        """
        if position_ids.dim() != 2:
            raise AttentionError(f"position_ids has shape {tuple(position_ids.shape)}; expected [batch, length]")
        batch, length = position_ids.shape
        ids = position_ids.detach().cpu().numpy()
        opens = np.ones((batch, length), dtype=bool)
        opens[:, 1:] = np.diff(ids, axis=1) != 1
        rows, starts = np.nonzero(opens)
        stops = np.append(np.where(rows[1:] == rows[:-1], starts[1:], length), length)
        first = ids[rows, starts]
        columns = zip(rows.tolist(), starts.tolist(), stops.tolist(), first.tolist(), strict=True)
        nodes = tuple(Node(row, start, stop - start, position, -1) for row, start, stop, position in columns)
        return cls._last_columns(nodes, batch, length, None, position_ids.device)

    @classmethod
    def from_prefix_tree(
        cls,
        lengths: Sequence[int] | Sequence[Sequence[int]],
        parents: Sequence[int] | Sequence[Sequence[int]],
        *,
        length: int | None = None,
        device: torch.device | str = "cpu",
    ) -> SequenceLayout:
        """Token runs that share prefixes: each node's tokens follow, logically, those of its parent.

        Nodes lie in the row in the order given. A group of two replies (4 and 5 tokens) to one prompt of 7 tokens is
        ``from_prefix_tree([7, 4, 5], [-1, 0, 0])``: one row of 16 tokens with positions 0-6, 7-10, 7-11.
        Depth-first order is the fastest.

        Args:
            lengths: tokens of each node, for one row or per row.
            parents: for each node the index of its parent within the same row, or -1; parents come first.
            length: columns of a row; the rest is padding. None means the longest row.
            device: where the layout's tensors live.

        Raises:
            AttentionError: a node is empty, a parent does not precede its child, or a row exceeds ``length``.
        """
        rows, parent_rows = _as_rows("lengths", lengths), _as_rows("parents", parents)
        if [len(row) for row in rows] != [len(row) for row in parent_rows]:
            raise AttentionError("parents must name one parent per entry of lengths; their shapes differ")
        nodes: list[Node] = []
        columns = 0
        for b, (sizes, above) in enumerate(zip(rows, parent_rows, strict=True)):
            first, start = len(nodes), 0
            for i, (size, parent) in enumerate(zip(sizes, above, strict=True)):
                _at_least(f"lengths[{b}][{i}]", size, 1)
                if not -1 <= parent < i:
                    raise AttentionError(
                        f"parents[{b}][{i}] is {parent}; expected -1 (a root) or an earlier node, 0 to {i - 1}"
                    )
                up = nodes[first + parent] if parent >= 0 else None
                position = up.position + up.length if up else 0
                nodes.append(Node(b, start, size, position, first + parent if up else -1))
                start += size
            columns = max(columns, start)
        if length is not None and columns > length:
            raise AttentionError(f"a row holds {columns} tokens but length is {length}; raise length or split the row")
        return cls._last_columns(tuple(nodes), len(rows), length or columns, None, device)

    @classmethod
    def decode(
        cls,
        key_lengths: Int[Tensor, " B"] | Sequence[int],
        num_keys: int,
        *,
        num_queries: int = 1,
        device: torch.device | str = "cpu",
    ) -> SequenceLayout:
        """A right-padded K/V cache with rows of different lengths; the queries are each row's last tokens.

        Args:
            key_lengths: [B] cached tokens of each row, the new ones included.
            num_keys: columns of the cache tensor (Tk).
            num_queries: new tokens of each row (Tq).
            device: where the layout's tensors live.

        Raises:
            AttentionError: a length is below ``num_queries`` or above ``num_keys``.
        """
        lengths = key_lengths.tolist() if isinstance(key_lengths, Tensor) else list(key_lengths)
        if not lengths or min(lengths) < num_queries or max(lengths) > num_keys:
            raise AttentionError(
                f"key_lengths must lie between num_queries={num_queries} and num_keys={num_keys}; got {lengths}"
            )
        _at_least("num_queries", num_queries, 1)
        return cls(
            batch=len(lengths),
            num_keys=num_keys,
            num_queries=num_queries,
            nodes=tuple(Node(b, 0, n, 0, -1) for b, n in enumerate(lengths)),
            query_start=tuple(n - num_queries for n in lengths),
            device=torch.device(device),
        )

    @classmethod
    def _last_columns(
        cls,
        nodes: tuple[Node, ...],
        batch: int,
        length: int,
        num_queries: int | None,
        device: torch.device | str,
    ) -> SequenceLayout:
        _at_least("batch", batch, 1)
        queries = length if num_queries is None else num_queries
        if not 1 <= queries <= length:
            raise AttentionError(f"num_queries is {queries}; expected 1 to the number of keys, {length}")
        return cls(
            batch=batch,
            num_keys=length,
            num_queries=queries,
            nodes=nodes,
            query_start=(length - queries,) * batch,
            device=torch.device(device),
        )

    # -- derived layouts ------------------------------------------------------------------------------------------

    def chunked(self, chunk: int) -> SequenceLayout:
        """Chunked local attention: a query sees only keys whose position lies in its own block of ``chunk`` positions.

        Args:
            chunk: positions a chunk, at least one.

        Raises:
            AttentionError: ``chunk`` is below one.
        """
        _at_least("chunk", chunk, 1)
        return replace(self, nodes=cut_chunks(self.nodes, chunk), _cache={})

    def to(self, device: torch.device | str) -> SequenceLayout:
        """The same layout with its tensors on ``device``; itself when it is there already."""
        target = _with_index(torch.device(device))
        return self if target == self.device else replace(self, device=target, _cache={})

    # -- tensors --------------------------------------------------------------------------------------------------

    @property
    def position(self) -> Int[Tensor, "B Tk"]:
        """[B, Tk] logical position of each key token; 0 for padding."""
        return self._key_tensors[0]

    @property
    def enter(self) -> Int[Tensor, "B Tk"]:
        """[B, Tk] forest number of each key token's node; -1 for padding."""
        return self._key_tensors[1]

    @property
    def exit(self) -> Int[Tensor, "B Tk"]:
        """[B, Tk] one past the last number in the subtree of each key token's node; -1 for padding."""
        return self._key_tensors[2]

    @property
    def q_position(self) -> Int[Tensor, "B Tq"]:
        """[B, Tq] logical position of each query; 0 for padding. Feed it to RoPE."""
        return self._query_tensors[0]

    @property
    def q_enter(self) -> Int[Tensor, "B Tq"]:
        """[B, Tq] forest number of each query's node; -1 for padding."""
        return self._query_tensors[1]

    @property
    def longest_path(self) -> int:
        """The largest number of keys that any query can see without a window."""
        return self.cached("longest_path", lambda: longest_path(self.nodes))

    def query_columns(self, node: Node) -> tuple[int, int]:
        """The key columns [start, stop) of a node's tokens that are queries; they are always its last ones."""
        first = self.query_start[node.row]
        stop = min(node.start + node.length, first + self.num_queries)
        return min(max(node.start, first), stop), stop

    def cached(self, key: Any, build: Callable[[], _T]) -> _T:
        """Return what ``build`` made for ``key``, calling it the first time only. Impls keep their plans here."""
        if key not in self._cache:
            self._cache[key] = build()
        value: _T = self._cache[key]
        return value

    @property
    def _key_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.cached("key_tensors", self._build_key_tensors)

    @property
    def _query_tensors(self) -> tuple[Tensor, Tensor]:
        return self.cached("query_tensors", self._build_query_tensors)

    def _build_key_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        enter, leave = preorder(self.nodes)
        table = np.array(self.nodes, dtype=np.int64).reshape(-1, 5)
        sizes = table[:, 2]
        inside = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        cell = np.repeat(table[:, 0] * self.num_keys + table[:, 1], sizes) + inside
        values = ((table[:, 3], 0, inside), (np.array(enter), -1, 0), (np.array(leave), -1, 0))
        tensors = []
        for per_node, padding, offset in values:
            flat = np.full(self.batch * self.num_keys, padding, dtype=np.int32)
            flat[cell] = np.repeat(per_node, sizes) + offset
            tensors.append(torch.from_numpy(flat).view(self.batch, self.num_keys).to(self.device))
        return tensors[0], tensors[1], tensors[2]

    def _build_query_tensors(self) -> tuple[Tensor, Tensor]:
        if self.num_queries == self.num_keys:
            return self.position, self.enter
        first = torch.tensor(self.query_start, device=self.device)
        column = first[:, None] + torch.arange(self.num_queries, device=self.device)
        return self.position.gather(1, column), self.enter.gather(1, column)


def _as_rows(name: str, values: Sequence[Any]) -> list[list[int]]:
    """One list of whole numbers per row, from one row's numbers or from a list (or array) of numbers per row."""
    nested = {isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0 for value in values}
    try:
        if len(nested) > 1:
            raise TypeError
        return [[operator.index(size) for size in row] for row in (values if True in nested else [values])]
    except TypeError:
        raise AttentionError(
            f"{name} is {values!r}; expected whole numbers for one row, or a list of whole numbers for each row"
        ) from None


def _with_index(device: torch.device) -> torch.device:
    """The device with its number, where it has one: "cuda" is the current one."""
    if str(device) == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise AttentionError(f"{name} is {value}; expected at least {low}")
