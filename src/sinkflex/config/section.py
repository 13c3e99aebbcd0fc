"""The base of every recipe section, and the two field types they share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """One table of a recipe: frozen, strict about types, and without room for an unknown key.

    The text under a field is its documentation: ``sinkflex config keys`` prints it.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


def _as_tuple(value: Any) -> Any:
    """TOML has lists only; a frozen section keeps tuples."""
    return tuple(value) if isinstance(value, list) else value


def _one_or_many(value: Any) -> Any:
    """``"easy"`` is short for ``["easy"]``."""
    return (value,) if isinstance(value, str) else _as_tuple(value)


Names = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]
"""A list of names; a lone string is a list of one."""

Pair = Annotated[tuple[float, float], BeforeValidator(_as_tuple)]
"""Two numbers, written as a TOML list."""

Counts = Annotated[tuple[int, ...], BeforeValidator(_as_tuple)]
"""Whole numbers, written as a TOML list."""
