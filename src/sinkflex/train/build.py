"""From a checked recipe to a run's parts, by plain construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import torch

import sinkflex.envs  # noqa: F401  (registers the Gymnasium ids)
from sinkflex.algo import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, ClipRange, group_advantages
from sinkflex.chat import Renderer
from sinkflex.config import Recipe
from sinkflex.models import Policy
from sinkflex.rollout.collector import Collector, FailurePolicy, GroupSpec
from sinkflex.rollout.engines.local import LocalEngine
from sinkflex.rollout.episode import EpisodeLimits
from sinkflex.rollout.trajectory import Group
from sinkflex.train.policy_setup import OnWarmstartStep, WarmstartRecord, make_renderer, prepare_policy
from sinkflex.train.reference import Reference
from sinkflex.train.sampling import Collect, GroupSource
from sinkflex.train.tasks import TaskSampler, held_out_tasks
from sinkflex.train.trainer import Estimator, RewardSettings, Schedule, Trainer
from sinkflex.train.update import PolicyUpdater, UpdateSettings


def make_env(recipe: Recipe, **changes: Any) -> Any:
    """Make one environment of the run.

    Args:
        recipe: its ``[env]`` section.
        **changes: keyword arguments that override the recipe's.
    """
    section = recipe.env
    chosen: dict[str, Any] = {
        "split": section.train_split,
        "prompt": section.prompt,
        "user": section.user,
        "max_steps": section.max_steps,
        "max_invalid_actions": section.max_invalid_actions,
        **section.kwargs,
        **changes,
    }
    given = {name: value for name, value in chosen.items() if value is not None}
    return gymnasium.make(section.id, disable_env_checker=True, **given)


def list_tasks(recipe: Recipe, env: Any, split: str) -> list[str]:
    """All tasks of a split in the recipe's tiers, in the environment's order."""
    tiers: Sequence[str | None] = recipe.env.tier or (None,)
    return [task_id for tier in tiers for task_id in env.unwrapped.task_ids(split, tier)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """Everything a run is made of.

    Attributes:
        policy: what is trained.
        warmstart: how it came about.
        renderer: its chat format.
        trainer: runs train steps.
        collect_validation: samples groups at the validation temperature.
        validation_tasks: the held-out tasks, the same ones every time.
        floor_env: an environment for agents that write plain text.
    """

    policy: Policy
    warmstart: WarmstartRecord
    renderer: Renderer
    trainer: Trainer
    collect_validation: Collect
    validation_tasks: list[str]
    floor_env: Any


def build_parts(recipe: Recipe, *, on_warmstart_step: OnWarmstartStep) -> Parts:
    """Build a run's parts, warm start included.

    Args:
        recipe: the run.
        on_warmstart_step: progress of supervised training.
    """
    env = make_env(recipe)
    train_tasks = list_tasks(recipe, env, recipe.env.train_split)
    held_out = list_tasks(recipe, env, recipe.env.validation_split)
    policy, warmstart = prepare_policy(recipe, env, train_tasks, on_step=on_warmstart_step)
    # torch seeds its generator anew in every process; here on the run's seed decides.
    torch.manual_seed(recipe.run.seed)
    renderer = make_renderer(recipe, policy.tokenizer)
    engine = LocalEngine(
        policy.model,
        max_slots=recipe.rollout.slots,
        max_length=recipe.rollout.max_length,
        prefill_chunk=recipe.rollout.prefill_chunk,
    )
    collector = Collector(
        make_env=lambda: make_env(recipe),
        renderer=renderer,
        client=engine,
        limits=EpisodeLimits(
            max_length=recipe.rollout.max_length,
            max_new_tokens=recipe.rollout.max_new_tokens,
            step_timeout_s=recipe.env.step_timeout_s,
        ),
        max_concurrent=recipe.rollout.slots,
        with_tools=recipe.env.prompt == "full",
        env_mode=recipe.env.mode,
        failures=FailurePolicy(retries=recipe.rollout.retries, max_share=recipe.rollout.max_failed_share),
    )
    return Parts(
        policy=policy,
        warmstart=warmstart,
        renderer=renderer,
        trainer=_trainer(recipe, policy, train_tasks, _collect_at(collector, recipe.rollout.temperature), engine),
        collect_validation=_collect_at(collector, recipe.validation.temperature),
        validation_tasks=held_out_tasks(held_out, count=recipe.validation.tasks),
        floor_env=env,
    )


def _collect_at(collector: Collector, temperature: float) -> Collect:
    def collect(specs: Sequence[GroupSpec], seed: int) -> list[Group]:
        return collector.run(specs, seed=seed, temperature=temperature)

    return collect


def _estimator(recipe: Recipe) -> Estimator:
    algo = recipe.algo
    if algo.estimator == "grpo":
        scale = algo.loss != "dr_grpo" if algo.scale_by_std is None else algo.scale_by_std
        return partial(group_advantages, scale=scale, ddof=algo.ddof, eps=algo.eps)
    return ADVANTAGE_ESTIMATORS[algo.estimator]


def clip_range(recipe: Recipe) -> ClipRange:
    """The recipe's ratio bounds, where it sets them, and those of the loss's source elsewhere."""
    algo, default = recipe.algo, POLICY_LOSSES[recipe.algo.loss].default_clip
    return ClipRange(
        low=default.low if algo.clip_low is None else algo.clip_low,
        high=default.high if algo.clip_high is None else algo.clip_high,
        dual=algo.dual_clip,
    )


def _trainer(
    recipe: Recipe,
    policy: Policy,
    task_ids: Sequence[str],
    collect: Collect,
    engine: LocalEngine,
) -> Trainer:
    algo, optim, rollout = recipe.algo, recipe.optim, recipe.rollout
    matrices = [p for p in policy.trainable().values() if p.dim() > 1]
    others = [p for p in policy.trainable().values() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=optim.lr,
        betas=optim.betas,
    )
    settings = UpdateSettings(
        loss=algo.loss,
        clip=clip_range(recipe),
        kl_coef=algo.kl_coef,
        kl_kind=algo.kl_kind,
        entropy_coef=algo.entropy_coef,
        correction=algo.correction,
        correction_cap=algo.correction_cap,
        temperature=rollout.temperature,
        updates_per_batch=algo.updates_per_batch,
        minibatches=algo.minibatches,
        microbatch_tokens=recipe.train.microbatch_tokens,
        prefix_tree=recipe.train.prefix_tree,
        max_grad_norm=optim.max_grad_norm,
        token_budget=rollout.max_length,
        seed=recipe.run.seed,
    )
    reference = Reference(policy) if algo.kl_coef else None
    source = GroupSource(
        collect,
        TaskSampler(task_ids, seed=recipe.run.seed),
        split=recipe.env.train_split,
        group_size=rollout.group_size,
        groups_per_step=rollout.tasks_per_step,
        dynamic_sampling=algo.dynamic_sampling,
        max_refills=algo.max_refills,
        seed=recipe.run.seed,
    )
    return Trainer(
        policy=policy,
        source=source,
        updater=PolicyUpdater(policy, reference, optimizer, settings),
        rewards=RewardSettings(
            estimator=_estimator(recipe),
            overlong=algo.overlong,
            overlong_buffer=algo.overlong_buffer,
            max_length=rollout.max_length,
        ),
        schedule=Schedule(lr=optim.lr, warmup_steps=optim.warmup_steps, steps=recipe.train.steps, kind=optim.schedule),
        weights_changed=engine.reset_cache,
    )
