from __future__ import annotations

import math

import pytest
import torch

from sinkflex.attention import SequenceLayout, sink_attention, sink_statistics
from sinkflex.errors import AttentionError


def test_hand_case() -> None:
    # Scores 0 everywhere and sink 0: token t has t + 1 keys and one sink, so the sink takes 1/2, 1/3 and 1/4.
    zeros = torch.zeros(1, 1, 3, 4)
    sink = torch.zeros(1)
    _, lse = sink_attention(zeros, zeros, zeros, sink, return_lse=True)
    got = sink_statistics(lse, sink)
    assert got.sink_mass.tolist() == pytest.approx([(1 / 2 + 1 / 3 + 1 / 4) / 3])
    assert got.lse_mean.tolist() == pytest.approx([(math.log(2) + math.log(3) + math.log(4)) / 3])
    assert got.lse_max.tolist() == pytest.approx([math.log(4)])


def test_padding_is_left_out() -> None:
    torch.manual_seed(0)
    x = [torch.randn(1, 2, 4, 8) for _ in range(3)]
    sink = torch.tensor([0.5, -1.0])
    layout = SequenceLayout.from_padding(torch.tensor([[0, 1, 1, 0]]))
    _, padded = sink_attention(*x, sink, layout=layout, return_lse=True)
    _, plain = sink_attention(*(y[:, :, 1:3] for y in x), sink, return_lse=True)
    got, wanted = sink_statistics(padded, sink, layout=layout), sink_statistics(plain, sink)
    torch.testing.assert_close(got.sink_mass, wanted.sink_mass)
    torch.testing.assert_close(got.lse_mean, wanted.lse_mean)
    torch.testing.assert_close(got.lse_max, wanted.lse_max)


def test_metrics_are_scalars_over_heads() -> None:
    lse = torch.tensor([[[1.0, 3.0], [0.0, 0.0]]])
    metrics = sink_statistics(lse, torch.tensor([1.0, 0.0])).metrics("layer_0/")
    assert metrics == pytest.approx(
        {
            "layer_0/sink_mass/mean": ((1 + math.exp(-2)) / 2 + 1) / 2,
            "layer_0/sink_mass/max": 1.0,
            "layer_0/lse/mean": 1.0,
            "layer_0/lse/max": 3.0,
        }
    )


def test_no_gradient() -> None:
    sink = torch.zeros(2, requires_grad=True)
    assert not sink_statistics(torch.ones(1, 2, 3, requires_grad=True), sink).sink_mass.requires_grad


def test_refusals() -> None:
    lse, sink = torch.zeros(1, 2, 3), torch.zeros(2)
    with pytest.raises(AttentionError, match=r"layout describes \(1, 4\) queries, but lse has \(1, 3\)"):
        sink_statistics(lse, sink, layout=SequenceLayout.causal(1, 4))
    with pytest.raises(AttentionError, match="layout holds padding only"):
        sink_statistics(lse, sink, layout=SequenceLayout.from_padding(torch.zeros(1, 3, dtype=torch.bool)))
