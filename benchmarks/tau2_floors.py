"""What an agent that does nothing, and one that only hands over, score on each split of τ²-bench.

python benchmarks/tau2_floors.py --write benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

from sinkflex.envs.tau2 import DOMAINS, Tau2Env

AGENTS = {
    "do_nothing": "I cannot help with that. Goodbye.",
    "transfer_only": '{"name": "transfer_to_human_agents", "arguments": {"summary": "The user needs help."}}',
}
"""Each agent says one thing, every turn."""


def floor(env: Tau2Env, split: str, action: str) -> int:
    """Return how many tasks of a split an agent solves that always sends the same action."""
    solved = 0
    for task_id in env.task_ids(split):
        env.reset(options={"task_id": task_id, "split": split, "group_seed": 0})
        terminated = truncated = False
        reward = 0.0
        while not (terminated or truncated):
            _, reward, terminated, truncated, _ = env.step(action)
        solved += reward == 1.0
    return solved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="folder for tau2_floors.json and .txt")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    package = ""
    for domain in DOMAINS:
        env = Tau2Env(domain=domain, split="base")
        package = env.domain.package.label
        for split in ("train", "test", "base"):
            if split in env.domain.splits:
                solved = {agent: floor(env, split, action) for agent, action in AGENTS.items()}
                rows.append({"domain": domain, "split": split, "tasks": len(env.task_ids(split)), **solved})
    report = {"package": package, "python": platform.python_version(), "user": "scripted", "floors": rows}
    lines = [
        f"Floors on {package}, scripted user, Python {report['python']}: tasks solved",
        "",
        f"{'domain':<18}{'split':<8}{'tasks':>6}{'do nothing':>12}{'transfer only':>15}",
        *(
            f"{row['domain']:<18}{row['split']:<8}{row['tasks']:>6}{row['do_nothing']:>12}{row['transfer_only']:>15}"
            for row in rows
        ),
    ]
    print("\n".join(lines))
    if options.write is not None:
        options.write.mkdir(parents=True, exist_ok=True)
        (options.write / "tau2_floors.json").write_text(json.dumps(report, indent=2) + "\n")
        (options.write / "tau2_floors.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
