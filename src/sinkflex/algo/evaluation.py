"""Scores of tasks by trials with their uncertainty: mean@k with a 95 % interval, pass@k and pass^k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

from sinkflex.errors import AlgorithmError

Z_95 = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean score over tasks.

    Attributes:
        value: mean over tasks of each task's mean over its trials.
        low: lower end of the 95 % interval.
        high: upper end.
        tasks: number of tasks.
        trials: number of trials of each task, the k of mean@k.
    """

    value: float
    low: float
    high: float
    tasks: int
    trials: int


def mean_at_k(scores: Sequence[Sequence[float]]) -> Estimate:
    """Estimate the mean score with an interval that treats *tasks*, not trials, as the independent draws.

    Binary scores (all 0 or 1) get Wilson's interval: with one trial a task on n tasks; with k trials on the
    effective number of draws ``p (1 - p) / se²``, where ``se`` is the standard error between task means
    (ddof=1), kept within [tasks, tasks * k]. So repeating a task many times never passes for having more
    tasks. Other scores get the normal interval ``value ± 1.96 se``, which wants some 30 tasks.

    Args:
        scores: one sequence a task, all of the same length k.

    Raises:
        AlgorithmError: no task, ragged or empty trials, a score that is not finite, or fewer than two tasks
            with scores that are not binary.
    """
    table = _checked_table(scores)
    tasks, trials = len(table), len(table[0])
    means = [fmean(row) for row in table]
    value = fmean(means)
    squared_error = variance(means) / tasks if tasks > 1 else 0.0
    if all(score in (0.0, 1.0) for row in table for score in row):
        draws = float(tasks)
        if tasks > 1 and 0 < value < 1:
            ceiling = draws * trials
            draws = min(max(value * (1 - value) / squared_error, draws), ceiling) if squared_error else ceiling
        low, high = wilson_interval(value, draws)
    elif tasks < 2:
        raise AlgorithmError("scores has 1 task, expected at least 2 for an interval of scores that are not 0 or 1")
    else:
        half = Z_95 * math.sqrt(squared_error)
        low, high = value - half, value + half
    return Estimate(value=value, low=low, high=high, tasks=tasks, trials=trials)


def wilson_interval(proportion: float, draws: float) -> tuple[float, float]:
    """Return Wilson's 95 % score interval of a proportion; inside [0, 1] and never of zero width (Wilson 1927).

    Args:
        proportion: observed, in [0, 1].
        draws: number of independent draws; may be fractional.
    """
    spread = Z_95**2 / draws
    centre = (proportion + spread / 2) / (1 + spread)
    half = Z_95 / (1 + spread) * math.sqrt(proportion * (1 - proportion) / draws + spread / (4 * draws))
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(successes: Sequence[int], *, trials: int, k: int) -> float:
    """Mean over tasks of the chance that at least one of k trials succeeds (unbiased; arXiv 2107.03374 eq.
    1).

    Args:
        successes: successful trials of each task, each between 0 and ``trials``.
        trials: trials of every task.
        k: between 1 and ``trials``.

    Raises:
        AlgorithmError: no task, or a count or k out of range.
    """
    _check_counts(successes, trials, k)
    return fmean(1 - math.comb(trials - count, k) / math.comb(trials, k) for count in successes)


def pass_hat_k(successes: Sequence[int], *, trials: int, k: int) -> float:
    """Mean over tasks of the chance that all of k trials succeed: pass^k of tau-bench (unbiased; arXiv
    2406.12045).

    Arguments and errors as ``pass_at_k``.
    """
    _check_counts(successes, trials, k)
    return fmean(math.comb(count, k) / math.comb(trials, k) for count in successes)


def _checked_table(scores: Sequence[Sequence[float]]) -> list[list[float]]:
    table = [[float(score) for score in row] for row in scores]
    if not table:
        raise AlgorithmError("scores is empty, expected one sequence of trials a task")
    lengths = sorted({len(row) for row in table})
    if lengths[0] == 0 or len(lengths) > 1:
        raise AlgorithmError(
            f"tasks have {lengths} trials, expected one number above 0 for all; run the missing trials again"
        )
    for task, row in enumerate(table):
        if not all(math.isfinite(score) for score in row):
            raise AlgorithmError(f"task {task} has scores {row}, expected finite numbers; leave failed episodes out")
    return table


def _check_counts(successes: Sequence[int], trials: int, k: int) -> None:
    if not successes:
        raise AlgorithmError("successes is empty, expected one count a task")
    if not 1 <= k <= trials:
        raise AlgorithmError(f"k is {k}, expected between 1 and trials={trials}")
    for task, count in enumerate(successes):
        if not 0 <= count <= trials:
            raise AlgorithmError(f"task {task} has {count} successes, expected between 0 and trials={trials}")
