"""Every impl against the reference in fp64, 1e-12 relative, over a grid in which every pair of choices meets.

The full product of the seven factors has 17,280 rows. Mistakes in masks and sinks show when two choices meet (a window
below a prefix, a sink of -30 in a row without keys), so the grid is the smallest that a greedy search finds in which
every possible pair occurs; the search is seeded, so the grid is always the same one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sinkflex.attention import SequenceLayout, sink_attention

TOLERANCE = 1e-12
FACTORS: dict[str, tuple[Any, ...]] = {
    "mask": ("causal", "cached", "left", "right", "both", "documents", "tree_1", "tree_2", "tree_3", "tree_4"),
    "length": (1, 127, 129, 4097),
    "window": (None, 1, 32, 33, 128, "T"),
    "num_sink_tokens": (0, 4),
    "ratio": (1, 4, 8),
    "sink": ("random", None, 30.0, -30.0, float("-inf"), "mixed"),
    "lse_grad": (True, False),
}
MIXED = (30.0, -30.0, 0.7, float("-inf"), -0.2, 30.0, -30.0, 2.0)
LONG = 1000
Row = tuple[Any, ...]


def is_possible(row: dict[str, Any]) -> bool:
    """Whether a row says anything: a tree needs tokens, and a gradient must not be rounding alone.

    Where each query sees one key and no sink that counts, its weight is 1 whatever the scores: without a gradient of
    the log-sum-exp dQ and dK are 0 in exact arithmetic, and their rounding has no scale to be compared with.
    """
    if row["mask"].startswith("tree") and row["length"] == 1:
        return False
    one_key = row["window"] == 1 or row["length"] == 1
    return not (one_key and not row["lse_grad"] and row["sink"] in (None, -30.0, float("-inf"), "mixed"))


def pairs_of(row: Row) -> set[Any]:
    return set(itertools.combinations(enumerate(row), 2))


def possible_pairs() -> set[Any]:
    rows = itertools.product(*FACTORS.values())
    return set().union(*(pairs_of(row) for row in rows if is_possible(dict(zip(FACTORS, row, strict=True)))))


def build_grid() -> list[Row]:
    """Greedy: of sixty random rows that hold a missing pair, keep the one that adds most pairs for its cost."""
    chance = random.Random(0)
    missing = possible_pairs()
    grid: list[Row] = []
    while missing:
        (i, a), (j, b) = min(missing, key=repr)
        best: tuple[float, Row] | None = None
        for _ in range(60):
            row = [chance.choice(values) for values in FACTORS.values()]
            row[i], row[j] = a, b
            named = dict(zip(FACTORS, row, strict=True))
            if not is_possible(named):
                continue
            # A long row costs seconds a head without a window and a tenth of that with one.
            wide = named["window"] in (None, "T")
            cost = 1.0 if named["length"] < LONG else 2.0 + named["ratio"] * (1.0 if wide else 0.1)
            worth = len(pairs_of(tuple(row)) & missing) / cost
            if best is None or worth > best[0]:
                best = (worth, tuple(row))
        if best is not None:
            grid.append(best[1])
            missing -= pairs_of(best[1])
    return grid


GRID = build_grid()


def layout_of(mask: str, length: int) -> SequenceLayout:
    """Two rows, the long ones only one; in ``both`` the second row is empty, in trees it is one document."""
    rows, third = (1 if length > LONG else 2), length // 3
    if mask == "causal":
        return SequenceLayout.causal(rows, length)
    if mask == "cached":
        return SequenceLayout.causal(rows, length, num_queries=max(third, 1))
    if mask in ("left", "right", "both"):
        column = torch.arange(length)
        first = (column >= (0 if mask == "right" else third)) & (column < length - (0 if mask == "left" else third))
        second = torch.zeros_like(first) if mask == "both" else torch.ones_like(first)
        return SequenceLayout.from_padding(torch.stack([first, second][:rows]))
    if mask == "documents":
        sizes = [third, 1, length // 5]
        sizes = [size for size in [*sizes, length - sum(sizes)] if size > 0] if length > 1 else [1]
        return SequenceLayout.from_documents([sizes, [length - third]][:rows], length=length)
    depth = int(mask[-1])
    each = length // (2 * depth + 2)
    lengths = [length - 2 * depth * each] + [each] * (2 * depth)
    parents = [-1] + [max(0, 2 * level - 1) for level in range(depth) for _ in range(2)]
    return SequenceLayout.from_prefix_tree([lengths, [length - third]][:rows], [parents, [-1]][:rows], length=length)


def flash(*inputs: Any, **options: Any) -> Any:
    return sink_attention(*inputs, **options, impl="flash", return_lse=True)


def check(lab: Any, row: Row, runs: dict[str, Callable[..., Any]]) -> None:
    chosen = dict(zip(FACTORS, row, strict=True))
    length, sink = chosen["length"], chosen["sink"]
    heads = (chosen["ratio"], 1) if length > LONG or chosen["ratio"] > 1 else (2, 2)
    case = lab.case(
        layout_of(chosen["mask"], length),
        heads=heads,
        sink=MIXED[: heads[0]] if sink == "mixed" else sink,
        lse_grad=chosen["lse_grad"],
    )
    window = length if chosen["window"] == "T" else chosen["window"]
    options = {"window": window, "num_sink_tokens": chosen["num_sink_tokens"]}
    if sink == float("-inf"):
        # Plain softmax is what a sink of -inf must equal, and such a sink has no gradient at all.
        expected = lab.reference(type(case)(**{**vars(case), "sink_logits": None}), **options)
        expected["d_sink_logits"] = torch.zeros_like(case.sink_logits)
        runs = runs | ({"reference": lab.run_reference} if length <= LONG else {})
    else:
        expected = lab.reference(case, **options)
    for name, run in runs.items():
        lab.assert_close(lab.results(run, case, **options), expected, TOLERANCE, what=name)


@pytest.mark.parametrize("row", [row for row in GRID if row[1] < LONG], ids=str)
def test_grid(lab: Any, row: Row) -> None:
    check(lab, row, {"flash": flash, "varlen": lab.run_varlen, "flex": lab.run_flex})


@pytest.mark.parametrize("row", [row for row in GRID if row[1] > LONG], ids=str)
def test_long_grid(lab: Any, row: Row) -> None:
    check(lab, row, {"flash": flash})


def test_long_rows_through_the_gpu_paths(lab: Any) -> None:
    """One long row each: their emulation holds the whole [T, T] matrix of every head."""
    row = ("documents", 4097, 128, 4, 1, "random", True)
    check(lab, row, {"varlen": lab.run_varlen, "flex": lab.run_flex})


def test_every_possible_pair_is_in_the_grid() -> None:
    assert set().union(*map(pairs_of, GRID)) == possible_pairs()
    assert len(GRID) < 100


def test_one_key_without_a_sink_has_no_gradient(lab: Any) -> None:
    """What the grid leaves out: dQ and dK are differences of equal terms of size 1, so 1e-14 is their rounding."""
    case = lab.case(SequenceLayout.causal(1, 20), sink=None, lse_grad=False)
    for run in (flash, lab.run_varlen, lab.run_flex, lab.run_reference):
        got = lab.results(run, case, window=1)
        assert max(float(got[name].abs().max()) for name in ("d_query", "d_key")) < 1e-14
        torch.testing.assert_close(got["out"], case.value.repeat_interleave(2, 1), rtol=1e-14, atol=0.0)
