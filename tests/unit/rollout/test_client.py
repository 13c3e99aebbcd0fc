"""Sampling parameters outside their range are refused where they are written."""

from __future__ import annotations

from typing import Any

import pytest

from sinkflex.errors import RolloutError
from sinkflex.rollout import SamplingParams


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"temperature": -0.1}, "temperature must be finite and >= 0"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"temperature": float("inf")}, "temperature must be finite"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, "top_p must lie in"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    ],
)
def test_ranges(change: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {"max_new_tokens": 4, "stop_ids": frozenset({1}), "seed": 0}
    with pytest.raises(RolloutError, match=match):
        SamplingParams(**(given | change))
