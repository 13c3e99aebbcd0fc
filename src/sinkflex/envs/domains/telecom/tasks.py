"""Telecom's task generator: any task is rebuilt from its id alone.

Train and test share neither ids nor combinations of faults; each single fault is seen in training.
"""

from __future__ import annotations

import itertools
import random
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from sinkflex.envs.domains.entities import draw_ids
from sinkflex.envs.domains.telecom.state import PLAN_GB, TOP_UP_GB, UNFIXABLE
from sinkflex.envs.protocol import Task
from sinkflex.envs.users.scripted import Persona
from sinkflex.errors import TaskError

Faults: TypeAlias = tuple[str, ...]
"""What is wrong with one line and its phone, agent-side faults first."""

TIERS = ("easy", "medium", "long")
COUNTS = {"train": 2000, "test": 400}
"""Tasks a tier and split."""

AGENT_FAULTS = ("suspended", "no_data", "sim_locked", "line_roaming", "unpaid")
USER_FAULTS = ("airplane", "data_off", "sim_loose", "stuck", "phone_roaming", "vpn")
_EASY = frozenset({*AGENT_FAULTS, *USER_FAULTS} - {"unpaid", "vpn"})
_CLASHES = ({"suspended", "unpaid"}, {"sim_locked", "stuck"})
_HAND_OFF_EVERY = 25
_LONG_CASES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One line with its problem.

    Attributes:
        line_id: four digits.
        faults: what is wrong.
        plan: the line's plan.
        gb: gigabytes left, before faults.
        wants_plan: the plan the user prefers over a top-up when out of data, or None.
        wants_gb: the top-up the user agrees to otherwise.
        symptom: ``signal``, ``data`` or ``slow``, what the user notices.
    """

    line_id: str
    faults: Faults
    plan: str
    gb: int
    wants_plan: str | None
    wants_gb: int
    symptom: str

    @property
    def abroad(self) -> bool:
        """Whether the user is abroad with this phone."""
        return "line_roaming" in self.faults or "phone_roaming" in self.faults


@dataclass(frozen=True, kw_only=True, slots=True)
class TelecomTask(Task):
    """A customer with one or more problems.

    Attributes:
        customer_id: four digits.
        pin: four digits.
        wrong_pin: what the user says when first asked for the PIN, or None.
        cases: problems in the order they come up.
        spare_lines: the customer's other lines, not to be touched.
        persona: the scripted user's temper.
    """

    customer_id: str
    pin: str
    wrong_pin: str | None
    cases: tuple[Case, ...]
    spare_lines: tuple[str, ...]
    persona: Persona


def task_ids(split: str, tier: str) -> tuple[str, ...]:
    """Return the ids of one split and tier."""
    return tuple(f"telecom-{tier}-{split}-{index:04d}" for index in range(COUNTS[split]))


@lru_cache(maxsize=4096)
def build_task(task_id: str) -> TelecomTask:
    """Return the task of an id.

    Raises:
        TaskError: the id is not one of ``task_ids``.
    """
    tier, split, index = _read_id(task_id)
    rng = random.Random(task_id)
    hand_off = index % _HAND_OFF_EVERY == _HAND_OFF_EVERY - 1
    case_count = _LONG_CASES + hand_off if tier == "long" else 1
    spare_count = 1 if tier == "medium" else 0
    customer_id, pin, wrong_pin, *lines = draw_ids(rng, split, 3 + case_count + spare_count)
    pool = combinations(split, tier)
    picked = [pool[(index + offset * 7) % len(pool)] for offset in range(case_count)]
    if hand_off:
        pool = _hand_off_combinations(split)
        picked[-1] = pool[index // _HAND_OFF_EVERY % len(pool)]
    cases = tuple(_case(rng, line, faults, tier) for line, faults in zip(lines, picked, strict=False))
    present = {fault for faults in picked for fault in faults}
    return TelecomTask(
        task_id=task_id,
        split=split,
        tier=tier,
        dual=not hand_off and bool(present & set(AGENT_FAULTS)) and bool(present & set(USER_FAULTS)),
        hand_off=hand_off,
        customer_id=customer_id,
        pin=pin,
        wrong_pin=wrong_pin if tier != "easy" and rng.random() < 0.25 else None,
        cases=cases,
        spare_lines=tuple(lines[case_count:]),
        persona=_persona(rng, tier),
    )


@lru_cache(maxsize=8)
def combinations(split: str, tier: str) -> tuple[Faults, ...]:
    """Return the fault combinations of a split and tier; train's and test's are disjoint."""
    sizes = {"easy": (1, 2), "medium": (2, 3), "long": (3,)}[tier]
    agent = [fault for fault in AGENT_FAULTS if tier != "easy" or fault in _EASY]
    user = [fault for fault in USER_FAULTS if tier != "easy" or fault in _EASY]
    found: list[Faults] = []
    for size in sizes:
        for faults in itertools.combinations((*agent, *user), size):
            sides = sum(fault in AGENT_FAULTS for fault in faults)
            # The easy tier has pairs on one side too: what to do about two odd things at once is learned from all.
            one_sided = tier != "easy" and size > 1 and sides in (0, size)
            if one_sided or any(clash <= set(faults) for clash in _CLASHES):
                continue
            in_test = size > 1 and zlib.crc32("+".join(faults).encode()) % 4 == 0
            if in_test == (split == "test"):
                found.append(faults)
    return tuple(found)


@lru_cache(maxsize=2)
def _hand_off_combinations(split: str) -> tuple[Faults, ...]:
    with_user = itertools.product(UNFIXABLE, (*USER_FAULTS[:4],))
    return tuple(pair for number, pair in enumerate(with_user) if (number % 3 == 0) == (split == "test"))


def _read_id(task_id: str) -> tuple[str, str, int]:
    parts = task_id.split("-")
    if len(parts) == 4 and parts[0] == "telecom" and parts[1] in TIERS and parts[2] in COUNTS:
        number = parts[3]
        if len(number) == 4 and number.isdecimal() and int(number) < COUNTS[parts[2]]:
            return parts[1], parts[2], int(number)
    raise TaskError(
        f"unknown telecom task {task_id!r}; ids read telecom-TIER-SPLIT-NNNN, for example 'telecom-easy-train-0000'"
    )


def _case(rng: random.Random, line_id: str, faults: Faults, tier: str) -> Case:
    plan = rng.choice(("basic", "plus"))
    wants_plan = "max" if tier != "easy" and rng.random() < 0.4 else None
    if faults == ("vpn",):
        symptom = "slow"
    elif {"data_off", "no_data", "line_roaming", "phone_roaming"} >= set(faults):
        symptom = "data"
    else:
        symptom = "signal"
    return Case(
        line_id=line_id,
        faults=faults,
        plan=plan,
        gb=rng.randint(1, PLAN_GB[plan]),
        wants_plan=wants_plan,
        wants_gb=rng.choice(TOP_UP_GB),
        symptom=symptom,
    )


def _persona(rng: random.Random, tier: str) -> Persona:
    if tier == "easy":
        return Persona(patience=2)
    return Persona(patience=rng.choice((2, 3)), chatty=rng.random() < 0.25, hesitant=rng.random() < 0.25)
