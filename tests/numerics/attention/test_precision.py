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


@pytest.mark.parametrize("name", sorted(CASES))
def test_bf16_within_twice_eager(lab: Any, name: str) -> None:
    layout, window = CASES[name]
    eager, flash = (
        lab.rms_errors(run, layout, torch.bfloat16, window=window) for run in (lab.run_eager, _run("flash"))
    )
    assert all(flash[result] <= 2 * eager[result] for result in eager), str((flash, eager))


def test_flex_bf16_within_twice_eager(lab: Any) -> None:
    layout, window = CASES["tree"]
    eager, flex = (lab.rms_errors(run, layout, torch.bfloat16, window=window) for run in (lab.run_eager, lab.run_flex))
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
