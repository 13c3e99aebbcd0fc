"""Recipe sections that say how the policy learns: warm start, rollout, algorithm, optimiser, train step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sinkflex.config.section import Pair, Section


class WarmstartSection(Section):
    """Supervised training on oracle dialogues to a deliberately imperfect policy. Cached by content hash."""

    enabled: bool = True
    """Run (or load from the cache) a warm start before the first train step."""

    dialogues: int = Field(default=4000, ge=1)
    """Dialogues played by the oracle on training tasks."""

    slip_rate: float = Field(default=0.15, ge=0, le=1)
    """Chance, at each agent turn, that the demonstration shows a plausible mistake instead. Keeps the policy
    imperfect and diverse, so that groups differ and there is something left to learn."""

    steps: int = Field(default=1000, ge=1)
    """Optimiser steps at most."""

    batch_tokens: int = Field(default=4096, ge=64)
    """Tokens a step, packed without padding."""

    lr: float = Field(default=3e-3, gt=0)
    """Peak learning rate."""

    copy_sequences_steps: int = Field(default=600, ge=0)
    """For so many first steps every second batch is short random copying, which teaches copying ids early."""

    bare_steps: int = Field(default=0, ge=0)
    """For so many first steps the dialogues come without system prompt and tools. Where those take thousands of tokens,
    the dialogues are learnt several times faster without them; the steps that are left put them in their place."""

    prefix_tree: Literal["auto", "on", "off"] = "off"
    """Hold the system prompt once per batch: right for long prompts, no gain for brief ones."""

    seed: int | None = Field(default=None, ge=0)
    """Seed of demonstrations and order. Unset: ``run.seed``."""

    cache_dir: str | None = None
    """Where warm starts are kept. Unset: ``~/.cache/sinkflex``."""


class RolloutSection(Section):
    """How episodes are sampled."""

    slots: int = Field(default=128, ge=1)
    """Episodes in flight at once; each holds its K/V between turns."""

    group_size: int = Field(default=8, ge=1)
    """Trajectories of one task and start state (G)."""

    tasks_per_step: int = Field(default=16, ge=1)
    """Groups a train step."""

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; log-probabilities on both sides are taken at it."""

    max_new_tokens: int = Field(default=48, ge=1)
    """Tokens one agent turn may sample."""

    max_length: int = Field(default=512, ge=16)
    """Tokens a whole trajectory may hold; a longer one ends with ``context_length``."""

    prefill_chunk: int = Field(default=4096, ge=16)
    """Prompt tokens fed to the model in one forward pass while sampling; bounds memory."""

    retries: int = Field(default=1, ge=0)
    """Times an episode is started again after an infrastructure failure."""

    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """Share of a step's episodes that may fail for good; above it the run stops with the reasons."""


class AlgoSection(Section):
    """The objective. The defaults are the paper's GRPO."""

    estimator: Literal["grpo", "rloo"] = "grpo"
    """Advantage estimator: each return against its group's mean, or against the mean of the others."""

    scale_by_std: bool | None = None
    """Divide centred returns by the group's standard deviation (GRPO), or not (Dr. GRPO). Unset: not with
    ``loss = "dr_grpo"``, else yes."""

    ddof: Literal[0, 1] = 0
    """Standard deviation with N (0) or N - 1 (1) in the denominator."""

    eps: float = Field(default=1e-4, gt=0)
    """Added to the standard deviation, in reward units."""

    loss: Literal["grpo", "seq_mean", "dr_grpo", "dapo", "gspo", "cispo"] = "grpo"
    """Policy loss; ``grpo`` sums over tokens and divides by their total number."""

    clip_low: float | None = Field(default=None, gt=0, le=1)
    """Ratios are clipped at 1 - clip_low; 1 is no lower bound. Unset: what the loss's source reports."""

    clip_high: float | None = Field(default=None, gt=0)
    """Ratios are clipped at 1 + clip_high; above ``clip_low`` it is DAPO's clip-higher. Unset: what the loss's source
    reports."""

    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of negative advantages at this multiple. Unset: no bound."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference policy; 0 keeps no reference."""

    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator (Schulman): k3 is unbiased and never negative."""

    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""

    correction: Literal["none", "tis", "mis"] = "none"
    """Importance correction of the sampler's against the trainer's probabilities: truncated or masked."""

    correction_cap: float = Field(default=2.0, gt=1)
    """Bound of the correction weight."""

    updates_per_batch: int = Field(default=1, ge=1)
    """Passes over a batch of trajectories."""

    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps a pass; each gets whole trajectories."""

    dynamic_sampling: bool = False
    """Replace groups whose members all got the same score (DAPO); they teach nothing."""

    max_refills: int = Field(default=2, ge=0)
    """Further rounds of sampling a step may spend on replacing them."""

    overlong: Literal["keep", "mask", "penalty"] = "keep"
    """Trajectories cut by a budget: train on them, leave them out, or lower their reward softly."""

    overlong_buffer: int = Field(default=64, ge=1)
    """With ``overlong = "penalty"``: last tokens of ``rollout.max_length`` over which it grows to 1."""


class OptimSection(Section):
    """The optimiser."""

    name: Literal["adamw"] = "adamw"
    """Optimiser."""

    lr: float = Field(default=3e-4, ge=0)
    """Peak learning rate; 0 trains nothing (a control run)."""

    betas: Pair = (0.9, 0.95)
    """Decay of the first and second moment."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, on matrices only."""

    warmup_steps: int = Field(default=2, ge=0)
    """Train steps over which the rate rises linearly."""

    schedule: Literal["constant", "cosine"] = "constant"
    """Rate after warm-up; ``cosine`` falls to a tenth of the peak at the last step."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""


class TrainSection(Section):
    """The loop."""

    steps: int = Field(default=40, ge=1)
    """Train steps: one batch of rollouts each."""

    microbatch_tokens: int = Field(default=8192, ge=64)
    """Tokens in one forward and backward pass; gradients are accumulated, results do not depend on it."""

    prefix_tree: Literal["auto", "on", "off"] = "auto"
    """Hold a group's shared prefix once in training rows; ``auto`` does so where it pays and says so."""
