"""From files and overrides to a checked recipe, and back to TOML."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from sinkflex.config.layers import KeyPath, Layer, file_layers, merge, override_layer
from sinkflex.config.recipe import Recipe
from sinkflex.config.section import Section
from sinkflex.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of the schema, for documentation.

    Attributes:
        name: dotted name.
        type: its type as Python writes it.
        default: the default as TOML writes it; ``"unset"`` when there is none.
        meaning: what it does, with its unit.
    """

    name: str
    type: str
    default: str
    meaning: str


def load_recipe(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply overrides and check everything.

    Args:
        path: TOML file; None starts from the defaults.
        overrides: assignments ``section.key=value`` in the order given; later ones win.

    Raises:
        ConfigError: anything wrong, with the file and line (or the override), the key and the remedy. All
            wrong values are listed at once.
    """
    layers = [] if path is None else file_layers(Path(path))
    layers += [override_layer(assignment) for assignment in overrides]
    try:
        return _validate(layers)
    except ValidationError as error:
        complaints = [_complaint(detail, layers) for detail in error.errors()]
        raise ConfigError("\n".join(complaints)) from error


def dump_recipe(recipe: Recipe) -> str:
    """Return the whole recipe as TOML; loading it gives an equal recipe. Unset keys are left out."""
    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))


def schema_keys() -> list[Key]:
    """Return every key of the schema with type, default and meaning, in the order of the sections."""
    return [_describe(path, section) for path, section in _leaves(Recipe, ())]


def _validate(layers: Sequence[Layer]) -> Recipe:
    """Validate; where an unquoted override meant text but reads as another TOML type, take it as typed."""
    try:
        return Recipe.model_validate(merge(layers))
    except ValidationError as error:
        wanted_text = {tuple(map(str, detail["loc"])) for detail in error.errors() if detail["type"] == "string_type"}
        patched = [_as_text(layer, wanted_text) for layer in layers]
        if patched == list(layers):
            raise
        return Recipe.model_validate(merge(patched))


def _as_text(layer: Layer, wanted_text: set[KeyPath]) -> Layer:
    if layer.raw is None or layer.raw[0] in "[{\"'":
        return layer
    key = layer.origin.partition("=")[0]
    return (
        override_layer(f"{key}={tomli_w.dumps({'v': layer.raw})[4:].strip()}") if _path(key) in wanted_text else layer
    )


def _path(dotted: str) -> KeyPath:
    return tuple(part.strip() for part in dotted.split("."))


def _complaint(detail: Mapping[str, Any], layers: Sequence[Layer]) -> str:
    """One line: where, which key, what was received, what was expected."""
    path = tuple(str(part) for part in detail["loc"])
    holders = [layer for layer in layers if path and layer.holds(path)]
    place = f"{holders[-1].place(path)}: " if holders else ""
    key = ".".join(path)
    if detail["type"] == "extra_forbidden":
        return f"{place}unknown key {key!r}.{_nearest(path)}"
    if not path:
        return str(detail["ctx"]["error"])
    message = detail["msg"].removeprefix("Input should be ")
    if detail["type"] == "model_type":
        message = "a table"
    received = detail["input"]
    if isinstance(received, Mapping):
        return f"{place}{key} is a table; expected {message}"
    return f"{place}{key} = {_toml(received)}; expected {message}"


def _nearest(path: KeyPath) -> str:
    """Name the key most like the unknown one: in its section first, then anywhere, else list the section."""
    known = [key for key, _ in _leaves(Recipe, ())]
    tables = {key[:depth] for key in known for depth in range(1, len(key))}
    siblings = sorted(
        {key[len(path) - 1] for key in [*known, *tables] if key[: len(path) - 1] == path[:-1] and len(key) >= len(path)}
    )
    close = difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {'.'.join((*path[:-1], close[0]))!r}?"
    elsewhere = [repr(".".join(key)) for key in known if key[-1] == path[-1]]
    if not elsewhere:
        dotted = [".".join(key) for key in known]
        elsewhere = [repr(name) for name in difflib.get_close_matches(".".join(path), dotted, n=1, cutoff=0.75)]
    if elsewhere:
        return f" Did you mean {' or '.join(elsewhere)}?"
    where = f"[{'.'.join(path[:-1])}] has" if len(path) > 1 else "The sections are"
    return f" {where} {', '.join(siblings)}."


def _leaves(section: type[Section], above: KeyPath) -> Iterator[tuple[KeyPath, type[Section]]]:
    """Yield each key that is no table, with the section that declares it."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _leaves(field.annotation, (*above, name))
        else:
            yield (*above, name), section


def _describe(path: KeyPath, section: type[Section]) -> Key:
    field = section.model_fields[path[-1]]
    default = field.get_default(call_default_factory=True)
    annotation = field.annotation
    return Key(
        name=".".join(path),
        type=_type_name(annotation),
        default="unset" if default is None else _toml(default),
        meaning=" ".join((field.description or "").split()),
    )


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        return annotation.__name__
    text = str(annotation).replace("typing.", "").replace(" | None", "")
    if text.startswith("Literal["):
        return " | ".join(part.strip() for part in text[8:-1].split(","))
    return {
        "tuple[str, ...]": "list of texts",
        "tuple[int, ...]": "list of numbers",
        "tuple[float, float]": "two numbers",
        "dict[str, Any]": "table",
    }.get(text, text)


def _toml(value: Any) -> str:
    """A value as TOML writes it, on one line."""
    plain = list(value) if isinstance(value, tuple) else value
    if isinstance(plain, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in plain.items()) + "}"
    if isinstance(plain, list):
        return "[" + ", ".join(_toml(item) for item in plain) + "]"
    return tomli_w.dumps({"v": plain})[4:].strip()
