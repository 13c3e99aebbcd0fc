"""JSON as an action may hold it: no duplicate keys, no NaN, no control characters, bounded depth.

``json`` alone accepts all of these and raises several exception types; a tool must never see them.
"""

from __future__ import annotations

import json
import math
import re
from typing import NoReturn

from sinkflex.types import JSONObject, JSONValue

MAX_DEPTH = 32
"""Deepest nesting of lists and objects an action may have."""

_BAD_CHARACTER = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


class StrictJSONError(ValueError):
    """The text is no acceptable JSON; the message is one clause that can stand after "the action"."""


def strict_loads(text: str) -> JSONValue:
    """Parse one JSON value.

    Args:
        text: the whole text; only white space may surround the value.

    Returns:
        The value, made of dict, list, str, int, float, bool and None.

    Raises:
        StrictJSONError: the text is not JSON, an object repeats a key, a number is not finite or has
            thousands of digits, nesting is deeper than ``MAX_DEPTH``, or a string holds a control character
            or a lone surrogate.
    """
    try:
        value = _DECODER.decode(text)
    except StrictJSONError:
        raise
    except json.JSONDecodeError as error:
        raise StrictJSONError(f"is not valid JSON ({error.msg} at character {error.pos})") from None
    except RecursionError:
        raise StrictJSONError(f"is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError:
        # CPython refuses integers of more than 4,300 digits.
        raise StrictJSONError("holds a number with too many digits") from None
    _check(value, depth=0)
    return value


def bad_character(text: str) -> str | None:
    """Return a printable name of the first control character or lone surrogate in ``text``, or None.

    New lines, tabs and carriage returns are allowed.
    """
    found = _BAD_CHARACTER.search(text)
    return None if found is None else f"U+{ord(found.group()):04X}"


def _unique_object(pairs: list[tuple[str, JSONValue]]) -> JSONObject:
    record: JSONObject = {}
    for key, value in pairs:
        if key in record:
            raise StrictJSONError(f"repeats the key {key[:40]!r}")
        record[key] = value
    return record


def _refuse_constant(name: str) -> NoReturn:
    raise StrictJSONError(f"holds {name}, which is not JSON")


def _check(value: JSONValue, *, depth: int) -> None:
    if isinstance(value, str):
        found = bad_character(value)
        if found is not None:
            raise StrictJSONError(f"holds the control character {found}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise StrictJSONError("holds a number too large to represent")
    elif isinstance(value, dict | list):
        if depth >= MAX_DEPTH:
            raise StrictJSONError(f"is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, dict):
            for key in value:
                _check(key, depth=depth)
        for child in value.values() if isinstance(value, dict) else value:
            _check(child, depth=depth + 1)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_object, parse_constant=_refuse_constant)
