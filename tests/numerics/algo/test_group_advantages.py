from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sinkflex.algo.advantages import ADVANTAGE_ESTIMATORS, group_advantages, leave_one_out_advantages

NAMES = sorted(ADVANTAGE_ESTIMATORS)
GROUPS = torch.tensor([5, 5, 5, -2, -2])


def test_hand_case_with_population_std() -> None:
    # group 5: mean 2, deviations -1, -1, 2, variance (1 + 1 + 4) / 3 = 2; group -2: mean 0.5, std 0.5
    rewards = torch.tensor([1.0, 1.0, 4.0, 0.0, 1.0], dtype=torch.float64)
    advantages = group_advantages(rewards, GROUPS, scale=True, ddof=0, eps=0.0)
    root = math.sqrt(2)
    assert advantages.tolist() == pytest.approx([-1 / root, -1 / root, 2 / root, -1.0, 1.0], rel=1e-14)


def test_hand_case_with_sample_std_and_eps() -> None:
    # group 5: variance 6 / 2 = 3; group -2: variance 0.5
    rewards = torch.tensor([1.0, 1.0, 4.0, 0.0, 1.0], dtype=torch.float64)
    advantages = group_advantages(rewards, GROUPS, scale=True, ddof=1, eps=0.25)
    first, second = math.sqrt(3) + 0.25, math.sqrt(0.5) + 0.25
    expected = [-1 / first, -1 / first, 2 / first, -0.5 / second, 0.5 / second]
    assert advantages.tolist() == pytest.approx(expected, rel=1e-14)


def test_hand_case_centred_only() -> None:
    rewards = torch.tensor([1.0, 1.0, 4.0, 0.0, 1.0], dtype=torch.float64)
    advantages = group_advantages(rewards, GROUPS, scale=False, ddof=1, eps=0.0)
    assert advantages.tolist() == pytest.approx([-1.0, -1.0, 2.0, -0.5, 0.5], rel=1e-14)


def test_hand_case_leave_one_out() -> None:
    # 1 - (1 + 4) / 2, 1 - (1 + 4) / 2, 4 - (1 + 1) / 2 and 0 - 1, 1 - 0
    rewards = torch.tensor([1.0, 1.0, 4.0, 0.0, 1.0], dtype=torch.float64)
    assert leave_one_out_advantages(rewards, GROUPS).tolist() == pytest.approx([-1.5, -1.5, 3.0, -1.0, 1.0])


def oracle(name: str, rewards: list[float], group_ids: list[int]) -> list[float]:
    advantages = []
    for reward, group in zip(rewards, group_ids, strict=True):
        members = [r for r, g in zip(rewards, group_ids, strict=True) if g == group]
        mean = sum(members) / len(members)
        if name == "rloo":
            advantages.append(reward - (sum(members) - reward) / (len(members) - 1))
            continue
        std = math.sqrt(sum((r - mean) ** 2 for r in members) / (len(members) - 1))
        advantages.append((reward - mean) / (std + 1e-6) if name == "grpo" else reward - mean)
    return advantages


def check_against_oracle(estimator: Callable[[Tensor, Tensor], Tensor], name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(32, generator=generator, dtype=torch.float64)
    group_ids = torch.arange(32) % 5 * 7
    group_ids = group_ids[torch.randperm(32, generator=generator)]
    expected = oracle(name, rewards.tolist(), group_ids.tolist())
    assert estimator(rewards, group_ids).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_loop(name: str) -> None:
    check_against_oracle(ADVANTAGE_ESTIMATORS[name], name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.7, 0.1, 1 / 3, -0.3, 1e-30, 3e7, 0.0])
def test_a_constant_group_gives_exact_zeros(name: str, value: float, dtype: torch.dtype) -> None:
    for size in (2, 3, 7, 8, 64):
        rewards = torch.full((size,), value, dtype=dtype)
        advantages = ADVANTAGE_ESTIMATORS[name](rewards, torch.zeros(size, dtype=torch.long))
        assert advantages.tolist() == [0.0] * size


