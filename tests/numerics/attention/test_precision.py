"""Low precision: fp32 within 1e-5, bf16 within twice the error that eager bf16 itself makes against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sinkflex.attention import SequenceLayout, dense_mask, sink_attention

CASES = {
    "causal": (SequenceLayout.causal(1, 300), None),
    "window": (SequenceLayout.causal(1, 300), 32),
    "documents": (SequenceLayout.from_documents([100, 37, 140]), None),
    "tree": (SequenceLayout.from_prefix_tree([150, 60, 60, 30], [-1, 0, 0, 1]), None),
    "windowed_tree": (SequenceLayout.from_prefix_tree([150, 60, 60, 30], [-1, 0, 0, 1]), 48),
}


def _run(impl: str) -> Any:
    def run(*args: Any, **options: Any) -> Any:
        return sink_attention(*args, **options, impl=impl, return_lse=True)

    return run


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("lse_grad", [True, False])
def test_fp32(lab: Any, name: str, lse_grad: bool) -> None:
    layout, window = CASES[name]
    case = lab.case(layout, dim=32, lse_grad=lse_grad)
    single = lab.results(_run("flash"), case.to(torch.float32), window=window)
    lab.assert_close(single, lab.reference(case, window=window), 1e-5)


def _eager(
    query: Tensor, key: Tensor, value: Tensor, sink_logits: Tensor, *, layout: SequenceLayout, window: int | None
) -> tuple[Tensor, Tensor]:
    """What models with sinks run without a kernel: all in the inputs' precision, the sink a column of the softmax.

    The reference is no yardstick here: it promotes its scores to fp32, which eager attention does not.
    """
    group = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = (query @ keys.transpose(-1, -2)) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~dense_mask(layout, num_heads=query.shape[1], window=window), -torch.inf)
    sinks = sink_logits.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    logits = torch.cat([scores, sinks], dim=-1)
    probabilities = logits.softmax(dim=-1, dtype=logits.dtype)[..., :-1]
    return probabilities @ values, logits.logsumexp(dim=-1)


def _rms_errors(lab: Any, run: Any, name: str) -> dict[str, float]:
    """Root mean square over eight seeds of each result's error against fp64; one draw of four sinks is luck."""
    layout, window = CASES[name]
    squares: dict[str, float] = {}
    for seed in range(8):
        case = lab.case(layout, dim=32, lse_grad=False, seed=seed).to(torch.bfloat16)
        exact = lab.reference(case.to(torch.float64), window=window)
        for result, error in lab.errors(lab.results(run, case, window=window), exact).items():
            squares[result] = squares.get(result, 0.0) + error**2 / 8
    return {result: square**0.5 for result, square in squares.items()}


@pytest.mark.parametrize("name", sorted(CASES))
def test_bf16_within_twice_eager(lab: Any, name: str) -> None:
    eager, flash = _rms_errors(lab, _eager, name), _rms_errors(lab, _run("flash"), name)
    assert all(flash[result] <= 2 * eager[result] for result in eager), str((flash, eager))


def test_flex_bf16_within_twice_eager(lab: Any) -> None:
    eager, flex = _rms_errors(lab, _eager, "tree"), _rms_errors(lab, lab.run_flex, "tree")
    assert all(flex[result] <= 2 * eager[result] for result in eager), str((flex, eager))


@pytest.mark.parametrize("impl", ["flash", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lse_is_fp32(impl: str, dtype: torch.dtype) -> None:
    x = [torch.randn(1, 2, 9, 16, dtype=dtype) for _ in range(3)]
    out, lse = sink_attention(*x, torch.zeros(2), impl=impl, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)


def test_flex_lse_is_fp32(lab: Any) -> None:
    layout, window = CASES["tree"]
    case = lab.case(layout, dim=32, lse_grad=False).to(torch.bfloat16)
    assert lab.results(lab.run_flex, case, window=window)["lse"].dtype == torch.float32


def test_large_scores_stay_finite(lab: Any) -> None:
    layout, _ = CASES["tree"]
    case = lab.case(layout, dim=32)
    loud = type(case)(**{**vars(case), "query": case.query * 200.0})
    single = lab.results(_run("flash"), loud.to(torch.float32))
    assert all(torch.isfinite(x).all() for x in single.values())
