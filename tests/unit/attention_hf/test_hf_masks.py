"""Layouts read from transformers' mask requests show what transformers' own dense masks show."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig
from transformers import masking_utils as theirs

from sinkflex.attention import SequenceLayout, hf_masks
from sinkflex.attention.hf_masks import LayerMask, read_pattern, sinkflex_mask
from sinkflex.attention.masks import visible

LENGTH = 12
LEFT_PADDING = torch.tensor([3, 0])
PADDED = torch.arange(LENGTH) >= LEFT_PADDING[:, None]
POSITIONS = torch.tensor([[*range(5), *range(7)], [*range(8), *range(4)]])
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 8 + [1] * 4])

PATTERNS: dict[str, Callable[[], Any]] = {
    "causal": lambda: theirs.causal_mask_function,
    "window": lambda: theirs.sliding_window_causal_mask_function(4),
    "chunk": lambda: theirs.chunked_causal_mask_function(3, LEFT_PADDING),
}


def dense(**request: Any) -> Tensor:
    mask = theirs.sdpa_mask(**request, allow_is_causal_skip=False)
    assert mask is not None
    return mask[:, 0]


def shown(**request: Any) -> Tensor:
    mask = sinkflex_mask(**request)
    assert isinstance(mask, LayerMask)
    assert mask.shape == (request["batch_size"], 1, request["q_length"], request["kv_length"])
    return visible(mask.layout, window=mask.window)


def same_where_real(request: dict[str, Any], padding: Tensor | None) -> None:
    """Padded queries are nobody's: transformers lets them look around, a layout lets them see nothing."""
    got, want = shown(**request), dense(**request)
    if padding is not None:
        start = int(request["q_offset"])
        real = padding[:, start : start + request["q_length"]]
        got, want = got[real], want[real]
    assert torch.equal(got, want)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("padding", [None, PADDED])
@pytest.mark.parametrize("start", [0, 7, 11])
def test_whole_rows_and_growing_caches(pattern: str, padding: Tensor | None, start: int) -> None:
    function = PATTERNS[pattern]() if padding is not None or pattern != "chunk" else _unpadded_chunks()
    request = {
        "batch_size": 2,
        "q_length": LENGTH - start,
        "kv_length": LENGTH,
        "q_offset": start,
        "kv_offset": 0,
        "mask_function": function,
        "attention_mask": padding,
    }
    same_where_real(request, padding)


def _unpadded_chunks() -> Any:
    return theirs.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize("pattern", ["window", "chunk"])
@pytest.mark.parametrize("padding", [None, PADDED])
@pytest.mark.parametrize("queries", [1, 3])
def test_sliding_caches_that_have_dropped_keys(pattern: str, padding: Tensor | None, queries: int) -> None:
    function = PATTERNS[pattern]() if padding is not None or pattern == "window" else _unpadded_chunks()
    start = LENGTH - queries
    kept = queries + 3
    request = {
        "batch_size": 2,
        "q_length": queries,
        "kv_length": kept,
        "q_offset": start,
        "kv_offset": LENGTH - kept,
        "mask_function": function,
        "attention_mask": padding,
    }
    same_where_real(request, padding)
    assert sinkflex_mask(**request).evicted  # type: ignore[union-attr]


@pytest.mark.parametrize("start", [0, 5])
def test_static_caches_are_longer_than_what_was_seen(start: int) -> None:
    request = {
        "batch_size": 2,
        "q_length": 3,
        "kv_length": 20,
        # A static cache counts on the device.
        "q_offset": torch.tensor(start),
        "kv_offset": 0,
        "mask_function": theirs.causal_mask_function,
        "attention_mask": PADDED[:, : start + 3],
    }
    same_where_real(request, PADDED)


@pytest.mark.parametrize("pattern", ["causal", "window"])
def test_packed_rows(pattern: str) -> None:
    function = theirs.and_masks(PATTERNS[pattern](), theirs.packed_sequence_mask_function(DOCUMENTS))
    request = {"batch_size": 2, "q_length": LENGTH, "kv_length": LENGTH, "q_offset": 0, "mask_function": function}
    same_where_real(request, None)
    mask = sinkflex_mask(**request)
    assert isinstance(mask, LayerMask)
    assert not mask.plain


