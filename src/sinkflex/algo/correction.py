"""Importance weights against the gap between the sampler's and the trainer's probabilities.

The tokens were drawn from ``rollout_logprobs`` (the inference engine) while the objectives assume
``old_logprobs`` (the trainer with the same weights). Kernels, precisions and batch shapes differ, so the two
are never quite equal. With ``w = exp(old_logprobs - rollout_logprobs)`` the expectation is corrected by
weighing each token's loss; the weight is bounded (truncated) or the outliers are left out (masked), as its
variance is otherwise without limit. Both sides are at the sampling temperature.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkflex.algo.aggregation import trajectory_sums
from sinkflex.algo.ratios import masked_log_ratio, safe_exp
from sinkflex.errors import AlgorithmError


class WeightLevel(StrEnum):
    """What one weight belongs to.

    ``TOKEN``: each token's own ratio; low variance, biased. ``SEQUENCE``: the product over a trajectory, on
    all its tokens; unbiased, variance grows with length. ``GEOMETRIC``: the product's T-th root, comparable
    between lengths: a criterion for masking, not a weight that corrects anything.
    """

    TOKEN = "token"
    SEQUENCE = "sequence"
    GEOMETRIC = "geometric"


def importance_weights(
    old_logprobs: Float[Tensor, " N"],
    rollout_logprobs: Float[Tensor, " N"],
    *,
    loss_mask: Bool[Tensor, " N"],
    trajectory_ids: Int[Tensor, " N"],
    level: WeightLevel,
) -> Float[Tensor, " N"]:
    """Return the unbounded weights of trainer against sampler.

    Args:
        old_logprobs: [N] trainer, before the update.
        rollout_logprobs: [N] sampler, recorded when the token was drawn.
        loss_mask: [N] True = sampled and trained; elsewhere the weight is 0.
        trajectory_ids: [N] equal ids mark one trajectory, whole in one call.
        level: what one weight belongs to.

    Returns:
        [N] weights, no gradient, 0 where masked.
    """
    log_ratio = masked_log_ratio(old_logprobs.detach(), rollout_logprobs.detach(), loss_mask)
    if level is not WeightLevel.TOKEN:
        sums, index = trajectory_sums(log_ratio, trajectory_ids)
        if level is WeightLevel.GEOMETRIC:
            lengths, _ = trajectory_sums(loss_mask.to(log_ratio.dtype), trajectory_ids)
            sums = sums / lengths.clamp(min=1)
        log_ratio = sums[index]
    return torch.where(loss_mask, safe_exp(log_ratio), log_ratio.new_zeros(()))


def truncate_weights(weights: Float[Tensor, " N"], *, cap: float) -> Float[Tensor, " N"]:
    """Bound weights from above: truncated importance sampling, ``min(w, cap)`` (Ionides 2008; TIS of Yao et
    al. 2025).

    Args:
        weights: [N] from ``importance_weights``.
        cap: at least 1; 2 is usual for tokens.

    Raises:
        AlgorithmError: ``cap`` is below 1, which would shrink tokens that match exactly.
    """
    if cap < 1:
        raise AlgorithmError(f"cap is {cap}, expected at least 1: a token without mismatch has weight 1")
    return weights.clamp(max=cap)


def mask_weights(
    weights: Float[Tensor, " N"], criterion: Float[Tensor, " N"], *, low: float, high: float
) -> Float[Tensor, " N"]:
    """Leave out what lies outside a band: masked importance sampling, ``w * 1[low <= criterion <= high]``.

    The tokens left out stay in the loss's denominator, so their absence is not made up for by the others.

    Args:
        weights: [N] from ``importance_weights``, truncated or not.
        criterion: [N] what the band is laid on: the weights themselves, or those of another level, so that
            one far-off token or a drifting trajectory (``WeightLevel.GEOMETRIC``) takes out the whole
            trajectory.
        low: in [0, 1].
        high: at least 1.

    Raises:
        AlgorithmError: the band does not contain 1.
    """
    if not 0 <= low <= 1 <= high:
        raise AlgorithmError(
            f"the band is [{low}, {high}], expected 0 <= low <= 1 <= high: it must keep a perfect match"
        )
    return torch.where((criterion >= low) & (criterion <= high), weights, weights.new_zeros(()))


def mismatch_statistics(
    old_logprobs: Float[Tensor, " N"],
    rollout_logprobs: Float[Tensor, " N"],
    *,
    loss_mask: Bool[Tensor, " N"],
    weights: Float[Tensor, " N"],
) -> dict[str, float]:
    """Say how far sampler and trainer are apart, over all trained tokens of a batch.

    Args:
        old_logprobs: [N] trainer.
        rollout_logprobs: [N] sampler.
        loss_mask: [N] True = sampled and trained, at least one.
        weights: [N] the weights the loss will use.

    Returns:
        ``rollout_probs_diff_mean/max/std`` (of |difference of probabilities|, std with ddof=0),
        ``rollout_logprobs_diff_max`` (absolute), ``rollout_kl`` (k3 estimate of KL(sampler || trainer)),
        ``correction_mean``, ``correction_zero_fraction`` (share of tokens left out) and ``correction_ess``:
        (sum w)² / (n sum w²), 1 when all weights are equal, 1/n when one token carries everything, 0 when
        none does.

    Raises:
        AlgorithmError: no token is trained.
    """
    if not bool(loss_mask.any()):
        raise AlgorithmError("loss_mask has no True, expected at least one trained token to compare logprobs on")
    old, rollout = old_logprobs.detach()[loss_mask].double(), rollout_logprobs.detach()[loss_mask].double()
    used = weights.detach()[loss_mask].double()
    difference = (old.exp() - rollout.exp()).abs()
    log_ratio = old - rollout
    squares = used.square().sum()
    figures = {
        "rollout_probs_diff_mean": difference.mean(),
        "rollout_probs_diff_max": difference.max(),
        "rollout_probs_diff_std": difference.std(correction=0),
        "rollout_logprobs_diff_max": log_ratio.abs().max(),
        "rollout_kl": (safe_exp(log_ratio) - 1 - log_ratio).mean(),
        "correction_mean": used.mean(),
        "correction_zero_fraction": (used == 0).double().mean(),
        "correction_ess": torch.where(squares > 0, used.sum().square() / (used.numel() * squares), 0.0),
    }
    return {name: float(value) for name, value in figures.items()}
