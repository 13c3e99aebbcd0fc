"""The sampler's log-probabilities against one plain fp64 forward with transformers' own eager attention."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from sinkflex.attention import hf
from sinkflex.models import TinyShape, build_tiny_model
from sinkflex.rollout import SamplingParams, TokenLedger
from sinkflex.rollout.engines.local import LocalEngine

VOCAB = 61
SHAPE = TinyShape(
    hidden_size=32, layers=4, heads=4, kv_heads=2, head_dim=8, experts=3, intermediate_size=24, sliding_window=10
)
# The project's promise is 1e-4 on every sampled token; fp32 rounding over four layers stays far below it.
TOLERANCE = 4e-5


def build(attention: str, *, window: int = SHAPE.sliding_window) -> Any:
    hf.register()
    shape = TinyShape(
        **{
            **{name: getattr(SHAPE, name) for name in SHAPE.__dataclass_fields__},
            "sliding_window": window,
            "initializer_range": 0.3,
        }
    )
    return build_tiny_model(
        shape,
        vocab_size=VOCAB,
        pad_token_id=0,
        eos_token_id=1,
        attention=attention,
        experts_implementation="eager",
        seed=3,
    )


def rollouts(*, temperature: float = 1.0, slots: int = 8, chunk: int = 64, observed: int = 6) -> list[TokenLedger]:
    """Three groups of three episodes of four turns, prompts of 14 to 44 tokens, the system part shared by all."""
    engine = LocalEngine(build("sinkflex"), max_slots=slots, max_length=300, prefill_chunk=chunk)
    rng = np.random.default_rng(0)
    system = rng.integers(2, VOCAB, size=9).tolist()
    prompts = [system + rng.integers(2, VOCAB, size=5 + 15 * group).tolist() for group in range(3)]

    async def episode(index: int) -> TokenLedger:
        own = np.random.default_rng(100 + index)
        ledger = TokenLedger()
        ledger.append_prompt(prompts[index // 3])
        for turn in range(4):
            answer = await engine.generate(
                f"e{index}",
                prompt_ids=ledger.ids,
                sampling=SamplingParams(
                    max_new_tokens=7, stop_ids=frozenset({1, 2, 3}), seed=5, temperature=temperature
                ),
            )
            ledger.append_sampled(answer.token_ids, answer.logprobs)
            if turn < 3:
                ledger.append_observation(own.integers(2, VOCAB, size=int(own.integers(1, 2 * observed))).tolist())
        engine.release(f"e{index}")
        return ledger

    async def main() -> list[TokenLedger]:
        return await asyncio.gather(*(episode(index) for index in range(9)))

    ledgers = asyncio.run(main())
    assert (engine.stats.evictions > 0) == (slots < 9)
    return ledgers


def worst_difference(ledgers: list[TokenLedger], *, temperature: float = 1.0, window: int = 10) -> float:
    """Largest |sampler - oracle| over all sampled tokens."""
    oracle = build("eager", window=window).double()
    worst = 0.0
    for ledger in ledgers:
        with torch.no_grad():
            logits = oracle(input_ids=torch.tensor([ledger.ids])).logits[0]
        logprobs = (logits / temperature).log_softmax(-1)
        for position, (token, on) in enumerate(zip(ledger.ids, ledger.loss_mask, strict=True)):
            if on:
                worst = max(worst, abs(float(logprobs[position - 1, token]) - ledger.logprobs[position]))
    return worst


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_every_sampled_token_at_its_temperature(temperature: float) -> None:
    assert worst_difference(rollouts(temperature=temperature, slots=9), temperature=temperature) < TOLERANCE


@pytest.mark.parametrize("slots", [1, 4])
def test_eviction_and_recomputation_change_nothing(slots: int) -> None:
    assert worst_difference(rollouts(slots=slots)) < TOLERANCE


@pytest.mark.parametrize("chunk", [5, 1000])
def test_long_observations_through_prefill_passes(chunk: int) -> None:
    assert worst_difference(rollouts(slots=9, chunk=chunk, observed=25)) < TOLERANCE


def test_the_comparison_can_fail() -> None:
    """A window that is off by one, or a temperature left out on one side, is far outside the tolerance."""
    ledgers = rollouts(slots=9)
    assert worst_difference(ledgers, window=11) > 100 * TOLERANCE
    assert worst_difference(ledgers, window=9) > 100 * TOLERANCE
    assert worst_difference(ledgers, temperature=1.1) > 100 * TOLERANCE


def test_a_copied_prefix_equals_a_prefill_of_its_own() -> None:
    model = build("sinkflex")
    prompt = np.random.default_rng(1).integers(2, VOCAB, size=50).tolist()

    def run(names: str) -> LocalEngine:
        engine = LocalEngine(model, max_slots=3, max_length=80)
        params = SamplingParams(max_new_tokens=1, stop_ids=frozenset({1}), seed=0)

        async def main() -> None:
            await asyncio.gather(*(engine.generate(n, prompt_ids=prompt, sampling=params) for n in names))

        asyncio.run(main())
        return engine

    alone, group = run("a"), run("abc")
    assert alone.stats.copied_tokens == 0
    assert group.stats.copied_tokens == 2 * 49
    for own, shared in zip(
        alone._cache.keys + alone._cache.values, group._cache.keys + group._cache.values, strict=True
    ):
        assert own[0, :, :50].abs().max() > 0.1
        for slot in range(3):
            torch.testing.assert_close(shared[slot, :, :50], own[0, :, :50], atol=1e-5, rtol=1e-5)
