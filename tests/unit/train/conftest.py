"""A recipe small enough to train in seconds: a two-layer policy on the easy telecom tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sinkflex.config import Recipe, load_recipe

TINY = (
    "env.tier=easy",
    "model.tiny.hidden_size=32",
    "model.tiny.layers=2",
    "model.tiny.heads=2",
    "model.tiny.kv_heads=1",
    "model.tiny.head_dim=16",
    "model.tiny.intermediate_size=32",
    "model.tiny.vocab_size=700",
    "model.tiny.sliding_window=4",
    "warmstart.dialogues=40",
    "warmstart.steps=6",
    "warmstart.batch_tokens=512",
    "warmstart.copy_sequences_steps=2",
    "rollout.group_size=3",
    "rollout.tasks_per_step=2",
    "rollout.slots=6",
    "rollout.max_new_tokens=24",
    "rollout.max_length=320",
    "algo.dynamic_sampling=false",
    # The policy is too small to solve a task; a reward that falls with length gives every group something to learn.
    "algo.overlong=penalty",
    "algo.overlong_buffer=300",
    "optim.lr=1e-3",
    "train.steps=4",
    "validation.every=2",
    "validation.tasks=4",
    "validation.temperature=1.0",
    "checkpoint.every=1",
    "checkpoint.keep_last=8",
    "logging.tensorboard=false",
)


@pytest.fixture(scope="session")
def warmstart_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One warm-start cache for the whole session, so that only the first test trains it."""
    return tmp_path_factory.mktemp("warmstart")


@pytest.fixture
def tiny_recipe(warmstart_cache: Path) -> Callable[..., Recipe]:
    """``tiny_recipe("train.steps=2", ...)``: the tiny recipe with overrides."""

    def build(*overrides: str) -> Recipe:
        return load_recipe(None, [*TINY, f"warmstart.cache_dir={warmstart_cache}", *overrides])

    return build
