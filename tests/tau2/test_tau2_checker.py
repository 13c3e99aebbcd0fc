"""SinkFlex's own conformance kit holds for the adapter too."""

from __future__ import annotations

import pytest

from sinkflex.envs.checker import check

pytestmark = [pytest.mark.tau2, pytest.mark.slow]


@pytest.mark.parametrize("env_id", ["sinkflex/Tau2-Retail-v0", "sinkflex/Tau2-Telecom-v0"])
def test_the_conformance_kit_finds_nothing(env_id: str) -> None:
    check(env_id, tasks=4, fuzzed_actions=300).raise_for_findings()
