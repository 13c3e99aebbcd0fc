"""KL divergence to a reference policy, estimated from the sampled tokens alone.

With ``d = logprob - ref_logprob`` of a token sampled from the policy (Schulman, "Approximating KL divergence",
2020),
the value, and the gradient that it has in expectation when the estimate is *added to the loss*:

- k1: ``d``. Gradient zero, since E[grad logprob] = 0. Useful as a penalty inside the reward, not as a loss.
- k2: ``d² / 2``. Gradient of KL(policy || ref), the one usually meant.
- k3: ``exp(-d) - 1 + d``. Gradient of KL(ref || policy). Its *value* estimates KL(policy || ref), is never
negative, and   varies less than k1.

So GRPO's k3 term pulls the policy to cover the reference, while k2 is the gradient of the reverse KL that the
formula names; near the reference both agree to first order. Temperature enters ``logprobs`` and
``ref_logprobs`` alike.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Bool, Float
from torch import Tensor

from sinkflex.algo.ratios import masked_log_ratio, safe_exp


def k1(
    logprobs: Float[Tensor, " N"], ref_logprobs: Float[Tensor, " N"], loss_mask: Bool[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """Return the plain log-ratio: unbiased in value, of either sign; as a loss its expected gradient is zero.

    Args:
        logprobs: [N] policy; carries gradient.
        ref_logprobs: [N] reference; no gradient.
        loss_mask: [N] True = sampled by the policy; elsewhere the result is 0.
    """
    return masked_log_ratio(logprobs, ref_logprobs, loss_mask)


def k2(
    logprobs: Float[Tensor, " N"], ref_logprobs: Float[Tensor, " N"], loss_mask: Bool[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """Return half the squared log-ratio: biased, with the gradient of KL(policy || ref); arguments as ``k1``."""
    return masked_log_ratio(logprobs, ref_logprobs, loss_mask).square() / 2


def k3(
    logprobs: Float[Tensor, " N"], ref_logprobs: Float[Tensor, " N"], loss_mask: Bool[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """Return ``exp(-d) - 1 + d``: unbiased, never negative (arXiv 2402.03300 eq. 4); arguments as ``k1``.

    Beyond ``ratios.LOG_RATIO_LIMIT`` the exponential goes on linearly, so a token that the policy has all but
    ruled out keeps a finite value and a gradient that still raises its probability.
    """
    log_ratio = masked_log_ratio(logprobs, ref_logprobs, loss_mask)
    return safe_exp(-log_ratio) - 1 + log_ratio


KLEstimator = Callable[[Float[Tensor, " N"], Float[Tensor, " N"], Bool[Tensor, " N"]], Float[Tensor, " N"]]
"""``(logprobs [N], ref_logprobs [N], loss_mask [N]) -> [N]``, 0 where masked."""

KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}
"""Estimators by name; reduce them with ``aggregation.aggregate``."""
