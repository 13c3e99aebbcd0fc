"""Advantages without a value model: each trajectory against the others of its group.

All functions take one reward per *trajectory*; spread the result over its tokens with
``advantages[index_of_the_token's_trajectory]``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkflex.errors import AlgorithmError


def group_advantages(
    rewards: Float[Tensor, " N"], group_ids: Int[Tensor, " N"], *, scale: bool, ddof: int, eps: float
) -> Float[Tensor, " N"]:
    """Centre each reward on its group's mean; optionally divide by the group's std (GRPO, arXiv 2402.03300
    eq. 1).

    Args:
        rewards: [N] episode returns, finite.
        group_ids: [N] equal ids share one task and start state; order is free.
        scale: True divides by (std + eps); False only centres (Dr. GRPO, arXiv 2503.20783).
        ddof: 0 population, 1 sample; implementations disagree, so it is said.
        eps: added to std, in reward units.

    Returns:
        [N] advantages, no gradient. A constant group gives exact zeros, also where its float mean is off by a
        bit (eight rewards of 0.7).

    Raises:
        AlgorithmError: a group has fewer than two members, or a reward is not finite; the message carries the
            group id.
    """
    if ddof not in (0, 1):
        raise AlgorithmError(f"ddof is {ddof}, expected 0 (population) or 1 (sample)")
    if eps < 0:
        raise AlgorithmError(f"eps is {eps}, expected at least 0 reward units")
    index, sizes = _checked_groups(rewards, group_ids)
    centred = _centred(rewards, index, sizes)
    if scale:
        squares = torch.zeros_like(sizes).index_add(0, index, centred * centred)
        std = (squares / (sizes - ddof)).sqrt()[index]
        # 0 / 0 in a constant group with eps = 0: its numerator is exactly 0, so any divisor will do.
        centred = centred / torch.where(centred == 0, 1.0, std + eps)
    return centred.to(rewards.dtype)


def leave_one_out_advantages(rewards: Float[Tensor, " N"], group_ids: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Subtract from each reward the mean of the *other* members (RLOO, arXiv 2402.14740 section 3).

    Args:
        rewards: [N] episode returns, finite.
        group_ids: [N] equal ids share one task and start state; order is free.

    Returns:
        [N] advantages, no gradient: the centred reward times n / (n - 1). A constant group gives exact zeros.

    Raises:
        AlgorithmError: as ``group_advantages``.
    """
    index, sizes = _checked_groups(rewards, group_ids)
    factor = (sizes / (sizes - 1))[index]
    return (_centred(rewards, index, sizes) * factor).to(rewards.dtype)


def _checked_groups(
    rewards: Float[Tensor, " N"], group_ids: Int[Tensor, " N"]
) -> tuple[Int[Tensor, " N"], Float[Tensor, " K"]]:
    """Return [N] each reward's group index and [K] group sizes in fp64, refusing what must not be trained on."""
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise AlgorithmError(
            f"rewards has shape {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)}, expected one "
            "[N] for both; pass one entry a trajectory"
        )
    ids, index, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    bad = ~torch.isfinite(rewards)
    if bad.any():
        first = int(bad.nonzero()[0])
        raise AlgorithmError(
            f"group {int(group_ids[first])} has reward {float(rewards[first])} at index {first}, expected a "
            "finite number; a failed episode must leave its group, not score"
        )
    if (counts < 2).any():
        lone = int(ids[counts < 2][0])
        raise AlgorithmError(
            f"group {lone} has 1 member, expected at least 2; drop it or sample its task again: alone there is "
            "no baseline"
        )
    return index, counts.double()


def _centred(rewards: Float[Tensor, " N"], index: Int[Tensor, " N"], sizes: Float[Tensor, " K"]) -> Float[Tensor, " N"]:
    """Return [N] fp64 rewards minus their group's mean; exactly 0 throughout a constant group."""
    values = rewards.detach().double()
    # Measured from the group's minimum, not from 0: a constant group is then all zeros before any rounding,
    # and a common shift of the rewards cancels before the sum.
    minimum = torch.full_like(sizes, torch.inf).scatter_reduce(0, index, values, "amin")
    excess = values - minimum[index]
    means = torch.zeros_like(sizes).index_add(0, index, excess) / sizes
    return excess - means[index]


AdvantageEstimator = Callable[[Float[Tensor, " N"], Int[Tensor, " N"]], Float[Tensor, " N"]]
"""``(rewards [N], group_ids [N]) -> advantages [N]``."""

ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {
    "grpo": partial(group_advantages, scale=True, ddof=1, eps=1e-6),
    "dr_grpo": partial(group_advantages, scale=False, ddof=1, eps=0.0),
    "rloo": leave_one_out_advantages,
}
"""Estimators by name. ``grpo`` divides by the sample std, as verl does."""