def test_a_constant_group_is_zero_without_eps_too() -> None:
    rewards = torch.tensor([0.7] * 8 + [0.0, 1.0])
    group_ids = torch.tensor([0] * 8 + [1, 1])
    advantages = group_advantages(rewards, group_ids, scale=True, ddof=0, eps=0.0)
    assert advantages.tolist() == [0.0] * 8 + [-1.0, 1.0]


@pytest.mark.parametrize("name", NAMES)
def test_order_is_free(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    rewards = torch.randn(24, generator=generator)
    group_ids = torch.arange(24) // 8
    order = torch.randperm(24, generator=generator)
    plain = ADVANTAGE_ESTIMATORS[name](rewards, group_ids)
    assert torch.equal(ADVANTAGE_ESTIMATORS[name](rewards[order], group_ids[order]), plain[order])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(
    rewards=st.lists(st.integers(-64, 64).map(lambda n: n / 64), min_size=2, max_size=12),
    shift=st.integers(-1024, 1024),
)
def test_shifting_the_rewards_changes_nothing(name: str, rewards: list[float], shift: int) -> None:
    # Multiples of 1/64 and whole shifts are exact in floats, so the invariance must be too.
    ids = torch.zeros(len(rewards), dtype=torch.long)
    plain = torch.tensor(rewards, dtype=torch.float32)
    advantages = ADVANTAGE_ESTIMATORS[name](plain, ids)
    assert torch.equal(ADVANTAGE_ESTIMATORS[name](plain + shift, ids), advantages)
    assert float(advantages.double().sum()) == pytest.approx(0.0, abs=1e-5)


def test_scaling_the_rewards_changes_only_what_is_not_divided() -> None:
    rewards = torch.randn(8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ids = torch.zeros(8, dtype=torch.long)
    normed = {factor: group_advantages(rewards * factor, ids, scale=True, ddof=1, eps=0.0) for factor in (1, 3)}
    torch.testing.assert_close(normed[3], normed[1], rtol=1e-13, atol=0)
    centred = {factor: group_advantages(rewards * factor, ids, scale=False, ddof=1, eps=0.0) for factor in (1, 3)}
    torch.testing.assert_close(centred[3], 3 * centred[1], rtol=1e-13, atol=1e-15)


def test_no_gradient_flows() -> None:
    rewards = torch.tensor([0.0, 1.0], requires_grad=True)
    for estimator in ADVANTAGE_ESTIMATORS.values():
        assert not estimator(rewards, torch.tensor([0, 0])).requires_grad


MUTANTS = {
    "population for sample": ("grpo", "(squares / (sizes - ddof))", "(squares / sizes)"),
    "variance for std": ("grpo", ".sqrt()[index]", "[index]"),
    "eps squared away": ("grpo", "1.0, std + eps)", "1.0, std)"),
    "never scaled": ("grpo", "    if scale:", "    if False:"),
    "always scaled": ("dr_grpo", "    if scale:", "    if True:"),
    "flipped sign": ("dr_grpo", "return excess - means[index]", "return means[index] - excess"),
    "inverted factor": ("rloo", "(sizes / (sizes - 1))[index]", "((sizes - 1) / sizes)[index]"),
}


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_mutants_fail(mutant: str, mutate) -> None:
    name, original, replacement = MUTANTS[mutant]
    module = mutate("sinkflex.algo.advantages", original, replacement)
    with pytest.raises(AssertionError):
        check_against_oracle(module.ADVANTAGE_ESTIMATORS[name], name)


def test_the_naive_mean_is_a_mutant_that_leaks_residue(mutate) -> None:
    # ten times 0.1 sum to 0.9999999999999999
    module = mutate("sinkflex.algo.advantages", "excess = values - minimum[index]", "excess = values")
    rewards = torch.full((10,), 0.1, dtype=torch.float64)
    advantages = module.ADVANTAGE_ESTIMATORS["dr_grpo"](rewards, torch.zeros(10, dtype=torch.long))
    assert advantages.tolist() != [0.0] * 10
