from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sinkflex.chat import FastTokenizer
from sinkflex.errors import ChatError


def word_level(vocab: list[str], *, special: list[str]) -> Tokenizer:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocab)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(special)
    return backend


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_ordinary_text_survives(tokenizer: FastTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    parts=st.lists(
        st.one_of(st.sampled_from(["<|start|>", "<|end|>", "</tool_call>", "<think>", "<|"]), st.text(max_size=3))
    )
)
def test_text_never_becomes_a_control_token(tokenizer: FastTokenizer, parts: list[str]) -> None:
    text = "".join(parts).encode("utf-8", "replace").decode()
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.control_tokens.values())
    assert tokenizer.decode(ids) == text


def test_control_tokens_decode_to_their_spelling(tokenizer: FastTokenizer) -> None:
    start = tokenizer.token_to_id("<|start|>")
    assert start is not None
    assert tokenizer.decode([start, *tokenizer.encode("user"), start]) == "<|start|>user<|start|>"
    assert tokenizer.token_to_id("user") is None


def test_a_vocabulary_that_holds_the_control_token_as_a_word_is_safe() -> None:
    backend = word_level(["<unk>", "hi", "<|start|>", "<"], special=["<unk>", "<|start|>"])
    assert backend.encode("hi <|start|>").ids == [1, 2], "the plain tokenizer forges the token"
    assert FastTokenizer(backend).encode("hi <|start|> hi") == [1, 3, 0, 1]


def test_a_vocabulary_that_cannot_be_made_safe_is_refused() -> None:
    backend = word_level(["<unk>", "hi", "<a>", "a>", "<"], special=["<a>", "a>"])
    with pytest.raises(ChatError, match="turns ordinary text into the control token 'a>'"):
        FastTokenizer(backend).encode("hi <a>")


def test_wraps_a_transformers_tokenizer_without_changing_it() -> None:
    backend = word_level(["<unk>", "hi", "<|start|>", "<s>"], special=["<|start|>", "<s>"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<s>")
    before = wrapped.backend_tokenizer.to_str()
    adapter = FastTokenizer(wrapped)
    assert adapter.encode("hi <|start|>") == [1, 0, 0]
    assert adapter.eos_id == 3
    assert wrapped.backend_tokenizer.to_str() == before
    assert wrapped("hi <|start|>")["input_ids"] == [1, 2]


def test_the_end_token_is_the_named_one_or_a_usual_one() -> None:
    backend = word_level(["<unk>", "<|im_end|>", "<|stop|>", "</s>"], special=["</s>", "<|stop|>", "<|im_end|>"])
    assert FastTokenizer(backend).eos_id == 1
    assert FastTokenizer(backend, eos_token="<|stop|>").eos_id == 2
    assert FastTokenizer(word_level(["<unk>"], special=[])).eos_id is None
    with pytest.raises(ChatError, match=r"eos_token '<eos>' is not a control token .* choose one of </s>, <.im_end.>"):
        FastTokenizer(backend, eos_token="<eos>")


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ChatError, match=r"tokenizer is a dict; expected a tokenizers.Tokenizer"):
        FastTokenizer({})
