"""One run's moving parts joined: groups in, an updated policy and figures out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinkflex.algo.filtering import overlong_penalty
from sinkflex.errors import AlgorithmError
from sinkflex.models import Policy
from sinkflex.rollout.trajectory import Group, Trajectory
from sinkflex.train.batch_metrics import batch_metrics, spread
from sinkflex.train.sampling import GroupSource, StepGroups
from sinkflex.train.update import PolicyUpdater, UpdateBatch
from sinkflex.types import StopReason

LENGTH_BUDGETS = frozenset({StopReason.MAX_STEPS, StopReason.CONTEXT_LENGTH, StopReason.EPISODE_TIMEOUT})
"""Cuts that say nothing about what the policy did up to them; too many invalid actions do."""

Estimator = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """From trajectories to advantages.

    Attributes:
        estimator: ``(rewards [B], group ids [B]) -> advantages [B]``.
        overlong: ``"keep"``, ``"mask"`` (trajectories cut by a length budget shape the baseline but are not trained
            on) or ``"penalty"`` (their reward falls softly over the last ``overlong_buffer`` tokens).
        overlong_buffer: tokens over which the penalty grows.
        max_length: tokens a trajectory may hold.
    """

    estimator: Estimator
    overlong: str
    overlong_buffer: int
    max_length: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate by train step.

    Attributes:
        lr: peak.
        warmup_steps: linear rise.
        steps: train steps of the run.
        kind: ``"constant"`` or ``"cosine"`` (to a tenth of the peak at the last step).
    """

    lr: float
    warmup_steps: int
    steps: int
    kind: str

    def at(self, step: int) -> float:
        """Rate of train step ``step``, counted from 1."""
        warm = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        if self.kind == "constant":
            return self.lr * warm
        progress = min(1.0, max(0, step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return self.lr * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult:
    """What one train step did: its figures and what was sampled."""

    metrics: dict[str, float]
    groups: StepGroups


class Trainer:
    """Runs train steps; knows no algorithm by name.

    Args:
        policy: what is trained.
        source: gives each step its groups.
        updater: applies batches.
        rewards: from trajectories to advantages.
        schedule: learning rate.
        weights_changed: called after every update, so that the sampler drops what it computed with old weights.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        source: GroupSource,
        updater: PolicyUpdater,
        rewards: RewardSettings,
        schedule: Schedule,
        weights_changed: Callable[[], None],
    ) -> None:
        self.policy = policy
        self.source = source
        self.updater = updater
        self.rewards = rewards
        self.schedule = schedule
        self._weights_changed = weights_changed

    def step(self, step: int) -> StepResult:
        """Sample, weigh, update.

        A step whose groups all teach nothing leaves the weights as they are and says so in
        ``training/updated`` = 0.

        Args:
            step: counted from 1.
        """
        start = time.perf_counter()
        groups = self.source.next(step)
        metrics = batch_metrics(groups)
        weigh_start = time.perf_counter()
        batch, advantages, returns = self._batch(groups.groups)
        metrics["timing_s/adv"] = time.perf_counter() - weigh_start
        learning_rate = self.schedule.at(step)
        if batch is not None:
            metrics |= self.updater.update(batch, step=step, learning_rate=learning_rate)
            self._weights_changed()
            metrics |= spread("critic/advantages", advantages.tolist()) | spread("critic/returns", returns.tolist())
        now = time.perf_counter()
        tokens = sum(len(trajectory.ledger) for trajectory in groups.sampled)
        metrics |= {
            "training/updated": float(batch is not None),
            "timing_s/gen": groups.seconds,
            "timing_s/step": now - start,
            "perf/throughput": tokens / (now - start),
        }
        return StepResult(metrics=metrics, groups=groups)

    def _batch(self, groups: Sequence[Group]) -> tuple[UpdateBatch | None, Tensor, Tensor]:
        """Those worth a forward pass as an update batch, and the advantages and returns of all trajectories."""
        members = [trajectory for group in groups for trajectory in group.trajectories]
        if not members:
            return None, torch.zeros(0), torch.zeros(0)
        group_ids = torch.tensor([index for index, group in enumerate(groups) for _ in group.trajectories])
        returns = self._returns(members)
        advantages = self.rewards.estimator(returns, group_ids)
        keep = [
            index
            for index, trajectory in enumerate(members)
            if not (self.rewards.overlong == "mask" and trajectory.stop_reason in LENGTH_BUDGETS)
        ]
        if not keep or not bool(advantages[keep].any()):
            return None, advantages, returns
        if any(members[index].top_p < 1 for index in keep):
            raise AlgorithmError(
                "a trajectory was sampled with top_p < 1: its logprobs are not the sampler's. Train on top_p = 1"
            )
        logprobs = [
            value
            for index in keep
            for value, on in zip(members[index].ledger.logprobs, members[index].ledger.loss_mask, strict=True)
            if on
        ]
        batch = UpdateBatch(
            rows=[members[index].ledger for index in keep],
            advantages=advantages[keep],
            rollout_logprobs=torch.tensor(logprobs),
        )
        return batch, advantages, returns

    def _returns(self, members: Sequence[Trajectory]) -> Tensor:
        rewards = torch.tensor([trajectory.reward for trajectory in members])
        if self.rewards.overlong != "penalty":
            return rewards
        lengths = torch.tensor([len(trajectory.ledger) for trajectory in members])
        return rewards + overlong_penalty(
            lengths, max_length=self.rewards.max_length, buffer=self.rewards.overlong_buffer
        )

    def state(self) -> dict[str, Any]:
        """JSON-ready state beside weights and optimiser."""
        return {"source": self.source.state(), "skipped_in_a_row": self.updater.skipped_in_a_row}

    def tensors(self) -> dict[str, Any]:
        """Optimiser and generator state."""
        return {
            "optimizer": self.updater.optimizer.state_dict(),
            "torch_rng": torch.random.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def restore(self, *, policy_folder: Path, tensors: dict[str, Any], state: dict[str, Any]) -> None:
        """Continue exactly where ``state`` and ``tensors`` were taken, under this trainer's own settings."""
        self.policy.load_weights(policy_folder)
        self._weights_changed()
        optimizer = self.updater.optimizer
        settings = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        optimizer.load_state_dict(tensors["optimizer"])
        # The moments are the checkpoint's; betas and weight decay the recipe's, which may have changed.
        for group, ours in zip(optimizer.param_groups, settings, strict=True):
            group.update(ours)
        torch.random.set_rng_state(tensors["torch_rng"])
        if tensors["cuda_rng"]:
            torch.cuda.set_rng_state_all(tensors["cuda_rng"])
        self.updater.skipped_in_a_row = int(state["skipped_in_a_row"])
        self.source.restore(state["source"])
