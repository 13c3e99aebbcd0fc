"""Updates: gradients equal a plain per-row computation, whatever the packing; bad gradients are skipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sinkflex.algo import ClipRange
from sinkflex.attention import hf
from sinkflex.errors import ModelError
from sinkflex.models import Policy, TinyShape, build_tiny_model
from sinkflex.train.reference import Reference
from sinkflex.train.scoring import score_rows
from sinkflex.train.update import PolicyUpdater, UpdateBatch, UpdateSettings

VOCAB = 60
SETTINGS = UpdateSettings(
    loss="grpo",
    clip=ClipRange(low=0.2, high=0.2),
    kl_coef=0.0,
    kl_kind="k3",
    entropy_coef=0.0,
    correction="none",
    correction_cap=2.0,
    temperature=0.7,
    updates_per_batch=1,
    minibatches=1,
    microbatch_tokens=4096,
    prefix_tree="off",
    max_grad_norm=math.inf,
    token_budget=64,
    seed=0,
)


@dataclass(frozen=True)
class Row:
    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def make_rows() -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(VOCAB, (90,), generator=generator).tolist()
    rows = []
    for length in (30, 47, 12, 25):
        tail = torch.randint(VOCAB, (length,), generator=generator).tolist()
        mask = [False] * 90 + [position % 3 != 1 for position in range(length)]
        rows.append(Row(tuple(prompt + tail), tuple(mask)))
    return rows


@pytest.fixture
def policy() -> Policy:
    hf.register()
    shape = TinyShape(hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=16, sliding_window=8)
    model = build_tiny_model(
        shape,
        vocab_size=VOCAB,
        pad_token_id=0,
        eos_token_id=1,
        attention="sinkflex",
        experts_implementation="eager",
        seed=1,
    )
    return Policy(model=model, tokenizer=None)


def separate_logprobs(policy: Policy, row: Row, temperature: float) -> Tensor:
    """The oracle: one unpacked row through the whole model under eager attention, with full logits."""
    lm = policy.causal_lm
    lm.config._attn_implementation = "eager"
    logits = lm(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0] / temperature
    lm.config._attn_implementation = "sinkflex"
    trained = [position for position, on in enumerate(row.loss_mask) if on]
    table = logits.log_softmax(-1)
    return torch.stack([table[position - 1, row.ids[position]] for position in trained])


def batch_of(policy: Policy, rows: list[Row], advantages: list[float]) -> UpdateBatch:
    with torch.no_grad():
        rollout = torch.cat([separate_logprobs(policy, row, SETTINGS.temperature) for row in rows])
    return UpdateBatch(rows=rows, advantages=torch.tensor(advantages), rollout_logprobs=rollout)


def gradients_after(
    policy: Policy, batch: UpdateBatch, settings: UpdateSettings, reference: Reference | None = None
) -> dict[str, Tensor]:
    """Gradients of one update with a frozen optimiser."""
    optimizer = torch.optim.SGD(policy.trainable().values(), lr=0.0)
    PolicyUpdater(policy, reference, optimizer, settings).update(batch, step=1, learning_rate=0.0)
    return {name: p.grad.clone() for name, p in policy.trainable().items() if p.grad is not None}


def test_scores_are_taken_without_dropout_and_gradients_with_the_model_in_train_mode(policy: Policy) -> None:
    modes: list[tuple[bool, bool]] = []
    policy.model.register_forward_hook(lambda module, *_: modes.append((torch.is_grad_enabled(), module.training)))
    policy.model.model.register_forward_hook(
        lambda module, *_: modes.append((torch.is_grad_enabled(), module.training))
    )
    policy.model.train()
    batch = batch_of(policy, make_rows(), [1.0, -0.5, 0.25, -0.75])
    modes.clear()
    gradients_after(policy, batch, SETTINGS)
    assert modes == [(False, False), (True, True)]


def test_packed_scores_equal_separate_rows(policy: Policy) -> None:
    rows = make_rows()
    packed = score_rows(policy, rows, temperature=0.7)
    separate = torch.cat([separate_logprobs(policy, row, 0.7) for row in rows])
    torch.testing.assert_close(packed, separate, atol=2e-5, rtol=0)


def test_gradient_is_that_of_the_paper_objective(policy: Policy) -> None:
    rows, advantages = make_rows(), [1.0, -0.5, 0.25, -0.75]
    found = gradients_after(policy, batch_of(policy, rows, advantages), SETTINGS)
    policy.model.zero_grad()
    total = sum(sum(row.loss_mask) for row in rows)
    loss = torch.zeros(())
    for row, advantage in zip(rows, advantages, strict=True):
        logprobs = separate_logprobs(policy, row, 0.7)
        # On-policy the ratio is 1 and unclipped: its gradient is that of the logprob.
        loss = loss - (torch.exp(logprobs - logprobs.detach()) * advantage).sum() / total
    loss.backward()
    for name, parameter in policy.trainable().items():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=1e-3, msg=name)
    assert max(float(gradient.abs().max()) for gradient in found.values()) > 1e-4


@pytest.mark.parametrize("change", [{"microbatch_tokens": 130}, {"prefix_tree": "on"}, {"prefix_tree": "auto"}])
@pytest.mark.parametrize("loss", ["grpo", "seq_mean", "dr_grpo", "dapo", "gspo", "cispo"])
def test_packing_does_not_change_the_gradient(policy: Policy, loss: str, change: dict[str, object]) -> None:
    batch = batch_of(policy, make_rows(), [1.0, -0.5, 0.25, -0.75])
    settings = replace(SETTINGS, loss=loss, kl_coef=0.1, entropy_coef=0.01)
    reference = Reference(policy)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.mul_(1.01)
    whole = gradients_after(policy, batch, settings, reference)
    split = gradients_after(policy, batch, replace(settings, **change), reference)
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, atol=1e-6, rtol=1e-3, msg=name)


def test_prefixes_are_held_once_and_reported(policy: Policy) -> None:
    batch = batch_of(policy, make_rows(), [1.0, -0.5, 0.25, -0.75])
    optimizer = torch.optim.SGD(policy.trainable().values(), lr=0.0)
    metrics = PolicyUpdater(policy, None, optimizer, replace(SETTINGS, prefix_tree="auto")).update(
        batch, step=1, learning_rate=0.0
    )
    # Four rows of 90 + (30, 47, 12, 25) tokens need the 90 once: at least half of 474 is saved.
    assert metrics["training/prefix_saved_fraction"] > 0.5
    assert metrics["training/rollout_logprobs_diff_max"] < 1e-4


@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_every_trajectory_is_trained_on_once_a_pass(policy: Policy, minibatches: int) -> None:
    batch = batch_of(policy, make_rows(), [1.0, -0.5, 0.25, -0.75])
    optimizer = torch.optim.SGD(policy.trainable().values(), lr=0.0)
    settings = replace(SETTINGS, minibatches=minibatches, updates_per_batch=2)
    metrics = PolicyUpdater(policy, None, optimizer, settings).update(batch, step=1, learning_rate=0.0)
    # With lr 0 every ratio stays 1, so its mean over all updates is 1 and nothing is clipped.
    assert metrics["actor/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] == 0.0
    assert metrics["actor/skipped_updates"] == 0.0


@pytest.mark.parametrize(("correction", "zero_share"), [("none", 0.0), ("tis", 0.0), ("mis", 0.5)])
def test_mismatch_is_corrected_or_only_reported(policy: Policy, correction: str, zero_share: float) -> None:
    batch = batch_of(policy, make_rows(), [1.0, -0.5, 0.25, -0.75])
    shifted = batch.rollout_logprobs.clone()
    shifted[::2] -= 2.0
    batch = replace(batch, rollout_logprobs=shifted)
    optimizer = torch.optim.SGD(policy.trainable().values(), lr=0.0)
    metrics = PolicyUpdater(policy, None, optimizer, replace(SETTINGS, correction=correction)).update(
        batch, step=1, learning_rate=0.0
    )
    assert metrics["training/rollout_logprobs_diff_max"] == pytest.approx(2.0, abs=1e-4)
    assert metrics["training/correction_zero_fraction"] == pytest.approx(zero_share, abs=0.02)


def poison(policy: Policy) -> Callable[[], None]:
    """Make every gradient NaN until the returned function is called."""
    parameter = next(iter(policy.trainable().values()))
    handle = parameter.register_hook(lambda gradient: gradient * float("nan"))
    return handle.remove


def test_one_nan_gradient_is_skipped_and_leaves_no_trace(policy: Policy) -> None:
    batch = batch_of(policy, make_rows(), [1.0, -0.5, 0.25, -0.75])
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=1e-3)
    updater = PolicyUpdater(policy, None, optimizer, SETTINGS)
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    heal = poison(policy)
    metrics = updater.update(batch, step=1, learning_rate=1e-3)
    assert metrics["actor/skipped_updates"] == 1.0
    assert all(torch.equal(before[name], p) for name, p in policy.trainable().items())
    assert optimizer.state_dict()["state"] == {}
    heal()
    assert updater.update(batch, step=2, learning_rate=1e-3)["actor/skipped_updates"] == 0.0
    assert any(not torch.equal(before[name], p) for name, p in policy.trainable().items())


def test_nan_gradients_that_do_not_stop_end_the_run(policy: Policy) -> None:
    batch = batch_of(policy, make_rows(), [1.0, -0.5, 0.25, -0.75])
    updater = PolicyUpdater(policy, None, torch.optim.AdamW(policy.trainable().values(), lr=1e-3), SETTINGS)
    poison(policy)
    for step in range(1, 5):
        updater.update(batch, step=step, learning_rate=1e-3)
    with pytest.raises(ModelError, match=r"not finite in 5 updates in a row.*lower optim.lr"):
        updater.update(batch, step=5, learning_rate=1e-3)


def test_the_reference_stays_where_it_was_made(policy: Policy) -> None:
    rows = make_rows()
    reference = Reference(policy)
    before = score_rows(policy, rows, temperature=0.7).detach()
    batch = replace(batch_of(policy, rows, [1.0, -0.5, 0.25, -0.75]))
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.mul_(1.05)
    moved = score_rows(policy, rows, temperature=0.7).detach()
    settings = replace(SETTINGS, kl_coef=1.0, kl_kind="k1")
    optimizer = torch.optim.SGD(policy.trainable().values(), lr=0.0)
    metrics = PolicyUpdater(policy, reference, optimizer, settings).update(batch, step=1, learning_rate=0.0)
    assert metrics["actor/kl_loss"] == pytest.approx(float((moved - before).mean()), abs=1e-5)
