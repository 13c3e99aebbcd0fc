"""Policy objectives without a value model, as pure functions of flat per-token tensors.

All share one signature, so a trainer need not know which one it runs::

    loss = POLICY_LOSSES["grpo"]
    output = loss(inputs, totals=totals, clip=loss.default_clip)

Shapes: ``N`` counts the tokens of whole trajectories, laid end to end, trained or not. Two trajectories of 2
and 3 tokens, whose first token is part of the prompt::

    trajectory_ids  0      0      1      1      1
    loss_mask       False  True   False  True   True
    advantages      .      0.5    .      -0.5   -0.5     (masked positions may hold anything)

Temperature: ``logprobs`` and ``old_logprobs`` must both be those of the *sampling* distribution,
``log_softmax(logits / temperature)``. Neither is adjusted here; a ratio of two temperatures is not a policy
ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkflex.algo.aggregation import Aggregation, BatchTotals, aggregate, trajectory_sums
from sinkflex.algo.ratios import masked_log_ratio, safe_exp
from sinkflex.algo.stats import Statistic
from sinkflex.errors import AlgorithmError


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """One microbatch of whole trajectories.

    Attributes:
        logprobs: [N] of the policy being trained, at the sampling temperature; carries gradient.
        old_logprobs: [N] of the same weights before the step's first update, computed by the trainer; no
            gradient.
        advantages: [N] each token's advantage; for outcome rewards its trajectory's.
        loss_mask: [N] True = sampled by the policy and trained.
        trajectory_ids: [N] equal ids mark one trajectory, unique over the batch; order is free. A trajectory
            must not be split between calls: the sequence objectives need all of it.
        correction: [N] detached weights against sampler-trainer mismatch (``algo.correction``), or None for
            ones.

    Raises:
        AlgorithmError: a tensor is not [N], or ``loss_mask`` is not boolean.
    """

    logprobs: Float[Tensor, " N"]
    old_logprobs: Float[Tensor, " N"]
    advantages: Float[Tensor, " N"]
    loss_mask: Bool[Tensor, " N"]
    trajectory_ids: Int[Tensor, " N"]
    correction: Float[Tensor, " N"] | None = None

    def __post_init__(self) -> None:
        expected = (self.logprobs.numel(),)
        for name in ("logprobs", "old_logprobs", "advantages", "loss_mask", "trajectory_ids", "correction"):
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != expected:
                raise AlgorithmError(
                    f"LossInputs.{name} has shape {tuple(tensor.shape)}, expected {expected} as logprobs; "
                    "flatten all rows to one token axis and spread per-trajectory values over their tokens"
                )
        if self.loss_mask.dtype != torch.bool:
            raise AlgorithmError(
                f"LossInputs.loss_mask has dtype {self.loss_mask.dtype}, expected torch.bool; convert with .bool()"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipRange:
    """How far a ratio may move before it stops paying.

    Attributes:
        low: the ratio is clipped at ``1 - low`` from below; in (0, 1], where 1 means no lower bound.
        high: the ratio is clipped at ``1 + high`` from above; above 0, may be inf.
        dual: for negative advantages the loss is capped at ``dual`` times the advantage (Dual-Clip PPO, arXiv
            1912.09729), above 1; None for no cap.

    Raises:
        AlgorithmError: a bound is out of its range.
    """

    low: float
    high: float
    dual: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.low <= 1:
            raise AlgorithmError(f"ClipRange.low is {self.low}, expected in (0, 1]; 1 means no lower bound")
        if not self.high > 0:
            raise AlgorithmError(f"ClipRange.high is {self.high}, expected above 0; inf means no upper bound")
        if self.dual is not None and not self.dual > 1:
            raise AlgorithmError(f"ClipRange.dual is {self.dual}, expected above 1, or None for no cap")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """What a policy loss returns.

    Attributes:
        loss: scalar to minimise, this microbatch's share of the batch's loss; carries gradient.
        stats: detached figures, merged over microbatches by ``stats.merge_statistics``: ``ppo_kl`` (mean of
            old minus new logprob), ``pg_clipfrac`` and ``pg_clipfrac_lower`` (share of clipped, and of
            dual-clipped, tokens; of trajectories in gspo), ``ratio_mean`` and ``ratio_max`` (over tokens;
            over trajectories in gspo).
    """

    loss: Float[Tensor, ""]
    stats: Mapping[str, Statistic]


@runtime_checkable
class _Objective(Protocol):
    def __call__(self, inputs: LossInputs, *, totals: BatchTotals, clip: ClipRange) -> LossOutput: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """A named objective with what belongs to it.

    Attributes:
        objective: the function.
        aggregation: its denominator; KL and entropy terms beside it use the same.
        default_clip: the clip range its source reports.
    """

    objective: _Objective
    aggregation: Aggregation
    default_clip: ClipRange

    def __call__(self, inputs: LossInputs, *, totals: BatchTotals, clip: ClipRange) -> LossOutput:
        """Return the loss of one microbatch; see the objective's own docstring."""
        return self.objective(inputs, totals=totals, clip=clip)


