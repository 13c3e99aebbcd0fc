"""The flash impl against the reference in fp64, 1e-12 relative, over layouts, windows, heads, sinks and lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sinkflex.attention import SequenceLayout, chunked_local, sink_attention

TOLERANCE = 1e-12


def _flash(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = sink_attention(*args, **options, impl="flash", return_lse=True)
    return out, lse


@pytest.mark.parametrize(("window", "num_sink_tokens"), [(None, 0), (1, 0), (33, 0), (7, 3), (20, 25)])
def test_every_layout_and_window(lab: Any, layout: SequenceLayout, window: int | None, num_sink_tokens: int) -> None:
    for heads, token_major in (((4, 2), True), ((2, 2), False)):
        case = lab.case(layout, heads=heads, token_major=token_major)
        options = {"window": window, "num_sink_tokens": num_sink_tokens}
        lab.assert_close(lab.results(_flash, case, **options), lab.reference(case, **options), TOLERANCE)


@pytest.mark.parametrize("sink", [None, 30.0, -30.0, float("-inf")])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", ["both_and_empty", "cached_one", "depth_4", "documents", "ragged_few"])
def test_sinks(lab: Any, layouts: Any, kind: str, window: int | None, sink: float | None) -> None:
    for lse_grad in (True, False):
        case = lab.case(layouts[kind](), heads=(4, 1), sink=sink, lse_grad=lse_grad)
        options = {"window": window}
        lab.assert_close(lab.results(_flash, case, **options), lab.reference(case, **options), TOLERANCE)


@pytest.mark.parametrize("length", [1, 127, 129, 700])
@pytest.mark.parametrize("window", [None, 1, 32, 33, 128, 1000])
def test_lengths(lab: Any, length: int, window: int | None) -> None:
    case = lab.case(SequenceLayout.causal(1, length), heads=(2, 1))
    lab.assert_close(lab.results(_flash, case, window=window), lab.reference(case, window=window), TOLERANCE)


@pytest.mark.parametrize("window", [None, 128])
def test_long(lab: Any, window: int | None) -> None:
    case = lab.case(SequenceLayout.causal(1, 4097), heads=(1, 1), dim=4)
    options = {"window": window, "num_sink_tokens": 4}
    lab.assert_close(lab.results(_flash, case, **options), lab.reference(case, **options), TOLERANCE)


def test_long_documents_share_no_padding(lab: Any) -> None:
    case = lab.case(SequenceLayout.from_documents([1100, 1030, 40]), heads=(2, 1), dim=4)
    lab.assert_close(lab.results(_flash, case), lab.reference(case), TOLERANCE)


def test_value_dim_may_differ(lab: Any) -> None:
    for dim, value_dim in ((8, 4), (4, 8)):
        case = lab.case(SequenceLayout.from_documents([9, 5]), dim=dim, value_dim=value_dim)
        lab.assert_close(lab.results(_flash, case), lab.reference(case), TOLERANCE)


def test_mask_mod_block_by_block(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinkflex.attention.plan._MASK_BLOCK_ENTRIES", 2000)
    layout = SequenceLayout.from_padding(torch.rand(2, 60, generator=torch.Generator().manual_seed(3)) > 0.2)
    case = lab.case(layout)

    def odd_heads_see_even_keys(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (h % 2 == 0) | (k % 2 == 0)

    for options in (
        {"mask_mod": odd_heads_see_even_keys},
        {"mask_mod": odd_heads_see_even_keys, "window": 6, "num_sink_tokens": 2},
        {"mask_mod": chunked_local(layout, 16)},
    ):
        lab.assert_close(lab.results(_flash, case, **options), lab.reference(case, **options), TOLERANCE)


def test_chunked_layout_is_the_chunked_mask(lab: Any) -> None:
    layout = SequenceLayout.from_prefix_tree([30, 10, 12, 5], [-1, 0, 0, 1])
    case = lab.case(layout)
    split = lab.case(layout.chunked(16))
    lab.assert_close(lab.results(_flash, split), lab.reference(case, mask_mod=chunked_local(layout, 16)), TOLERANCE)


def test_scale_and_expanded_gradient() -> None:
    x = [torch.randn(1, 2, 40, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    grads = []
    for impl in ("reference", "flash"):
        out = sink_attention(*x, scale=0.7, impl=impl)
        assert isinstance(out, torch.Tensor)
        grads.append(torch.autograd.grad(out.sum(), x))
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_gradient_through_lse_alone(lab: Any) -> None:
    case = lab.case(SequenceLayout.from_prefix_tree([9, 4, 5], [-1, 0, 0]))
    grads = []
    for impl in ("reference", "flash"):
        leaves = [x.detach().clone().requires_grad_() for x in (case.query, case.key, case.value, case.sink_logits)]
        _, lse = sink_attention(*leaves, layout=case.layout, window=3, impl=impl, return_lse=True)
        (lse * case.grad_lse).sum().backward()
        grads.append([x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves])
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    layout = SequenceLayout.from_prefix_tree([3, 2, 2], [-1, 0, 0])
    leaves = [torch.randn(1, heads, 7, 2, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1)]
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def run(*inputs: torch.Tensor) -> Any:
        return sink_attention(*inputs, layout=layout, window=3, num_sink_tokens=1, impl="flash", return_lse=True)

    assert torch.autograd.gradcheck(run, (*leaves, sink))


def test_only_the_sink_is_trained() -> None:
    x = [torch.randn(1, 2, 5, 4) for _ in range(3)]
    sink = torch.zeros(2, requires_grad=True)
    out = sink_attention(*x, sink)
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    assert sink.grad is not None
    assert torch.isfinite(sink.grad).all()
    assert (sink.grad != 0).all()
