"""From a value per token to one number per batch: the three denominators that tell the objectives apart.

Every sum is divided by totals of the *whole* batch, never of the tokens at hand. Losses of microbatches,
however they are split, therefore add up to the loss of the batch, and so do their gradients.

Two trajectories of 1 and 3 trained tokens with values ``[8 | 1 2 3]``::

    token_mean      (8 + 1 + 2 + 3) / 4                  = 3.5
    sequence_mean   (8/1 + (1 + 2 + 3)/3) / 2            = 5.0
    constant        (8 + 1 + 2 + 3) / (2 * token_budget) = 0.7   with token_budget = 10
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkflex.errors import AlgorithmError


class Aggregation(StrEnum):
    """How token values become one number; the module docstring works an example."""

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN = "sequence_mean"
    CONSTANT = "constant"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTotals:
    """The denominators of one optimiser step, over all its microbatches (and ranks).

    Attributes:
        tokens: trained tokens (``loss_mask`` True); at least 1.
        trajectories: trajectories with at least one trained token; at least 1.
        token_budget: most tokens a trajectory could have trained on, a constant of the run; ``constant``
            needs it.

    Raises:
        AlgorithmError: a total is below 1, so there is nothing to train on.
    """

    tokens: int
    trajectories: int
    token_budget: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "trajectories", "token_budget"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise AlgorithmError(
                    f"BatchTotals.{name} is {value}, expected at least 1; a batch without trained tokens must "
                    "be skipped before the loss"
                )

    @classmethod
    def count(
        cls,
        *,
        loss_mask: Bool[Tensor, " N"],
        trajectory_ids: Int[Tensor, " N"],
        token_budget: int | None = None,
    ) -> BatchTotals:
        """Count a whole batch's trained tokens and the trajectories that own them.

        Args:
            loss_mask: [N] all tokens of the batch, True = trained.
            trajectory_ids: [N] equal ids mark one trajectory.
            token_budget: passed through.

        Raises:
            AlgorithmError: no token is trained.
        """
        owners = torch.unique(trajectory_ids[loss_mask])
        return cls(tokens=int(loss_mask.sum()), trajectories=owners.numel(), token_budget=token_budget)


def trajectory_sums(
    values: Float[Tensor, " N"], trajectory_ids: Int[Tensor, " N"]
) -> tuple[Float[Tensor, " K"], Int[Tensor, " N"]]:
    """Sum values over each trajectory.

    Args:
        values: [N] already zero where masked.
        trajectory_ids: [N] any integers; order is free.

    Returns:
        [K] sums, one a distinct id in ascending order, and [N] each token's index into them.
    """
    ids, index = torch.unique(trajectory_ids, return_inverse=True)
    return values.new_zeros(ids.numel()).index_add(0, index, values), index


def aggregate(
    values: Float[Tensor, " N"],
    *,
    loss_mask: Bool[Tensor, " N"],
    trajectory_ids: Int[Tensor, " N"],
    totals: BatchTotals,
    how: Aggregation,
) -> Float[Tensor, ""]:
    """Reduce token values to this microbatch's share of the batch's number.

    Args:
        values: [N] a loss, a KL or an entropy per token; masked positions may hold anything, NaN included.
        loss_mask: [N] True = counts.
        trajectory_ids: [N] equal ids mark one trajectory. ``sequence_mean`` needs each trajectory whole in
            one call.
        totals: denominators of the whole batch.
        how: which denominator.

    Returns:
        Scalar that carries the gradient of ``values``.

    Raises:
        AlgorithmError: ``constant`` without ``totals.token_budget``.
    """
    kept = torch.where(loss_mask, values, values.new_zeros(()))
    if how is Aggregation.TOKEN_MEAN:
        return kept.sum() / totals.tokens
    if how is Aggregation.SEQUENCE_MEAN:
        sums, _ = trajectory_sums(kept, trajectory_ids)
        lengths, _ = trajectory_sums(loss_mask.to(values.dtype), trajectory_ids)
        return (sums / lengths.clamp(min=1)).sum() / totals.trajectories
    if totals.token_budget is None:
        raise AlgorithmError(
            "aggregation 'constant' got BatchTotals.token_budget=None; give the run's largest number of "
            "trained tokens a trajectory, or choose token_mean"
        )
    return kept.sum() / (totals.trajectories * totals.token_budget)
