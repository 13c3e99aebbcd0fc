"""Sink architectures on a card under ``sinkflex``: eager's logits and gradients, as on CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

DEVICE = "cuda"
LENGTH = 40

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture
def loss_and_gradients() -> Callable[..., dict[str, Tensor]]:
    """Return a function that runs a model on the card: logits and every parameter's gradient, on CPU."""

    def measure(model: nn.Module, implementation: str, mask: Tensor) -> dict[str, Tensor]:
        model.set_attn_implementation(implementation)
        model.zero_grad(set_to_none=True)
        ids = torch.randint(2, 53, (2, LENGTH), generator=torch.Generator().manual_seed(5)).to(DEVICE)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        weights = torch.randn(logits.shape[1:], generator=torch.Generator().manual_seed(7)).to(DEVICE)
        real = mask.bool()
        (logits * weights)[real].sum().backward()
        grads = {name: p.grad.clone().cpu() for name, p in model.named_parameters() if p.grad is not None}
        return {"logits": logits.detach()[real].cpu(), **grads}

    return measure


@pytest.mark.parametrize("padded", [0, 9])
@pytest.mark.parametrize("name", ["gpt_oss", "granite_swa", "mimo_v2_flash", "flint"])
def test_equals_eager(
    name: str, padded: int, build: Callable[[str], nn.Module], loss_and_gradients: Callable[..., Any]
) -> None:
    model = build(name).to(DEVICE)
    mask = torch.ones(2, LENGTH, dtype=torch.long, device=DEVICE)
    mask[0, :padded] = 0
    got, want = (loss_and_gradients(model, implementation, mask) for implementation in ("sinkflex", "eager"))
    assert got.keys() == want.keys()
    for key, wanted in want.items():
        limit = 1e-4 * float(wanted.abs().max())
        torch.testing.assert_close(got[key], wanted, rtol=0.0, atol=limit, msg=lambda m, k=key: f"{k}: {m}")
