"""The GPU paths' mathematics, on CPU: the varlen engine over an emulated kernel, FlexAttention differentiated."""

from __future__ import annotations

from typing import Any

import pytest

from sinkflex.attention import SequenceLayout
from sinkflex.attention.flex import BLOCK, bucket, build_block_mask

TOLERANCE = 1e-12


@pytest.mark.parametrize(("window", "num_sink_tokens"), [(None, 0), (1, 0), (7, 3), (20, 25)])
def test_varlen_every_layout(lab: Any, layout: SequenceLayout, window: int | None, num_sink_tokens: int) -> None:
    case = lab.case(layout)
    options = {"window": window, "num_sink_tokens": num_sink_tokens}
    lab.assert_close(lab.results(lab.run_varlen, case, **options), lab.reference(case, **options), TOLERANCE)


@pytest.mark.parametrize("sink", [None, 30.0, float("-inf")])
@pytest.mark.parametrize("dim", [8, 5])
def test_varlen_sinks_and_head_dims(lab: Any, layouts: Any, sink: float | None, dim: int) -> None:
    case = lab.case(layouts["both_and_empty"](), sink=sink, dim=dim)
    lab.assert_close(lab.results(lab.run_varlen, case), lab.reference(case), TOLERANCE)


FLEX_LAYOUTS = ["both_and_empty", "depth_4", "documents", "cached_chunk", "ragged_one", "chunked_local"]


@pytest.mark.parametrize("kind", FLEX_LAYOUTS)
@pytest.mark.parametrize(("window", "num_sink_tokens"), [(None, 0), (7, 3)])
def test_flex_layouts(lab: Any, layouts: Any, kind: str, window: int | None, num_sink_tokens: int) -> None:
    case = lab.case(layouts[kind]())
    options = {"window": window, "num_sink_tokens": num_sink_tokens}
    lab.assert_close(lab.results(lab.run_flex, case, **options), lab.reference(case, **options), TOLERANCE)


@pytest.mark.parametrize("sink", [None, 30.0, -30.0, float("-inf")])
def test_flex_sinks(lab: Any, layouts: Any, sink: float | None) -> None:
    for kind in ("both_and_empty", "group"):
        case = lab.case(layouts[kind](), sink=sink)
        lab.assert_close(lab.results(lab.run_flex, case, window=5), lab.reference(case, window=5), TOLERANCE)


@pytest.mark.parametrize("length", [1, 127, 129, 300])
def test_flex_lengths(lab: Any, length: int) -> None:
    case = lab.case(SequenceLayout.causal(1, length), heads=(2, 1), dim=4)
    lab.assert_close(lab.results(lab.run_flex, case), lab.reference(case), TOLERANCE)


def test_alike_rows_share_a_block_mask(layouts: Any) -> None:
    for name, rows in (("causal", 1), ("cached_one", 1), ("left_padding", 3), ("ragged_one", 3), ("documents", 2)):
        mask = build_block_mask(layouts[name](), window=None, num_sink_tokens=0, mask_mod=None, num_heads=4)
        assert mask.shape[0] == rows, name


def test_block_mask_is_kept_on_the_layout() -> None:
    layout = SequenceLayout.causal(1, 200)
    options = {"num_sink_tokens": 0, "mask_mod": None, "num_heads": 2}
    first = build_block_mask(layout, window=9, **options)
    assert build_block_mask(layout, window=9, **options) is first
    assert build_block_mask(layout, window=8, **options) is not first


def test_buckets_are_few_and_close() -> None:
    sizes = {bucket(length) for length in range(1, 32_769)}
    assert all(size % BLOCK == 0 for size in sizes)
    assert all(length <= bucket(length) for length in range(1, 32_769))
    assert max(bucket(length) / length for length in range(1024, 32_769)) <= 1.25
    assert len(sizes) <= 32
