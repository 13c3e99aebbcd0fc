"""The flex impl: FlexAttention with the sink's rescale outside the kernel, differentiated through its log-sum-exp.

Block masks are computed from each block's smallest and largest position and forest number, never from a dense mask, and
are kept on the layout. Lengths are padded to buckets, so that a run over many lengths compiles a few kernels only.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from sinkflex.attention.layout import SequenceLayout
from sinkflex.attention.masks import MaskMod

BLOCK = 128
"""Tokens a side of a mask block; the kernels' own default."""

_SMALLEST_HEAD_DIM = 16
_MOST_COMPILED = 256


def flex_sink_attention(
    query: Float[Tensor, "B Hq Tq D"],
    key: Float[Tensor, "B Hkv Tk D"],
    value: Float[Tensor, "B Hkv Tk Dv"],
    sink_logits: Float[Tensor, " Hq"] | None,
    *,
    layout: SequenceLayout,
    window: int | None,
    num_sink_tokens: int,
    mask_mod: MaskMod | None,
    scale: float,
) -> tuple[Float[Tensor, "B Hq Tq Dv"], Float[Tensor, "B Hq Tq"]]:
    """Sink-aware attention through FlexAttention; compiled on CUDA, unfused (for checking) on CPU.

    Args:
        query: [B, Hq, Tq, D].
        key: [B, Hkv, Tk, D].
        value: [B, Hkv, Tk, Dv].
        sink_logits: [Hq], in the units of the scaled scores; None means no sink.
        layout: documents, padding and prefixes.
        window: keys a query sees at most, its own included, in logical positions; None means all.
        num_sink_tokens: keys at positions below this stay visible outside the window.
        mask_mod: the caller's own mask.
        scale: factor on the raw scores.

    Returns:
        (out, lse): lse is natural, includes the sink, is at least fp32 and carries gradient.
    """
    block_mask = build_block_mask(
        layout, window=window, num_sink_tokens=num_sink_tokens, mask_mod=mask_mod, num_heads=query.shape[1]
    )
    num_queries, num_keys = block_mask.seq_lengths
    value_dim = value.shape[-1]
    kernel = _kernel(query.device.type)
    # By default torch stops compiling after eight shapes and masks and from then on runs unfused, in quadratic memory.
    limits = torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED, fail_on_recompile_limit_hit=True)
    with limits, warnings.catch_warnings():
        if query.device.type == "cpu":
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out, aux = kernel(
            _padded(query, num_queries),
            _padded(key, num_keys),
            _padded(value, num_keys),
            block_mask=block_mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=True),
        )
    length = query.shape[2]
    return add_sink(out[:, :, :length, :value_dim], aux.lse[:, :, :length], sink_logits)


def add_sink(
    out: Float[Tensor, "B Hq Tq D"],
    lse: Float[Tensor, "B Hq Tq"],
    sink_logits: Float[Tensor, " Hq"] | None,
) -> tuple[Float[Tensor, "B Hq Tq D"], Float[Tensor, "B Hq Tq"]]:
    """``O' = O * sigmoid(lse - s)`` and ``lse' = logaddexp(lse, s)``, in fp32 or better, differentiable in all three.

    Args:
        out: attention without a sink.
        lse: its log-sum-exp, natural; -inf where a query saw nothing.
        sink_logits: [Hq] or None.
    """
    if sink_logits is None:
        return out, lse
    # Rows that saw nothing are taken out first: the gradient of logaddexp(-inf, -inf) is NaN.
    empty = lse == -torch.inf
    safe = lse.masked_fill(empty, 0.0)
    sink = sink_logits.to(lse.dtype)[:, None]
    # Not sigmoid: its gradient, y * (1 - y), loses a sink whose weight rounds to 0 beside the keys' weight of 1.
    weight = torch.exp(torch.nn.functional.logsigmoid(safe - sink))
    total = torch.where(empty, sink, torch.logaddexp(safe, sink))
    return (out * weight[..., None]).to(out.dtype), total


def bucket(length: int) -> int:
    """The padded length: a multiple of 128 with at most three leading bits, so at most 25 % more and few sizes."""
    step = max(BLOCK, 1 << max(length - 1, 1).bit_length() >> 3)
    return -(-length // step) * step


def build_block_mask(
    layout: SequenceLayout,
    *,
    window: int | None,
    num_sink_tokens: int,
    mask_mod: MaskMod | None,
    num_heads: int,
) -> BlockMask:
    """The layout as a block mask, broadcast over heads, and over rows when all rows are alike.

    Cached on the layout except under a ``mask_mod``, which may close over anything.

    Args:
        layout: documents, padding and prefixes.
        window: keys a query sees at most, its own included; None means all.
        num_sink_tokens: keys at positions below this stay visible.
        mask_mod: the caller's own mask; blocks it might touch are evaluated inside the kernel.
        num_heads: query heads.
    """

    def build() -> BlockMask:
        return _build(layout, window, num_sink_tokens, mask_mod)

    return build() if mask_mod is not None else layout.cached(("flex", window, num_sink_tokens), build)


def _build(layout: SequenceLayout, window: int | None, num_sink_tokens: int, mask_mod: MaskMod | None) -> BlockMask:
    num_queries, num_keys = bucket(layout.num_queries), bucket(layout.num_keys)
    alike = mask_mod is None and _rows_alike(layout)
    rows = slice(0, 1) if alike else slice(None)

    def pad(x: Tensor, length: int, fill: int) -> Tensor:
        return torch.nn.functional.pad(x[rows], (0, length - x.shape[1]), value=fill)

    q_position, q_enter = pad(layout.q_position, num_queries, 0), pad(layout.q_enter, num_queries, -1)
    position, enter, leave = (
        pad(layout.position, num_keys, 0),
        pad(layout.enter, num_keys, -1),
        pad(layout.exit, num_keys, -1),
    )
    possible, full = _block_visibility((q_position, q_enter), (position, enter, leave), window, num_sink_tokens)
    if mask_mod is not None:
        full = torch.zeros_like(full)
    mask = _layout_mask_mod(
        q_position, q_enter, position, enter, leave, alike=alike, window=window, num_sink_tokens=num_sink_tokens
    )
    if mask_mod is not None:
        mask = _inside(mask, mask_mod, layout.num_queries, layout.num_keys)
    partial_count, partial_index = _ordered(possible & ~full)
    full_count, full_index = _ordered(full)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_index,
        full_count,
        full_index,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask,
        seq_lengths=(num_queries, num_keys),
    )


