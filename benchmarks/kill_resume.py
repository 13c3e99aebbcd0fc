"""Kill a training run with SIGKILL again and again; it must end with the weights of an undisturbed run, bit for bit.

    python benchmarks/kill_resume.py --kills 20 --out benchmarks/results

Two runs of one small recipe: one undisturbed, one killed at random moments (during the warm start, a rollout, an
update, a checkpoint's write) and continued with ``--resume``. A kill before the first checkpoint starts again, as a
user would. Exit status 1 when anything differs: a weight, the optimiser's or the generators' state, the data position,
or a figure in ``metrics.jsonl`` (times apart).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from sinkflex.bench.meter import machine

OVERRIDES = (
    "env.tier=easy",
    "run.threads=1",
    "model.tiny.hidden_size=64",
    "model.tiny.sliding_window=4",
    "warmstart.dialogues=200",
    "warmstart.steps=40",
    "rollout.group_size=4",
    "rollout.tasks_per_step=4",
    "rollout.max_new_tokens=32",
    "rollout.max_length=320",
    "algo.dynamic_sampling=true",
    "algo.minibatches=2",
    "algo.kl_coef=0.01",
    "optim.lr=1e-3",
    "optim.schedule=cosine",
    "train.steps=24",
    "validation.every=8",
    "validation.tasks=8",
    "checkpoint.every=1",
    "checkpoint.keep_last=3",
    "logging.tensorboard=false",
)


def command(out: Path, cache: Path, *, resume: bool) -> list[str]:
    changes = [item for override in (*OVERRIDES, f"warmstart.cache_dir={cache}") for item in ("--set", override)]
    entry = "from sinkflex.cli import main; main()"
    program = [sys.executable, "-c", entry, "train", "quickstart", "--out", str(out), *changes]
    return [*program, "--resume"] if resume else program


def fingerprint(out: Path) -> dict[str, str]:
    """Hashes of the weights, the trainer's tensors and state at the last checkpoint, and of all figures."""
    last = sorted((out / "checkpoints").glob("step_*"))[-1]
    figures = [
        {name: value for name, value in json.loads(line).items() if not name.startswith(("wall_s", "timing", "perf"))}
        for line in (out / "metrics.jsonl").read_text().splitlines()
    ]
    tensors = torch.load(last / "trainer.pt", weights_only=True)
    state = json.loads((last / "state.json").read_text())
    state.pop("warmstart", None)  # says whether the warm start was trained or came from the cache
    return {
        "step": last.name,
        "weights": hashlib.sha256((last / "policy" / "model.safetensors").read_bytes()).hexdigest(),
        "trainer": hashlib.sha256(repr(list(flat(tensors))).encode()).hexdigest(),
        "state": hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest(),
        "figures": hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest(),
    }


def flat(value: object) -> Iterator[object]:
    """Leaves of nested state, tensors as their bytes."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from flat(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flat(item)
    elif isinstance(value, torch.Tensor):
        yield value.numpy().tobytes()
    else:
        yield value


def run_to_end(out: Path, cache: Path) -> float:
    start = time.perf_counter()
    subprocess.run(command(out, cache, resume=False), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def run_with_kills(out: Path, cache: Path, *, kills: int, longest_s: float, seed: int) -> list[dict[str, object]]:
    """Kill at uniform random moments until ``kills`` kills have hit a live process, then let it finish."""
    rng = random.Random(seed)
    log: list[dict[str, object]] = []
    while True:
        resume = any((out / "checkpoints").glob("step_*"))
        if out.exists() and not resume:
            shutil.rmtree(out)
        process = subprocess.Popen(command(out, cache, resume=resume), stdout=subprocess.DEVNULL)
        if len(log) == kills:
            if process.wait() != 0:
                raise SystemExit(f"the resumed run ended with exit status {process.returncode}")
            return log
        delay = rng.uniform(0.5, longest_s)
        try:
            status = process.wait(timeout=delay)
            if status != 0:
                raise SystemExit(f"a resumed run ended with exit status {status} by itself")
            shutil.rmtree(out)  # it finished before its kill: start over, the kills so far stay counted
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            steps = sorted(path.name for path in (out / "checkpoints").glob("step_*"))
            log.append({"after_s": round(delay, 2), "newest_checkpoint": steps[-1] if steps else None})
            print(f"kill {len(log)}/{kills} after {delay:.1f} s, newest checkpoint {log[-1]['newest_checkpoint']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="folder for kill_resume.json")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        undisturbed_s = run_to_end(root / "undisturbed", root / "cache")
        # The killed run must train its own warm start too, so it gets a cache of its own.
        log = run_with_kills(
            root / "killed",
            root / "cache-killed",
            kills=arguments.kills,
            longest_s=min(undisturbed_s, 30.0),
            seed=arguments.seed,
        )
        prints = fingerprint(root / "undisturbed"), fingerprint(root / "killed")
    record = {
        "machine": machine(torch.device("cpu")),
        "undisturbed_s": round(undisturbed_s, 1),
        "kills": log,
        "undisturbed": prints[0],
        "killed": prints[1],
        "identical": prints[0] == prints[1],
    }
    print(json.dumps(prints, indent=1), "identical:", record["identical"])
    if arguments.out is not None:
        (arguments.out / "kill_resume.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0 if record["identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
