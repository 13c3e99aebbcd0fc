from __future__ import annotations

import re

import broken_domains
import broken_envs
import pytest

from sinkflex.envs import ENV_IDS
from sinkflex.envs.checker import DOMAIN_CHECKS, ENV_CHECKS, CheckReport, check
from sinkflex.envs.domains.mock import MockDomain
from sinkflex.errors import EnvError


@pytest.mark.parametrize("env_id", sorted(ENV_IDS))
def test_every_embedded_environment_passes(env_id: str) -> None:
    report = check(env_id, fuzzed_actions=100)
    report.raise_for_findings()
    assert len(report.results) == len(ENV_CHECKS) + len(DOMAIN_CHECKS)


def assert_caught(report: CheckReport, name: str, cause: str) -> None:
    found = [text for result in report.results if result.name == name for text in result.findings]
    assert any(re.search(cause, text) for text in found), report
    assert not report.ok


@pytest.mark.parametrize("name", sorted(broken_domains.CASES))
def test_a_broken_domain_is_caught_with_its_cause(name: str) -> None:
    kind, failing, cause = broken_domains.CASES[name]
    assert_caught(check(kind, tasks=3, fuzzed_actions=20), failing, cause)


@pytest.mark.parametrize("env_id", sorted(broken_envs.CASES))
def test_a_broken_environment_is_caught_with_its_cause(env_id: str) -> None:
    failing, cause = broken_envs.CASES[env_id]
    options = {} if ":" in env_id else {"prompt": "brief"}  # own options keep the checker from starting processes
    assert_caught(check(env_id, tasks=3, fuzzed_actions=300, **options), failing, cause)


def test_at_least_fifteen_broken_ones() -> None:
    assert len(broken_domains.CASES) + len(broken_envs.CASES) >= 15


def test_the_sound_domain_the_broken_ones_derive_from_passes() -> None:
    report = check(MockDomain(), tasks=3, fuzzed_actions=300)
    assert report.ok, report
    report.raise_for_findings()
    assert report.findings == ()
    assert "ok   solvable" in str(report)


def test_findings_are_raised_with_their_check() -> None:
    report = check(broken_domains.Vacuous, tasks=1, fuzzed_actions=1)
    with pytest.raises(EnvError, match=r"mock is not sound:\n(.|\n)*- components: .*every component is None"):
        report.raise_for_findings()


def test_there_must_be_something_to_check() -> None:
    with pytest.raises(EnvError, match="tasks must be at least 1, got 0"):
        check("sinkflex/Mock-v0", tasks=0)

    class Empty(MockDomain):
        def tier_task_ids(self, split: str, tier: str) -> tuple[str, ...]:
            return ()

    with pytest.raises(EnvError, match="has no tasks to check"):
        check(Empty)
