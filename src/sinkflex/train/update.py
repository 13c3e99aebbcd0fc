"""One policy update from finished trajectories: old and reference logprobs, correction, optimiser steps.

The updater does not know which algorithm it runs: objective, KL and correction are entries of the dicts in
``sinkflex.algo``, and advantages come in from outside.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sinkflex.algo import (
    KL_ESTIMATORS,
    POLICY_LOSSES,
    BatchTotals,
    ClipRange,
    LossInputs,
    Statistic,
    aggregate,
)
from sinkflex.algo.correction import (
    WeightLevel,
    importance_weights,
    mask_weights,
    mismatch_statistics,
    truncate_weights,
)
from sinkflex.algo.stats import merge_statistics
from sinkflex.errors import ModelError
from sinkflex.models import Policy
from sinkflex.rollout.packing import PackedRow, PackingPlan, TokenRow
from sinkflex.train.reference import Reference
from sinkflex.train.scoring import pack_rows, score_packed
from sinkflex.train.stopwatch import Stopwatch

MAX_SKIPPED_IN_A_ROW = 5


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """How a batch is turned into optimiser steps; the recipe's ``[algo]`` and ``[optim]`` explain each.

    Attributes:
        loss: a name in ``POLICY_LOSSES``.
        clip: ratio bounds.
        kl_coef: weight of the KL term; 0 needs no reference.
        kl_kind: a name in ``KL_ESTIMATORS``.
        entropy_coef: weight of the entropy bonus.
        correction: ``"none"``, ``"tis"`` (truncated) or ``"mis"`` (masked).
        correction_cap: bound of the correction weight.
        temperature: the sampling temperature, which all logprobs are taken at.
        updates_per_batch: passes over the batch.
        minibatches: optimiser steps a pass.
        microbatch_tokens: packed tokens a forward pass.
        prefix_tree: ``"auto"``, ``"on"`` or ``"off"``: hold shared prefixes once.
        max_grad_norm: global norm that gradients are scaled down to.
        token_budget: most tokens one trajectory could have sampled (Dr. GRPO's constant).
        seed: with the step it fixes the order of minibatches.
    """

    loss: str
    clip: ClipRange
    kl_coef: float
    kl_kind: str
    entropy_coef: float
    correction: str
    correction_cap: float
    temperature: float
    updates_per_batch: int
    minibatches: int
    microbatch_tokens: int
    prefix_tree: str
    max_grad_norm: float
    token_budget: int
    seed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateBatch:
    """Trajectories to train on.

    Attributes:
        rows: one token row a trajectory, each with at least one trained token.
        advantages: [B] one a trajectory.
        rollout_logprobs: [N] the sampler's logprobs of the trained tokens, rows end to end.
    """

    rows: Sequence[TokenRow]
    advantages: Tensor
    rollout_logprobs: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class _Fixed:
    """What stays the same over all optimiser steps of a batch, per trained token [N]."""

    owner: Tensor
    advantages: Tensor
    old: Tensor
    reference: Tensor | None
    correction: Tensor | None


class PolicyUpdater:
    """Owns the optimiser and applies batches to the policy.

    Args:
        policy: trained in place.
        reference: scores the KL term; None when ``kl_coef`` is 0.
        optimizer: over ``policy.trainable()``.
        settings: see ``UpdateSettings``.

    Attributes:
        skipped_in_a_row: updates left out, up to the last one, because the gradient was not finite.
        packing: how the last batch was packed, in words; empty before the first.
    """

    def __init__(
        self,
        policy: Policy,
        reference: Reference | None,
        optimizer: torch.optim.Optimizer,
        settings: UpdateSettings,
    ) -> None:
        self.policy = policy
        self.reference = reference
        self.optimizer = optimizer
        self.settings = settings
        self.skipped_in_a_row = 0
        self.packing = ""

    def update(self, batch: UpdateBatch, *, step: int, learning_rate: float) -> dict[str, float]:
        """Apply one batch.

        Args:
            batch: what was sampled.
            step: the train step, for the order of minibatches.
            learning_rate: of this step.

        Returns:
            Figures under verl's names: ``actor/*``, ``training/rollout_*``, ``timing_s/*``.

        Raises:
            ModelError: gradients were not finite in five updates in a row. A single such update is skipped, counted in
                ``actor/skipped_updates`` and leaves weights and optimiser as they were.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        watch = Stopwatch(self.policy.device)
        fixed, metrics = self._fix(batch, watch)
        parts: list[Mapping[str, Statistic]] = []
        norms: list[float] = []
        losses: list[float] = []
        skipped = 0
        order = random.Random(f"{self.settings.seed}/{step}")
        with watch.part("update_actor"):
            for _ in range(self.settings.updates_per_batch):
                for members in _split(len(batch.rows), self.settings.minibatches, order):
                    shares = [0.0]
                    for share, figures in self._accumulate(batch, members, fixed):
                        shares.append(share)
                        parts.append(figures)
                    losses.append(sum(shares))
                    norm = self._apply()
                    skipped += norm is None
                    if norm is not None:
                        norms.append(norm)
        merged = merge_statistics(parts)
        metrics.update({f"actor/{name}": value for name, value in merged.items()})
        metrics["actor/pg_loss"] = sum(losses) / len(losses)
        metrics["actor/grad_norm"] = sum(norms) / len(norms) if norms else float("nan")
        metrics["actor/skipped_updates"] = float(skipped)
        metrics["actor/lr"] = learning_rate
        return metrics | watch.metrics()

    def _fix(self, batch: UpdateBatch, watch: Stopwatch) -> tuple[_Fixed, dict[str, float]]:
        """Score the batch under the weights as they are, and weigh the sampler's mismatch."""
        settings, device = self.settings, self.policy.device
        counts = torch.tensor([sum(row.loss_mask) for row in batch.rows], device=device)
        owner = torch.repeat_interleave(torch.arange(len(batch.rows), device=device), counts)
        rollout = batch.rollout_logprobs.to(device)
        old = torch.empty_like(rollout)
        reference = torch.empty_like(rollout) if self.reference is not None else None
        packed, plan = self._pack(batch.rows)
        self.packing = plan.describe()
        self.policy.model.eval()
        with torch.no_grad():
            for micro in packed:
                with watch.part("old_log_prob"):
                    old[micro.flat] = score_packed(self.policy, micro, temperature=settings.temperature)[0]
                if reference is not None and self.reference is not None:
                    with watch.part("ref"):
                        reference[micro.flat] = self.reference.score(micro, temperature=settings.temperature)
        trained = torch.ones_like(owner, dtype=torch.bool)
        weights = importance_weights(old, rollout, loss_mask=trained, trajectory_ids=owner, level=WeightLevel.TOKEN)
        if settings.correction == "tis":
            weights = truncate_weights(weights, cap=settings.correction_cap)
        elif settings.correction == "mis":
            weights = mask_weights(weights, weights, low=1 / settings.correction_cap, high=settings.correction_cap)
        figures = mismatch_statistics(old, rollout, loss_mask=trained, weights=weights)
        fixed = _Fixed(
            owner=owner,
            advantages=batch.advantages.to(device, old.dtype)[owner],
            old=old,
            reference=reference,
            correction=None if settings.correction == "none" else weights,
        )
        figures["prefix_saved_fraction"] = plan.saved_fraction
        return fixed, {f"training/{name}": value for name, value in figures.items()}

    def _accumulate(
        self, batch: UpdateBatch, members: list[int], fixed: _Fixed
    ) -> Iterator[tuple[float, Mapping[str, Statistic]]]:
        """Add one minibatch's gradient, microbatch by microbatch; the split does not change the sum."""
        self.optimizer.zero_grad(set_to_none=True)
        rows = [batch.rows[index] for index in members]
        place = torch.cat([torch.nonzero(fixed.owner == index)[:, 0] for index in members])
        totals = BatchTotals(tokens=len(place), trajectories=len(members), token_budget=self.settings.token_budget)
        self.policy.model.train()
        packed, _ = self._pack(rows)
        for micro in packed:
            yield self._backward(micro, place[micro.flat], fixed, totals)

    def _pack(self, rows: Sequence[TokenRow]) -> tuple[list[PackedRow], PackingPlan]:
        return pack_rows(
            rows,
            token_budget=self.settings.microbatch_tokens,
            device=self.policy.device,
            prefix_tree=self.settings.prefix_tree,
        )

    def _backward(
        self, micro: PackedRow, place: Tensor, fixed: _Fixed, totals: BatchTotals
    ) -> tuple[float, Mapping[str, Statistic]]:
        settings = self.settings
        objective = POLICY_LOSSES[settings.loss]
        # Without an entropy bonus the entropy is only shown; it gets no gradient and costs no backward.
        logprobs, entropy = score_packed(self.policy, micro, temperature=settings.temperature, with_entropy=True)
        owner, trained = fixed.owner[place], torch.ones_like(place, dtype=torch.bool)
        output = objective(
            LossInputs(
                logprobs=logprobs,
                old_logprobs=fixed.old[place],
                advantages=fixed.advantages[place],
                loss_mask=trained,
                trajectory_ids=owner,
                correction=None if fixed.correction is None else fixed.correction[place],
            ),
            totals=totals,
            clip=settings.clip,
        )
        loss = output.loss
        figures = dict(output.stats)

        def reduced(values: Tensor) -> Tensor:
            return aggregate(values, loss_mask=trained, trajectory_ids=owner, totals=totals, how=objective.aggregation)

        if entropy is not None:
            figures["entropy"] = Statistic.mean(entropy, trained)
            if settings.entropy_coef:
                loss = loss - settings.entropy_coef * reduced(entropy)
        if fixed.reference is not None:
            divergence = KL_ESTIMATORS[settings.kl_kind](logprobs, fixed.reference[place], trained)
            figures["kl_loss"] = Statistic.mean(divergence, trained)
            loss = loss + settings.kl_coef * reduced(divergence)
        torch.autograd.backward(loss)
        return float(output.loss.detach()), figures

    def _apply(self) -> float | None:
        """Clip and step; None when the gradient is not finite and the step was left out."""
        parameters = list(self.policy.trainable().values())
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm))
        if norm == norm and norm != float("inf"):
            self.optimizer.step()
            self.skipped_in_a_row = 0
            return norm
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise ModelError(
                f"the gradient was not finite in {self.skipped_in_a_row} updates in a row (norm {norm}); "
                "lower optim.lr, or look for NaN in the last checkpoint's weights"
            )
        return None


def _split(count: int, parts: int, order: random.Random) -> list[list[int]]:
    """Deal trajectories into minibatches; one part keeps the order, so a single update is free of shuffling."""
    indices = list(range(count))
    if parts > 1:
        order.shuffle(indices)
    parts = min(parts, count)
    bounds = [round(part * count / parts) for part in range(parts + 1)]
    return [indices[low:high] for low, high in pairwise(bounds)]
