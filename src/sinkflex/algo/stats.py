"""Figures that survive being split: microbatches and ranks report parts, the merge is the whole batch's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkflex.errors import AlgorithmError


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistic:
    """One part of a figure, detached and without device synchronisation.

    Attributes:
        reduction: how parts combine. ``mean`` divides the summed ``value`` by the summed ``count``.
        value: scalar sum (``mean``) or extreme (``max``).
        count: scalar number of items behind ``value``: tokens or trajectories, whichever the figure is about.
    """

    reduction: Literal["mean", "max"]
    value: Float[Tensor, ""]
    count: Float[Tensor, ""]

    @classmethod
    def mean(cls, values: Float[Tensor, " N"], mask: Bool[Tensor, " N"]) -> Statistic:
        """Mean of ``values`` where ``mask`` is True, summed in fp64."""
        kept = torch.where(mask, values.detach(), values.new_zeros(()))
        return cls(reduction="mean", value=kept.double().sum(), count=mask.double().sum())

    @classmethod
    def maximum(cls, values: Float[Tensor, " N"], mask: Bool[Tensor, " N"]) -> Statistic:
        """Largest of ``values`` where ``mask`` is True."""
        kept = torch.where(mask, values.detach().double(), -math.inf)
        floor = kept.new_full((1,), -math.inf)
        return cls(reduction="max", value=torch.cat([kept, floor]).max(), count=mask.double().sum())


def merge_statistics(parts: Iterable[Mapping[str, Statistic]]) -> dict[str, float]:
    """Combine the parts of one step into plain numbers.

    Args:
        parts: one mapping a microbatch; a name may be missing from some.

    Returns:
        Name to value. A figure with no item behind it in any part (an all-masked batch) is left out, not NaN.

    Raises:
        AlgorithmError: one name comes with two reductions.
    """
    gathered: dict[str, list[Statistic]] = {}
    for part in parts:
        for name, statistic in part.items():
            gathered.setdefault(name, []).append(statistic)
    merged: dict[str, float] = {}
    for name, statistics in gathered.items():
        reductions = {statistic.reduction for statistic in statistics}
        if len(reductions) > 1:
            raise AlgorithmError(
                f"statistic {name!r} comes with reductions {sorted(reductions)}, expected one; rename one of them"
            )
        count = sum(float(statistic.count) for statistic in statistics)
        if count == 0:
            continue
        values = [float(statistic.value) for statistic in statistics]
        merged[name] = max(values) if reductions == {"max"} else sum(values) / count
    return merged
