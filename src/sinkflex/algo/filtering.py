"""What a batch leaves out: groups that teach nothing, trajectories cut off by length (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkflex.errors import AlgorithmError


def is_informative(scores: Sequence[float], *, success_at: float = 1.0) -> bool:
    """Return True when some but not all members of a group succeeded (dynamic sampling, eq. 11).

    The decision looks at the binary outcome and not at the shaped reward: lengths or penalties make nearly
    every group's rewards differ, and the filter would then pass everything.

    Args:
        scores: the grader's score of each member of one group.
        success_at: a score of at least this counts as success.

    Raises:
        AlgorithmError: no scores.
    """
    if not scores:
        raise AlgorithmError("scores is empty, expected one score a member; drop a group whose episodes all failed")
    successes = sum(score >= success_at for score in scores)
    return 0 < successes < len(scores)


def overlong_penalty(lengths: Int[Tensor, " N"], *, max_length: int, buffer: int) -> Float[Tensor, " N"]:
    """Return DAPO's soft punishment of length, to be added to the reward (eq. 13).

    0 up to ``max_length - buffer`` tokens, then falling linearly to -1 at ``max_length``, and -1 beyond.

    Args:
        lengths: [N] trained tokens of each trajectory.
        max_length: tokens at which the punishment is full.
        buffer: tokens over which it grows, between 1 and ``max_length``.

    Raises:
        AlgorithmError: ``buffer`` is out of range.
    """
    if not 1 <= buffer <= max_length:
        raise AlgorithmError(f"buffer is {buffer}, expected between 1 and max_length={max_length} tokens")
    excess = (lengths - (max_length - buffer)).to(torch.float32)
    return -(excess / buffer).clamp(0, 1)


def overlong_filter(
    loss_mask: Bool[Tensor, " N"], trajectory_ids: Int[Tensor, " N"], truncated_ids: Int[Tensor, " M"]
) -> Bool[Tensor, " N"]:
    """Return the loss mask without the trajectories that a length budget cut off (overlong filtering, section
    3.4).

    Their reward still counts in the group's baseline. Count ``BatchTotals`` on the mask returned here, so
    that the tokens taken out leave the denominator too.

    Args:
        loss_mask: [N] True = trained.
        trajectory_ids: [N] equal ids mark one trajectory.
        truncated_ids: [M] ids of the trajectories to leave out; may be empty.
    """
    return loss_mask & ~torch.isin(trajectory_ids, truncated_ids)
