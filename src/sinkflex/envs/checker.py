"""A conformance kit: says whether an environment is sound and, if not, what is probably wrong.

::

    report = check("sinkflex/Telecom-v0")
    print(report)
    report.raise_for_findings()

``sinkflex env check ID`` runs the same. While writing a domain, pass the class or an instance of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium

from sinkflex.envs.checks import contract, dialogue, fuzz, soundness, worlds
from sinkflex.envs.checks.play import Bench
from sinkflex.envs.gym import DualControlEnv
from sinkflex.envs.protocol import Domain
from sinkflex.errors import EnvError

Check: TypeAlias = Callable[[Bench], Iterator[str]]

ENV_CHECKS: tuple[Check, ...] = (*contract.CHECKS, *fuzz.CHECKS)
"""Run on every environment; each check's name is its function's, its claim the docstring's first line."""

DOMAIN_CHECKS: tuple[Check, ...] = (*worlds.CHECKS, *soundness.CHECKS, *dialogue.CHECKS)
"""Run besides on environments that play a ``Domain``."""

MAX_FINDINGS = 5
"""Findings kept of one check; the first says it all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """What one check found.

    Attributes:
        name: the check.
        claim: what it makes sure of.
        findings: what is wrong, with the likely cause; empty when it passed.
        seconds: how long it took.
    """

    name: str
    claim: str
    findings: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """All results on one environment.

    Attributes:
        target: what was checked.
        results: one a check, in order.
    """

    target: str
    results: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return not any(result.findings for result in self.results)

    @property
    def findings(self) -> tuple[str, ...]:
        """All findings, each led by its check's name."""
        return tuple(f"{result.name}: {text}" for result in self.results for text in result.findings)

    def raise_for_findings(self) -> None:
        """Do nothing if all is well.

        Raises:
            EnvError: something was found; the message lists it.
        """
        if not self.ok:
            raise EnvError(f"{self.target} is not sound:\n" + "\n".join(f"- {text}" for text in self.findings))

    def __str__(self) -> str:
        lines = [f"{self.target}"]
        for result in self.results:
            mark = "FAIL" if result.findings else "ok"
            lines.append(f"  {mark:4} {result.name:18} {result.claim} ({result.seconds:.1f} s)")
            lines += [f"       - {text}" for text in result.findings]
        return "\n".join(lines)


def check(
    target: str | Domain[Any] | type[Domain[Any]], *, tasks: int = 12, fuzzed_actions: int = 500, **make_kwargs: Any
) -> CheckReport:
    """Check an environment.

    Args:
        target: a registered id, or a domain under construction (class or instance).
        tasks: how many tasks to play, spread evenly over tiers and splits.
        fuzzed_actions: how many nonsensical actions to send.
        **make_kwargs: passed on when the environment is made.

    Returns:
        The report; a check that itself breaks is reported as a finding.

    Raises:
        EnvError: there is nothing to check: no tasks were asked for, or the environment has none.
    """
    if tasks < 1:
        raise EnvError(f"tasks must be at least 1, got {tasks}")
    bench = _bench(target, tasks=tasks, fuzzed=fuzzed_actions, make_kwargs=make_kwargs)
    checks = ENV_CHECKS if bench.domain is None else (*DOMAIN_CHECKS, *ENV_CHECKS)
    name = target if isinstance(target, str) else bench.domain.name if bench.domain is not None else repr(target)
    return CheckReport(target=name, results=tuple(_run(item, bench) for item in checks))


def _bench(target: Any, *, tasks: int, fuzzed: int, make_kwargs: dict[str, Any]) -> Bench:
    env_id = target if isinstance(target, str) else None
    if env_id is None:
        instance = target() if isinstance(target, type) else target

        def make(**more: Any) -> gymnasium.Env[str, str]:
            return DualControlEnv(domain=instance, **make_kwargs, **more)
    else:

        def make(**more: Any) -> gymnasium.Env[str, str]:
            made: gymnasium.Env[str, str] = gymnasium.make(str(env_id), disable_env_checker=True, **make_kwargs, **more)
            return made

    first = make()
    unwrapped: Any = first.unwrapped
    domain = unwrapped.domain if isinstance(unwrapped, DualControlEnv) else None
    pools = _pools(unwrapped, domain)
    sample = _sample(pools, tasks)
    first.close()
    if not sample:
        raise EnvError(f"{target!r} has no tasks to check")
    other_process = env_id if not make_kwargs else None
    return Bench(
        make=make,
        task_ids=sample,
        domain=domain,
        registered=env_id is not None,
        env_id=other_process,
        fuzz=fuzzed,
    )


def _pools(unwrapped: Any, domain: Domain[Any] | None) -> list[Sequence[str]]:
    if domain is None:
        return [unwrapped.task_ids(unwrapped.split)]
    return [domain.task_ids(split, tier) for split in domain.splits for tier in domain.tiers]


def _sample(pools: list[Sequence[str]], count: int) -> tuple[str, ...]:
    """Take tasks evenly from the pools and evenly within each, its last (often special) task included."""
    pools = [pool for pool in pools if pool]
    picked: dict[str, None] = {}
    for number, pool in enumerate(pools):
        share = count // len(pools) + (number < count % len(pools))
        for step in range(share):
            picked[pool[(step * (len(pool) - 1)) // max(share - 1, 1)]] = None
    return tuple(picked)


def _run(item: Check, bench: Bench) -> CheckResult:
    started = time.perf_counter()
    findings: list[str] = []
    try:
        for text in item(bench):
            findings.append(text)
            if len(findings) == MAX_FINDINGS:
                break
    except Exception as error:  # a check must report a broken environment, not break with it
        findings.append(f"the environment raised {type(error).__name__}: {error}")
    claim = (item.__doc__ or "").strip().splitlines()[0]
    return CheckResult(name=item.__name__, claim=claim, findings=tuple(findings), seconds=time.perf_counter() - started)
