"""The GPU paths' mathematics, on CPU: the varlen engine over an emulated kernel, FlexAttention differentiated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sinkflex.attention import SequenceLayout, visible
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


def test_flex_mask_mod_sees_no_padded_column(lab: Any) -> None:
    hidden = torch.rand(2, 4, 50, 50, generator=torch.Generator().manual_seed(0)) < 0.4

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ~hidden[b, h, q, k]

    case = lab.case(SequenceLayout.causal(2, 50))
    options = {"mask_mod": mask_mod}
    lab.assert_close(lab.results(lab.run_flex, case, **options), lab.reference(case, **options), TOLERANCE)


@pytest.mark.parametrize(("window", "num_sink_tokens"), [(None, 0), (7, 0), (150, 0), (200, 140)])
def test_block_masks_miss_nothing_and_claim_nothing(layouts: Any, window: int | None, num_sink_tokens: int) -> None:
    """A block left out hides everything in it; a block called full shows everything in it."""
    long = {
        "long": SequenceLayout.causal(1, 700),
        "long_documents": SequenceLayout.from_documents([[300, 260, 90], [128, 256]], length=700),
        "long_tree": SequenceLayout.from_prefix_tree([256, 200, 130], [-1, 0, 0]),
        "left": SequenceLayout.from_padding(torch.arange(400)[None] >= 130),
        **{name: build() for name, build in layouts.items()},
    }
    full_blocks = 0
    for name, layout in long.items():
        mask = build_block_mask(layout, window=window, num_sink_tokens=num_sink_tokens, mask_mod=None, num_heads=2)
        assert mask.shape[1] == 1, "block masks broadcast over heads"
        seen = visible(layout, window=window, num_sink_tokens=num_sink_tokens)
        rows, columns = bucket(layout.num_queries), bucket(layout.num_keys)
        seen = torch.nn.functional.pad(seen, (0, columns - seen.shape[2], 0, rows - seen.shape[1]))
        blocks = seen.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
        some, every = blocks.any(-1).any(2), blocks.all(-1).all(2)
        for row in range(layout.batch):
            partial = _dense(mask.kv_num_blocks, mask.kv_indices, row)
            full = _dense(mask.full_kv_num_blocks, mask.full_kv_indices, row)
            assert not (some[row] & ~partial & ~full).any(), name
            assert not (full & ~every[row]).any(), name
            assert not (full & partial).any(), name
            full_blocks += int(full.sum())
    # A window narrower than two blocks fills none, unless enough keys are always visible.
    assert full_blocks > 0 or (window is not None and window < 2 * BLOCK and num_sink_tokens < BLOCK)


def _dense(counts: torch.Tensor, indices: torch.Tensor, row: int) -> torch.Tensor:
    row = min(row, counts.shape[0] - 1)
    dense = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for block, (count, index) in enumerate(zip(counts[row, 0].tolist(), indices[row, 0].tolist(), strict=True)):
        dense[block, index[:count]] = True
    return dense


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
