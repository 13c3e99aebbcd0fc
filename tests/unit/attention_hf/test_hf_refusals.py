"""What the transformers attention function refuses, by name, and what it hands to ``sink_attention``."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from sinkflex.attention import SequenceLayout, hf, hf_dense
from sinkflex.attention.hf_masks import LayerMask, sinkflex_mask
from sinkflex.errors import AttentionError, UnsupportedError

T = 6


@pytest.fixture(autouse=True)
def registered() -> None:
    hf.register()
    hf.register()  # a second call changes nothing


class Attention(nn.Module):
    def __init__(self, sinks: bool = True) -> None:
        super().__init__()
        self.layer_idx = 0
        self.is_causal = True
        self.sinks = nn.Parameter(torch.zeros(2)) if sinks else None


def call(module: nn.Module | None = None, mask: Any = None, batch: int = 1, **kwargs: Any) -> Tensor:
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, 2, T, 4, generator=made) for _ in range(3))
    module = module or Attention()
    options = {"s_aux": module.sinks, "scaling": 0.5, "dropout": 0.0} | kwargs
    function = AttentionInterface()["sinkflex"]
    out, weights = function(module, q, k, v, mask, **options)
    assert weights is None
    assert out.shape == (batch, T, 2, 4)
    return out


def padded(row: list[int]) -> Any:
    return sinkflex_mask(batch_size=1, q_length=T, kv_length=T, attention_mask=torch.tensor([row]).bool())


def test_every_name_is_registered_for_attention_and_mask() -> None:
    for name in hf.IMPLEMENTATIONS:
        assert name in AttentionInterface().valid_keys()
        assert name in AttentionMaskInterface().valid_keys()
        # transformers swaps any name with "flash" in it for a kernel of its own.
        assert "flash" not in name


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"dropout": 0.1}, UnsupportedError, "'sinkflex' has no attention dropout; set attention_dropout=0.0"),
        ({"softcap": 30.0}, UnsupportedError, "no soft-cap on attention scores, but Attention asks for softcap=30.0"),
        ({"output_attentions": True}, UnsupportedError, "never holds the attention weights"),
        ({"s_aux": None}, AttentionError, "Attention has learned sinks but passed s_aux=None"),
        ({"alibi": torch.zeros(1)}, UnsupportedError, r"does not know the keyword argument\(s\) \['alibi'\]"),
        (
            {"position_bias": torch.zeros(1, 2, T, 5)},
            AttentionError,
            r"position_bias has shape \(1, 2, 6, 5\); expected",
        ),
        ({"sinks": torch.zeros(2)}, UnsupportedError, "passes both s_aux and sinks"),
        ({"mask": "all of it"}, AttentionError, "attention_mask is a str; expected"),
        (
            {"mask": torch.zeros(1, T)},
            AttentionError,
            r"attention_mask has shape \(1, 6\); expected \[batch, 1 or head",
        ),
        ({"mask": torch.full((1, 1, T, T), -0.5)}, UnsupportedError, "carries additive biases other than hide-or-show"),
        (
            {"mask": torch.ones(1, 1, T, T).bool(), "num_sink_tokens": 1},
            UnsupportedError,
            "num_sink_tokens and mask_mod cannot be combined with a dense attention_mask",
        ),
        (
            {"mask": torch.ones(1, 1, T, T).bool(), "layout": SequenceLayout.causal(1, T)},
            UnsupportedError,
            "Attention edits its mask, or attention_mask is 4-D, so layout= cannot describe it",
        ),
        (
            {"layout": SequenceLayout.from_documents([2, 4]), "position_ids": torch.arange(T)[None]},
            AttentionError,
            "position_ids do not follow the layout",
        ),
        (
            {"cu_seq_lens_q": torch.tensor([0, 2, T]), "batch": 2},
            UnsupportedError,
            "cu_seq_lens_q describes one flattened row without a cache; got batch 2",
        ),
        (
            {"layout": SequenceLayout.causal(1, T), "mask": padded([0, 1, 1, 1, 1, 1])},
            AttentionError,
            "attention_mask hides tokens that layout= holds as real ones",
        ),
        (
            {"cu_seq_lens_q": torch.tensor([0, 2, T]), "mask": padded([0, 1, 1, 1, 1, 1])},
            UnsupportedError,
            "cu_seq_lens_q marks packed documents, which goes with neither a padding attention_mask nor a cache",
        ),
        (
            {"seq_idx": torch.tensor([[0, 0, 1, 1, 1, 1]]), "mask": padded([1, 1, 1, 1, 1, 0])},
            UnsupportedError,
            "seq_idx marks packed documents",
        ),
        (
            {"is_causal": False, "sliding_window": 2, "cu_seq_lens_q": torch.tensor([0, 2, T])},
            UnsupportedError,
            "Attention is bidirectional .* that contradicts sliding_window, cu_seq_lens_q",
        ),
        (
            {"is_causal": False, "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]])},
            UnsupportedError,
            "that contradicts position_ids that restart",
        ),
    ],
)
def test_refused_by_name(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**kwargs)


def test_sink_tokens_need_keys_that_a_sliding_cache_has_dropped() -> None:
    mask = sinkflex_mask(batch_size=1, q_length=T, kv_length=T, q_offset=4, kv_offset=4)
    with pytest.raises(UnsupportedError, match="num_sink_tokens=1 needs the first keys"):
        call(mask=mask, num_sink_tokens=1)


def test_an_impl_without_sink_gradient_is_refused() -> None:
    function = AttentionInterface()["sinkflex_flex"]
    module = Attention()
    q = torch.randn(1, 2, T, 4)
    with pytest.raises(UnsupportedError, match='impl="flex" has no gradients on CPU'):
        function(module, q, q, q, None, s_aux=module.sinks)


def test_soft_capped_models_are_refused() -> None:
    config = Gemma2Config(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, head_dim=4
    )
    config._attn_implementation = "sinkflex"
    model = Gemma2ForCausalLM(config).eval()
    with pytest.raises(UnsupportedError, match=r"Gemma2Attention asks for softcap=50\.0"):
        model(torch.tensor([[1, 2]]))


def test_inert_and_absent_arguments_change_nothing() -> None:
    inert = {"use_cache": False, "cache_position": torch.arange(T), "output_router_logits": True, "softcap": None}
    assert torch.equal(call(**inert), call())


def test_boundaries_and_position_ids_mean_the_same_documents() -> None:
    by_boundaries = call(cu_seq_lens_q=torch.tensor([0, 2, T]), cu_seq_lens_k=torch.tensor([0, 2, T]), max_length_q=4)
    by_positions = call(position_ids=torch.tensor([[0, 1, 0, 1, 2, 3]]))
    torch.testing.assert_close(by_boundaries, by_positions)
    assert not torch.allclose(by_boundaries, call())


def test_seq_idx_means_documents() -> None:
    by_index = call(seq_idx=torch.tensor([[0, 0, 1, 1, 1, 1]]))
    torch.testing.assert_close(by_index, call(position_ids=torch.tensor([[0, 1, 0, 1, 2, 3]])))


def test_a_mask_that_hides_nothing_leaves_packing_to_the_position_ids() -> None:
    packed = {"position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]])}
    torch.testing.assert_close(call(mask=padded([1] * T), **packed), call(**packed))
    model, ids, positions = tiny(), torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[0, 1, 0, 1, 2]])
    got = model(ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, model(ids, position_ids=positions, use_cache=False).logits)
    alone = model(ids[:, 2:], use_cache=False).logits
    torch.testing.assert_close(got[:, 2:], alone, rtol=1e-4, atol=1e-6)


def test_a_layout_that_leaves_out_what_the_mask_leaves_out_is_fine() -> None:
    mask = padded([0, 0, 1, 1, 1, 1])
    layout = SequenceLayout.from_padding(torch.tensor([[0, 0, 0, 1, 1, 1]]))
    torch.testing.assert_close(call(mask=mask, layout=layout), call(layout=layout))


@pytest.mark.parametrize("name", ["sinkflex_flex", "sinkflex_fa"])
def test_a_forced_kernel_refuses_a_dense_mask(name: str) -> None:
    module = Attention()
    q = torch.randn(1, 2, T, 4)
    dense = torch.ones(1, 1, T, T).bool()
    with pytest.raises(UnsupportedError, match=f"'{name}' forces the .* which take no dense mask, score bias or sink"):
        AttentionInterface()[name](module, q, q, q, dense, s_aux=module.sinks)


def test_a_dense_mask_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    hf_dense.log_dense.cache_clear()
    for _ in range(2):
        call(mask=torch.ones(1, 1, T, T).bool())
    assert [record.message for record in caplog.records if "computes it densely" in record.message] == [
        "Attention has a mask that is no layout's (4-D, edited by the layer, or bidirectional), or a bias or sink for "
        "each query; sinkflex computes it densely (exact, memory grows with the square of the length as in eager)"
    ]


def test_a_window_over_a_preallocated_cache_stops_at_the_last_query() -> None:
    """40 queries against 70 columns of which the last 20 are not written yet."""
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, size, 4, generator=made) for size in (40, 70, 70))
    layout = dataclasses.replace(SequenceLayout.causal(1, 70), num_queries=40, query_start=(10,), _cache={})
    mask = LayerMask(layout=layout, window=7, plain=False)
    module = Attention()
    got, _ = AttentionInterface()["sinkflex"](module, q, k, v, mask, s_aux=module.sinks)
    want, _ = AttentionInterface()["sinkflex_reference"](module, q, k, v, mask, s_aux=module.sinks)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_layout_in_the_mask_slot_takes_the_layers_window() -> None:
    layout = SequenceLayout.causal(1, T)
    torch.testing.assert_close(call(mask=layout, sliding_window=2), call(sliding_window=2))
    masked = LayerMask(layout=layout, window=3, plain=False)
    torch.testing.assert_close(call(mask=masked, sliding_window=2), call(sliding_window=3))


def test_a_constant_shift_of_positions_is_fine() -> None:
    layout = SequenceLayout.from_documents([2, 4])
    torch.testing.assert_close(call(layout=layout, position_ids=layout.q_position + 5), call(layout=layout))


def test_without_mask_and_causality_everything_is_seen() -> None:
    module = Attention()
    module.is_causal = False
    full = torch.ones(1, 1, T, T, dtype=torch.bool)
    torch.testing.assert_close(call(module), call(mask=full))


def test_indices_pick_keys_out_of_a_dense_mask() -> None:
    causal = torch.ones(T, T).tril().bool()[None, None]
    chosen = torch.tensor([[[max(i - 1, 0), i] for i in range(T)]], dtype=torch.int32)
    torch.testing.assert_close(call(mask=causal, indices=chosen), call(sliding_window=2))
    torch.testing.assert_close(call(indices=chosen), call(sliding_window=2))


def tiny() -> GptOssForCausalLM:
    config = GptOssConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=3,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    config._attn_implementation = "sinkflex"
    torch.manual_seed(0)
    return GptOssForCausalLM(config).eval()


@pytest.mark.parametrize("packed", [False, True])
def test_layers_of_one_type_share_one_layout(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    seen: list[tuple[int, int | None]] = []
    real = hf.sink_attention

    def spy(*args: Any, layout: SequenceLayout, window: int | None, **kwargs: Any) -> Any:
        seen.append((id(layout), window))
        return real(*args, layout=layout, window=window, **kwargs)

    monkeypatch.setattr(hf, "sink_attention", spy)
    positions = {"position_ids": torch.tensor([[0, 1, 0, 1, 2]])} if packed else {}
    tiny()(torch.tensor([[1, 2, 3, 4, 5]]), use_cache=False, **positions)
    assert [window for _, window in seen] == [3, None, 3, None]
    assert len({layout for layout, _ in seen}) == 2


def test_forced_impls_reach_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(query: Tensor, *args: Any, impl: str, **kwargs: Any) -> Tensor:
        seen.append(impl)
        return query

    monkeypatch.setattr(hf, "sink_attention", spy)
    q = torch.randn(1, 2, T, 4)
    module = nn.Module()
    module.sinks = None
    for name in hf.IMPLEMENTATIONS:
        AttentionInterface()[name](module, q, q, q, None)
    assert seen == list(hf.IMPLEMENTATIONS.values())


def test_num_sink_tokens_reach_every_layer() -> None:
    model, ids = tiny(), torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    got = model(ids, use_cache=False, num_sink_tokens=2).logits
    rows, columns = torch.arange(8)[:, None], torch.arange(8)
    full = columns <= rows
    sliding = full & ((rows - columns < 3) | (columns < 2))
    additive = {
        name: torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None]
        for name, mask in {"full_attention": full, "sliding_attention": sliding}.items()
    }
    model.set_attn_implementation("eager")
    want = model(ids, attention_mask=additive, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_recorded_sink_mass_is_what_eagers_weights_leave_over() -> None:
    model, ids = tiny(), torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    with hf.record_sinks() as record:
        model(ids, attention_mask=mask, use_cache=False)
    model(ids, use_cache=False)  # outside the block: changes nothing
    model.set_attn_implementation("eager")
    weights = model(ids, attention_mask=mask, use_cache=False, output_attentions=True).attentions
    assert sorted(record) == [0, 1, 2, 3]
    for layer, seen in record.items():
        left_over = 1.0 - weights[layer][0, :, 2:].sum(-1).mean(-1)
        torch.testing.assert_close(seen.sink_mass, left_over.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's, while tracing
def test_compiled_models_give_the_same() -> None:
    model, ids = tiny(), torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    results = []
    for run in (compiled, model):
        model.zero_grad()
        logits = run(ids, attention_mask=mask, use_cache=False).logits[:, 2:]
        logits.pow(2).sum().backward()
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    torch._dynamo.reset()
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
