"""The shared state both sides act on: plain records with a write journal.

Records are never changed in place: a write replaces the record and journals the old one, so a snapshot is a
journal position, a restore undoes what came after it, and a hash re-reads only what changed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from sinkflex.errors import EnvError, ToolError, unknown_name
from sinkflex.types import JSONObject, JSONValue

Record: TypeAlias = Mapping[str, JSONValue]
"""One row, read-only: field name to JSON value."""

_Entry: TypeAlias = tuple[str, str, JSONObject | None, int | None]
"""Table, key, what was there, and for a deleted row the place that it had."""

_HASH_BITS = 128


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Snapshot:
    """A point in a world's journal; only ``World.restore`` of the same world understands it."""

    position: int
    tail: Any


class World:
    """Tables of records keyed by string ids, with a write journal.

    Args:
        tables: table name to (key to record). The world takes ownership; hand it fresh dicts.
        bags: (table, field) pairs whose list value is a multiset: order does not enter the hash.
    """

    __slots__ = ("_bags", "_digests", "_journal", "_stale", "_tables", "_total")

    def __init__(self, tables: dict[str, dict[str, JSONObject]], *, bags: Iterable[tuple[str, str]] = ()) -> None:
        self._tables = tables
        self._bags = frozenset(bags)
        self._journal: list[_Entry] = []
        self._digests: dict[tuple[str, str], int] = {}
        self._stale: set[tuple[str, str]] | None = None
        self._total = 0

    def get(self, table: str, key: str) -> Record:
        """Return one record, read-only.

        Raises:
            ToolError: the table has no such key (ids come from the acting side, which reads the message).
            EnvError: there is no such table.
        """
        record = self._rows(table).get(key)
        if record is None:
            raise ToolError(f"{table} has no {key!r}")
        return MappingProxyType(record)

    def has(self, table: str, key: str) -> bool:
        """Return whether the table holds the key."""
        return key in self._rows(table)

    def keys(self, table: str) -> tuple[str, ...]:
        """Return the table's keys in insertion order."""
        return tuple(self._rows(table))

    def items(self, table: str) -> Iterator[tuple[str, Record]]:
        """Yield (key, read-only record) in insertion order."""
        for key, record in self._rows(table).items():
            yield key, MappingProxyType(record)

    def update(self, table: str, key: str, **fields: JSONValue) -> None:
        """Set fields of one record and journal the write.

        Raises:
            ToolError: the table has no such key.
            EnvError: a field is not one of the record's; a misspelt write would otherwise pass unseen.
        """
        rows = self._rows(table)
        old = rows.get(key)
        if old is None:
            raise ToolError(f"{table} has no {key!r}")
        if not fields.keys() <= old.keys():
            stray = next(name for name in fields if name not in old)
            raise EnvError(unknown_name(f"field of {table}", stray, old))
        self._write(table, key, {**old, **fields})

    def insert(self, table: str, key: str, record: JSONObject) -> None:
        """Add a record and journal the write.

        Raises:
            EnvError: the key is taken.
        """
        if key in self._rows(table):
            raise EnvError(f"{table} already has {key!r}; use update to change it")
        self._write(table, key, dict(record))

    def delete(self, table: str, key: str) -> None:
        """Remove a record and journal the write.

        Raises:
            ToolError: the table has no such key.
        """
        if key not in self._rows(table):
            raise ToolError(f"{table} has no {key!r}")
        self._write(table, key, None)

    def snapshot(self) -> Snapshot:
        """Return the present point in the journal; costs nothing."""
        return Snapshot(position=len(self._journal), tail=self._journal[-1] if self._journal else None)

    def restore(self, snapshot: Snapshot) -> None:
        """Undo every write made after the snapshot.

        Raises:
            EnvError: the snapshot is not in this world's past (another world's, or undone since).
        """
        position = snapshot.position
        tail = self._journal[position - 1] if 0 < position <= len(self._journal) else None
        if position > len(self._journal) or tail is not snapshot.tail:
            raise EnvError("snapshot is not in this world's past; restore snapshots newest first")
        while len(self._journal) > position:
            table, key, old, place = self._journal.pop()
            self._put(table, key, old)
            if place is not None:
                self._move(table, key, place)

    @property
    def writes(self) -> int:
        """Number of journalled writes that stand."""
        return len(self._journal)

    def hash(self) -> str:
        """Return a canonical hash of the whole state; equal states hash equally however they came about.

        Integral floats equal integers, keys are unordered, and bag fields are multisets. The cost after the
        first call is that of the records changed since the last one. The per-record digests are added up, which
        suits comparing states, not defending against an adversary who picks records.

        Raises:
            EnvError: a record holds a number that is not finite.
        """
        stale = self._stale
        if stale is None:
            stale = {(table, key) for table, rows in self._tables.items() for key in rows}
        for slot in stale:
            self._total -= self._digests.pop(slot, 0)
            record = self._tables[slot[0]].get(slot[1])
            if record is not None:
                self._digests[slot] = digest = self._digest(*slot, record)
                self._total += digest
        self._stale = set()
        self._total %= 1 << _HASH_BITS
        return f"{self._total:032x}"

    def audit(self) -> None:
        """Check that every change went through the journal.

        Raises:
            EnvError: a record was changed in place; the message names it.
        """
        self.hash()
        for (table, key), digest in self._digests.items():
            if self._digest(table, key, self._tables[table][key]) != digest:
                raise EnvError(f"{table}[{key!r}] was changed in place; write with World.update so it is journalled")

    def to_dict(self) -> dict[str, dict[str, JSONObject]]:
        """Return a deep plain copy of all tables, for records and displays."""
        copied: dict[str, dict[str, JSONObject]] = json.loads(json.dumps(self._tables))
        return copied

    def _rows(self, table: str) -> dict[str, JSONObject]:
        try:
            return self._tables[table]
        except KeyError:
            raise EnvError(unknown_name("table", table, self._tables)) from None

    def _write(self, table: str, key: str, new: JSONObject | None) -> None:
        rows = self._tables[table]
        place = list(rows).index(key) if new is None else None
        self._journal.append((table, key, rows.get(key), place))
        self._put(table, key, new)

    def _put(self, table: str, key: str, record: JSONObject | None) -> None:
        if record is None:
            self._tables[table].pop(key, None)
        else:
            self._tables[table][key] = record
        if self._stale is not None:
            self._stale.add((table, key))

    def _move(self, table: str, key: str, place: int) -> None:
        """Put a row back where it stood before it was deleted; tools list rows in order."""
        rows = self._tables[table]
        for later in list(rows)[place:-1]:
            rows[later] = rows.pop(later)

    def _digest(self, table: str, key: str, record: JSONObject) -> int:
        fields = {
            name: sorted((_canonical(item) for item in value), key=_sort_key)
            if (table, name) in self._bags and isinstance(value, list)
            else _canonical(value)
            for name, value in record.items()
        }
        text = json.dumps([table, key, fields], sort_keys=True, separators=(",", ":"))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_HASH_BITS // 8).digest())


def _canonical(value: JSONValue) -> JSONValue:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise EnvError(f"a record holds {value!r}; state must be finite numbers")
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return value


def _sort_key(value: JSONValue) -> str:
    return json.dumps(value, sort_keys=True)
