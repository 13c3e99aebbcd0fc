"""One training step of a fixed gpt-oss-style model at one length; run in a process of its own by ``train_step``.

    python -m sinkflex.bench.train_child '{"implementation": "sinkflex", "tokens": 1024, ...}'

Prints one JSON line: seconds and peak bytes, or that memory ran out.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, cast

import torch
from torch import nn

from sinkflex.algo.logprobs import OutputHead, token_logprobs
from sinkflex.attention import hf
from sinkflex.bench import meter
from sinkflex.types import JSONObject

MODEL: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "sliding_window": 128,
    "max_position_embeddings": 65536,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
}
"""The fixed configuration: gpt-oss in small, every second layer with a window of 128."""

WARM_TOKENS = 64

SDPA_FLOOR = "sink-free"
"""transformers' SDPA attention with the sink left out: another model, and a floor for time and memory.

The name says no "sdpa", because transformers refuses such names for models with sinks.
"""


def main() -> None:
    """Run the step named in the first argument and print its figures as one line of JSON."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    device = torch.device(settings["device"])
    if device.type == "cuda":
        share = settings["cap_bytes"] / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0), device)
    try:
        record = measured_step(
            settings["implementation"], settings["tokens"], device, checkpointing=settings["checkpointing"]
        )
    except RuntimeError as error:  # torch.OutOfMemoryError is one, and the CPU allocator knows no better
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        record = {"status": "out of memory"}
    print(json.dumps(record), flush=True)


def measured_step(implementation: str, tokens: int, device: torch.device, *, checkpointing: bool) -> JSONObject:
    """Train one step at a small length, then one that is measured.

    Args:
        implementation: transformers' ``attn_implementation``.
        tokens: T of the measured step, one row.
        device: cpu or cuda.
        checkpointing: recompute each layer in backward.
    """
    from transformers import GptOssConfig, GptOssForCausalLM

    from sinkflex.models.load import enable_checkpointing

    hf.register()
    _register_floor()
    config = GptOssConfig(**MODEL)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    model: Any = GptOssForCausalLM(config)
    model.to(device).train()
    if checkpointing:
        enable_checkpointing(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    # On a GPU kernels are compiled for the shapes they meet, which is no part of a step's time.
    _step(model, optimizer, tokens if device.type == "cuda" else WARM_TOKENS, device)
    meter.reset_peak(device)
    start = time.perf_counter()
    loss = _step(model, optimizer, tokens, device)
    seconds = time.perf_counter() - start
    peak_bytes = meter.peak_bytes(device)
    matmul = meter.matmul_peak(torch.float32, device)
    return {
        "status": "ok",
        "seconds": seconds,
        "peak_bytes": peak_bytes,
        "loss": loss,
        "tokens_per_s": tokens / seconds,
        "peak_share": step_flops(model, tokens) / seconds / matmul,
    }


def step_flops(model: nn.Module, tokens: int) -> float:
    """Matmul FLOPs of one forward and backward: 6 a weight and token, and 14·D a visible query-key pair and head."""
    used = MODEL["num_experts_per_tok"] / MODEL["num_local_experts"]
    weights: float = sum(
        parameter.numel() * (used if ".experts." in name else 1.0)
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and "embed_tokens" not in name
    )
    pairs = 0.0
    for kind in cast(Any, model).config.layer_types:
        width = min(MODEL["sliding_window"], tokens) if kind == "sliding_attention" else tokens
        pairs += width * (width + 1) / 2 + (tokens - width) * width
    return float(6 * weights * tokens + 14 * MODEL["head_dim"] * MODEL["num_attention_heads"] * pairs)


def _register_floor() -> None:
    """Make transformers' SDPA known under a name that models with sinks accept."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def without_sink(module: nn.Module, *tensors: Any, s_aux: Any = None, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, *tensors, **kwargs)

    AttentionInterface.register(SDPA_FLOOR, without_sink)
    AttentionMaskInterface.register(SDPA_FLOOR, sdpa_mask)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: int, device: torch.device) -> float:
    """One policy-gradient step with fixed advantages; the logits are chunked for every implementation alike."""
    language_model: Any = model
    made = torch.Generator().manual_seed(tokens)
    ids = torch.randint(MODEL["vocab_size"], (1, tokens), generator=made).to(device)
    advantages = torch.randn(tokens - 1, generator=made).to(device)
    hidden = language_model.model(input_ids=ids, use_cache=False).last_hidden_state
    head = OutputHead.from_module(language_model.lm_head)
    logprobs = token_logprobs(hidden[0, :-1], head, ids[0, 1:])
    if isinstance(logprobs, tuple):
        raise TypeError("token_logprobs returned an entropy that was not asked for")
    loss = -(advantages * logprobs).mean()
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


if __name__ == "__main__":
    main()
