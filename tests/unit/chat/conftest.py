from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sinkflex.chat import FastTokenizer
from sinkflex.types import ToolSchema

HARMONY_TOKENS = [
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
]
CHATML_TOKENS = ["<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def byte_level(special: list[str], tags: list[str]) -> Tokenizer:
    """One token a byte, plus control tokens: small, lossless, and shaped like the tokenizers of real models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    backend.add_tokens(tags)
    return backend


@pytest.fixture(scope="session")
def tokenizer() -> FastTokenizer:
    """A byte-level tokenizer that knows the control tokens of every format."""
    return FastTokenizer(byte_level(HARMONY_TOKENS + CHATML_TOKENS + ["<|endoftext|>"], TAGS))


@pytest.fixture
def get_line_tool() -> ToolSchema:
    return ToolSchema(
        name="get_line",
        description="Look a line up.",
        parameters={"type": "object", "properties": {"line_id": {"type": "string"}}, "required": ["line_id"]},
    )
