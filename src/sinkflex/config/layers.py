"""Where a recipe's values come from: files, each of which may extend another, and command-line overrides.

A layer remembers its text, so that a later complaint about a value can name the file and the line.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinkflex.errors import ConfigError

KeyPath = tuple[str, ...]
"""A key's place in a recipe: ``("rollout", "group_size")`` is ``rollout.group_size``."""

_TABLE = re.compile(r"^\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*((?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*'))*)\s*=")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Values from one source.

    Attributes:
        origin: file name, or the override as typed.
        values: nested tables.
        text: the file's text; empty for an override.
        raw: the override's value as typed; None for a file.
    """

    origin: str
    values: Mapping[str, Any]
    text: str = ""
    raw: str | None = None

    def holds(self, path: KeyPath) -> bool:
        """True when this layer sets ``path`` or something above or below it."""
        table: Any = self.values
        for key in path:
            if not isinstance(table, Mapping):
                return True
            if key not in table:
                return False
            table = table[key]
        return True

    def place(self, path: KeyPath) -> str:
        """Return ``file:line`` of ``path`` or of the table above it; for an override, how it was typed."""
        if self.raw is not None:
            return f"--set {self.origin}"
        for length in range(len(path), 0, -1):
            line = _line_of(self.text, path[:length])
            if line is not None:
                return f"{self.origin}:{line}"
        return self.origin


def file_layers(path: Path) -> list[Layer]:
    """Read a recipe and those it extends, the outermost parent first.

    A recipe extends another with ``extends = "other.toml"`` before its first table; the name is relative to
    the file that says it.

    Raises:
        ConfigError: a file is missing, unreadable or no TOML, ``extends`` is no name, or the files extend
            each other in a circle.
    """
    layers: list[Layer] = []
    seen: list[Path] = []
    current: Path | None = path
    while current is not None:
        if current.resolve() in seen:
            chain = " -> ".join(str(step.name) for step in [*seen, current])
            raise ConfigError(f"recipes extend each other in a circle: {chain}; drop one `extends`")
        seen.append(current.resolve())
        layer, parent = _read_layer(current)
        layers.append(layer)
        current = None if parent is None else current.parent / parent
    return layers[::-1]


def override_layer(assignment: str) -> Layer:
    """Parse one ``a.b=value`` of ``--set``. The value is TOML; a text needs no quotes.

    Raises:
        ConfigError: no ``=``, an empty key or value, or a list, table or quoted text that is not TOML.
    """
    key, equals, raw = assignment.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    raw = raw.strip()
    if not equals or not all(path):
        raise ConfigError(f"--set {assignment!r} is no assignment; write it as section.key=value")
    if not raw:
        raise ConfigError(f'--set {assignment!r} has no value; write {key}="" for an empty text')
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError as error:
        if raw[0] in "[{\"'":
            raise ConfigError(f"--set {assignment!r}: the value is not TOML ({error})") from error
        value = raw
    return Layer(origin=assignment, values=_nest(path, value), raw=raw)


def merge(layers: Iterable[Layer]) -> dict[str, Any]:
    """Return the layers' values, later ones winning key by key; tables merge, everything else is replaced."""
    merged: dict[str, Any] = {}
    for layer in layers:
        _merge_into(merged, layer.values)
    return merged


def _read_layer(path: Path) -> tuple[Layer, str | None]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"recipe {str(path)!r} does not exist{_nearby(path)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {str(path)!r} cannot be read: {error}") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {str(path)!r} is not TOML: {error}") from error
    parent = values.pop("extends", None)
    if parent is not None and not isinstance(parent, str):
        raise ConfigError(f"{path}: extends = {parent!r} must be the name of one recipe file")
    return Layer(origin=str(path), values=values, text=text), parent


def _nearby(path: Path) -> str:
    others = sorted(other.name for other in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    return f"; {str(path.parent)!r} has {', '.join(others)}" if others else ""


def _nest(path: KeyPath, value: Any) -> dict[str, Any]:
    nested: Any = value
    for key in reversed(path):
        nested = {key: nested}
    return dict(nested)


def _merge_into(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        if isinstance(value, Mapping):
            below = target.get(key)
            table = dict(below) if isinstance(below, Mapping) else {}
            _merge_into(table, value)
            target[key] = table
        else:
            target[key] = value


def _line_of(text: str, path: KeyPath) -> int | None:
    """Line, from 1, on which a TOML text sets ``path`` or opens it as a table; None when it does neither."""
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), start=1):
        header = _TABLE.match(line)
        if header:
            table = _split_key(header[1])
            if table == path:
                return number
            continue
        key = _KEY.match(line)
        if key and table + _split_key(key[1]) == path:
            return number
    return None


def _split_key(dotted: str) -> KeyPath:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
