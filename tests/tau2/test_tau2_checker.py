"""SinkFlex's own conformance kit holds for the adapter too."""

from __future__ import annotations

import pytest

from sinkflex.envs import TAU2_IDS
from sinkflex.envs.checker import check

pytestmark = [pytest.mark.tau2, pytest.mark.slow]


@pytest.mark.parametrize("env_id", sorted(TAU2_IDS))
def test_the_conformance_kit_finds_nothing(env_id: str) -> None:
    check(env_id, tasks=3, fuzzed_actions=60).raise_for_findings()
