from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from sinkflex.algo import correction as correction_module
from sinkflex.algo.correction import (
    WeightLevel,
    importance_weights,
    mask_weights,
    mismatch_statistics,
    truncate_weights,
)

# ratios 2 and 1/4 in trajectory 7, 3 in trajectory 1, and a masked token of trajectory 7
RATIOS = (2.0, 0.25, 3.0)
OLD = torch.tensor([-1 + math.log(2), -1 - math.log(4), -2 + math.log(3), math.nan], dtype=torch.float64)
ROLLOUT = torch.tensor([-1.0, -1.0, -2.0, math.inf], dtype=torch.float64)
MASK = torch.tensor([True, True, True, False])
IDS = torch.tensor([7, 7, 1, 7])
EXPECTED = {
    WeightLevel.TOKEN: [2.0, 0.25, 3.0, 0.0],
    WeightLevel.SEQUENCE: [0.5, 0.5, 3.0, 0.0],
    WeightLevel.GEOMETRIC: [math.sqrt(0.5), math.sqrt(0.5), 3.0, 0.0],
}


def check_hand_case(module: ModuleType, level: WeightLevel) -> None:
    weights = module.importance_weights(
        OLD, ROLLOUT, loss_mask=MASK, trajectory_ids=IDS, level=module.WeightLevel(level.value)
    )
    assert weights.tolist() == pytest.approx(EXPECTED[level], rel=1e-13)


@pytest.mark.parametrize("level", list(WeightLevel))
def test_weights_by_hand(level: WeightLevel) -> None:
    check_hand_case(correction_module, level)


@pytest.mark.parametrize("level", list(WeightLevel))
def test_equal_logprobs_give_ones_without_gradient(level: WeightLevel) -> None:
    logprobs = torch.tensor([-0.3, -2.0, -5.0], requires_grad=True)
    weights = importance_weights(
        logprobs,
        logprobs.detach(),
        loss_mask=torch.ones(3, dtype=torch.bool),
        trajectory_ids=torch.tensor([0, 0, 1]),
        level=level,
    )
    assert weights.tolist() == [1.0, 1.0, 1.0]
    assert not weights.requires_grad


def test_sequence_weights_correct_an_expectation_exactly() -> None:
    """Sum over all two-token trajectories of the sampler's probability times weight times payoff."""
    sampler, trainer = [0.7, 0.3], [0.4, 0.6]
    pairs = [(a, b) for a in range(2) for b in range(2)]
    payoff = {(0, 0): 1.0, (0, 1): -2.0, (1, 0): 0.5, (1, 1): 3.0}
    tokens = [token for pair in pairs for token in pair]
    weights = importance_weights(
        torch.tensor([math.log(trainer[t]) for t in tokens], dtype=torch.float64),
        torch.tensor([math.log(sampler[t]) for t in tokens], dtype=torch.float64),
        loss_mask=torch.ones(8, dtype=torch.bool),
        trajectory_ids=torch.arange(8) // 2,
        level=WeightLevel.SEQUENCE,
    )[::2]
    corrected = sum(sampler[a] * sampler[b] * float(w) * payoff[a, b] for (a, b), w in zip(pairs, weights, strict=True))
    exact = sum(trainer[a] * trainer[b] * payoff[a, b] for a, b in pairs)
    assert corrected == pytest.approx(exact, rel=1e-13)


def test_truncation_bounds_only_from_above() -> None:
    weights = torch.tensor([0.1, 1.0, 1.9, 5.0])
    assert truncate_weights(weights, cap=2.0).tolist() == pytest.approx([0.1, 1.0, 1.9, 2.0])
    assert torch.equal(truncate_weights(weights, cap=math.inf), weights)


def test_masking_leaves_out_both_sides_and_keeps_the_rest_as_they_are() -> None:
    weights = torch.tensor([0.4, 0.5, 1.0, 2.0, 2.1])
    kept = mask_weights(weights, weights, low=0.5, high=2.0)
    assert torch.equal(kept, torch.tensor([0.0, 0.5, 1.0, 2.0, 0.0]))


def test_a_drifting_trajectory_is_masked_as_a_whole() -> None:
    tokens, drift = (
        importance_weights(OLD, ROLLOUT, loss_mask=MASK, trajectory_ids=IDS, level=level)
        for level in (WeightLevel.TOKEN, WeightLevel.GEOMETRIC)
    )
    kept = mask_weights(tokens, drift, low=0.9, high=4.0)
    assert kept.tolist() == pytest.approx([0.0, 0.0, 3.0, 0.0])


def test_statistics_by_hand() -> None:
    old, rollout = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.4, 0.5]).log()
    weights = torch.tensor([1.0, 0.5])
    figures = mismatch_statistics(
        torch.cat([old, torch.tensor([math.nan])]),
        torch.cat([rollout, torch.tensor([math.inf])]),
        loss_mask=torch.tensor([True, True, False]),
        weights=torch.cat([weights, torch.tensor([9.0])]),
    )
    ratios = [0.5 / 0.4, 0.25 / 0.5]
    assert figures == pytest.approx(
        {
            "rollout_probs_diff_mean": (0.1 + 0.25) / 2,
            "rollout_probs_diff_max": 0.25,
            "rollout_probs_diff_std": 0.075,
            "rollout_logprobs_diff_max": math.log(2),
            "rollout_kl": sum(r - 1 - math.log(r) for r in ratios) / 2,
            "correction_mean": 0.75,
            "correction_zero_fraction": 0.0,
            "correction_ess": 1.5**2 / (2 * 1.25),
        },
        rel=1e-6,
    )


@pytest.mark.parametrize(("weights", "size"), [([2.0] * 4, 1.0), ([0.0, 0.0, 3.0, 0.0], 0.25), ([0.0] * 4, 0.0)])
def test_effective_sample_size_at_its_limits(weights: list[float], size: float) -> None:
    logprobs = torch.zeros(4)
    figures = mismatch_statistics(
        logprobs, logprobs, loss_mask=torch.ones(4, dtype=torch.bool), weights=torch.tensor(weights)
    )
    assert figures["correction_ess"] == pytest.approx(size)
    assert figures["correction_zero_fraction"] == weights.count(0.0) / 4


MUTANTS = {
    "inverse ratio": (
        WeightLevel.TOKEN,
        "masked_log_ratio(old_logprobs.detach(), rollout_logprobs.detach(), loss_mask)",
        "masked_log_ratio(rollout_logprobs.detach(), old_logprobs.detach(), loss_mask)",
    ),
    "geometric over all tokens": (
        WeightLevel.GEOMETRIC,
        "trajectory_sums(loss_mask.to(log_ratio.dtype), trajectory_ids)",
        "trajectory_sums(torch.ones_like(log_ratio), trajectory_ids)",
    ),
    "sequence as token": (
        WeightLevel.SEQUENCE,
        "if level is not WeightLevel.TOKEN:",
        "if level is WeightLevel.GEOMETRIC:",
    ),
    "masked tokens weigh one": (
        WeightLevel.TOKEN,
        "torch.where(loss_mask, safe_exp(log_ratio), log_ratio.new_zeros(()))",
        "safe_exp(log_ratio)",
    ),
}


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_mutants_fail(mutant: str, mutate) -> None:
    level, original, replacement = MUTANTS[mutant]
    module = mutate("sinkflex.algo.correction", original, replacement)
    with pytest.raises(AssertionError):
        check_hand_case(module, level)
