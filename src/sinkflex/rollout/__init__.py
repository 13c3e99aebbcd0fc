"""Rollouts: exact tokens, masks and log-probabilities from an episode to a training batch.

``Collector`` plays groups of episodes through an ``LLMClient`` (``engines.local``, or one of your own with the same two
methods) and records each as a ``Trajectory`` over an append-only ``TokenLedger``; ``batch`` lays them out for training.
"""

from sinkflex.rollout.client import Generation, LLMClient, SamplingParams
from sinkflex.rollout.collector import Collector, FailurePolicy, GroupSpec
from sinkflex.rollout.episode import EpisodeLimits
from sinkflex.rollout.ledger import TokenLedger
from sinkflex.rollout.trajectory import EpisodeFailure, Group, Trajectory

__all__ = [
    "Collector",
    "EpisodeFailure",
    "EpisodeLimits",
    "FailurePolicy",
    "Generation",
    "Group",
    "GroupSpec",
    "LLMClient",
    "SamplingParams",
    "TokenLedger",
    "Trajectory",
]
