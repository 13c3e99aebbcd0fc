"""Every architecture under ``sinkflex`` gives eager's logits and all of eager's parameter gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sinkflex.attention import SequenceLayout
from sinkflex.models.load import enable_checkpointing

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SINK_DECODERS = ["gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "flint", "deepseek_v4", "hy_v4"]
PLAIN_DECODERS = ["llama", "qwen3", "gemma3"]
DECODERS = SINK_DECODERS + PLAIN_DECODERS
BIASED = ["inkling", "inkling2", "inkling2_loop"]
EVERY = [*DECODERS, *BIASED, "hy_v4_vl", "openai_privacy_filter"]
PACKING = [name for name in DECODERS if name != "deepseek_v4"]
BY_LAYOUT = [name for name in PACKING if name != "hy_v4"]
LENGTH = 21
DOCUMENTS = (slice(0, 8), slice(8, LENGTH))
PACKED = torch.tensor([[*range(8), *range(LENGTH - 8)]])


def tokens(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(2, 53, (rows, length), generator=torch.Generator().manual_seed(5))


def left_padded() -> Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :6] = 0
    return mask


@pytest.mark.parametrize("name", EVERY)
def test_plain(name: str, build: Callable[[str], nn.Module], run: Any, agree: Any) -> None:
    model = build(name)
    agree(run(model, "sinkflex", tokens()), run(model, "eager", tokens()))


@pytest.mark.parametrize("name", EVERY)
def test_left_padded(name: str, build: Callable[[str], nn.Module], run: Any, agree: Any) -> None:
    model, mask = build(name), left_padded()
    real = mask.bool()
    inputs = {"attention_mask": mask, "real": real}
    agree(run(model, "sinkflex", tokens(), **inputs), run(model, "eager", tokens(), **inputs), real)


@pytest.mark.parametrize("name", EVERY)
def test_checkpointed(name: str, build: Callable[[str], nn.Module], run: Any, agree: Any) -> None:
    model = build(name)
    want = run(model, "eager", tokens())
    model.train()
    enable_checkpointing(model)
    agree(run(model, "sinkflex", tokens()), want)


@pytest.mark.parametrize("name", PACKING)
def test_packed_by_position_ids_equals_separate_rows(
    name: str, build: Callable[[str], nn.Module], run: Any, run_apart: Any, agree: Any
) -> None:
    model = build(name)
    agree(run(model, "sinkflex", tokens(1), position_ids=PACKED), run_apart(model, tokens(1), DOCUMENTS))


@pytest.mark.parametrize("name", [name for name in EVERY if name != "gpt_oss"])
def test_packed_equals_eager_packed(name: str, build: Callable[[str], nn.Module], run: Any, agree: Any) -> None:
    model = build(name)
    packed = [run(model, i, tokens(1), position_ids=PACKED) for i in ("sinkflex", "eager")]
    agree(*packed)


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v4", "openai_privacy_filter"])
def test_models_whose_eager_cannot_pack(name: str, build: Callable[[str], nn.Module], run: Any, run_apart: Any) -> None:
    """Their eager lets documents of a packed row see each other, whatever position_ids say.

    gpt_oss makes its masks without position_ids; sinkflex cuts the documents at the layer, see above. deepseek_v4
    compresses keys across documents before attention, and openai_privacy_filter looks both ways with a mask that
    never hears of position_ids: there sinkflex gives what eager gives.
    """
    model = build(name)
    packed = run(model, "eager", tokens(1), position_ids=PACKED).logits[0, 8:]
    alone = run_apart(model, tokens(1), DOCUMENTS).logits[0, 8:]
    assert float((packed - alone).abs().max()) > 0.01 * float(alone.abs().max())


@pytest.mark.parametrize("name", BY_LAYOUT)
def test_prefix_tree_by_layout_equals_separate_rows_under_eager(
    name: str, build: Callable[[str], nn.Module], run: Any
) -> None:
    """Two replies to one prompt share its tokens; the logits on each reply are those of its own row."""
    model = build(name)
    layout = SequenceLayout.from_prefix_tree([9, 5, 7], [-1, 0, 0])
    got = run(model, "sinkflex", tokens(1), position_ids=layout.q_position.long(), layout=layout).logits[0]
    for reply in (slice(9, 14), slice(14, 21)):
        row = torch.cat([tokens(1)[:, :9], tokens(1)[:, reply]], dim=1)
        want = run(model, "eager", row).logits[0, 9:]
        torch.testing.assert_close(got[reply], want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        (name, cache)
        for name in [*DECODERS, *BIASED]
        for cache in ("dynamic", "static", "growing")
        # Under eager too these only run with caches that keep what their compressor, indexer or convolutions need.
        if (name, cache) != ("deepseek_v4", "static")
        and not (cache == "growing" and name in {"deepseek_v4", "hy_v4", *BIASED})
    ],
)
def test_cached_decode(name: str, cache: str, build: Callable[[str], nn.Module]) -> None:
    """Left-padded prompts, decoded past every window, equal eager with the same kind of cache.

    ``dynamic`` evicts what the sliding layers no longer see, ``static`` preallocates, ``growing`` keeps all keys.
    """
    from transformers import DynamicCache

    model, mask = build(name), left_padded()
    outputs = []
    for implementation in ("sinkflex", "eager"):
        options: dict[str, Any] = {"cache_implementation": "static"} if cache == "static" else {}
        if cache == "growing":
            options = {"past_key_values": DynamicCache()}
        outputs.append(decode(model, implementation, mask, **options))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4 * float(outputs[1].abs().max()))


def decode(model: nn.Module, implementation: str, mask: Tensor, **options: Any) -> Tensor:
    """Return the [steps, B, V] logits of a greedy decode."""
    model.set_attn_implementation(implementation)
    out = model.generate(
        tokens(),
        attention_mask=mask,
        max_new_tokens=7,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return torch.stack(out.logits)


@pytest.mark.parametrize("name", ["hy_v4", "hy_v4_vl"])
def test_hyper_connection_gradients_agree_in_fp64(
    name: str, build: Callable[[str], nn.Module], run: Any, agree: Any
) -> None:
    """Their fp32 difference (3e-4 of one parameter's own maximum) is rounding: in fp64 nothing is left of it."""
    model, mask = build(name).double(), left_padded()
    agree(run(model, "sinkflex", tokens()), run(model, "eager", tokens()), tolerance=1e-8)
    inputs = {"attention_mask": mask, "real": mask.bool()}
    runs = [run(model, i, tokens(), **inputs) for i in ("sinkflex", "eager")]
    agree(*runs, real=mask.bool(), tolerance=1e-8)
    agree(*(run(model, i, tokens(1), position_ids=PACKED) for i in ("sinkflex", "eager")), tolerance=1e-8)
