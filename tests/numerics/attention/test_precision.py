"""Low precision: fp32 within 1e-5, bf16 within twice the error that eager bf16 itself makes against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sinkflex.attention import SequenceLayout, sink_attention

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


# Known gap: the stock backward takes the rescaled output in bf16, and the sink's gradient and a tree's dV are then
# 2.5 to 12 times eager's own error (about 4e-3 relative). Not strict, so that the fix may land before this mark goes.
BF16_GAP = pytest.mark.xfail(strict=False, reason="bf16: d_sink_logits and tree dV exceed twice eager's error")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[BF16_GAP] * (name not in ("window", "documents"))) for name in sorted(CASES)]
)
def test_bf16_within_twice_eager(lab: Any, name: str) -> None:
    layout, window = CASES[name]
    case = lab.case(layout, dim=32, lse_grad=False).to(torch.bfloat16)
    exact = lab.reference(case.to(torch.float64), window=window)
    eager = lab.errors(lab.results(_run("reference"), case, window=window), exact)
    flash = lab.errors(lab.results(_run("flash"), case, window=window), exact)
    assert all(flash[result] <= 2 * eager[result] for result in exact), str({r: (flash[r], eager[r]) for r in exact})


@pytest.mark.parametrize("impl", ["flash", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lse_is_fp32(impl: str, dtype: torch.dtype) -> None:
    x = [torch.randn(1, 2, 9, 16, dtype=dtype) for _ in range(3)]
    out, lse = sink_attention(*x, torch.zeros(2), impl=impl, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)


@BF16_GAP
def test_flex_lse_is_fp32_and_bf16_close(lab: Any) -> None:
    layout, window = CASES["tree"]
    case = lab.case(layout, dim=32, lse_grad=False).to(torch.bfloat16)
    exact = lab.reference(case.to(torch.float64), window=window)
    eager = lab.errors(lab.results(_run("reference"), case, window=window), exact)
    flex = lab.results(lab.run_flex, case, window=window)
    assert flex["lse"].dtype == torch.float32
    errors = lab.errors(flex, exact)
    assert all(errors[result] <= 2 * eager[result] for result in exact), str({r: (errors[r], eager[r]) for r in exact})


def test_large_scores_stay_finite(lab: Any) -> None:
    layout, _ = CASES["tree"]
    case = lab.case(layout, dim=32)
    loud = type(case)(**{**vars(case), "query": case.query * 200.0})
    single = lab.results(_run("flash"), loud.to(torch.float32))
    assert all(torch.isfinite(x).all() for x in single.values())
