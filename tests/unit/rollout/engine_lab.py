"""A tiny model, and one way to run requests on an engine over it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from sinkflex.attention import hf
from sinkflex.models import TinyShape, build_tiny_model
from sinkflex.rollout import Generation, SamplingParams
from sinkflex.rollout.engines.local import LocalEngine

VOCAB = 40
STOP = 2
STOPS = frozenset({STOP})
LENGTH = 160
SHAPE = TinyShape(hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate_size=32, sliding_window=12)


def build_model(seed: int = 0) -> Any:
    hf.register()
    return build_tiny_model(
        SHAPE,
        vocab_size=VOCAB,
        pad_token_id=0,
        eos_token_id=STOP,
        attention="sinkflex",
        experts_implementation="eager",
        seed=seed,
    )


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model()


@pytest.fixture
def make_engine(model: Any) -> Callable[..., LocalEngine]:
    def build(**settings: Any) -> LocalEngine:
        return LocalEngine(model, **({"max_slots": 4, "max_length": LENGTH} | settings))

    return build


def tokens(count: int, *, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, size=count).tolist()


def sampling(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": 8, "stop_ids": STOPS, "seed": 0} | changes))


def play(
    engine: LocalEngine,
    prompts: dict[str, Sequence[int]],
    *,
    turns: int = 1,
    observed: int = 5,
    params: SamplingParams | None = None,
) -> dict[str, list[Generation]]:
    """Run several requests at once, each for some turns with its own observations between them."""

    async def episode(name: str, ids: list[int]) -> list[Generation]:
        answers = []
        for turn in range(turns):
            answers.append(await engine.generate(name, prompt_ids=ids, sampling=params or sampling()))
            ids += [*answers[-1].token_ids, *tokens(observed, seed=hash((len(name), turn)) % 1000)]
        engine.release(name)
        return answers

    async def main() -> dict[str, list[Generation]]:
        answers = await asyncio.gather(*(episode(name, list(ids)) for name, ids in prompts.items()))
        return dict(zip(prompts, answers, strict=True))

    return asyncio.run(main())


def perturb(model: Any) -> None:
    """Change the weights as an optimiser would, only more."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def close(one: list[Generation], two: list[Generation]) -> bool:
    """Equal tokens, and log-probabilities that differ by rounding only."""
    return all(
        a.token_ids == b.token_ids and np.allclose(a.logprobs, b.logprobs, atol=1e-5)
        for a, b in zip(one, two, strict=True)
    )
