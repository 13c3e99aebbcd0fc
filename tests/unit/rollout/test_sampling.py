"""Noise comes from (seed, request, position) alone; tokens follow the distribution that is reported."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sinkflex.rollout.engines.sampling import request_key, sample_tokens, uniforms


def draw(logits: torch.Tensor, noise: list[float], *, temperature: float = 1.0, top_p: float | None = None):
    count = len(noise)
    return sample_tokens(
        logits.expand(count, -1),
        temperature=torch.full((count,), temperature),
        top_p=None if top_p is None else torch.full((count,), top_p, dtype=torch.float64),
        noise=torch.tensor(noise, dtype=torch.float64),
    )


def test_keys_tell_requests_and_seeds_apart() -> None:
    keys = {request_key(name, seed=seed) for name in ("a", "b", "ab") for seed in (0, 1, 10)}
    assert len(keys) == 9
    assert request_key("a", seed=0) == request_key("a", seed=0)


def test_noise_is_the_published_generator() -> None:
    """SplitMix64 seeded with 0 starts 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4 (its reference implementation)."""
    noise = uniforms(np.zeros(2, dtype=np.uint64), np.array([0, 1]))
    expected = [(0xE220A8397B1DCDAF >> 12) * 2.0**-52, (0x6E789E6AA1B965F4 >> 12) * 2.0**-52]
    assert noise.tolist() == expected


def test_noise_is_uniform_and_uncorrelated() -> None:
    keys = np.array([request_key(f"r{i}", seed=0) for i in range(200)], dtype=np.uint64)
    table = np.stack([uniforms(keys, np.full(200, position)) for position in range(200)])
    assert table.min() >= 0.0
    assert table.max() < 1.0
    # 40,000 draws: the mean's standard error is 0.0014, a bin of ten holds 4,000 +- 60.
    assert abs(table.mean() - 0.5) < 0.006
    assert np.abs(np.histogram(table, bins=10, range=(0, 1))[0] - 4000).max() < 300
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.02


def test_inverse_of_the_cumulative_distribution_by_hand() -> None:
    # Probabilities 1/2, 1/4, 1/4: cumulative 0.5, 0.75, 1. A boundary belongs to the next token.
    logits = torch.log(torch.tensor([2.0, 1.0, 1.0]))
    tokens, logprobs, normaliser = draw(logits, [0.0, 0.49, 0.5, 0.74, 0.76, 0.999])
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]
    assert logprobs.tolist() == pytest.approx([math.log(0.5)] * 2 + [math.log(0.25)] * 4, abs=1e-6)
    assert normaliser.tolist() == pytest.approx([math.log(4.0)] * 6, abs=1e-6)


def test_temperature_shapes_tokens_and_logprobs_alike() -> None:
    # At temperature 1/2 the odds 2 : 1 : 1 become 4 : 1 : 1.
    logits = torch.log(torch.tensor([2.0, 1.0, 1.0]))
    tokens, logprobs, _ = draw(logits, [0.66, 0.67], temperature=0.5)
    assert tokens.tolist() == [0, 1]
    assert logprobs.tolist() == pytest.approx([math.log(4 / 6), math.log(1 / 6)], abs=1e-6)


def test_greedy_takes_the_likeliest_and_reports_temperature_one() -> None:
    logits = torch.log(torch.tensor([1.0, 2.0, 1.0]))
    tokens, logprobs, _ = draw(logits, [0.01, 0.99], temperature=0.0)
    assert tokens.tolist() == [1, 1]
    assert logprobs.tolist() == pytest.approx([math.log(0.5)] * 2, abs=1e-6)


def test_nucleus_limits_tokens_but_not_the_logprobs() -> None:
    # 0.5 and 0.3 reach 0.6; 0.2 is cut. What remains is 5 : 3.
    logits = torch.log(torch.tensor([0.2, 0.5, 0.3]))
    tokens, logprobs, _ = draw(logits, [0.0, 0.62, 0.63, 0.99], top_p=0.6)
    assert tokens.tolist() == [1, 1, 2, 2]
    assert logprobs[0].item() == pytest.approx(math.log(0.5), abs=1e-6)


def test_a_nucleus_smaller_than_the_likeliest_token_keeps_it() -> None:
    tokens, _, _ = draw(torch.log(torch.tensor([0.2, 0.5, 0.3])), [0.0, 0.5, 0.999], top_p=0.01)
    assert tokens.tolist() == [1, 1, 1]


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    noise = [0.0, 0.25, 0.5, 0.75, 1.0 - 2.0**-52]
    tokens, logprobs, _ = draw(logits, noise)
    assert tokens.tolist() == [1, 1, 3, 3, 3]
    assert logprobs.tolist() == pytest.approx([math.log(0.5)] * 5, abs=1e-6)


def test_frequencies_follow_the_distribution() -> None:
    probabilities = torch.softmax(torch.randn(50, generator=torch.Generator().manual_seed(0)), 0)
    keys = np.full(20_000, request_key("r", seed=3), dtype=np.uint64)
    tokens, _, _ = draw(probabilities.log(), uniforms(keys, np.arange(20_000)).tolist())
    counts = torch.bincount(tokens, minlength=50) / 20_000
    deviation = (counts - probabilities) / (probabilities * (1 - probabilities) / 20_000).sqrt()
    assert deviation.abs().max() < 4.5


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_broken_logits_show_in_the_normaliser(broken: float) -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = broken
    _, _, normaliser = sample_tokens(
        logits, temperature=torch.ones(2), top_p=None, noise=torch.full((2,), 0.5, dtype=torch.float64)
    )
    assert normaliser.isfinite().tolist() == [True, False]


def test_half_precision_logits_are_normalised_in_fp32() -> None:
    logits = torch.randn(1, 4000, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens, logprobs, _ = sample_tokens(
        logits, temperature=torch.ones(1), top_p=None, noise=torch.tensor([0.7], dtype=torch.float64)
    )
    exact = logits.double().log_softmax(-1)[0, tokens[0]]
    assert logprobs.dtype == torch.float32
    assert logprobs[0].item() == pytest.approx(exact.item(), abs=2e-6)
