"""Policies: the tiny gpt-oss-style model the project trains itself, and any Hugging Face causal LM by path."""

from sinkflex.models.load import LoraSettings, load_policy
from sinkflex.models.policy import Policy
from sinkflex.models.tiny import TinyShape, build_tiny_model
from sinkflex.models.tokenizer import train_tokenizer

__all__ = ["LoraSettings", "Policy", "TinyShape", "build_tiny_model", "load_policy", "train_tokenizer"]
