"""Loading any Hugging Face causal LM by path, for full training or LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import Mxfp4Config

from sinkflex.attention import hf
from sinkflex.errors import MissingExtraError, ModelError
from sinkflex.models.policy import Policy

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters (arXiv 2106.09685) through peft.

    Attributes:
        rank: inner dimension r.
        alpha: scale; the update is ``alpha / rank * B @ A``.
        target_modules: module names, or ``"all-linear"``. Routed experts and the head are never adapted.
        seed: seeds the adapters' initialisation; the global generator is left as it was.
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] | str = ("q_proj", "k_proj", "v_proj", "o_proj")
    seed: int = 0


def load_policy(
    path: str | Path,
    *,
    tokenizer_path: str | Path | None = None,
    attention: str = "sinkflex",
    dtype: str = "float32",
    device: str = "cpu",
    lora: LoraSettings | None = None,
    gradient_checkpointing: bool = False,
    experts_implementation: str | None = None,
) -> Policy:
    """Load a causal LM and its tokenizer from a local folder or a hub name.

    Args:
        path: folder with ``config.json``, or a hub id where one can be reached.
        tokenizer_path: where the tokenizer is, when not beside the model.
        attention: transformers' ``attn_implementation``.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float64"``.
        device: torch device of the weights.
        lora: adapters to train instead of the weights.
        gradient_checkpointing: recompute activations layer by layer in backward.
        experts_implementation: transformers' expert kernel, or None for its default.

    Raises:
        ModelError: the folder has no loadable model or tokenizer, or the dtype is unknown.
        MissingExtraError: LoRA is asked for and peft is not installed.
    """
    if dtype not in DTYPES:
        raise ModelError(f"model.dtype={dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    hf.register()
    extra: dict[str, Any] = {} if experts_implementation is None else {"experts_implementation": experts_implementation}
    try:
        extra |= trainable_weights(AutoConfig.from_pretrained(str(path)))
        model = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=DTYPES[dtype], attn_implementation=attention, **extra
        )
        tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_path or path))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot load a model and tokenizer from {str(path)!r}: {error}") from error
    return finish_policy(model, tokenizer, device=device, lora=lora, gradient_checkpointing=gradient_checkpointing)


def trainable_weights(config: Any) -> dict[str, Any]:
    """Return arguments of ``from_pretrained`` that turn the released gpt-oss weights into ones that can be trained.

    gpt-oss ships its experts in MXFP4; kernels for those four bits have no backward, so they are unpacked.

    Args:
        config: the model's config.

    Raises:
        ModelError: the weights are quantised in another way, which this trainer does not unpack.
    """
    quantised = getattr(config, "quantization_config", None)
    if quantised is None:
        return {}
    method = quantised.get("quant_method") if isinstance(quantised, dict) else getattr(quantised, "quant_method", None)
    if method != "mxfp4":
        raise ModelError(
            f"the model's weights are quantised ({method}); save it unquantised first, in bfloat16 for example, and "
            "give that folder as model.path"
        )
    return {"quantization_config": Mxfp4Config(dequantize=True)}


def finish_policy(
    model: Any, tokenizer: Any, *, device: str, lora: LoraSettings | None, gradient_checkpointing: bool
) -> Policy:
    """Place a freshly built or loaded model, switch on checkpointing and wrap it for LoRA.

    Raises:
        ModelError: the model has dropout.
    """
    _refuse_dropout(model)
    model = model.to(device)
    model.config.use_cache = False
    if gradient_checkpointing:
        enable_checkpointing(model)
    wrapped: nn.Module = model if lora is None else _with_lora(model, lora, checkpointing=gradient_checkpointing)
    return Policy(model=wrapped, tokenizer=tokenizer)


def enable_checkpointing(model: Any) -> None:
    """Switch on gradient checkpointing without re-entrant autograd, under the name that this transformers has."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _refuse_dropout(model: nn.Module) -> None:
    """Old and new logprobs of one token must not differ by what a dropout mask happened to hide."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ModelError(
                f"{name or type(model).__name__} drops out activations (p = {module.p}), which makes ratios of "
                "log-probabilities noise; set the model's *_dropout to 0 in its config.json"
            )


def _with_lora(model: Any, settings: LoraSettings, *, checkpointing: bool) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingExtraError("LoRA needs peft; install it with: pip install 'sinkflex[train]'") from error
    targets = settings.target_modules
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=cast(int, settings.alpha),  # peft takes any number
        lora_dropout=0.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        adapted: nn.Module = get_peft_model(model, config)
    if checkpointing:
        model.enable_input_require_grads()
    return adapted