@pytest.mark.parametrize("pattern", ["causal", "window"])
def test_packed_rows_with_remapped_positions(pattern: str) -> None:
    remap = getattr(theirs, "remap_positions_for_packed_sequence", None)
    if remap is None:
        pytest.xfail("this transformers does not remap positions")
    function = theirs.and_masks(remap(PATTERNS[pattern](), POSITIONS), theirs.packed_sequence_mask_function(DOCUMENTS))
    request = {"batch_size": 2, "q_length": LENGTH, "kv_length": LENGTH, "q_offset": 0, "mask_function": function}
    same_where_real(request, None)


def test_position_ids_of_a_layer_cut_a_plain_mask_once() -> None:
    mask = sinkflex_mask(batch_size=2, q_length=LENGTH, kv_length=LENGTH)
    assert isinstance(mask, LayerMask)
    assert mask.plain
    layout = mask.packed(POSITIONS)
    assert mask.packed(POSITIONS) is layout
    expected = SequenceLayout.from_documents([[5, 7], [8, 4]])
    assert torch.equal(visible(layout), visible(expected))


def test_nested_windows_take_the_smallest() -> None:
    pattern = read_pattern(
        theirs.and_masks(theirs.sliding_window_overlay(9), theirs.sliding_window_causal_mask_function(4))
    )
    assert pattern is not None
    assert pattern.window == 4


def test_a_finished_mask_is_passed_on() -> None:
    mask = sinkflex_mask(batch_size=1, q_length=4, kv_length=4)
    assert isinstance(mask, LayerMask)
    assert mask.ndim == 4
    assert sinkflex_mask(batch_size=1, q_length=4, kv_length=4, attention_mask=mask) is mask


def causal_mask_function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Named like transformers' own, but it hides the first key."""
    return (k <= q) & (k > 0)


@pytest.mark.parametrize(
    "function",
    [
        causal_mask_function,
        theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(torch.zeros(2, LENGTH)))
        if hasattr(theirs, "blockwise_overlay")
        else theirs.bidirectional_mask_function,
        theirs.sliding_window_bidirectional_mask_function(3),
        theirs.sliding_window_overlay(3),
    ],
    ids=["a stranger's", "blocks", "both ways", "never causal"],
)
def test_any_other_pattern_is_dense_exact_and_logged_once(function: Any, caplog: pytest.LogCaptureFixture) -> None:
    hf_masks._log_dense.cache_clear()
    request = {"batch_size": 2, "q_length": LENGTH, "kv_length": LENGTH, "mask_function": function}
    with caplog.at_level(logging.WARNING, logger=hf_masks.__name__):
        masks = [sinkflex_mask(**request, dtype=torch.float32) for _ in range(2)]
    assert len(caplog.records) == 1
    assert "sinkflex evaluates it densely" in caplog.text
    mask = masks[0]
    assert isinstance(mask, Tensor)
    assert torch.equal(mask[:, 0] == 0, dense(**request))


def test_layers_that_edit_their_mask_get_a_tensor() -> None:
    config = GptOssConfig(layer_types=["full_attention"] * 36)
    config.layer_types = ["sliding_attention", "compressed_sparse_attention"]
    mask = sinkflex_mask(batch_size=1, q_length=4, kv_length=4, config=config, dtype=torch.float32)
    assert isinstance(mask, Tensor)
    assert torch.equal(mask[0, 0] == 0, torch.ones(4, 4).tril().bool())


def test_a_window_off_by_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = hf_masks.read_pattern

    def wider(function: Any) -> Any:
        pattern = real(function)
        assert pattern is not None
        return replace(pattern, window=(pattern.window or 0) + 1)

    monkeypatch.setattr(hf_masks, "read_pattern", wider)
    with pytest.raises(AssertionError):
        test_whole_rows_and_growing_caches("window", None, 7)


def test_a_cache_offset_off_by_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = hf_masks._layout
    monkeypatch.setattr(hf_masks, "_layout", lambda batch, keys, offset, *rest: real(batch, keys, offset + 1, *rest))
    with pytest.raises(AssertionError):
        test_sliding_caches_that_have_dropped_keys("chunk", PADDED, 3)
