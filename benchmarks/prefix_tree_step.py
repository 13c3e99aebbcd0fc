"""A whole train step of the tiny policy on GRPO groups, and attention alone: shared prefixes held once, against rows.

    python benchmarks/prefix_tree_step.py [--tasks 1] [--group 8] [--prefix 4096] [--response 512] [--repeats 3]

Both ways run in turns within one process: forward, chunked logprobs, GRPO loss, backward, AdamW step, with sinks,
sliding and full layers on. Separate rows are measured in both shapes they could take, one microbatch a trajectory and
all rows in one, and the faster counts. The ratio is taken of wall time and, since other programs disturb that, of CPU
time too. Also printed: how far the gradients of the two ways are apart. Attention alone (forward and backward, 8 heads
of 64, sinks on) is measured over the group's tree against a batch of rows, without a window and with one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sinkflex.algo import POLICY_LOSSES, BatchTotals, LossInputs
from sinkflex.algo.logprobs import OutputHead, token_logprobs
from sinkflex.attention import SequenceLayout, hf, sink_attention
from sinkflex.bench.meter import machine
from sinkflex.models.tiny import TinyShape, build_tiny_model
from sinkflex.rollout.packing import PackedRow, PackingPlan, pack, plan_packing

VOCAB = 1024
NEVER = 2.0
SHARED = "shared prefix"


@dataclass(frozen=True)
class Row:
    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def make_groups(tasks: int, group: int, prefix: int, response: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    return [row for _ in range(tasks) for row in make_group(generator, group, prefix, response)]


def make_group(generator: torch.Generator, group: int, prefix: int, response: int) -> list[Row]:
    prompt = torch.randint(VOCAB, (prefix,), generator=generator).tolist()
    mask = (False,) * prefix + (True,) * response
    return [
        Row((*prompt, *torch.randint(VOCAB, (response,), generator=generator).tolist()), mask) for _ in range(group)
    ]


class Step:
    """One train step on a group; the same model and optimiser serve every way of packing."""

    def __init__(self, rows: Sequence[Row], window: int) -> None:
        longest = max(len(row.ids) for row in rows)
        hf.register()
        self.model = build_tiny_model(
            TinyShape(sliding_window=window, max_positions=longest),
            vocab_size=VOCAB,
            pad_token_id=0,
            eos_token_id=1,
            attention="sinkflex",
            experts_implementation="grouped_mm",
            seed=0,
        ).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.rows = rows
        counts = torch.tensor([sum(row.loss_mask) for row in rows])
        self.owner = torch.repeat_interleave(torch.arange(len(rows)), counts)
        self.advantages = torch.linspace(-1, 1, len(rows))
        self.totals = BatchTotals(tokens=int(counts.sum()), trajectories=len(rows))

    def gradients(self, plan: PackingPlan) -> None:
        """Accumulate the group's gradient, packing included."""
        objective = POLICY_LOSSES["grpo"]
        self.optimizer.zero_grad(set_to_none=True)
        for row in pack(self.rows, plan, device=torch.device("cpu")):
            logprobs = self.logprobs(row)
            owner = self.owner[row.flat]
            inputs = LossInputs(
                logprobs=logprobs,
                old_logprobs=logprobs.detach(),
                advantages=self.advantages[owner],
                loss_mask=torch.ones_like(owner, dtype=torch.bool),
                trajectory_ids=owner,
            )
            objective(inputs, totals=self.totals, clip=objective.default_clip).loss.backward()

    def logprobs(self, row: PackedRow) -> torch.Tensor:
        hidden = self.model.model(
            input_ids=row.input_ids, position_ids=row.position_ids, layout=row.layout, use_cache=False
        ).last_hidden_state[0]
        head = OutputHead.from_module(self.model.get_output_embeddings())
        scored = token_logprobs(hidden.index_select(0, row.predictors), head, row.targets)
        assert isinstance(scored, torch.Tensor)
        return scored

    def timed(self, plan: PackingPlan) -> tuple[float, float]:
        """Wall and CPU seconds of one whole step."""
        started, busy = time.perf_counter(), time.process_time()
        self.gradients(plan)
        self.optimizer.step()
        return time.perf_counter() - started, time.process_time() - busy

    def flat_gradient(self, plan: PackingPlan) -> torch.Tensor:
        self.gradients(plan)
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]).double()


