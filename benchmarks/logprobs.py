"""Log-probabilities from hidden states in chunks, against the plain way that holds all logits, at gpt-oss's vocabulary.

    python benchmarks/logprobs.py --out benchmarks/results

Both ways run in turns in one process, forward and backward: chunked as the trainer does it, and plain as
``log_softmax(hidden @ head.T)`` with a gather. Reported are the median time of each, the peak memory that each needs
beyond its inputs, and how far their gradients are apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from sinkflex.algo.logprobs import OutputHead, token_logprobs
from sinkflex.bench.meter import current_bytes, machine, peak_bytes, reset_peak

CPU = torch.device("cpu")


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Logprobs [T] through [T, V] logits."""
    return (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Logprobs [T] in chunks."""
    scored = token_logprobs(hidden, OutputHead(weight=weight), targets)
    assert isinstance(scored, Tensor)
    return scored


def gradients(way: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Gradients of a weighted sum of logprobs for hidden states and head."""
    hidden, weight, targets = inputs
    weights = torch.linspace(-1, 1, len(targets))
    return list(torch.autograd.grad((way(*inputs) * weights).sum(), (hidden, weight)))


def relative(one: Tensor, two: Tensor) -> float:
    return float((one - two).norm() / two.norm())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=201_088)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="folder that gets logprobs.json")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, options.width, generator=generator).requires_grad_()
    weight = (torch.randn(options.vocabulary, options.width, generator=generator) * 0.05).requires_grad_()
    targets = torch.randint(options.vocabulary, (options.tokens,), generator=generator)
    ways = {"chunked": chunked, "plain": plain}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, int] = {}
    found: dict[str, list[Tensor]] = {}
    for turn in range(options.repeats + 1):
        for name, way in ways.items():
            reset_peak(CPU)
            before = current_bytes(CPU)
            started = time.perf_counter()
            grads = gradients(way, (hidden, weight, targets))
            elapsed = time.perf_counter() - started
            # The gradients themselves are what both ways are asked for.
            peaks[name] = peak_bytes(CPU) - before - sum(grad.nbytes for grad in grads)
            if turn == 0:
                found[name] = grads
            else:
                seconds[name].append(elapsed)
            del grads
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    record = {
        "machine": machine(CPU),
        "shape": {"tokens": options.tokens, "vocabulary": options.vocabulary, "width": options.width},
        "median_seconds": medians,
        "extra_peak_bytes": peaks,
        "time_ratio": medians["chunked"] / medians["plain"],
        "memory_ratio": peaks["chunked"] / peaks["plain"],
        "gradient_relative_difference": {
            name: relative(one, two)
            for name, one, two in zip(("hidden", "head"), found["chunked"], found["plain"], strict=True)
        },
    }
    print(json.dumps(record, indent=1))
    if options.out is not None:
        (options.out / "logprobs.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
