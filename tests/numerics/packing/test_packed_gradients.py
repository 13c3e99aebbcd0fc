"""Packed rows under sinkflex against separate rows under transformers' eager attention: logprobs and all gradients.

The model is transformers' own gpt-oss at toy size: sinks, sliding and full layers, grouped heads, routed experts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm

from sinkflex.algo import POLICY_LOSSES, BatchTotals, LossInputs
from sinkflex.attention import SequenceLayout, hf
from sinkflex.errors import AttentionError
from sinkflex.rollout.packing import PackedRow, pack, plan_packing

VOCAB = 48


@dataclass(frozen=True)
class Row:
    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def group() -> list[Row]:
    """Two tasks: shared prompts and first turns, two equal trajectories, and one that begins another."""
    draw = random.Random(0)

    def some(count: int) -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(count)]

    rows = []
    system = some(5)
    for prompt_length in (23, 14):
        prompt, turn, answer = [*system, *some(prompt_length)], some(6), some(7)
        ends = [some(9), some(4), [*turn, *answer, *some(11)], [*turn, *answer, *some(3)]]
        for end in ends:
            # the environment's answer, where there is one, is not trained
            mask = [True] * 6 + [False] * 7 + [True] * 20
            rows.append(Row((*prompt, *end), (*[False] * len(prompt), *mask[: len(end)])))
    rows.append(rows[2])
    rows.append(Row(rows[0].ids[:-3], rows[0].loss_mask[:-3]))
    return rows


ROWS = group()
TRAINED = [sum(row.loss_mask) for row in ROWS]
OWNER = torch.repeat_interleave(torch.arange(len(ROWS)), torch.tensor(TRAINED))


def model(attention: str, dtype: torch.dtype) -> GptOssForCausalLM:
    hf.register()
    config = GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        attn_implementation=attention,
        experts_implementation="eager",
    )
    torch.manual_seed(0)
    lm = GptOssForCausalLM(config).to(dtype)
    if dtype == torch.float64:
        for module in lm.modules():
            if isinstance(module, GptOssRMSNorm):
                module.forward = partial(double_norm, module)  # type: ignore[method-assign]
    return lm


def double_norm(norm: GptOssRMSNorm, hidden: Tensor) -> Tensor:
    """The model's norm without its cast to fp32, which would hide everything below 1e-7."""
    return norm.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)


