"""One training step of a fixed gpt-oss-style model at one length; run in a process of its own by ``train_step``.

    python -m sinkflex.bench.train_child '{"implementation": "sinkflex", "tokens": 1024, ...}'

Prints one JSON line: seconds and peak bytes, or that memory ran out.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

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
    config = GptOssConfig(**MODEL)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    model: Any = GptOssForCausalLM(config)
    model.to(device).train()
    if checkpointing:
        enable_checkpointing(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    _step(model, optimizer, WARM_TOKENS, device)
    meter.reset_peak(device)
    start = time.perf_counter()
    loss = _step(model, optimizer, tokens, device)
    seconds = time.perf_counter() - start
    return {"status": "ok", "seconds": seconds, "peak_bytes": meter.peak_bytes(device), "loss": loss}


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
