from __future__ import annotations

import math

import pytest
import torch

from sinkflex.algo.stats import Statistic, merge_statistics


def part(values: list[float], mask: list[bool]) -> dict[str, Statistic]:
    tensor, kept = torch.tensor(values, requires_grad=True), torch.tensor(mask)
    return {"mean": Statistic.mean(tensor, kept), "largest": Statistic.maximum(tensor, kept)}


def test_parts_of_unequal_size_merge_to_the_whole() -> None:
    whole = merge_statistics([part([1.0, 2.0, 6.0, -1.0], [True] * 4)])
    split = merge_statistics([part([1.0], [True]), part([2.0, 6.0, -1.0, math.nan], [True, True, True, False])])
    assert whole == split == {"mean": 2.0, "largest": 6.0}


def test_a_figure_with_nothing_behind_it_is_left_out() -> None:
    assert merge_statistics([part([math.inf], [False])]) == {}
    assert merge_statistics([part([math.inf], [False]), part([-2.0], [True])]) == {"mean": -2.0, "largest": -2.0}


def test_names_missing_from_some_parts_merge_over_the_others() -> None:
    first, second = part([1.0], [True]), part([3.0], [True])
    del second["largest"]
    assert merge_statistics([first, second]) == {"mean": 2.0, "largest": 1.0}


def test_parts_hold_no_graph_and_an_empty_microbatch_works() -> None:
    statistics = part([1.0], [True])
    assert not any(s.value.requires_grad for s in statistics.values())
    empty = torch.zeros(0)
    figures = {"m": Statistic.maximum(empty, empty.bool()), "a": Statistic.mean(empty, empty.bool())}
    assert merge_statistics([figures]) == {}


def test_sums_are_kept_in_double_precision() -> None:
    values = torch.cat([torch.tensor([2.0**24]), torch.ones(64)])
    mean = merge_statistics([{"m": Statistic.mean(values, torch.ones(65, dtype=torch.bool))}])["m"]
    assert mean == pytest.approx((2.0**24 + 64) / 65, rel=1e-15)
