"""What would stop a run later, found before anything is trained or written."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import sinkflex.envs  # noqa: F401  (registers the ids)
from sinkflex.attention import hf
from sinkflex.chat import RENDERERS
from sinkflex.config import Recipe
from sinkflex.errors import ConfigError, MissingExtraError, ModelError, unknown_name
from sinkflex.train.build import list_tasks, make_env
from sinkflex.train.metrics import check_sinks
from sinkflex.train.policy_setup import pick_device


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What a recipe finds on this machine.

    Attributes:
        train_tasks: tasks of the training split and tiers; None where the environment's package is not installed.
        held_out_tasks: tasks of the validation split and tiers, or None.
        lacking: what the recipe needs and this machine has not: a device, packages. Another machine may have it.
    """

    train_tasks: int | None
    held_out_tasks: int | None
    lacking: tuple[MissingExtraError | ModelError, ...]


def preflight(recipe: Recipe) -> Preflight:
    """Check a recipe against this machine: environment, tasks, chat format, attention, model files, extras.

    Args:
        recipe: what is about to run.

    Raises:
        ConfigError: a name is unknown, the environment cannot be made, a split has no tasks, or the model's folder
            does not exist.
        EnvError: the environment does not take one of its options.
        TaskError: it has no such split or tier.
    """
    check_environment(recipe)
    if recipe.chat.renderer not in RENDERERS:
        raise ConfigError(f"chat.renderer: {unknown_name('chat format', recipe.chat.renderer, RENDERERS)}")
    _check_attention(recipe.model.attention)
    _check_model_path(recipe.model.path)
    lacking: list[MissingExtraError | ModelError] = []
    for need in (pick_device, _check_lora, check_sinks):
        try:
            need(recipe)
        except (MissingExtraError, ModelError) as error:
            lacking.append(error)
    try:
        env = _open_environment(recipe)
    except MissingExtraError as error:
        return Preflight(train_tasks=None, held_out_tasks=None, lacking=(*lacking, error))
    try:
        train, held_out = (_count_tasks(recipe, env, key) for key in ("train_split", "validation_split"))
    finally:
        env.close()
    return Preflight(train_tasks=train, held_out_tasks=held_out, lacking=tuple(lacking))


def check_environment(recipe: Recipe) -> None:
    """Refuse an environment id that nobody has registered; ``module:Id`` is left to Gymnasium, which imports it.

    Raises:
        ConfigError: the id is unknown; the message names the nearest.
    """
    if ":" not in recipe.env.id and recipe.env.id not in gymnasium.registry:
        ours = [name for name in gymnasium.registry if name.startswith("sinkflex/")]
        raise ConfigError(
            f"env.id: {unknown_name('environment', recipe.env.id, ours)} "
            "An id of your own is written 'module:Id-v0', so that its module is imported first."
        )


def _open_environment(recipe: Recipe) -> Any:
    try:
        return make_env(recipe)
    except (ImportError, TypeError, gymnasium.error.Error) as error:
        raise ConfigError(f"env.id = {recipe.env.id!r} cannot be made: {error}") from error


def _check_attention(name: str) -> None:
    hf.register()
    known = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if name not in known:
        raise ConfigError(f"model.attention: {unknown_name('attention implementation', name, known)}")


def _check_lora(recipe: Recipe) -> None:
    if recipe.model.lora.enabled and importlib.util.find_spec("peft") is None:
        raise MissingExtraError("model.lora.enabled needs peft; install it with: pip install 'sinkflex[train]'")


def _check_model_path(path: str | None) -> None:
    """Refuse a folder that is not there; a name with one slash or none may be a model hub's and is left to it."""
    if path is None:
        return
    local = path.startswith((".", "~", os.sep)) or path.count("/") > 1
    if local and not Path(path).expanduser().is_dir():
        raise ConfigError(f"model.path: there is no folder {path!r}; give a model's folder, or its name on a model hub")


def _count_tasks(recipe: Recipe, env: Any, key: str) -> int:
    split = getattr(recipe.env, key)
    count = len(list_tasks(recipe, env, split))
    if not count:
        tiers = ", ".join(recipe.env.tier) or "all tiers"
        raise ConfigError(f"env.{key} = {split!r} has no tasks in {recipe.env.id} ({tiers}); check env.tier too")
    return count
