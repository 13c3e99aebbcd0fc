"""The recipes that come with SinkFlex, by name or by path."""

from __future__ import annotations

from pathlib import Path

from sinkflex.errors import ConfigError, unknown_name

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDERS = (_PACKAGE / "recipes", _PACKAGE.parents[1] / "recipes")
"""Inside an installed wheel, and in a source tree."""


def shipped_recipes() -> dict[str, Path]:
    """Return the shipped recipes: name without ``.toml`` to file."""
    for folder in _FOLDERS:
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.toml"))}
    return {}


def find_recipe(name: str) -> Path:
    """Return the recipe file that a person means.

    Args:
        name: a path, or the name of a shipped recipe with or without ``.toml`` or ``recipes/`` before it.

    Raises:
        ConfigError: there is no such file and no such shipped recipe.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    shipped = shipped_recipes()
    if path.stem in shipped and path.parent in (Path(), Path("recipes")):
        return shipped[path.stem]
    raise ConfigError(f"no file {name!r}, and {unknown_name('shipped recipe', path.stem, shipped)}")
