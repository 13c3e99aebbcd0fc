"""Tiny random models of every architecture with learned sinks, and of three without."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from sinkflex.attention import hf

VOCAB = 53
LAYER_TYPES = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
HYBRID_TYPES = ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

# name -> (config class, model class, settings)
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        COMMON
        | {"head_dim": 8, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 5}
        | {"layer_types": LAYER_TYPES, "rope_parameters": ROPE},
    ),
    "granite_swa": (
        "GraniteSWAConfig",
        "GraniteSWAForCausalLM",
        COMMON
        | {"sliding_window": 5, "layer_types": LAYER_TYPES, "rope_parameters": ROPE}
        | {"attention_multiplier": 0.3},
    ),
    "granitemoe_swa": (
        "GraniteMoeSWAConfig",
        "GraniteMoeSWAForCausalLM",
        COMMON
        | {"sliding_window": 5, "layer_types": LAYER_TYPES, "rope_parameters": ROPE}
        | {"num_local_experts": 3, "num_experts_per_tok": 2, "attention_multiplier": 0.3},
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        "MiMoV2FlashForCausalLM",
        COMMON
        | MOE
        | {"num_key_value_heads": 1, "n_routed_experts": 3, "head_dim": 12, "v_head_dim": 8}
        | {"sliding_window": 5, "layer_types": LAYER_TYPES},
    ),
    "flint": (
        "FlintConfig",
        "FlintForCausalLM",
        COMMON
        | MOE
        | {"num_experts": 3, "shared_expert_intermediate_size": 16, "head_dim": 8}
        | {"sliding_window": 5, "layer_types": LAYER_TYPES},
    ),
    "deepseek_v4": (
        "DeepseekV4Config",
        "DeepseekV4ForCausalLM",
        {k: v for k, v in COMMON.items() if k != "intermediate_size"}
        | MOE
        | {"num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8}
        | {"n_routed_experts": 3, "hc_mult": 2, "hc_sinkhorn_iters": 2, "sliding_window": 5, "o_groups": 2}
        | {"o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 2}
        | {"layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]}
        | {"num_hidden_layers": 3, "mlp_layer_types": ["moe"] * 3, "num_nextn_predict_layers": 0}
        | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    ),
    "hy_v4": (
        "HYV4Config",
        "HYV4ForCausalLM",
        COMMON
        | MOE
        | {"num_key_value_heads": 4, "num_hidden_layers": 3, "n_routed_experts": 3, "q_lora_rank": 12}
        | {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "hc_mult": 2}
        # Few indexer heads leave keys tied at a score of exactly 0, and which of them top-k takes depends on the row.
        | {"index_topk": 6, "index_head_dim": 8, "index_n_heads": 8, "indexer_types": ["full", "shared", "full"]},
    ),
    "hy_v4_vl": ("HYV4VLConfig", "HYV4VLForConditionalGeneration", {}),
    "openai_privacy_filter": (
        "OpenAIPrivacyFilterConfig",
        "OpenAIPrivacyFilterForTokenClassification",
        COMMON
        | {"head_dim": 8, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 5, "num_labels": VOCAB}
        | {"rope_parameters": ROPE},
    ),
    "inkling": (
        "InklingTextConfig",
        "InklingForCausalLM",
        COMMON
        | MOE
        | {"head_dim": 8, "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}
        | {"sliding_window_size": 5, "d_rel": 4, "rel_extent": 7, "n_routed_experts": 3, "conv_kernel_size": 3}
        | {"unpadded_vocab_size": VOCAB, "layer_types": HYBRID_TYPES, "n_shared_experts": 1},
    ),
    "inkling2": (
        "Inkling2TextConfig",
        "Inkling2ForCausalLM",
        {k: v for k, v in COMMON.items() if k != "intermediate_size"}
        | MOE
        | {"head_dim": 8, "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}
        | {"sliding_window_size": 5, "d_rel": 4, "rel_extent": 7, "n_routed_experts": 3, "conv_kernel_size": 3}
        | {"unpadded_vocab_size": VOCAB, "n_layers_per_attn_res_block": 2, "layer_types": HYBRID_TYPES},
    ),
    "inkling2_loop": ("Inkling2LoopTextConfig", "Inkling2LoopForCausalLM", {}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", COMMON),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", COMMON | {"head_dim": 8}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        COMMON | {"head_dim": 8, "sliding_window": 5, "layer_types": LAYER_TYPES},
    ),
}
ARCHITECTURES["inkling2_loop"][2].update(
    ARCHITECTURES["inkling2"][2]
    | {"loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 2, "loop_gate_rank": 4}
)
ARCHITECTURES["hy_v4_vl"][2].update(
    text_config=ARCHITECTURES["hy_v4"][2] | {"rope_parameters": ROPE | {"mrope_section": [1, 1, 0]}},
    vision_config={"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    | {"out_hidden_size": 32},
)


@dataclass(frozen=True)
class Result:
    """Logits of one forward and the gradient of a fixed random projection of them, by parameter name."""

    logits: Tensor
    grads: dict[str, Tensor]


def projection(length: int, vocab: int) -> Tensor:
    """[T, V] fixed random weights that make a scalar of the logits."""
    return torch.randn(length, vocab, generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    hf.register()


@pytest.fixture(scope="session")
def build() -> Callable[[str], nn.Module]:
    """Return a function that gives a fresh copy of a tiny model; weights are large enough for attention to matter."""
    made: dict[str, nn.Module] = {}

    def model(name: str) -> nn.Module:
        if name not in made:
            config_name, class_name, settings = ARCHITECTURES[name]
            config = getattr(transformers, config_name)(**settings)
            config._experts_implementation = "eager"
            torch.manual_seed(0)
            fresh = getattr(transformers, class_name)(config).float().eval()
            with torch.no_grad():
                for parameter_name, parameter in fresh.named_parameters():
                    if parameter_name.endswith("sinks"):
                        parameter.copy_(torch.linspace(-2.0, 2.0, parameter.numel()))
                    elif parameter.dim() > 1 and "norm" not in parameter_name:
                        parameter.normal_(0.0, 0.2)
            made[name] = fresh
        return copy.deepcopy(made[name])

    return model


@pytest.fixture(scope="session")
def run() -> Callable[..., Result]:
    """Return a function that runs a model under one attention implementation, with its gradients."""

    def forward(
        model: nn.Module, implementation: str, ids: Tensor, *, real: Tensor | None = None, **inputs: Any
    ) -> Result:
        model.set_attn_implementation(implementation)
        model.zero_grad(set_to_none=True)
        logits = model(input_ids=ids, use_cache=False, **inputs).logits
        loss = logits * projection(ids.shape[1], logits.shape[2])
        (loss if real is None else loss[real]).sum().backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return Result(logits.detach(), grads)

    return forward


@pytest.fixture(scope="session")
def run_apart() -> Callable[..., Result]:
    """Return a function that runs each part of a row as a row of its own under eager.

    Logits are joined and gradients added: what packing the parts into one row must give.
    """

    def forward(model: nn.Module, row: Tensor, parts: Sequence[slice]) -> Result:
        model.set_attn_implementation("eager")
        model.zero_grad(set_to_none=True)
        pieces = []
        for part in parts:
            logits = model(input_ids=row[:, part], use_cache=False).logits
            (logits * projection(row.shape[1], logits.shape[2])[part]).sum().backward()
            pieces.append(logits.detach())
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return Result(torch.cat(pieces, dim=1), grads)

    return forward


@pytest.fixture(scope="session")
def agree() -> Callable[..., None]:
    """Return a function that asserts equal logits (where ``real``) and equal gradients of every parameter."""

    def check(got: Result, want: Result, real: Tensor | None = None, tolerance: float = 1e-4) -> None:
        logits = (got.logits, want.logits) if real is None else (got.logits[real], want.logits[real])
        torch.testing.assert_close(*logits, rtol=tolerance, atol=tolerance * float(logits[1].abs().max()))
        assert got.grads.keys() == want.grads.keys()
        # Each parameter is judged on its own largest gradient, the sinks above all. Only the hyper-connections'
        # scales and biases are the small rest of large terms and carry those terms' rounding in fp32; fp64 has them
        # equal too (test_hyper_connection_gradients_agree_in_fp64).
        largest = max(float(grad.abs().max()) for grad in want.grads.values())
        for name, grad in want.grads.items():
            rounding = 1e-2 * largest if re.search(r"[._]hc[._]", name) and grad.dtype == torch.float32 else 0.0
            scale = max(float(grad.abs().max()), rounding)
            torch.testing.assert_close(
                got.grads[name], grad, rtol=0.0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}"
            )

    return check
