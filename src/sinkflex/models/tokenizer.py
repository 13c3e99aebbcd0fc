"""A byte-level BPE tokenizer trained on a domain's own text, with harmony's special tokens.

The split pattern is what makes a million-parameter policy teachable: digits come in pairs, so a four-digit id is two
tokens of a closed set of one hundred; a word with its leading space is one piece; and a harmony tool header
(`` to=functions.get_line``) is one piece. Bytes back every piece, so any text encodes and nothing is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sinkflex.errors import ModelError

HARMONY_SPECIAL_TOKENS: tuple[str, ...] = (
    "<|pad|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|call|>",
    "<|return|>",
)

SPLIT_PATTERN = (
    r" to=functions\.\w+|functions\.\w+ to=assistant"  # a tool header is one decision, so it is one piece
    r"|\p{N}{1,2}"
    r"| ?[\p{L}_][\p{L}\p{M}_']*"
    r"|[^\s\p{L}\p{N}]+"
    r"|\s+"
)

_DIGIT_PAIRS = [f"{number:02d}" for number in range(100)]


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train the tiny policy's tokenizer.

    Args:
        texts: the domain's text: rendered dialogues without special tokens, policy documents, tool schemas.
        vocab_size: upper bound on the vocabulary, special tokens and the 256 bytes included.

    Returns:
        A Hugging Face fast tokenizer; ``<|pad|>`` pads, ``<|return|>`` ends.

    Raises:
        ModelError: ``vocab_size`` leaves no room for the bytes, the special tokens and the digit pairs.
    """
    smallest = 256 + len(HARMONY_SPECIAL_TOKENS) + len(_DIGIT_PAIRS)
    if vocab_size < smallest:
        raise ModelError(
            f"vocab_size={vocab_size} is too small: bytes, special tokens and digit pairs alone need {smallest}; "
            "raise model.tiny.vocab_size"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(HARMONY_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = list(texts)
    # Every digit pair must win a merge whatever the dialogues hold, so their weight follows the corpus's size.
    copies = max(50, sum(len(text) for text in corpus) // 200)
    backend.train_from_iterator([*corpus, *([" ".join(_DIGIT_PAIRS)] * copies)], trainer=trainer)
    return wrap_tokenizer(backend)


def wrap_tokenizer(backend: Any) -> PreTrainedTokenizerFast:
    """Give a raw ``tokenizers.Tokenizer`` with harmony's special tokens the Hugging Face interface."""
    build: Any = PreTrainedTokenizerFast
    return cast(
        PreTrainedTokenizerFast,
        build(
            tokenizer_object=backend,
            pad_token="<|pad|>",
            eos_token="<|return|>",
            additional_special_tokens=[
                token for token in HARMONY_SPECIAL_TOKENS if token not in ("<|pad|>", "<|return|>")
            ],
            clean_up_tokenization_spaces=False,
        ),
    )