def grpo_loss(inputs: LossInputs, *, totals: BatchTotals, clip: ClipRange) -> LossOutput:
    """Token-summed GRPO over all tokens of the batch (SinkFlex, arXiv 2608.10357; clip of PPO, arXiv
    1707.06347 eq. 7).

    ``-(1 / sum_i T_i) sum_i sum_t min(r A, clip(r, 1 - eps, 1 + eps) A)`` with ``r = exp(logprob -
    old_logprob)``.

    Args:
        inputs: one microbatch.
        totals: of the whole batch; ``tokens`` divides.
        clip: symmetric, ``low == high``.

    Raises:
        AlgorithmError: ``clip`` is not symmetric.
    """
    if clip.low != clip.high:
        raise AlgorithmError(
            f"grpo clips symmetrically but got low={clip.low}, high={clip.high}; choose 'dapo' for a clip-higher range"
        )
    return _clipped_loss(inputs, totals, clip, Aggregation.TOKEN_MEAN)


def sequence_mean_loss(inputs: LossInputs, *, totals: BatchTotals, clip: ClipRange) -> LossOutput:
    """GRPO as first published: the mean over each trajectory's tokens, then over trajectories (arXiv
    2402.03300 eq. 3).

    Long trajectories' tokens weigh less here; see ``grpo_loss`` for the arguments.
    """
    return _clipped_loss(inputs, totals, clip, Aggregation.SEQUENCE_MEAN)


def dr_grpo_loss(inputs: LossInputs, *, totals: BatchTotals, clip: ClipRange) -> LossOutput:
    """Dr. GRPO: the token sum over a constant, the number of trajectories times the token budget (arXiv
    2503.20783).

    Pair with the advantage estimator of the same name, which does not divide by the std.

    Args:
        inputs: one microbatch.
        totals: of the whole batch; ``trajectories * token_budget`` divides.
        clip: as PPO.

    Raises:
        AlgorithmError: ``totals.token_budget`` is None.
    """
    return _clipped_loss(inputs, totals, clip, Aggregation.CONSTANT)


def dapo_loss(inputs: LossInputs, *, totals: BatchTotals, clip: ClipRange) -> LossOutput:
    """DAPO: token mean with separate lower and upper clip bounds (arXiv 2503.14476 eq. 8).

    Its other parts are ``filtering.is_informative`` (dynamic sampling) and ``filtering.overlong_penalty``;
    see ``grpo_loss`` for the arguments.
    """
    return _clipped_loss(inputs, totals, clip, Aggregation.TOKEN_MEAN)


