"""Loading a policy: adapters that repeat, dropout refused, quantised weights unpacked or refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sinkflex.attention import hf
from sinkflex.errors import ModelError
from sinkflex.models import LoraSettings, TinyShape, build_tiny_model, load_policy, train_tokenizer
from sinkflex.models.load import finish_policy, trainable_weights

# peft asks transformers by the name that it is giving up.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    hf.register()
    tokenizer = train_tokenizer(["a policy reads this and that"], vocab_size=400)
    model = build_tiny_model(
        TinyShape(hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=16),
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        attention="sinkflex",
        experts_implementation="eager",
        seed=0,
    )
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_adapters_start_alike_for_equal_seeds_and_leave_the_global_generator_alone(model_folder: Path) -> None:
    before = torch.random.get_rng_state()

    def adapters(seed: int) -> list[torch.Tensor]:
        policy = load_policy(model_folder, lora=LoraSettings(rank=2, seed=seed))
        return [parameter.detach().clone() for parameter in policy.trainable().values()]

    first, again, other = adapters(0), adapters(0), adapters(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert torch.equal(before, torch.random.get_rng_state())


def test_only_adapters_train_and_without_them_the_base_speaks(model_folder: Path) -> None:
    policy = load_policy(model_folder, lora=LoraSettings(rank=2))
    assert policy.is_lora
    assert all("lora_" in name for name in policy.trainable())
    ids = torch.arange(5)[None]
    base = load_policy(model_folder).hidden_states(input_ids=ids, position_ids=ids, layout=None)
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            if "lora_B" in name:
                parameter.fill_(0.5)
        adapted = policy.hidden_states(input_ids=ids, position_ids=ids, layout=None)
        with policy.without_adapters():
            plain = policy.hidden_states(input_ids=ids, position_ids=ids, layout=None)
    torch.testing.assert_close(plain, base)
    assert not torch.allclose(adapted, base)


def test_dropout_is_refused_by_name() -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp_dropout = nn.Dropout(0.1)

    with pytest.raises(ModelError, match=r"mlp_dropout drops out activations \(p = 0.1\)"):
        finish_policy(Leaky(), None, device="cpu", lora=None, gradient_checkpointing=False)


def test_the_released_four_bit_experts_are_unpacked() -> None:
    assert trainable_weights(SimpleNamespace()) == {}
    for quantised in ({"quant_method": "mxfp4"}, SimpleNamespace(quant_method="mxfp4")):
        given = trainable_weights(SimpleNamespace(quantization_config=quantised))
        assert given["quantization_config"].dequantize
    with pytest.raises(ModelError, match=r"quantised \(gptq\); save it unquantised"):
        trainable_weights(SimpleNamespace(quantization_config={"quant_method": "gptq"}))