def attention_seconds(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Median seconds of one attention call, forward and backward, by mask and by way of packing."""
    length, size = options.prefix + options.response, (8, 64)
    parents = [-1, *([0] * options.group)]
    tree = SequenceLayout.from_prefix_tree([options.prefix, *([options.response] * options.group)], parents)
    ways = {SHARED: tree, "separate rows": SequenceLayout.causal(options.group, length)}
    results: dict[str, dict[str, float]] = {}
    for mask, window in (("full", None), (f"window {options.window}", options.window)):
        calls = {name: attention_call(layout, size, window) for name, layout in ways.items()}
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(options.repeats + 1):
            for name, call in calls.items():
                started = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - started)
        medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
        results[mask] = {**medians, "speedup": medians["separate rows"] / medians[SHARED]}
    both = {name: sum(figures[name] for figures in results.values()) for name in ways}
    results["a full and a windowed layer"] = {**both, "speedup": both["separate rows"] / both[SHARED]}
    return results


def pair_ratio(options: argparse.Namespace) -> float:
    """Visible query-key pairs of separate rows over those of the shared prefix under full attention, the most that
    sharing can save there."""

    def triangle(length: int) -> float:
        return length * (length + 1) / 2

    apart = options.group * triangle(options.prefix + options.response)
    own = triangle(options.response) + options.response * options.prefix
    return apart / (triangle(options.prefix) + options.group * own)


def attention_call(layout: SequenceLayout, size: tuple[int, int], window: int | None) -> Callable[[], None]:
    """Return a forward and backward over random inputs of a layout's shape."""
    heads, dim = size
    query, key, value = (torch.randn(layout.batch, heads, layout.num_keys, dim, requires_grad=True) for _ in range(3))
    sink_logits = torch.zeros(heads, requires_grad=True)
    grad = torch.randn(layout.batch, heads, layout.num_keys, dim)

    def call() -> None:
        out = sink_attention(query, key, value, sink_logits, layout=layout, window=window)
        torch.autograd.grad(out, (query, key, value, sink_logits), grad)

    return call


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tasks", type=int, default=1)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", type=Path, help="folder that gets prefix_tree_step.json")
    options = parser.parse_args(argv)
    rows = make_groups(options.tasks, options.group, options.prefix, options.response)
    longest, everything = options.prefix + options.response, sum(len(row.ids) for row in rows)
    plans = {
        SHARED: plan_packing(rows, token_budget=everything, pays_from=0.0, min_saved_tokens=1),
        "separate, one microbatch each": plan_packing(rows, token_budget=longest, pays_from=NEVER),
        "separate, one microbatch": plan_packing(rows, token_budget=everything, pays_from=NEVER),
    }
    step = Step(rows, options.window)
    shared, apart = (step.flat_gradient(plans[name]) for name in (SHARED, "separate, one microbatch each"))
    error = float((shared - apart).norm() / apart.norm())
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
    for _ in range(options.repeats):
        for name, plan in plans.items():
            seconds[name].append(step.timed(plan))
    wall, cpu = (
        {name: statistics.median(t[kind] for t in times) for name, times in seconds.items()} for kind in (0, 1)
    )
    attention = attention_seconds(options)
    result = {
        "median_wall_seconds": wall,
        "median_cpu_seconds": cpu,
        "speedup_wall": speedup(wall),
        "speedup_cpu": speedup(cpu),
        "gradient_relative_difference": error,
        "attention": attention,
        "visible_pairs_full": pair_ratio(options),
        "packing": plans[SHARED].describe(),
        "machine": machine(torch.device("cpu")),
    }
    print(plans[SHARED].describe())
    for name in plans:
        print(f"{name:32} {wall[name]:7.2f} s wall {cpu[name]:7.2f} s CPU a step")
    print(f"speed-up {result['speedup_wall']:.2f}x wall, {result['speedup_cpu']:.2f}x CPU")
    print(f"gradients differ by {error:.1e}")
    for mask, figures in attention.items():
        print(f"attention alone, {mask}: {figures['speedup']:.2f}x")
    print(f"visible pairs under full attention: {pair_ratio(options):.2f}x fewer")
    if options.write is not None:
        (options.write / "prefix_tree_step.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


def speedup(seconds: dict[str, float]) -> float:
    """The faster way of separate rows against the shared row."""
    return min(value for name, value in seconds.items() if name != SHARED) / seconds[SHARED]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
