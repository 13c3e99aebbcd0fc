"""The tiny gpt-oss-style policy: transformers' own ``GptOssForCausalLM`` at laptop size.

It has everything that makes gpt-oss hard for fast attention kernels: learned sinks, alternating sliding and full
layers, grouped-query heads and routed experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GptOssConfig, GptOssForCausalLM

from sinkflex.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class TinyShape:
    """Sizes of the tiny policy. The defaults give about one million parameters with a vocabulary of 1,000."""

    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 2
    experts_per_token: int = 1
    intermediate_size: int = 256
    sliding_window: int = 64
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    initializer_range: float = 0.02


def build_tiny_model(
    shape: TinyShape,
    *,
    vocab_size: int,
    pad_token_id: int,
    eos_token_id: int,
    attention: str,
    experts_implementation: str,
    seed: int,
) -> GptOssForCausalLM:
    """Build a randomly initialised tiny policy, the same weights for the same seed.

    Args:
        shape: layer sizes.
        vocab_size: rows of the embedding and of the head.
        pad_token_id: id that pads.
        eos_token_id: id that ends a turn.
        attention: transformers' ``attn_implementation``; ``"sinkflex"`` needs
            ``sinkflex.attention.hf.register`` to have run.
        experts_implementation: ``"eager"`` or ``"grouped_mm"``; ``"batched_mm"`` is several times slower on CPU.
        seed: seeds the initialisation only; the global generator is left as it was.

    Raises:
        ModelError: the heads do not divide evenly, or more experts are routed than exist.
    """
    if shape.heads % shape.kv_heads:
        raise ModelError(f"heads={shape.heads} is not a multiple of kv_heads={shape.kv_heads}; change model.tiny")
    if shape.experts_per_token > shape.experts:
        raise ModelError(
            f"experts_per_token={shape.experts_per_token} exceeds experts={shape.experts}; change model.tiny"
        )
    build_config: Any = GptOssConfig  # its generated signature omits the base class's arguments
    config = build_config(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        sliding_window=shape.sliding_window,
        max_position_embeddings=shape.max_positions,
        initializer_range=shape.initializer_range,
        # The class default is YaRN with factor 32 for a 4,096-token base, which ruins a small context.
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        pad_token_id=pad_token_id,
        eos_token_id=eos_token_id,
        attn_implementation=attention,
        experts_implementation=experts_implementation,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GptOssForCausalLM(config)
