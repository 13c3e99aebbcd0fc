"""Equal inputs give equal bits, on several threads too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sinkflex.attention import hf
from sinkflex.models import TinyShape, build_tiny_model
from sinkflex.train.determinism import repeatable


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def gradients(model: torch.nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(input_ids=ids).logits.logsumexp(-1).mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.usefixtures("two_threads")
def test_gradients_of_sorted_experts_repeat_bit_for_bit() -> None:
    hf.register()
    model = build_tiny_model(
        TinyShape(sliding_window=4),
        vocab_size=500,
        pad_token_id=0,
        eos_token_id=1,
        attention="sinkflex",
        experts_implementation="grouped_mm",
        seed=0,
    )
    ids = torch.randint(0, 500, (1, 2048), generator=torch.Generator().manual_seed(0))
    with repeatable("cpu"):
        first, *others = (gradients(model, ids) for _ in range(4))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_settings_are_those_of_the_user_again_afterwards() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with repeatable("cpu"):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_a_gpu_run_is_left_alone() -> None:
    with repeatable("cuda"):
        assert not torch.are_deterministic_algorithms_enabled()
