"""A policy: a causal LM split into backbone and head, so that training never builds ``[T, V]`` logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.utils import logging as hf_logging

from sinkflex.errors import ModelError


@dataclass(frozen=True, kw_only=True, eq=False)
class Policy:
    """A Hugging Face causal LM (perhaps wrapped by peft) and its tokenizer.

    Attributes:
        model: the module whose parameters are trained; a ``PeftModel`` when LoRA is on.
        tokenizer: its Hugging Face fast tokenizer.
    """

    model: nn.Module
    tokenizer: Any

    @property
    def causal_lm(self) -> Any:
        """The Hugging Face model itself, with peft's wrapper taken off (its injected layers stay)."""
        unwrap = getattr(self.model, "get_base_model", None)
        return unwrap() if unwrap is not None else self.model

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return next(self.model.parameters()).device

    @property
    def is_lora(self) -> bool:
        """True when only adapters are trained, which makes the reference policy free."""
        return hasattr(self.model, "disable_adapter")

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that receive gradients, by name, in the model's own order."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def hidden_states(
        self, *, input_ids: Int[Tensor, "B T"], position_ids: Int[Tensor, "B T"], layout: Any
    ) -> Float[Tensor, "B T d"]:
        """Run the backbone over packed rows.

        Args:
            input_ids: [B, T] packed tokens.
            position_ids: [B, T] logical positions (what RoPE and windows see).
            layout: the rows' ``SequenceLayout``; says which token sees which.

        Returns:
            [B, T, d] hidden states after the final norm, with gradient where grad mode is on.
        """
        output = self.causal_lm.base_model(
            input_ids=input_ids, position_ids=position_ids, layout=layout, use_cache=False
        )
        return cast(Tensor, output.last_hidden_state)

    @property
    def output_embedding(self) -> nn.Module:
        """The output projection as the model holds it: an ``nn.Linear``, or peft's layer around one."""
        return cast(nn.Module, self.causal_lm.get_output_embeddings())

    @property
    def final_softcap(self) -> float | None:
        """Gemma-style soft cap on the final logits, or None."""
        return getattr(self.causal_lm.config, "final_logit_softcapping", None)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Run the base model below LoRA: the reference policy at no extra memory."""
        if not self.is_lora:
            raise ModelError("without_adapters needs a LoRA policy; keep a frozen copy for full training")
        with cast(Any, self.model).disable_adapter():
            yield

    def save(self, folder: Path) -> None:
        """Write weights, config and tokenizer in Hugging Face format (adapters only, under LoRA)."""
        with _quietly():
            cast(Any, self.model).save_pretrained(folder, safe_serialization=True)
        self.tokenizer.save_pretrained(folder)

    def load_weights(self, folder: Path) -> None:
        """Take over the weights that ``save`` wrote, exactly.

        Raises:
            ModelError: the folder's weights do not fit this model.
        """
        try:
            if self.is_lora:
                from peft.utils import load_peft_weights, set_peft_model_state_dict

                set_peft_model_state_dict(self.model, load_peft_weights(str(folder), device="cpu"))
                return
            with _quietly():
                stored = type(self.causal_lm).from_pretrained(folder, dtype=self.causal_lm.dtype)
            self.model.load_state_dict(stored.state_dict())
        except (OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"weights in {folder} do not fit this policy: {error}") from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep transformers' progress bars off the run's own display."""
    shown = hf_logging.is_progress_bar_enabled()
    cast(Any, hf_logging).disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            cast(Any, hf_logging).enable_progress_bar()
