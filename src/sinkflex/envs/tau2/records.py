"""A database shared by many episodes: a row is copied when code that may write first gets hold of it.

τ²'s retail and airline databases hold thousands of rows and an episode touches a handful. Loading, copying and hashing
the whole database for every episode is where the time goes, so the untouched rows are shared, and two states are
compared by what differs from the common origin.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

Delta: TypeAlias = dict[tuple[str, str], str | None]
"""(table, key) of every row that differs from the origin, to its canonical JSON; None for a row that is gone."""

_ABSENT: Any = object()


def canonical_json(record: Any) -> str:
    """Return the text τ²'s own database hash is taken over, for one row or one field.

    Args:
        record: a pydantic model, or plain data.
    """
    plain = record.model_dump(warnings=False) if hasattr(record, "model_dump") else record
    return json.dumps(plain, sort_keys=True, default=str)


class Access:
    """Says for all tables of one episode whether the running tool only reads."""

    __slots__ = ("reading",)

    def __init__(self) -> None:
        self.reading = False


class Origin:
    """The untouched rows of one table, with their copies and JSON made at most once.

    Args:
        rows: key to pydantic model; owned by the origin from now on.
    """

    def __init__(self, rows: Mapping[str, Any]) -> None:
        self.rows = dict(rows)
        self._pickled: dict[str, bytes] = {}
        self._json: dict[str, str] = {}

    def copy(self, key: str) -> Any:
        """Return a private copy of one row."""
        blob = self._pickled.get(key)
        if blob is None:
            blob = self._pickled[key] = pickle.dumps(self.rows[key], protocol=pickle.HIGHEST_PROTOCOL)
        return pickle.loads(blob)

    def json(self, key: str) -> str | None:
        """Return one row's canonical JSON, None when there is no such row."""
        if key not in self.rows:
            return None
        if key not in self._json:
            self._json[key] = canonical_json(self.rows[key])
        return self._json[key]


class SharedTable(dict[str, Any]):
    """One episode's view of a table: behaves as the dict it stands for.

    While ``access.reading`` is False every row handed out is a private copy, so changing it in place changes this
    episode only. While it is True the shared rows themselves are handed out and must not be changed.
    """

    __slots__ = ("_access", "_origin", "_owned")

    def __init__(self, origin: Origin, access: Access) -> None:
        super().__init__(origin.rows)
        self._origin = origin
        self._access = access
        self._owned: set[str] = set()

    def _hand_out(self, key: str, record: Any) -> Any:
        if self._access.reading or key in self._owned:
            return record
        record = self._origin.copy(key)
        self._owned.add(key)
        super().__setitem__(key, record)
        return record

    def __getitem__(self, key: str) -> Any:
        return self._hand_out(key, super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the row, or the default."""
        try:
            return self[key]
        except KeyError:
            return default

    def values(self) -> Any:
        """Return the rows as a list."""
        return [self[key] for key in self]

    def items(self) -> Any:
        """Return (key, row) pairs as a list."""
        return [(key, self[key]) for key in self]

    def __setitem__(self, key: str, record: Any) -> None:
        self._owned.add(key)
        super().__setitem__(key, record)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self._owned.add(key)

    def pop(self, key: str, default: Any = _ABSENT) -> Any:
        """Remove a row and return it."""
        if key not in self and default is not _ABSENT:
            return default
        record = self[key]
        del self[key]
        return record

    def popitem(self) -> tuple[str, Any]:
        """Remove and return the last row."""
        key = next(reversed(self))
        return key, self.pop(key)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the row, adding the default when there is none."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **rows: Any) -> None:
        """Add or replace rows."""
        for key, record in dict(*others, **rows).items():
            self[key] = record

    def clear(self) -> None:
        """Remove every row."""
        for key in list(self):
            del self[key]

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (copy.deepcopy(dict(self)),)

    def changes(self) -> dict[str, str | None]:
        """Return key to canonical JSON of the rows that differ from the origin, None where a row is gone."""
        changed: dict[str, str | None] = {}
        for key in self._owned:
            text = canonical_json(super().__getitem__(key)) if key in self else None
            if text != self._origin.json(key):
                changed[key] = text
        return changed


class SharedDatabase:
    """The origin of one database; hands out an episode's own view of it.

    Args:
        database: pydantic model whose dict-of-model fields become shared tables; other fields are copied.
    """

    def __init__(self, database: Any) -> None:
        self._model = type(database)
        self._tables: dict[str, Origin] = {}
        self._fields: dict[str, bytes] = {}
        for name in type(database).model_fields:
            value = getattr(database, name)
            if isinstance(value, dict) and all(hasattr(record, "model_dump") for record in value.values()):
                self._tables[name] = Origin(value)
            else:
                self._fields[name] = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)

    def view(self, access: Access) -> Any:
        """Return a fresh database model for one episode."""
        tables = {name: SharedTable(origin, access) for name, origin in self._tables.items()}
        fields = {name: pickle.loads(blob) for name, blob in self._fields.items()}
        return self._model.model_construct(**fields, **tables)

    def damaged(self, originals: Mapping[str, Mapping[str, str]]) -> Iterable[tuple[str, str]]:
        """Yield (table, key) of shared rows that no longer match; a tool declared as reading wrote to them.

        Args:
            originals: ``fingerprints`` taken when the database was loaded.
        """
        for name, rows in self.fingerprints().items():
            for key, text in rows.items():
                if originals[name].get(key) != text:
                    yield name, key

    def fingerprints(self) -> dict[str, dict[str, str]]:
        """Return table to key to canonical JSON of every shared row, read afresh."""
        return {
            name: {key: canonical_json(record) for key, record in origin.rows.items()}
            for name, origin in self._tables.items()
        }


def delta(database: Any) -> Delta:
    """Return how a view differs from its origin; equal deltas of one origin mean equal database hashes.

    A database that has no shared tables is compared whole, under the empty table name.
    """
    changes: Delta = {}
    for name in type(database).model_fields:
        value = getattr(database, name)
        if isinstance(value, SharedTable):
            changes.update({(name, key): text for key, text in value.changes().items()})
        else:
            changes[("", name)] = canonical_json(database.model_dump(include={name}, warnings=False))
    return changes