def gspo_loss(inputs: LossInputs, *, totals: BatchTotals, clip: ClipRange) -> LossOutput:
    """GSPO: one length-normalised ratio a trajectory, clipped as a whole (arXiv 2507.18071 eq. 5 and 7).

    ``s_i = exp(mean_t (logprob - old_logprob))``. Written in the token form of eq. 13-14, ``sg[s_i] * pi /
    sg[pi]``, whose value is ``s_i`` on every token and whose gradient weighs each token by ``s_i / T_i``; so
    advantages may differ between tokens.

    Args:
        inputs: one microbatch of whole trajectories.
        totals: of the whole batch; ``trajectories`` divides.
        clip: about a thousand times narrower than for token ratios, since ``s_i`` is a geometric mean.

    Raises:
        AlgorithmError: ``clip.dual`` is set, which the source does not define.
    """
    _refuse_dual(clip, "gspo")
    mask = inputs.loss_mask
    log_ratio = masked_log_ratio(inputs.logprobs, inputs.old_logprobs, mask)
    sums, index = trajectory_sums(log_ratio.detach(), inputs.trajectory_ids)
    lengths, _ = trajectory_sums(mask.to(log_ratio.dtype), inputs.trajectory_ids)
    sequence_log_ratio = sums / lengths.clamp(min=1)
    token_form = safe_exp(sequence_log_ratio)[index] * torch.exp(log_ratio - log_ratio.detach())
    advantages = _masked(inputs.advantages, mask)
    losses, clipped = _pessimistic(token_form, advantages, clip)
    # One trajectory is one clipping decision: count it once, at any of its trained tokens.
    clipped_tokens, _ = trajectory_sums((clipped & mask).to(log_ratio.dtype), inputs.trajectory_ids)
    trained, ratios = lengths > 0, safe_exp(sequence_log_ratio)
    stats = {
        "ppo_kl": Statistic.mean(-log_ratio, mask),
        "pg_clipfrac": Statistic.mean((clipped_tokens > 0).to(log_ratio.dtype), trained),
        "pg_clipfrac_lower": Statistic.mean(torch.zeros_like(ratios), trained),
        "ratio_mean": Statistic.mean(ratios, trained),
        "ratio_max": Statistic.maximum(ratios, trained),
    }
    return LossOutput(loss=_reduce(losses, inputs, totals, Aggregation.SEQUENCE_MEAN), stats=stats)


def cispo_loss(inputs: LossInputs, *, totals: BatchTotals, clip: ClipRange) -> LossOutput:
    """CISPO: the clipped ratio is a constant weight on the log-probability (MiniMax-M1, arXiv 2506.13585 eq.
    4-5).

    ``-(1 / sum_i T_i) sum_i sum_t sg[clip(r, 1 - low, 1 + high)] A logprob``. No token's gradient is ever
    dropped; a large ratio only stops growing. The loss *value* means little, its gradient is what counts.

    Args:
        inputs: one microbatch.
        totals: of the whole batch; ``tokens`` divides.
        clip: the source sets no lower bound (``low=1``).

    Raises:
        AlgorithmError: ``clip.dual`` is set, which the source does not define.
    """
    _refuse_dual(clip, "cispo")
    mask = inputs.loss_mask
    log_ratio = masked_log_ratio(inputs.logprobs, inputs.old_logprobs, mask)
    ratio = safe_exp(log_ratio)
    weight = ratio.detach().clamp(1 - clip.low, 1 + clip.high)
    losses = -weight * _masked(inputs.advantages, mask) * _masked(inputs.logprobs, mask)
    stats = _token_stats(log_ratio, ratio, mask, clipped=ratio != weight, dual_clipped=torch.zeros_like(mask))
    return LossOutput(loss=_reduce(losses, inputs, totals, Aggregation.TOKEN_MEAN), stats=stats)


