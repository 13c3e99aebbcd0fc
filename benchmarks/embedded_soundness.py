"""Play every task of the embedded domains: the oracle must score 1, and nothing, giving up or one side alone 0.

    python benchmarks/embedded_soundness.py --out benchmarks/results/embedded_soundness.json
    python benchmarks/embedded_soundness.py --tasks 20

Exits with 1 when a claim fails; the JSON lists up to five failing tasks of each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import gymnasium
import torch

from sinkflex.bench.meter import machine
from sinkflex.envs import ENV_IDS
from sinkflex.envs.checks.play import oracle_policy, play_episode, write_action
from sinkflex.envs.checks.soundness import grade_calls
from sinkflex.envs.protocol import call, say
from sinkflex.envs.tools import Side
from sinkflex.types import StopReason

MAX_HAND_OFF_SHARE = 0.05
MAX_LISTED = 5


def hand_off_action(domain: Any) -> str | None:
    """Return a hand-off with the first allowed arguments, None when the domain has no such tool."""
    for item in domain.agent_tools.tools.values():
        if item.stops is StopReason.HAND_OFF:
            properties = item.schema.parameters["properties"]
            return write_action(
                call(item.name, **{key: kind.get("enum", ["help"])[0] for key, kind in properties.items()})
            )
    return None


def failures_of(env: Any, task_id: str, hand_off: str | None) -> list[str]:
    """Return the claims that fail on one task."""
    domain = env.unwrapped.domain
    task = domain.task(task_id)
    failed = []
    if play_episode(env, task_id, policy=oracle_policy).score != 1.0:
        failed.append("oracle")
    transcript = list(env.unwrapped.episode.transcript)
    if task.dual:
        for side in Side:
            calls = [made for who, message in transcript if who is side for made in message.tool_calls]
            if grade_calls(domain, task, side, calls) > 0.0:
                failed.append(f"{side}_only")
    idle = write_action(say("Hello."))
    if play_episode(env, task_id, policy=lambda _, step: idle).score > 0.0:
        failed.append("do_nothing")
    if hand_off is not None and play_episode(env, task_id, policy=lambda _, step: hand_off).score > 0.0:
        failed += [] if task.hand_off else ["transfer"]
    return failed


def measure(env_id: str, split: str, tier: str, count: int | None) -> dict[str, Any]:
    """Play the tasks of one split and tier; returns the row of the report."""
    env: Any = gymnasium.make(env_id, disable_env_checker=True)
    domain = env.unwrapped.domain
    every = domain.task_ids(split, tier)
    ids = every if count is None else every[:: max(-(-len(every) // count), 1)]
    hand_off = hand_off_action(domain)
    failing: dict[str, list[str]] = defaultdict(list)
    for task_id in ids:
        for claim in failures_of(env, task_id, hand_off):
            failing[claim].append(task_id)
    hand_offs = sum(domain.task(task_id).hand_off for task_id in every)
    row = {
        "env": env_id,
        "split": split,
        "tier": tier,
        "tasks": len(ids),
        "of": len(every),
        "dual": sum(domain.task(task_id).dual for task_id in ids),
        "hand_off_share": hand_offs / len(every) if every else 0.0,
        "failures": {claim: len(found) for claim, found in failing.items()},
        "failing": {claim: found[:MAX_LISTED] for claim, found in failing.items()},
    }
    row["ok"] = not failing and row["hand_off_share"] <= MAX_HAND_OFF_SHARE
    return row


def main() -> int:
    """Play, print a line a tier and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=None, help="tasks a split and tier, spread evenly; default all")
    parser.add_argument("--out", type=Path, default=None, help="where to write the JSON")
    given = parser.parse_args()
    if given.tasks is not None and given.tasks < 1:
        parser.error(f"--tasks must be at least 1, got {given.tasks}")
    rows = []
    for env_id in sorted(ENV_IDS):
        unwrapped: Any = gymnasium.make(env_id, disable_env_checker=True).unwrapped
        for split in unwrapped.domain.splits:
            for tier in unwrapped.domain.tiers:
                row = measure(env_id, split, tier, given.tasks)
                if row["of"]:
                    rows.append(row)
                    print(env_id, split, tier, f"{row['tasks']}/{row['of']}", row["failures"] or "ok", flush=True)
    if given.out is not None:
        given.out.write_text(
            json.dumps({"machine": machine(torch.device("cpu")), "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
