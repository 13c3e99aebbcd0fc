"""Does GRPO learn, and is it GRPO that learns? The quickstart over three seeds, and two controls.

    python benchmarks/learning.py --out benchmarks/results --runs runs/learning

For seeds 0, 1 and 2 the recipe runs as it is. The controls run seed 0 with the learning rate at 0 (the curve must stay
flat) and with rewards shuffled within each group (it must not rise: the same updates, told nothing). Every figure comes
from the runs' own ``metrics.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor

import sinkflex
from sinkflex.algo import group_advantages
from sinkflex.config import load_recipe
from sinkflex.train import build
from sinkflex.train.loop import run
from sinkflex.train.metrics import read_metrics

ENDS = 5
"""Train steps averaged at either end of a curve; a single step's batch is noisy."""


def shuffled_advantages(rewards: Tensor, group_ids: Tensor, *, scale: bool, ddof: int, eps: float) -> Tensor:
    """GRPO's advantages of rewards dealt anew within each group: same statistics, no information."""
    # The sum of the rewards stands for the step, so that each batch is dealt differently and reproducibly.
    generator = torch.Generator().manual_seed(int(rewards.sum()))
    dealt = rewards.clone()
    for group in group_ids.unique():
        members = (group_ids == group).nonzero()[:, 0]
        dealt[members] = rewards[members[torch.randperm(len(members), generator=generator)]]
    return group_advantages(dealt, group_ids, scale=scale, ddof=ddof, eps=eps)


def figures(folder: Path) -> dict[str, Any]:
    """First and last validation with intervals, and training scores at either end."""
    records = read_metrics(folder)
    name = next(key for key in records[0] if key.endswith("/mean@1"))
    validations = [
        {
            "step": record["step"],
            "mean@1": record[name],
            "low": record[f"{name}/low"],
            "high": record[f"{name}/high"],
            "n": int(record[f"{name}/n"]),
        }
        for record in records
        if record.get(name) is not None
    ]
    train = [record for record in records if "critic/score/mean" in record]

    def ends(metric: str) -> dict[str, float]:
        values = [record[metric] for record in train]
        return {"first": round(fmean(values[:ENDS]), 4), "last": round(fmean(values[-ENDS:]), 4)}

    first, last = validations[0], validations[-1]
    return {
        "first": first,
        "last": last,
        "gain": round(last["mean@1"] - first["mean@1"], 4),
        "intervals_apart": first["high"] < last["low"],
        "training_score": ends("critic/score/mean"),
        "trajectory_reward": ends("critic/rewards/mean"),
        "rollout_logprobs_diff_max": max(record.get("training/rollout_logprobs_diff_max", 0.0) for record in train),
        "floors": {key.split("/")[-1]: value for key, value in records[0].items() if "/floor/" in key},
        "validations": validations,
        "wall_s": round(records[-1]["wall_s"], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="recipes/quickstart.toml")
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"))
    parser.add_argument("--out", type=Path, default=None, help="folder for learning.json")
    parser.add_argument("--only", nargs="*", default=None, help="names of the runs to do, for example seed0 lr0")
    parser.add_argument("--set", nargs="*", default=[], dest="overrides", help="further recipe overrides")
    arguments = parser.parse_args()
    plans = {f"seed{seed}": [f"run.seed={seed}"] for seed in (0, 1, 2)}
    plans["lr0"] = ["run.seed=0", "optim.lr=0.0"]
    plans["shuffled"] = ["run.seed=0"]
    results = {}
    for name, changes in plans.items():
        if arguments.only is not None and name not in arguments.only:
            continue
        folder = arguments.runs / name
        estimator = shuffled_advantages if name == "shuffled" else group_advantages
        with mock.patch.object(build, "group_advantages", estimator):
            recipe = load_recipe(arguments.recipe, [*changes, *arguments.overrides])
            run(recipe, out=folder, resume=(folder / "checkpoints").exists())
        results[name] = figures(folder)
        gain, last = results[name]["gain"], results[name]["last"]
        print(f"{name}: {results[name]['first']['mean@1']:.3f} -> {last['mean@1']:.3f} ({gain:+.3f})", flush=True)
    record = {
        "command": " ".join(["python", *sys.argv]),
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "sinkflex": sinkflex.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "runs": results,
    }
    if arguments.out is not None:
        (arguments.out / "learning.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