def _clipped_loss(inputs: LossInputs, totals: BatchTotals, clip: ClipRange, how: Aggregation) -> LossOutput:
    """PPO's clipped surrogate on token ratios, optionally dual-clipped, under one of the denominators."""
    mask = inputs.loss_mask
    log_ratio = masked_log_ratio(inputs.logprobs, inputs.old_logprobs, mask)
    ratio = safe_exp(log_ratio)
    advantages = _masked(inputs.advantages, mask)
    losses, clipped = _pessimistic(ratio, advantages, clip)
    dual_clipped = torch.zeros_like(mask)
    if clip.dual is not None:
        cap = -clip.dual * advantages
        dual_clipped = (advantages < 0) & (losses > cap)
        losses = torch.where(dual_clipped, cap, losses)
    stats = _token_stats(log_ratio, ratio, mask, clipped=clipped, dual_clipped=dual_clipped)
    return LossOutput(loss=_reduce(losses, inputs, totals, how), stats=stats)


def _pessimistic(
    ratio: Float[Tensor, " N"], advantages: Float[Tensor, " N"], clip: ClipRange
) -> tuple[Float[Tensor, " N"], Bool[Tensor, " N"]]:
    """Return [N] losses ``-min(r A, clip(r) A)`` and [N] True where the clipped branch is strictly smaller."""
    plain = ratio * advantages
    bounded = ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
    return -torch.minimum(plain, bounded), bounded < plain


def _token_stats(
    log_ratio: Float[Tensor, " N"],
    ratio: Float[Tensor, " N"],
    mask: Bool[Tensor, " N"],
    *,
    clipped: Bool[Tensor, " N"],
    dual_clipped: Bool[Tensor, " N"],
) -> dict[str, Statistic]:
    """Figures over trained tokens."""
    return {
        "ppo_kl": Statistic.mean(-log_ratio, mask),
        "pg_clipfrac": Statistic.mean(clipped.to(ratio.dtype), mask),
        "pg_clipfrac_lower": Statistic.mean(dual_clipped.to(ratio.dtype), mask),
        "ratio_mean": Statistic.mean(ratio, mask),
        "ratio_max": Statistic.maximum(ratio, mask),
    }


def _reduce(
    losses: Float[Tensor, " N"], inputs: LossInputs, totals: BatchTotals, how: Aggregation
) -> Float[Tensor, ""]:
    """Weigh by the mismatch correction, then aggregate."""
    if inputs.correction is not None:
        losses = losses * _masked(inputs.correction, inputs.loss_mask)
    return aggregate(losses, loss_mask=inputs.loss_mask, trajectory_ids=inputs.trajectory_ids, totals=totals, how=how)


def _masked(values: Float[Tensor, " N"], mask: Bool[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Zero what is masked, so that NaN or inf there cannot reach a product's gradient."""
    return torch.where(mask, values, values.new_zeros(()))


def _refuse_dual(clip: ClipRange, name: str) -> None:
    if clip.dual is not None:
        raise AlgorithmError(f"{name} cannot honour ClipRange.dual={clip.dual}; set it to None")


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "grpo": PolicyLoss(
        objective=grpo_loss,
        aggregation=Aggregation.TOKEN_MEAN,
        default_clip=ClipRange(low=0.2, high=0.2),
    ),
    "seq_mean": PolicyLoss(
        objective=sequence_mean_loss,
        aggregation=Aggregation.SEQUENCE_MEAN,
        default_clip=ClipRange(low=0.2, high=0.2),
    ),
    "dr_grpo": PolicyLoss(
        objective=dr_grpo_loss,
        aggregation=Aggregation.CONSTANT,
        default_clip=ClipRange(low=0.2, high=0.2),
    ),
    "dapo": PolicyLoss(
        objective=dapo_loss,
        aggregation=Aggregation.TOKEN_MEAN,
        default_clip=ClipRange(low=0.2, high=0.28),
    ),
    "gspo": PolicyLoss(
        objective=gspo_loss,
        aggregation=Aggregation.SEQUENCE_MEAN,
        default_clip=ClipRange(low=3e-4, high=4e-4),
    ),
    "cispo": PolicyLoss(
        objective=cispo_loss,
        aggregation=Aggregation.TOKEN_MEAN,
        default_clip=ClipRange(low=1.0, high=4.0),
    ),
}
"""Objectives by name. CISPO's source reports no bounds: ratios up to 5 after ScaleRL (arXiv 2510.13786)."""
