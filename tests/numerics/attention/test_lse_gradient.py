"""The gradient through the returned log-sum-exp where a kernel is short of head dimension or of bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sinkflex.attention import SequenceLayout
from sinkflex.attention.cpu import CpuEngine
from sinkflex.attention.flash import _summands, sink_attention_through
from sinkflex.attention.plan import build_plan


def full_engine(layout: SequenceLayout, window: int | None, scale: float, *, max_head_dim: int | None) -> CpuEngine:
    plan = build_plan(layout, device=torch.device("cpu"), num_heads=4, window=window, num_sink_tokens=0, mask_mod=None)
    engine = CpuEngine(plan, scale)
    engine.max_head_dim = max_head_dim
    return engine


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sink", [None, "random", float("-inf")])
def test_a_kernel_at_its_widest_takes_two_passes(
    lab: Any, layout: SequenceLayout, window: int | None, sink: float | str | None
) -> None:
    def run(*inputs: Any, layout: SequenceLayout) -> Any:
        engine = full_engine(layout, window, inputs[0].shape[-1] ** -0.5, max_head_dim=8)
        return sink_attention_through(engine, *inputs)

    case = lab.case(layout, sink=sink)
    lab.assert_close(lab.results(run, case), lab.reference(case, window=window), 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gradient_is_split_into_what_half_precision_can_hold(dtype: torch.dtype) -> None:
    wanted = torch.tensor([1.0 + 2.0**-20, -3.3e-3, 0.0, 517.77])
    parts = _summands(wanted, dtype)
    assert parts.shape == (4, 3)
    torch.testing.assert_close(parts.float().sum(-1), wanted, rtol=2.0**-22, atol=2.0**-24)
    # One column would round to 8 or 11 bits.
    assert not torch.allclose(parts[:, 0].float(), wanted, rtol=2.0**-14)


def test_a_gradient_of_its_own_dtype_is_one_column() -> None:
    wanted = torch.randn(3, dtype=torch.float64)
    assert torch.equal(_summands(wanted, torch.float64), wanted[:, None])
