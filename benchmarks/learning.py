"""Does GRPO learn, and is it GRPO that learns? The quickstart over three seeds, and two controls.

    python benchmarks/learning.py --out benchmarks/results --runs runs/learning
    python benchmarks/learning.py --out benchmarks/results --runs runs/tau2 --recipe recipes/tau2-retail.toml \
        --only seed0 seed1 --train-samples 8 --gain 0.15 --name tau2_learning

For seeds 0, 1 and 2 the recipe runs as it is. The controls run seed 0 with the learning rate at 0 (the curve must stay
flat) and with rewards shuffled within each group (it must not rise: the same updates, told nothing). Every figure comes
from the runs' own ``metrics.jsonl``; with ``--train-samples`` the first and the last policy also play every training
task so many times. Results are added to those already in the file. Exit status 1 when a run does not show what it must:
a seed a gain of ``--gain`` or more (on the training tasks with ``--train-samples``, else held out and with intervals
apart), a control none.
"""

from __future__ import annotations

import argparse
import json
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
from sinkflex.bench.meter import machine
from sinkflex.config import Recipe, load_recipe
from sinkflex.train import build
from sinkflex.train.checkpoint import CheckpointStore, read_checkpoint
from sinkflex.train.loop import run
from sinkflex.train.metrics import read_metrics
from sinkflex.train.validation import measure_floors, validate

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


def score_training_tasks(recipe: Recipe, folder: Path, *, samples: int) -> dict[str, Any]:
    """Mean score over all training tasks, with its 95 % interval: of the warm start and of the last policy."""
    parts = build.build_parts(recipe, on_warmstart_step=lambda *_: None)
    tasks = build.list_tasks(recipe, parts.floor_env, recipe.env.train_split)
    scores = {}
    last = CheckpointStore(folder / "checkpoints", keep_last=1, keep_best=True).choose(None)
    for name, checkpoint in (("warm_start", None), ("last", last)):
        if checkpoint is not None:
            tensors, state = read_checkpoint(checkpoint)
            parts.trainer.restore(policy_folder=checkpoint.path / "policy", tensors=tensors, state=state["trainer"])
        result = validate(
            parts.collect_validation, tasks, split=recipe.env.train_split, samples=samples, pass_k=(1, samples)
        )
        mean = result.mean_at_k
        scores[name] = {
            "mean": round(mean.value, 4),
            "low": round(mean.low, 4),
            "high": round(mean.high, 4),
            "tasks": mean.tasks,
            "samples": mean.trials,
            f"pass^{samples}": round(result.pass_hat_k[samples], 4),
        }
    held_out_score = validate(
        parts.collect_validation, parts.validation_tasks, split=recipe.env.validation_split, samples=1, pass_k=(1,)
    ).mean_at_1
    scores["last_held_out"] = {
        "mean@1": round(held_out_score.value, 4),
        "low": round(held_out_score.low, 4),
        "high": round(held_out_score.high, 4),
        "n": held_out_score.tasks,
    }
    floors = measure_floors(parts.floor_env, parts.validation_tasks, split=recipe.env.validation_split)
    held_out = {name: round(estimate.value, 4) for name, estimate in floors.items()}
    return {
        **scores,
        "held_out_floors": held_out,
        "gain": round(scores["last"]["mean"] - scores["warm_start"]["mean"], 4),
    }


def falls_short(name: str, run_figures: dict[str, Any], gain: float) -> str | None:
    """Why a run does not show what it must, None when it does."""
    if not name.startswith("seed"):
        apart = run_figures["intervals_apart"] and run_figures["gain"] > 0
        return f"the control rose by {run_figures['gain']:+.3f}, intervals apart" if apart else None
    if "training_tasks" in run_figures:
        rise = run_figures["training_tasks"]["gain"]
        return None if rise >= gain else f"the training score rose by {rise:+.3f} only"
    if run_figures["gain"] < gain:
        return f"mean@1 rose by {run_figures['gain']:+.3f} only"
    if not run_figures["intervals_apart"]:
        return "the intervals of first and last validation overlap"
    for score in ("training_score", "trajectory_reward"):
        if run_figures[score]["last"] <= run_figures[score]["first"]:
            return f"the {score.replace('_', ' ')} did not rise"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="recipes/quickstart.toml")
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"))
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    parser.add_argument("--name", default="learning", help="name of the results' file")
    parser.add_argument("--train-samples", type=int, default=0, help="episodes a training task, before and after")
    parser.add_argument("--gain", type=float, default=0.25, help="what a seed must gain")
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
        if arguments.train_samples:
            results[name]["training_tasks"] = score_training_tasks(recipe, folder, samples=arguments.train_samples)
        gain, last = results[name]["gain"], results[name]["last"]
        print(f"{name}: {results[name]['first']['mean@1']:.3f} -> {last['mean@1']:.3f} ({gain:+.3f})", flush=True)
    record = {
        "machine": machine(torch.device("cpu")),
        "versions": {"sinkflex": sinkflex.__version__, "transformers": transformers.__version__},
        "runs": results,
    }
    if arguments.out is not None:
        path = arguments.out / f"{arguments.name}.json"
        if path.exists():
            record["runs"] = {**json.loads(path.read_text())["runs"], **results}
        path.write_text(json.dumps(record, indent=1) + "\n")
    short = {name: why for name, found in results.items() if (why := falls_short(name, found, arguments.gain))}
    for name, why in short.items():
        print(f"{name} falls short: {why}", file=sys.stderr)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