def token_logprobs(lm: GptOssForCausalLM, hidden: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax(lm.lm_head(hidden), -1).gather(1, targets[:, None])[:, 0]


def separate(lm: GptOssForCausalLM) -> Tensor:
    parts = []
    for row in ROWS:
        ids = torch.tensor([row.ids])
        hidden = lm.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        trained = torch.tensor(row.loss_mask).nonzero()[:, 0]
        parts.append(token_logprobs(lm, hidden[trained - 1], ids[0, trained]))
    return torch.cat(parts)


def packed(
    lm: GptOssForCausalLM, budget: int, pays_from: float, change: Callable[[PackedRow], PackedRow] | None = None
) -> Tensor:
    plan = plan_packing(ROWS, token_budget=budget, min_saved_tokens=4, pays_from=pays_from)
    logprobs = torch.zeros(len(OWNER), dtype=lm.dtype)
    for row in pack(ROWS, plan, device=torch.device("cpu")):
        used = change(row) if change is not None else row
        hidden = lm.model(
            input_ids=used.input_ids, position_ids=used.position_ids, layout=used.layout, use_cache=False
        ).last_hidden_state[0]
        logprobs = logprobs.index_put((used.flat,), token_logprobs(lm, hidden[used.predictors], used.targets))
    return logprobs


def loss(logprobs: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    noise = 0.3 * torch.randn(len(logprobs), generator=generator, dtype=torch.float64)
    advantages = torch.linspace(-1, 1, len(ROWS), dtype=torch.float64)[OWNER]
    mask = torch.ones(len(logprobs), dtype=torch.bool)
    objective = POLICY_LOSSES["dapo"]
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=(logprobs.detach() + noise).to(logprobs.dtype),
        advantages=advantages.to(logprobs.dtype),
        loss_mask=mask,
        trajectory_ids=OWNER,
    )
    totals = BatchTotals.count(loss_mask=mask, trajectory_ids=OWNER)
    return objective(inputs, totals=totals, clip=objective.default_clip).loss


def gradients(lm: GptOssForCausalLM, logprobs: Tensor) -> dict[str, Tensor]:
    lm.zero_grad()
    loss(logprobs).backward()
    return {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def expected() -> tuple[Tensor, dict[str, Tensor]]:
    lm = model("eager", torch.float64)
    logprobs = separate(lm)
    return logprobs.detach(), gradients(lm, logprobs)


def check(
    expected: tuple[Tensor, dict[str, Tensor]],
    *,
    dtype: torch.dtype,
    tolerance: float,
    budget: int = 10_000,
    pays_from: float = 0.0,
    change: Callable[[PackedRow], PackedRow] | None = None,
) -> None:
    lm = model("sinkflex", dtype)
    logprobs = packed(lm, budget, pays_from, change)
    found = gradients(lm, logprobs)
    reference, reference_gradients = expected
    assert (logprobs.detach() - reference).abs().max() <= tolerance * reference.abs().max()
    assert found.keys() == reference_gradients.keys()
    for name, gradient in reference_gradients.items():
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error <= tolerance, f"{name}: {float(error):.2e}"


def test_the_model_trains_its_sinks(expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    sinks = [gradient for name, gradient in expected[1].items() if name.endswith("sinks")]
    assert len(sinks) == 4
    assert all((gradient != 0).all() for gradient in sinks)


@pytest.mark.parametrize("budget", [10_000, 90])
@pytest.mark.parametrize("pays_from", [0.0, 2.0])
def test_packed_rows_equal_separate_rows(
    expected: tuple[Tensor, dict[str, Tensor]], budget: int, pays_from: float
) -> None:
    check(expected, dtype=torch.float64, tolerance=1e-11, budget=budget, pays_from=pays_from)


def test_single_precision_gradients_are_within_one_in_a_hundred_thousand(
    expected: tuple[Tensor, dict[str, Tensor]],
) -> None:
    """Over all parameters together; each alone within twice eager's own error, or a 1e-7th of the whole gradient."""
    exact = expected[1]
    eager, shared = model("eager", torch.float32), model("sinkflex", torch.float32)
    found = {
        "eager": gradients(eager, separate(eager)),
        "shared": gradients(shared, packed(shared, budget=10_000, pays_from=0.0)),
    }
    errors = {
        which: {name: float((gradient - exact[name]).norm()) for name, gradient in by_name.items()}
        for which, by_name in found.items()
    }
    total = sum(float(gradient.norm()) ** 2 for gradient in exact.values()) ** 0.5
    assert sum(error**2 for error in errors["shared"].values()) ** 0.5 <= 1e-5 * total
    for name, error in errors["shared"].items():
        assert error <= max(2 * errors["eager"][name], 1e-7 * total), name


def test_the_shared_row_is_the_smaller_one() -> None:
    shared = plan_packing(ROWS, token_budget=10_000, min_saved_tokens=4, pays_from=0.0)
    assert shared.shares_prefixes
    assert shared.saved_fraction > 0.5


def side_by_side_positions(row: PackedRow) -> PackedRow:
    layout = SequenceLayout.causal(1, row.input_ids.shape[1])
    return replace(row, layout=layout, position_ids=layout.position.long())


def own_state(row: PackedRow) -> PackedRow:
    last = row.input_ids.shape[1] - 1
    return replace(row, predictors=(row.predictors + 1).clamp(max=last))


def each_shared_term_once(row: PackedRow) -> PackedRow:
    terms = zip(row.predictors.tolist(), row.targets.tolist(), strict=True)
    first = torch.tensor(sorted({term: at for at, term in reversed(list(enumerate(terms)))}.values()))
    return replace(row, predictors=row.predictors[first], targets=row.targets[first], flat=row.flat[first])


MUTANTS: dict[str, Callable[[PackedRow], PackedRow]] = {
    "branches see each other": side_by_side_positions,
    "predicted from its own state": own_state,
    "shared terms counted once": each_shared_term_once,
}


def test_positions_that_are_not_the_layouts_are_refused() -> None:
    with pytest.raises(AttentionError, match="position_ids do not follow the layout"):
        packed(
            model("sinkflex", torch.float64),
            budget=10_000,
            pays_from=0.0,
            change=lambda row: replace(row, position_ids=torch.arange(row.input_ids.shape[1])[None]),
        )


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_mutants_fail(mutant: str, expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    with pytest.raises(AssertionError):
        check(expected, dtype=torch.float64, tolerance=1e-11, change=MUTANTS[mutant])
