"""FlexAttention's path differentiated on CPU: every kind of mask with sinks, in the ways the grid does not combine.

The grid runs flex over padding, documents, trees, windows and always-visible keys; here are the caller's own masks on
top of those, the gradient that comes through the log-sum-exp alone, other scales and value widths, and the block masks,
which torch's unfused path on CPU does not read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sinkflex.attention import SequenceLayout, chunked_local, flex, sliding_window, visible
from sinkflex.attention.flex import BLOCK, bucket, build_block_mask, flex_sink_attention
from sinkflex.attention.reference import reference_attention

TOLERANCE = 1e-12
KINDS = ["causal", "both_and_empty", "holes", "documents", "depth_4", "cached_chunk", "cached_one", "ragged_few"]


def random_mask(layout: SequenceLayout) -> Any:
    """A head-dependent mask that reads a tensor of its own, and so must not be shown a padded column."""
    shape = (layout.batch, 4, layout.num_queries, layout.num_keys)
    shown = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.4
    return lambda b, h, q, k: shown[b, h, q, k]


MASK_MODS: dict[str, Callable[[SequenceLayout], Any]] = {
    "by head": random_mask,
    "chunks": lambda layout: chunked_local(layout, 16),
    "windows of single heads": lambda layout: (
        lambda b, h, q, k: (h % 2 == 0) | sliding_window(layout, 5, 2)(b, h, q, k)
    ),
}


@pytest.mark.parametrize("mask", sorted(MASK_MODS))
@pytest.mark.parametrize("kind", KINDS)
def test_mask_mods_over_every_layout(lab: Any, layouts: Any, kind: str, mask: str) -> None:
    layout = layouts[kind]()
    for options in ({}, {"window": 9, "num_sink_tokens": 4}):
        case = lab.case(layout, heads=(4, 1), sink=[0.5, 30.0, -2.0, 1.5])
        options = {"mask_mod": MASK_MODS[mask](layout), **options}
        lab.assert_close(lab.results(lab.run_flex, case, **options), lab.reference(case, **options), TOLERANCE)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("kind", ["both_and_empty", "depth_4", "documents"])
def test_gradient_through_lse_alone(lab: Any, layouts: Any, kind: str, heads: tuple[int, int]) -> None:
    case = lab.case(layouts[kind](), heads=heads)
    silent = type(case)(**{**vars(case), "grad": torch.zeros_like(case.grad)})
    options = {"window": 7, "num_sink_tokens": 3}
    got, wanted = (lab.results(run, silent, **options) for run in (lab.run_flex, lab.run_reference))
    assert bool((wanted["d_value"] == 0).all())
    lab.assert_close(got, wanted, TOLERANCE)


@pytest.mark.parametrize(("dim", "value_dim"), [(8, 20), (24, 8), (5, 7)])
def test_scales_and_value_widths(lab: Any, dim: int, value_dim: int) -> None:
    layout = SequenceLayout.from_prefix_tree([30, 10, 12], [-1, 0, 0])
    case = lab.case(layout, dim=dim, value_dim=value_dim)
    options: dict[str, Any] = {"window": None, "num_sink_tokens": 0, "mask_mod": None, "scale": 0.3}

    def run(*inputs: Any, layout: SequenceLayout) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *x: None)
            return flex_sink_attention(*inputs, layout=layout, **options)

    def specification(*inputs: Any, layout: SequenceLayout) -> Any:
        return reference_attention(*inputs, visible(layout)[:, None], scale=0.3)

    lab.assert_close(lab.results(run, case), lab.results(specification, case), TOLERANCE)


# -- block masks: on a GPU they decide which blocks are computed at all -----------------------------------------------

LONG: dict[str, Callable[[], SequenceLayout]] = {
    "long": lambda: SequenceLayout.causal(1, 700),
    "long_documents": lambda: SequenceLayout.from_documents([[300, 260, 90], [128, 256]], length=700),
    "long_tree": lambda: SequenceLayout.from_prefix_tree([256, 200, 130], [-1, 0, 0]),
    "left": lambda: SequenceLayout.from_padding(torch.arange(400)[None] >= 130),
    "cached": lambda: SequenceLayout.causal(1, 700, num_queries=200),
}


def faults(layout: SequenceLayout, window: int | None, num_sink_tokens: int) -> tuple[set[str], int]:
    """What is wrong with a layout's block mask, and how many blocks it calls full."""
    mask = build_block_mask(layout, window=window, num_sink_tokens=num_sink_tokens, mask_mod=None, num_heads=2)
    seen = visible(layout, window=window, num_sink_tokens=num_sink_tokens)
    rows, columns = bucket(layout.num_queries), bucket(layout.num_keys)
    seen = torch.nn.functional.pad(seen, (0, columns - seen.shape[2], 0, rows - seen.shape[1]))
    blocks = seen.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    some, every = blocks.any(-1).any(2), blocks.all(-1).all(2)
    found: set[str] = set() if mask.shape[1] == 1 else {"not broadcast over heads"}
    full_blocks = 0
    for row in range(layout.batch):
        partial = dense_blocks(mask.kv_num_blocks, mask.kv_indices, row)
        full = dense_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, row)
        wrong = {
            "a block left out holds something visible": some[row] & ~partial & ~full,
            "a block called full hides something": full & ~every[row],
            "a block is counted twice": full & partial,
        }
        found |= {what for what, where in wrong.items() if bool(where.any())}
        full_blocks += int(full.sum())
    return found, full_blocks