def _rows_alike(layout: SequenceLayout) -> bool:
    """Whether all rows hold the same runs at the same columns."""
    if layout.batch == 1:
        return True
    if len(layout.nodes) % layout.batch or len(set(layout.query_start)) > 1:
        return False
    count = len(layout.nodes) // layout.batch
    return all(
        node.row == i // count
        and node[1:4] == layout.nodes[i % count][1:4]
        and (node.parent < 0) == (layout.nodes[i % count].parent < 0)
        and (node.parent < 0 or node.parent - (i // count) * count == layout.nodes[i % count].parent)
        for i, node in enumerate(layout.nodes)
    )


def _layout_mask_mod(
    q_position: Tensor,
    q_enter: Tensor,
    position: Tensor,
    enter: Tensor,
    leave: Tensor,
    *,
    alike: bool,
    window: int | None,
    num_sink_tokens: int,
) -> MaskMod:
    """Visibility as a mask_mod; see ``masks.visible``, which it restates one index at a time."""

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row = b * 0 if alike else b
        seen = (enter[row, k] <= q_enter[row, q]) & (q_enter[row, q] < leave[row, k])
        seen = seen & (position[row, k] <= q_position[row, q])
        if window is not None:
            near = q_position[row, q] - position[row, k] < window
            seen = seen & (near | (position[row, k] < num_sink_tokens))
        return seen

    return mask


def _inside(mask: MaskMod, mask_mod: MaskMod, num_queries: int, num_keys: int) -> MaskMod:
    """Join with the caller's mask, which must not be shown a padded column: it may index tensors of its own."""

    def joined(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = mask_mod(b, h, q.clamp(max=num_queries - 1), k.clamp(max=num_keys - 1))
        return mask(b, h, q, k) & own

    return joined


def _block_visibility(
    queries: tuple[Int[Tensor, "B Tq"], Int[Tensor, "B Tq"]],
    keys: tuple[Int[Tensor, "B Tk"], Int[Tensor, "B Tk"], Int[Tensor, "B Tk"]],
    window: int | None,
    num_sink_tokens: int,
) -> tuple[Bool[Tensor, "B nq nk"], Bool[Tensor, "B nq nk"]]:
    """For each pair of blocks: whether anything in it may be visible, and whether all of it is.

    Works on the range of each quantity within a block, so the first may say yes too often; it never says no wrongly.
    """
    q_low, q_high, q_real, q_whole = _ranges(queries[0], queries[1])
    qe_low, qe_high, _, _ = _ranges(queries[1], queries[1])
    k_low, k_high, k_real, k_whole = _ranges(keys[0], keys[1])
    e_low, e_high, _, _ = _ranges(keys[1], keys[1])
    x_low, x_high, _, _ = _ranges(keys[2], keys[1])

    def q(x: Tensor) -> Tensor:
        return x[:, :, None]

    def k(x: Tensor) -> Tensor:
        return x[:, None]

    possible = q(q_real) & k(k_real) & (k(e_low) <= q(qe_high)) & (q(qe_low) < k(x_high))
    possible &= k(k_low) <= q(q_high)
    full = q(q_whole) & k(k_whole) & (k(e_high) <= q(qe_low)) & (q(qe_high) < k(x_low))
    full &= k(k_high) <= q(q_low)
    if window is not None:
        possible &= (q(q_low) - k(k_high) < window) | (k(k_low) < num_sink_tokens)
        full &= (q(q_high) - k(k_low) < window) | (k(k_high) < num_sink_tokens)
    return possible, full


def _ranges(x: Int[Tensor, "B T"], enter: Int[Tensor, "B T"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(smallest, largest, any real, all real) of each block's real tokens, [B, T / 128] each."""
    values, real = torch.unflatten(x, 1, (-1, BLOCK)), torch.unflatten(enter, 1, (-1, BLOCK)) >= 0
    limits = torch.iinfo(x.dtype)
    low = values.masked_fill(~real, limits.max).amin(-1)
    high = values.masked_fill(~real, limits.min).amax(-1)
    return low, high, real.any(-1), real.all(-1)


def _ordered(blocks: Bool[Tensor, "B nq nk"]) -> tuple[Int[Tensor, "B 1 nq"], Int[Tensor, "B 1 nq nk"]]:
    """Per query block: how many key blocks, and their numbers, those first."""
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


def _padded(x: Float[Tensor, "B H T D"], length: int) -> Float[Tensor, "B H T2 D2"]:
    wide = max(_SMALLEST_HEAD_DIM - x.shape[-1], 0)
    return torch.nn.functional.pad(x, (0, wide, 0, length - x.shape[2]))


@functools.cache
def _kernel(device: str) -> Callable[..., Any]:
    """FlexAttention for a device type; compiled once, by shape, where there is a fused kernel."""
    if device == "cpu":
        return flex_attention
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled
