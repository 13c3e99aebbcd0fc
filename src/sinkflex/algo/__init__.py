"""Reinforcement-learning objectives as pure tensor functions: no configuration, no I/O, no state.

``advantages`` (one a trajectory) and ``losses`` (flat tokens) hold the objectives, ``aggregation`` their
denominators, ``kl`` and ``correction`` the terms beside them, ``filtering`` what DAPO leaves out, ``stats``
the figures they report, ``evaluation`` scores with intervals, and ``logprobs`` log-probabilities without a
[T, V] tensor.
"""

from sinkflex.algo.advantages import ADVANTAGE_ESTIMATORS, group_advantages, leave_one_out_advantages
from sinkflex.algo.aggregation import Aggregation, BatchTotals, aggregate
from sinkflex.algo.kl import KL_ESTIMATORS
from sinkflex.algo.losses import POLICY_LOSSES, ClipRange, LossInputs, LossOutput, PolicyLoss
from sinkflex.algo.stats import Statistic, merge_statistics

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "Aggregation",
    "BatchTotals",
    "ClipRange",
    "LossInputs",
    "LossOutput",
    "PolicyLoss",
    "Statistic",
    "aggregate",
    "group_advantages",
    "leave_one_out_advantages",
    "merge_statistics",
]
