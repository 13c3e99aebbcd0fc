from __future__ import annotations

from typing import Any

import pytest
import torch

from sinkflex.attention import SequenceLayout, explain_impl, sink_attention
from sinkflex.errors import AttentionError, UnsupportedError


def _qkv(heads: int = 4, key_heads: int = 2, length: int = 5, dim: int = 8, **kwargs: Any) -> list[torch.Tensor]:
    return [torch.randn(1, h, length, dim, **kwargs) for h in (heads, key_heads, key_heads)]


def test_returns_lse_on_request() -> None:
    out = sink_attention(*_qkv(), torch.zeros(4))
    assert isinstance(out, torch.Tensor)
    pair = sink_attention(*_qkv(), torch.zeros(4), return_lse=True)
    assert isinstance(pair, tuple)
    assert (pair[0].shape, pair[1].shape) == ((1, 4, 5, 8), (1, 4, 5))


def test_default_layout_is_causal_and_aligned_at_the_end() -> None:
    q, k, v = _qkv()
    whole = sink_attention(q, k, v)
    last = sink_attention(q[:, :, 3:], k, v)
    torch.testing.assert_close(last, whole[:, :, 3:])


def test_no_gradient_is_kept_without_need() -> None:
    out, lse = sink_attention(*_qkv(), torch.zeros(4), return_lse=True)
    assert not out.requires_grad
    assert not lse.requires_grad


def test_both_outputs_carry_gradient() -> None:
    q, k, v = _qkv()
    for impl in ("flash", "reference"):
        sink = torch.zeros(4, requires_grad=True)
        out, lse = sink_attention(q, k, v, sink, impl=impl, return_lse=True)
        assert out.requires_grad
        assert lse.requires_grad


def _refused(message: str, error: type[Exception] = AttentionError, **changes: Any) -> Any:
    return pytest.param(changes, message, error, id=message[:40])


@pytest.mark.parametrize(
    ("changes", "message", "error"),
    [
        _refused(r"query has shape \(1, 4, 5\); expected \[batch", query=torch.zeros(1, 4, 5)),
        _refused("key is torch.float64 on cpu; query is torch.float32", key=torch.zeros(1, 2, 5, 8).double()),
        _refused("query is torch.int64", query=torch.zeros(1, 4, 5, 8, dtype=torch.long)),
        _refused("value is torch.float32 on meta", value=torch.zeros(1, 2, 5, 8, device="meta")),
        _refused("must agree in batch, heads and tokens", value=torch.zeros(1, 2, 6, 8)),
        _refused("must agree in batch and head dim", query=torch.zeros(1, 4, 5, 6)),
        _refused("query has 3 heads, no multiple of key's 2", query=torch.zeros(1, 3, 5, 8)),
        _refused("query has 6 tokens and key 5; expected 1 <= queries <= keys", query=torch.zeros(1, 4, 6, 8)),
        _refused(r"sink_logits has shape \(2,\) on cpu; expected", sink_logits=torch.zeros(2)),
        _refused("window is 0; expected at least 1", window=0),
        _refused("num_sink_tokens is -1; expected 0 or more", num_sink_tokens=-1),
        _refused(r"layout describes \(batch, queries, keys\) = \(1, 4, 4\)", layout=SequenceLayout.causal(1, 4)),
        _refused("layout is on meta and query on cpu", layout=SequenceLayout.causal(1, 5, device="meta")),
        _refused("unknown impl 'flesh'; .* Did you mean 'flash'", impl="flesh"),
        _refused(
            'impl="flex" has no gradients on CPU', UnsupportedError, impl="flex",
            query=torch.zeros(1, 4, 5, 8, requires_grad=True),
        ),
    ],
)  # fmt: skip
def test_refusals(changes: dict[str, Any], message: str, error: type[Exception]) -> None:
    query, key, value = _qkv()
    arguments: dict[str, Any] = {"query": query, "key": key, "value": value} | changes
    with pytest.raises(error, match=message):
        sink_attention(**arguments)


@pytest.mark.parametrize("impl", ["flash", "flex"])
def test_devices_without_kernels_are_refused(impl: str) -> None:
    x = [torch.zeros(1, 2, 4, 8, device="meta") for _ in range(3)]
    layout = SequenceLayout.causal(1, 4, device="meta")
    with pytest.raises(UnsupportedError, match=f'impl="{impl}" does not run on meta; use impl="reference"'):
        sink_attention(*x, layout=layout, impl=impl)


def test_flex_runs_on_cpu_without_gradient() -> None:
    q, k, v = _qkv()
    q.requires_grad_()
    with torch.no_grad():
        torch.testing.assert_close(sink_attention(q, k, v, impl="flex"), sink_attention(q, k, v, impl="flash"))


@pytest.mark.parametrize(
    ("arguments", "impl", "reason"),
    [
        (("cpu", torch.float64), "flash", "CPU flash kernel"),
        (("cuda", torch.bfloat16), "flash", "torch's CUDA flash kernel"),
        (("cuda", torch.float32), "flex", "fp16 or bf16, not torch.float32"),
        (("mps", torch.float16), "reference", "no flash or flex kernel with gradients for mps"),
    ],
)
def test_explain_impl(arguments: tuple[str, torch.dtype], impl: str, reason: str) -> None:
    got = explain_impl(*arguments)
    assert got[0] == impl
    assert reason in got[1]


def test_explain_impl_looks_at_head_dim_and_mask_mod() -> None:
    assert explain_impl("cuda", torch.bfloat16, head_dim=512)[0] == "flex"
    assert explain_impl("cuda", torch.bfloat16, mask_mod=True)[0] == "flex"
    assert explain_impl("cpu", torch.bfloat16, head_dim=512, mask_mod=True)[0] == "flash"


class _OnCuda:
    """Just enough of a CUDA tensor for the checks, which only read its attributes."""

    device = torch.device("cuda")
    requires_grad = False

    def __init__(self, dtype: torch.dtype, dim: int) -> None:
        self.dtype = dtype
        self.shape = torch.Size((1, 2, 4, dim))


@pytest.mark.parametrize(
    ("dtype", "dim", "mask_mod", "message"),
    [
        (torch.float32, 64, None, "wants fp16 or bf16 on CUDA, not torch.float32"),
        (torch.bfloat16, 512, None, "stops at head dim 256 on CUDA, not 512"),
        (torch.bfloat16, 64, lambda b, h, q, k: q >= k, "takes no mask_mod on CUDA"),
    ],
)
def test_flash_on_cuda_refuses_by_name(dtype: torch.dtype, dim: int, mask_mod: Any, message: str) -> None:
    from sinkflex.attention import dispatch

    x: Any = _OnCuda(dtype, dim)
    choose = getattr(dispatch.choose_impl, "__wrapped__", dispatch.choose_impl)
    with pytest.raises(UnsupportedError, match=message):
        choose("flash", x, x, x, None, mask_mod=mask_mod)
