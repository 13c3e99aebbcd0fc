from __future__ import annotations

import torch

from sinkflex.attention import SequenceLayout, chunked_local, dense_mask, sliding_window, visible


def _picture(mask: torch.Tensor) -> list[str]:
    return ["".join("x" if seen else "." for seen in row) for row in mask.tolist()]


def test_window_counts_the_query_itself() -> None:
    assert _picture(visible(SequenceLayout.causal(1, 5), window=2)[0]) == ["x....", "xx...", ".xx..", "..xx.", "...xx"]


def test_first_tokens_stay_visible() -> None:
    seen = visible(SequenceLayout.causal(1, 5), window=2, num_sink_tokens=1)[0]
    assert _picture(seen) == ["x....", "xx...", "xxx..", "x.xx.", "x..xx"]


def test_window_runs_over_logical_positions_across_a_prefix() -> None:
    # Prefix 0 1 2 and two replies: the second reply's window reaches back over the first into the prefix.
    seen = visible(SequenceLayout.from_prefix_tree([3, 2, 2], [-1, 0, 0]), window=3)[0]
    assert _picture(seen) == ["x......", "xx.....", "xxx....", ".xxx...", "..xxx..", ".xx..x.", "..x..xx"]


def test_sliding_window_as_mask_mod_equals_the_option() -> None:
    layout = SequenceLayout.from_prefix_tree([5, 3, 4], [-1, 0, 0])
    got = dense_mask(layout, num_heads=2, mask_mod=sliding_window(layout, 3, 2))
    assert got.shape == (1, 2, 12, 12)
    wanted = visible(layout, window=3, num_sink_tokens=2)
    assert torch.equal(got, wanted[:, None].expand(-1, 2, -1, -1))


def test_chunked_local() -> None:
    layout = SequenceLayout.causal(1, 5)
    assert _picture(dense_mask(layout, num_heads=1, mask_mod=chunked_local(layout, 2))[0, 0]) == [
        "x....",
        "xx...",
        "..x..",
        "..xx.",
        "....x",
    ]


def test_mask_mod_can_only_hide() -> None:
    layout = SequenceLayout.causal(1, 3)
    everything = dense_mask(layout, num_heads=1, mask_mod=lambda b, h, q, k: (q >= 0) & (k >= 0))
    assert _picture(everything[0, 0]) == ["x..", "xx.", "xxx"]


def test_columns_select_queries() -> None:
    layout = SequenceLayout.causal(2, 6, num_queries=4)
    whole = dense_mask(layout, num_heads=3, mask_mod=lambda b, h, q, k: (q + k + h) % 2 == 0)
    part = dense_mask(layout, num_heads=3, mask_mod=lambda b, h, q, k: (q + k + h) % 2 == 0, columns=slice(1, 3))
    assert torch.equal(part, whole[:, :, 1:3])
