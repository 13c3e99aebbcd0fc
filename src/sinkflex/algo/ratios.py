"""Log-ratios of two policies and the exponent that cannot overflow: what every objective here starts from."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LOG_RATIO_LIMIT = 10.0
"""Above this log-ratio (a ratio of about 22,000) ``safe_exp`` goes on along its tangent."""


def masked_log_ratio(
    logprobs: Float[Tensor, " N"], other_logprobs: Float[Tensor, " N"], loss_mask: Bool[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """Return ``logprobs - other_logprobs`` where the mask is True and exactly 0 elsewhere.

    Both sides are masked before the subtraction, so what lies in masked positions (inf - inf, NaN, the
    padding of a packed row) reaches neither the value nor the gradient.

    Args:
        logprobs: [N] natural-log probabilities; carries gradient.
        other_logprobs: [N] the policy compared with; gradient flows if it has one.
        loss_mask: [N] True = counts.
    """
    zero = logprobs.new_zeros(())
    return torch.where(loss_mask, logprobs, zero) - torch.where(loss_mask, other_logprobs, zero)


def safe_exp(log_ratio: Float[Tensor, " N"], limit: float = LOG_RATIO_LIMIT) -> Float[Tensor, " N"]:
    """Return ``exp(log_ratio)``, continued linearly above ``limit``.

    Up to ``limit`` value and gradient are exact. Above it both follow the tangent at ``limit``: the value
    still grows and the gradient stays at ``exp(limit)``. A plain clamp would stop the gradient there, and in
    the k3 estimator that *reverses* its sign (``exp(clamp(x)) - x - 1`` has derivative -1 for large x),
    pushing the policy away.
    """
    # Two branches and not one sum: exp(min(x, limit)) + exp(limit) * (x - min(x, limit)) has the same value, but its
    # gradient cancels two terms of size exp(limit), which costs four digits.
    tangent = math.exp(limit) * (1 + log_ratio - limit)
    return torch.where(log_ratio > limit, tangent, torch.exp(log_ratio.clamp(max=limit)))
