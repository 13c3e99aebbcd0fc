from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from sinkflex.algo import aggregation as aggregation_module
from sinkflex.algo.aggregation import Aggregation, BatchTotals, aggregate

HAND = {
    "values": torch.tensor([8.0, 1.0, 2.0, 3.0, math.nan], dtype=torch.float64),
    "loss_mask": torch.tensor([True, True, True, True, False]),
    "trajectory_ids": torch.tensor([4, 9, 9, 9, 9]),
}
EXPECTED = {Aggregation.TOKEN_MEAN: 3.5, Aggregation.SEQUENCE_MEAN: 5.0, Aggregation.CONSTANT: 0.7}


def check_hand_case(module: ModuleType, how: Aggregation) -> None:
    mask, ids = HAND["loss_mask"], HAND["trajectory_ids"]
    totals = module.BatchTotals.count(loss_mask=mask, trajectory_ids=ids, token_budget=10)
    result = module.aggregate(
        HAND["values"],
        loss_mask=mask,
        trajectory_ids=ids,
        totals=totals,
        how=module.Aggregation(how.value),
    )
    assert float(result) == pytest.approx(EXPECTED[how], rel=1e-14)


@pytest.mark.parametrize("how", list(Aggregation))
def test_the_example_of_the_docstring(how: Aggregation) -> None:
    check_hand_case(aggregation_module, how)


def test_totals_count_trained_tokens_and_their_owners_only() -> None:
    totals = BatchTotals.count(
        loss_mask=torch.tensor([True, False, True, False]), trajectory_ids=torch.tensor([1, 1, 2, 3])
    )
    assert totals == BatchTotals(tokens=2, trajectories=2)


@pytest.mark.parametrize("how", list(Aggregation))
def test_equals_the_loop(how: Aggregation) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(50, generator=generator, dtype=torch.float64)
    mask = torch.rand(50, generator=generator) > 0.4
    ids = torch.randint(7, (50,), generator=generator)
    rows: dict[int, list[float]] = {}
    for value, kept, owner in zip(values.tolist(), mask.tolist(), ids.tolist(), strict=True):
        if kept:
            rows.setdefault(owner, []).append(value)
    everything = [value for row in rows.values() for value in row]
    expected = {
        Aggregation.TOKEN_MEAN: sum(everything) / len(everything),
        Aggregation.SEQUENCE_MEAN: sum(sum(row) / len(row) for row in rows.values()) / len(rows),
        Aggregation.CONSTANT: sum(everything) / (len(rows) * 20),
    }[how]
    totals = BatchTotals.count(loss_mask=mask, trajectory_ids=ids, token_budget=20)
    result = aggregate(values, loss_mask=mask, trajectory_ids=ids, totals=totals, how=how)
    assert float(result) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("how", list(Aggregation))
def test_gradient_is_finite_where_masked_values_are_not(how: Aggregation) -> None:
    values = HAND["values"].clone().requires_grad_()
    totals = BatchTotals(tokens=4, trajectories=2, token_budget=10)
    aggregate(
        values,
        loss_mask=HAND["loss_mask"],
        trajectory_ids=HAND["trajectory_ids"],
        totals=totals,
        how=how,
    ).backward()
    weights = {
        Aggregation.TOKEN_MEAN: [1 / 4] * 4,
        Aggregation.SEQUENCE_MEAN: [1 / 2] + [1 / 6] * 3,
        Aggregation.CONSTANT: [1 / 20] * 4,
    }[how]
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([*weights, 0.0], rel=1e-14)


def test_a_microbatch_without_trained_tokens_is_zero() -> None:
    mask = torch.zeros(2, dtype=torch.bool)
    values = torch.tensor([1.0, math.inf], requires_grad=True)
    for how in Aggregation:
        result = aggregate(
            values,
            loss_mask=mask,
            trajectory_ids=torch.tensor([0, 0]),
            totals=BatchTotals(tokens=4, trajectories=2, token_budget=10),
            how=how,
        )
        (gradient,) = torch.autograd.grad(result, values)
        assert (float(result.detach()), gradient.tolist()) == (0.0, [0.0, 0.0])


MUTANTS = {
    "tokens for trajectories": (
        Aggregation.SEQUENCE_MEAN,
        "clamp(min=1)).sum() / totals.trajectories",
        "clamp(min=1)).sum() / totals.tokens",
    ),
    "trajectories for tokens": (
        Aggregation.TOKEN_MEAN,
        "return kept.sum() / totals.tokens",
        "return kept.sum() / totals.trajectories",
    ),
    "batch-local denominator": (
        Aggregation.CONSTANT,
        "(totals.trajectories * totals.token_budget)",
        "(totals.tokens * totals.token_budget)",
    ),
    "mask ignored": (Aggregation.TOKEN_MEAN, "torch.where(loss_mask, values, values.new_zeros(()))", "values"),
    "lengths of all tokens": (
        Aggregation.SEQUENCE_MEAN,
        "trajectory_sums(loss_mask.to(values.dtype), trajectory_ids)",
        "trajectory_sums(torch.ones_like(kept), trajectory_ids)",
    ),
    "owners without trained tokens": (
        Aggregation.SEQUENCE_MEAN,
        "torch.unique(trajectory_ids[loss_mask])",
        "torch.unique(torch.cat([trajectory_ids, trajectory_ids.new_tensor([77])]))",
    ),
}


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_mutants_fail(mutant: str, mutate) -> None:
    how, original, replacement = MUTANTS[mutant]
    module = mutate("sinkflex.algo.aggregation", original, replacement)
    with pytest.raises(AssertionError):
        check_hand_case(module, how)
