"""The attention implementations that are measured side by side.

Each runs one forward on [B, H, T, D] tensors, causal, with or without a window. The sink-free ones answer a different
question (they leave the sink out); they are here as the floor that no exact implementation can be expected to beat.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sinkflex.attention import SequenceLayout, sink_attention
from sinkflex.errors import ConfigError, unknown_name

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(query, key, value, sink_logits) -> out; made once per length, so masks are not part of the time."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One attention problem.

    Attributes:
        batch: rows B.
        heads: query heads Hq.
        kv_heads: key/value heads Hkv.
        head_dim: D.
        tokens: T, queries and keys.
        window: keys a query sees, its own included; None means all before it.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    window: int | None

    @property
    def visible_pairs(self) -> int:
        """Query-key pairs of one head and row that the mask leaves."""
        width = min(self.window or self.tokens, self.tokens)
        return width * (width + 1) // 2 + (self.tokens - width) * width

    def flops(self, *, backward: bool) -> float:
        """Matmul FLOPs over the visible pairs: two products forward and five more backward, 2·D each."""
        return self.batch * self.heads * self.visible_pairs * 2 * self.head_dim * (7 if backward else 2)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One implementation.

    Attributes:
        has_sink: False where the sink is left out of the denominator.
        quadratic: True where a [T, T] matrix per head is held.
        missing: given device and dtype, why it cannot run there, or None.
        build: makes the function to measure.
    """

    has_sink: bool
    quadratic: bool
    missing: Callable[[torch.device, torch.dtype], str | None]
    build: Callable[[Shape, torch.device], Attend]


def select(names: list[str]) -> dict[str, Contender]:
    """Return the named contenders.

    Raises:
        ConfigError: a name is unknown.
    """
    for name in names:
        if name not in CONTENDERS:
            raise ConfigError(unknown_name("contender", name, CONTENDERS))
    return {name: CONTENDERS[name] for name in names}


def _hf_eager(shape: Shape, device: torch.device) -> Attend:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    hidden = torch.full((), torch.finfo(torch.float32).min, device=device)
    additive = torch.where(_visible(shape, device), 0.0, hidden)[None, None]

    def attend(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
        module: Any = SimpleNamespace(sinks=s, num_key_value_groups=shape.heads // shape.kv_heads, training=False)
        out: Tensor = eager_attention_forward(module, q, k, v, additive.to(q.dtype), scaling=shape.head_dim**-0.5)[0]
        return out.transpose(1, 2)

    return attend


def _hf_flex(shape: Shape, device: torch.device) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask
    from transformers.integrations.flex_attention import flex_attention_forward

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q - k < (shape.window or shape.tokens))

    mask = create_block_mask(causal, None, None, shape.tokens, shape.tokens, device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
        module: Any = SimpleNamespace(training=True)
        out: Tensor = flex_attention_forward(module, q, k, v, mask, scaling=shape.head_dim**-0.5, s_aux=s)[0]
        return out.transpose(1, 2)

    return attend


def _sdpa(shape: Shape, device: torch.device) -> Attend:
    mask = _visible(shape, device) if shape.window is not None else None
    group = shape.heads // shape.kv_heads

    def attend(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
        # As transformers does it: torch's own enable_gqa leaves the flash kernel on CPU.
        keys, values = (x if group == 1 else x.repeat_interleave(group, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=mask is None)

    return attend


def _flash_attn(package: str) -> Callable[[Shape, torch.device], Attend]:
    def build(shape: Shape, device: torch.device) -> Attend:
        flash_attn_func = importlib.import_module(package).flash_attn_func
        window = (-1, -1) if shape.window is None else (shape.window - 1, 0)

        def attend(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
            heads_last = (x.transpose(1, 2) for x in (q, k, v))
            out = flash_attn_func(*heads_last, causal=True, window_size=window)
            # flash-attn 3 returned the log-sum-exp as well in its first releases.
            attended: Tensor = out[0] if isinstance(out, tuple) else out
            return attended.transpose(1, 2)

        return attend

    return build


def _sinkflex(impl: str) -> Callable[[Shape, torch.device], Attend]:
    def build(shape: Shape, device: torch.device) -> Attend:
        layout = SequenceLayout.causal(shape.batch, shape.tokens, device=device)

        def attend(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
            out = sink_attention(q, k, v, s, layout=layout, window=shape.window, impl=impl)
            return out[0] if isinstance(out, tuple) else out

        return attend

    return build


def _visible(shape: Shape, device: torch.device) -> Tensor:
    position = torch.arange(shape.tokens, device=device)
    distance = position[:, None] - position
    return (distance >= 0) & (distance < (shape.window or shape.tokens))


def _needs(
    package: str, *, cuda: bool = False, half: bool = False, capability: int = 0
) -> Callable[[torch.device, torch.dtype], str | None]:
    def missing(device: torch.device, dtype: torch.dtype) -> str | None:
        if cuda and device.type != "cuda":
            return "needs a CUDA device"
        if half and dtype not in (torch.float16, torch.bfloat16):
            return f"wants float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
        if capability and torch.cuda.get_device_capability(device)[0] != capability:
            return f"needs compute capability {capability}"
        return None if importlib.util.find_spec(package) else f"{package} is not installed"

    return missing


CONTENDERS: dict[str, Contender] = {
    "hf-eager": Contender(has_sink=True, quadratic=True, missing=_needs("transformers"), build=_hf_eager),
    "hf-flex": Contender(has_sink=True, quadratic=False, missing=_needs("transformers", cuda=True), build=_hf_flex),
    "sdpa": Contender(has_sink=False, quadratic=False, missing=_needs("torch"), build=_sdpa),
    "flash-attn": Contender(
        has_sink=False,
        quadratic=False,
        missing=_needs("flash_attn", cuda=True, half=True),
        build=_flash_attn("flash_attn"),
    ),
    "flash-attn-3": Contender(
        has_sink=False,
        quadratic=False,
        missing=_needs("flash_attn_interface", cuda=True, half=True, capability=9),
        build=_flash_attn("flash_attn_interface"),
    ),
    "sinkflex": Contender(has_sink=True, quadratic=False, missing=_needs("torch"), build=_sinkflex("auto")),
    "sinkflex-flex": Contender(
        has_sink=True, quadratic=False, missing=_needs("torch", cuda=True), build=_sinkflex("flex")
    ),
}
"""Everything ``bench attention`` knows, by name."""