def dense_blocks(counts: torch.Tensor, indices: torch.Tensor, row: int) -> torch.Tensor:
    row = min(row, counts.shape[0] - 1)
    dense = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for block, (count, index) in enumerate(zip(counts[row, 0].tolist(), indices[row, 0].tolist(), strict=True)):
        dense[block, index[:count]] = True
    return dense


OPTIONS = [(None, 0), (1, 0), (7, 0), (128, 0), (150, 0), (200, 140), (33, 4)]


@pytest.mark.parametrize(("window", "num_sink_tokens"), OPTIONS)
def test_block_masks_miss_nothing_and_claim_nothing(layouts: Any, window: int | None, num_sink_tokens: int) -> None:
    full_blocks = 0
    for name, build in {**layouts, **LONG}.items():
        found, full = faults(build(), window, num_sink_tokens)
        assert not found, (name, found)
        full_blocks += full
    # A window narrower than two blocks fills none, unless enough keys are always visible.
    assert full_blocks > 0 or (window is not None and window < 2 * BLOCK and num_sink_tokens < BLOCK)


BLOCK_MUTANTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "all that is possible called full": (
        "_block_visibility",
        lambda real: lambda *x: (real(*x)[0], real(*x)[0]),
    ),
    "only full blocks kept": ("_block_visibility", lambda real: lambda *x: (real(*x)[1], real(*x)[1])),
    "window of a block too short": (
        "_block_visibility",
        lambda real: lambda q, k, window, n: real(q, k, window and window - BLOCK, n),
    ),
    "first keys forgotten": ("_block_visibility", lambda real: lambda q, k, window, n: real(q, k, window, 0)),
    "padding taken for real": (
        "_ranges",
        lambda real: lambda x, enter: (*real(x, enter)[:3], torch.ones_like(real(x, enter)[3])),
    ),
    "order of blocks reversed": (
        "_ordered",
        lambda real: lambda blocks: (real(blocks)[0], real(blocks)[1].flip(-1)),
    ),
    "rows taken for alike": ("_rows_alike", lambda real: lambda layout: True),
}


@pytest.mark.parametrize("mutant", sorted(BLOCK_MUTANTS))
def test_block_mask_mutants_are_found(layouts: Any, monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    name, wrong = BLOCK_MUTANTS[mutant]
    monkeypatch.setattr(flex, name, wrong(getattr(flex, name)))
    found: set[str] = set()
    for build in [*layouts.values(), *LONG.values()]:
        for window, num_sink_tokens in ((None, 0), (200, 140)):
            found |= faults(build(), window, num_sink_tokens)[0]
    assert found
