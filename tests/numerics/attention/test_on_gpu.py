"""The CUDA paths on a card: FlexAttention compiled, the flash kernel that is installed, and what each keeps in memory.

Without a card their mathematics is tested by ``test_flex_maths`` and ``test_other_impls``; here are the kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sinkflex.attention import SequenceLayout, sink_attention, sliding_window
from sinkflex.attention.dispatch import explain_impl

DEVICE = "cuda"
HALVES = [torch.bfloat16, torch.float16]
# (window, num_sink_tokens)
MASKS = [(None, 0), (1, 0), (32, 0), (33, 4), (128, 0), (5000, 0)]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(1200),
    # Compiling a kernel warns of much that has nothing to do with its result.
    pytest.mark.filterwarnings("default"),
]


def through(impl: str) -> Any:
    def run(*inputs: Any, **options: Any) -> Any:
        return sink_attention(*inputs, **options, impl=impl, return_lse=True)

    return run


def check_single(lab: Any, layout: SequenceLayout, *, case: dict[str, Any] | None = None, **options: Any) -> None:
    """FlexAttention in fp32 against the specification in fp64: outputs, log-sum-exps and all gradients."""
    made = lab.case(layout, dim=32, **(case or {}))
    got = lab.results(through("flex"), made.to(torch.float32, DEVICE), **options)
    # A single sink's gradient is a sum that may cancel, so fp32 is judged by the largest of all heads.
    lab.assert_close(got, lab.reference(made, **options), 1e-5, per_head=False)


@pytest.mark.parametrize(("window", "num_sink_tokens"), [(None, 0), (7, 3)])
def test_flex_every_layout(lab: Any, layout: SequenceLayout, window: int | None, num_sink_tokens: int) -> None:
    check_single(lab, layout, window=window, num_sink_tokens=num_sink_tokens)


@pytest.mark.parametrize(("window", "num_sink_tokens"), MASKS)
@pytest.mark.parametrize("length", [1, 127, 129, 4097])
def test_flex_lengths_and_windows(lab: Any, length: int, window: int | None, num_sink_tokens: int) -> None:
    layout = SequenceLayout.causal(1, length)
    check_single(lab, layout, case={"heads": (2, 1)}, window=window, num_sink_tokens=num_sink_tokens)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("sink", ["random", None, 30.0, -30.0, float("-inf")])
def test_flex_sinks_and_head_ratios(lab: Any, layouts: Any, heads: tuple[int, int], sink: float | str | None) -> None:
    # A sink of +-30 leaves outputs or gradients of 1e-13, which fp32 holds to the same relative error.
    for kind in ("both_and_empty", "depth_4"):
        check_single(lab, layouts[kind](), case={"heads": heads, "sink": sink, "lse_grad": False})


def test_flex_takes_the_callers_mask(lab: Any, layouts: Any) -> None:
    on_host, on_card = layouts["depth_4"](), layouts["depth_4"]().to(DEVICE)
    made = lab.case(on_host, dim=32)
    got = lab.results(through("flex"), made.to(torch.float32, DEVICE), mask_mod=sliding_window(on_card, 5, 2))
    lab.assert_close(got, lab.reference(made, mask_mod=sliding_window(on_host, 5, 2)), 1e-5, per_head=False)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("impl", ["flash", "flex"])
@pytest.mark.parametrize(("window", "num_sink_tokens"), [(None, 0), (48, 0), (7, 3)])
def test_half_precision_within_twice_eager(
    lab: Any, layouts: Any, impl: str, dtype: torch.dtype, window: int | None, num_sink_tokens: int
) -> None:
    """Against fp64, by the error that eager makes on the same card in the same precision."""
    options = {"window": window, "num_sink_tokens": num_sink_tokens}
    long = SequenceLayout.from_prefix_tree([150, 60, 60, 30], [-1, 0, 0, 1])
    for kind in [long, *(build() for build in layouts.values())]:
        if kind.num_keys < 40:
            continue
        eager, ours = (
            lab.rms_errors(run, kind, dtype, device=DEVICE, **options) for run in (lab.run_eager, through(impl))
        )
        assert all(ours[result] <= 2 * eager[result] for result in eager), str((kind, ours, eager))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_auto_takes_what_it_says_and_keeps_lse_wide(dtype: torch.dtype) -> None:
    impl, _ = explain_impl(DEVICE, dtype, head_dim=64)
    query, key, value = (torch.randn(1, 2, 100, 64, device=DEVICE, dtype=dtype) for _ in range(3))
    sinks = torch.zeros(2, device=DEVICE)
    auto, named = (sink_attention(query, key, value, sinks, impl=name, return_lse=True) for name in ("auto", impl))
    for got, wanted in zip(auto, named, strict=True):
        assert torch.equal(got, wanted)
    assert auto[1].dtype == torch.float32


@pytest.mark.parametrize(("impl", "dtype"), [("flash", torch.bfloat16), ("flex", torch.float32)])
@pytest.mark.parametrize("window", [None, 128])
def test_memory_grows_with_the_length(impl: str, dtype: torch.dtype, window: int | None) -> None:
    def peak(length: int) -> int:
        def leaf(heads: int) -> Tensor:
            return torch.randn(1, heads, length, 64, device=DEVICE, dtype=dtype, requires_grad=True)

        query, key, value = leaf(8), leaf(2), leaf(2)
        sinks = torch.zeros(8, device=DEVICE, requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = sink_attention(query, key, value, sinks, window=window, impl=impl)
        assert isinstance(out, Tensor)
        out.float().square().sum().backward()
        return torch.cuda.max_memory_allocated() - before

    peak(4096)  # compiles, and fills what is kept
    assert peak(16_384) <= 4.5 * peak(4096)
