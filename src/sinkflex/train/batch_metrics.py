"""Figures about a step's trajectories under verl's names. Every statistic counts trajectories, not rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from sinkflex.train.sampling import StepGroups
from sinkflex.types import StopReason


def batch_metrics(groups: StepGroups) -> dict[str, float]:
    """Summarise everything sampled in a step, groups that were left out included.

    Returns:
        ``critic/score``, ``critic/rewards``, ``response_length``, ``prompt_length``, ``num_turns`` (each mean, max,
        min), shares of stop reasons, invalid actions, and what became of the groups.
    """
    sampled = groups.sampled
    metrics = {
        "training/failed_episodes": float(len(groups.failures)),
        "training/constant_groups": float(groups.constant_groups),
        "training/lone_groups": float(groups.lone_groups),
        "training/sampling_rounds": float(groups.rounds),
        "training/groups": float(len(groups.groups)),
        "training/trajectories": float(len(sampled)),
    }
    if not sampled:
        return metrics
    metrics |= spread("critic/score", [trajectory.score for trajectory in sampled])
    metrics |= spread("critic/rewards", [trajectory.reward for trajectory in sampled])
    metrics |= spread("response_length", [trajectory.ledger.num_sampled for trajectory in sampled])
    metrics |= spread("prompt_length", [trajectory.ledger.prompt_length for trajectory in sampled])
    metrics |= spread("num_turns", [trajectory.turns for trajectory in sampled])
    metrics["env/invalid_actions/mean"] = fmean(trajectory.invalid_actions for trajectory in sampled)
    reasons = Counter(trajectory.stop_reason for trajectory in sampled)
    metrics |= {f"env/stop/{reason}": reasons[reason] / len(sampled) for reason in StopReason}
    return metrics


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return mean, max and min of values, at least one, as ``<name>/mean`` and so on."""
    return {
        f"{name}/mean": fmean(values),
        f"{name}/max": float(max(values)),
        f"{name}/min": float(min(values)),
    }
