"""Warm start: supervised training on oracle dialogues, cached by the hash of everything that shapes it."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sinkflex.errors import ModelError
from sinkflex.models import Policy
from sinkflex.train.checkpoint import atomic_folder, write_manifest
from sinkflex.train.demonstrations import TokenRow
from sinkflex.train.scoring import score_rows

CACHE_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class WarmstartPlan:
    """How the warm start trains.

    Attributes:
        steps: optimiser steps.
        batch_tokens: tokens a step, packed without padding.
        lr: peak learning rate; linear warm-up over the first 20 steps, then cosine to a tenth.
        copy_steps: for that many first steps every second batch is short random copying.
        bare_steps: for that many first steps the rows come without the system prompt that begins all of them.
        prefix_tree: ``"auto"``, ``"on"`` or ``"off"``: hold what the rows of a batch share once.
        seed: order of the rows and content of the copy sequences.
    """

    steps: int
    batch_tokens: int
    lr: float
    copy_steps: int
    bare_steps: int
    prefix_tree: str
    seed: int


def cache_key(plan: WarmstartPlan, rows: Sequence[TokenRow], **context: Any) -> str:
    """Hash everything that decides the warm start's weights.

    Args:
        plan: training settings.
        rows: the demonstrations.
        **context: JSON-ready extras: model shape, tokenizer text, versions.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps([CACHE_FORMAT, asdict(plan), context], sort_keys=True).encode())
    for row in rows:
        digest.update(repr((row.ids, row.loss_mask)).encode())
    return digest.hexdigest()[:20]


def copy_rows(*, token_budget: int, token_ids: Sequence[int], rng: random.Random) -> list[TokenRow]:
    """Make random patterns, each repeated four times; the loss is on the repetitions.

    ``a b c a b c a b c a b c``: what comes next is always found by looking back for the token just written, which is
    the circuit that copies ids into tool calls. Short patterns repeated often teach it several times sooner than one
    long pattern shown twice.

    Args:
        token_budget: tokens of all rows together, at least one row.
        token_ids: tokens to draw from (digit pairs, or common pieces).
        rng: draws pattern lengths (2 to 10) and tokens.
    """
    rows: list[TokenRow] = []
    used = 0
    while not rows or used < token_budget:
        pattern = rng.sample(token_ids, k=min(rng.randint(2, 10), len(token_ids)))
        mask = (*([False] * len(pattern)), *([True] * (3 * len(pattern))))
        rows.append(TokenRow(ids=tuple(pattern * 4), loss_mask=mask))
        used += len(mask)
    return rows


def shared_beginning(rows: Sequence[TokenRow]) -> int:
    """How many tokens all rows begin with: system prompt, tools, greeting. Ends a token before any is trained."""
    first = rows[0].ids
    length = min(row.loss_mask.index(True) - 1 for row in rows)
    for row in rows[1:]:
        length = next((i for i, (a, b) in enumerate(zip(first[:length], row.ids, strict=False)) if a != b), length)
    return length


def train_warmstart(
    policy: Policy,
    rows: Sequence[TokenRow],
    plan: WarmstartPlan,
    *,
    copy_token_ids: Sequence[int],
    on_step: Callable[[int, float], None],
) -> list[float]:
    """Train on demonstrations in place.

    Args:
        policy: the policy; all its trainable parameters move.
        rows: demonstrations; loss on ``loss_mask`` only.
        plan: settings.
        copy_token_ids: tokens used by the copy curriculum.
        on_step: called with (steps done, loss in nats per token) after each step.

    Returns:
        Loss of each step on dialogue batches, in nats per trained token.

    Raises:
        ModelError: the loss is not finite; the message carries the step.
    """
    rng = random.Random(plan.seed)
    shared = shared_beginning(rows)
    bare = [TokenRow(ids=row.ids[shared:], loss_mask=row.loss_mask[shared:]) for row in rows]
    # What a packed batch holds once does not count against its budget.
    counted_from = 0 if plan.prefix_tree == "off" else shared
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.01)
    order: list[int] = []
    losses = []
    for step in range(plan.steps):
        copying = step < plan.copy_steps and step % 2 == 1
        if copying:
            batch = copy_rows(token_budget=plan.batch_tokens // 2, token_ids=copy_token_ids, rng=rng)
        elif step < plan.bare_steps:
            batch = [bare[index] for index in _next_batch(order, bare, plan.batch_tokens, rng)]
        else:
            batch = [rows[index] for index in _next_batch(order, rows, plan.batch_tokens, rng, counted_from)]
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * _schedule(step, plan.steps)
        logprobs = score_rows(policy, batch, temperature=1.0, prefix_tree=plan.prefix_tree)
        loss = -logprobs.mean()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ModelError(f"warm start: loss is {value} at step {step}; lower warmstart.lr (now {plan.lr})")
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(policy.trainable().values(), 1.0)
        optimizer.step()
        if not copying:
            losses.append(value)
        on_step(step + 1, value)
    return losses


def save_warmstart(policy: Policy, folder: Path, record: dict[str, Any]) -> None:
    """Write the warm policy and a record of how it came about; atomic, so a cache entry is whole or absent."""
    with atomic_folder(folder) as staging:
        policy.save(staging / "policy")
        (staging / "warmstart.json").write_text(json.dumps(record, indent=1, sort_keys=True))
        write_manifest(staging, {"kind": "warmstart"})


def _next_batch(
    order: list[int], rows: Sequence[TokenRow], budget: int, rng: random.Random, counted_from: int = 0
) -> list[int]:
    """Deal rows until their tokens from ``counted_from`` on fill the budget; ``order`` holds what is not dealt yet."""
    batch: list[int] = []
    used = 0
    while used < budget:
        if not order:
            order.extend(range(len(rows)))
            rng.shuffle(order)
        batch.append(order.pop())
        used += len(rows[batch[-1]].ids) - counted_from
    return batch


def _schedule(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / 20)
    return warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / max(1, steps))))
