from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sinkflex.chat.strict_json import MAX_DEPTH, StrictJSONError, bad_character, strict_loads


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", r"is not valid JSON \(Expecting value at character 0\)"),
        ("[1,]", "is not valid JSON"),
        ('{"a":1,"a":1}', "repeats the key 'a'"),
        ("Infinity", "holds Infinity"),
        ("[-1e400]", "too large to represent"),
        ("1" * 4301, "too many digits"),
        ('["\\u001b"]', r"control character U\+001B"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), f"deeper than {MAX_DEPTH}"),
        ("[" * 99_999, f"deeper than {MAX_DEPTH}"),
    ],
)
def test_refusals(text: str, reason: str) -> None:
    with pytest.raises(StrictJSONError, match=reason):
        strict_loads(text)


def test_accepts_what_json_means() -> None:
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert strict_loads(' {"a": [1, -2.5, true, null, "x\\n\\u00e9"]}\n') == {"a": [1, -2.5, True, None, "x\né"]}
    assert strict_loads(deepest) is not None


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text())
def test_bad_character_finds_exactly_what_utf8_or_a_terminal_cannot_take(text: str) -> None:
    bad = [c for c in text if (ord(c) < 32 and c not in "\n\t\r") or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000]
    assert bad_character(text) == (f"U+{ord(bad[0]):04X}" if bad else None)
