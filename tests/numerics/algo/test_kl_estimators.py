"""Values by hand and by exact expectation; gradients by the exact derivative of what each estimate stands for."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from sinkflex.algo import kl as kl_module
from sinkflex.algo.kl import KL_ESTIMATORS, k3
from sinkflex.algo.ratios import LOG_RATIO_LIMIT, safe_exp


def check_hand_case(module: ModuleType, name: str) -> None:
    # log-ratios ln 2 and ln(1/2); the third token is masked
    logprobs = torch.tensor([-1 + math.log(2), -1 - math.log(2), -1.0], dtype=torch.float64)
    reference = torch.tensor([-1.0, -1.0, math.inf], dtype=torch.float64)
    mask = torch.tensor([True, True, False])
    half = math.log(2) ** 2 / 2
    expected = {
        "k1": [math.log(2), -math.log(2), 0.0],
        "k2": [half, half, 0.0],
        "k3": [0.5 - 1 + math.log(2), 2 - 1 - math.log(2), 0.0],
    }[name]
    assert module.KL_ESTIMATORS[name](logprobs, reference, mask).tolist() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_hand_case(name: str) -> None:
    check_hand_case(kl_module, name)


def policies() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), 0)
    return logits, torch.log_softmax(logits, 0), reference


def expectation(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Exact expected value of an estimate over a six-way policy, its expected gradient, and the logits."""
    logits, logprobs, reference = policies()
    mask = torch.ones(6, dtype=torch.bool)
    estimates = KL_ESTIMATORS[name](logprobs, reference, mask)
    weights = logprobs.exp().detach()
    value = (weights * estimates).sum()
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach(), gradient, logits


def divergences() -> dict[str, tuple[Tensor, Tensor]]:
    results = {}
    for name in ("reverse", "forward"):
        logits, logprobs, reference = policies()
        if name == "reverse":
            value = (logprobs.exp() * (logprobs - reference)).sum()
        else:
            value = (reference.exp() * (reference - logprobs)).sum()
        (gradient,) = torch.autograd.grad(value, logits)
        results[name] = (value.detach(), gradient)
    return results


def test_k1_and_k3_are_unbiased_and_k2_is_not() -> None:
    reverse, _ = divergences()["reverse"]
    for name in ("k1", "k3"):
        torch.testing.assert_close(expectation(name)[0], reverse, rtol=1e-13, atol=0)
    assert abs(float(expectation("k2")[0] / reverse) - 1) > 0.02


def test_gradients_are_those_the_table_promises() -> None:
    exact = divergences()
    torch.testing.assert_close(expectation("k1")[1], torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(expectation("k2")[1], exact["reverse"][1], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(expectation("k3")[1], exact["forward"][1], rtol=1e-12, atol=1e-15)


def test_k3_is_never_negative_and_zero_only_at_equality() -> None:
    logprobs = torch.linspace(-8, 0, 401, dtype=torch.float64)
    reference = torch.full_like(logprobs, -4.0)
    values = k3(logprobs, reference, torch.ones(401, dtype=torch.bool))
    assert float(values.min()) == 0.0
    assert int((values == 0).sum()) == 1


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_gradcheck_and_masked_gradients(name: str) -> None:
    logprobs = torch.tensor([-0.5, -3.0, math.nan], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.5, -math.inf], dtype=torch.float64)
    mask = torch.tensor([True, True, False])
    KL_ESTIMATORS[name](logprobs, reference, mask).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[2] == 0
    assert torch.isfinite(logprobs.grad).all()
    inner = torch.tensor([-0.5, -3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: KL_ESTIMATORS[name](x, reference[:2], mask[:2]), inner)


def test_a_ruled_out_token_keeps_a_finite_k3_that_raises_it_again() -> None:
    logprobs = torch.tensor([-300.0], requires_grad=True)
    value = k3(logprobs, torch.tensor([-0.5]), torch.tensor([True]))
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    assert torch.isfinite(value).all()
    # minimising lowers the value, so the gradient must be negative for the logprob to rise
    assert float(gradient) == pytest.approx(1 - math.exp(LOG_RATIO_LIMIT), rel=1e-6)


def test_safe_exp_is_exact_below_its_limit_and_smooth_at_it() -> None:
    at = LOG_RATIO_LIMIT
    points = torch.tensor([-700.0, -1.0, 0.0, at, at + 1e-9, at + 2], dtype=torch.float64, requires_grad=True)
    values = safe_exp(points)
    (gradient,) = torch.autograd.grad(values.sum(), points)
    top = math.exp(at)
    expected = [math.exp(-700), math.exp(-1), 1.0, top, top * (1 + 1e-9), top * 3]
    assert values.tolist() == pytest.approx(expected, rel=1e-12)
    assert gradient.tolist() == pytest.approx([*expected[:3], top, top, top], rel=1e-12)


MUTANTS = {
    "k1 flipped": (
        "k1",
        "    return masked_log_ratio(logprobs, ref_logprobs, loss_mask)\n",
        "    return -masked_log_ratio(logprobs, ref_logprobs, loss_mask)\n",
    ),
    "k2 without the half": ("k2", ".square() / 2", ".square()"),
    "k3 of the inverse ratio": ("k3", "safe_exp(-log_ratio) - 1 + log_ratio", "safe_exp(log_ratio) - 1 - log_ratio"),
    "k3 without the correction": ("k3", "safe_exp(-log_ratio) - 1 + log_ratio", "safe_exp(-log_ratio) - 1"),
}


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_mutants_fail(mutant: str, mutate) -> None:
    name, original, replacement = MUTANTS[mutant]
    module = mutate("sinkflex.algo.kl", original, replacement)
    with pytest.raises(AssertionError):
        check_hand_case(module, name)


def test_a_mutant_that_forgets_the_mask_fails(mutate) -> None:
    ratios = mutate("sinkflex.algo.ratios", "- torch.where(loss_mask, other_logprobs, zero)", "- other_logprobs")
    module = mutate("sinkflex.algo.kl", "from sinkflex.algo.ratios import", "from sinkflex.algo.ratios_mutant import")
    assert module.masked_log_ratio is ratios.masked_log_ratio
    with pytest.raises(AssertionError):
        check_hand_case(module, "k1")
