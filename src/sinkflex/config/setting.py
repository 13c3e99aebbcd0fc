"""Recipe sections that say what is trained: the run, the environment, the model and its chat format."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from sinkflex.config.section import Names, Section


class RunSection(Section):
    """What the run is called, where it goes and what it may use."""

    name: str = "run"
    """Names the run folder and the experiment in trackers."""

    seed: int = Field(default=0, ge=0)
    """Seeds every random part: weights, tasks, sampling. Equal seeds give equal runs on one machine."""

    out: str | None = None
    """Run folder. Unset: ``runs/<name>-seed<seed>``."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives. ``auto`` takes CUDA when there is a device."""

    threads: int = Field(default=0, ge=0)
    """CPU threads for tensor work; 0 uses every core the process may run on."""


class EnvSection(Section):
    """The environment, its tasks and its budgets."""

    id: str = "sinkflex/Telecom-v0"
    """A Gymnasium id; ``sinkflex env list`` shows those that ship."""

    tier: Names = ("easy",)
    """Difficulty tiers to draw tasks from, one name or a list. An empty list takes every tier."""

    prompt: Literal["brief", "full"] = "brief"
    """``full`` puts the whole policy and every tool schema into the system prompt, ``brief`` a few lines."""

    user: str = "scripted"
    """Who plays the user; ``scripted`` needs no model."""

    max_steps: int | None = Field(default=None, ge=1)
    """Agent steps before an episode is cut. Unset: the environment's own budget."""

    max_invalid_actions: int | None = Field(default=None, ge=1)
    """Malformed actions before an episode is cut. Unset: the environment's own budget."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments for ``gymnasium.make``."""

    train_split: str = "train"
    """Split the training tasks come from."""

    validation_split: str = "test"
    """Held-out split for validation; must differ from ``train_split``."""

    mode: Literal["inline", "threads"] = "inline"
    """``inline`` steps environments in the event loop (right for embedded domains, which take microseconds);
    ``threads`` gives each its own worker (right when a step waits on a network)."""

    step_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds a reset or a step may take before the episode is given up as failed (never as reward 0)."""


class TinySection(Section):
    """Shape of the small gpt-oss-style policy built when ``model.path`` is unset."""

    hidden_size: int = Field(default=128, ge=8)
    """Width of the residual stream."""

    layers: int = Field(default=4, ge=1)
    """Decoder layers, alternating sliding and full attention."""

    heads: int = Field(default=4, ge=1)
    """Query heads; a multiple of ``kv_heads``."""

    kv_heads: int = Field(default=2, ge=1)
    """Key and value heads."""

    head_dim: int = Field(default=32, ge=2)
    """Width of one head; even, for rotary positions."""

    experts: int = Field(default=2, ge=1)
    """Feed-forward experts a layer."""

    experts_per_token: int = Field(default=1, ge=1)
    """Experts each token is routed to; at most ``experts``."""

    intermediate_size: int = Field(default=256, ge=8)
    """Inner width of one expert."""

    sliding_window: int = Field(default=64, ge=1)
    """Keys a sliding layer sees, the query's own included."""

    vocab_size: int = Field(default=1500, ge=300)
    """Tokens of the tokenizer trained on the domain's text; an upper bound."""

    max_positions: int = Field(default=2048, ge=16)
    """Longest sequence, in tokens."""


class LoraSection(Section):
    """Low-rank adapters instead of full training (peft)."""

    enabled: bool = False
    """Train adapters only; the base weights stay as loaded and serve as the KL reference."""

    rank: int = Field(default=16, ge=1)
    """Rank of each adapter."""

    alpha: float = Field(default=32.0, gt=0)
    """Adapter scale; the update is multiplied by alpha / rank."""

    target_modules: Names = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Names of the linear layers that get an adapter."""


class ModelSection(Section):
    """The policy."""

    path: str | None = None
    """Folder or hub name of a Hugging Face causal LM. Unset: the tiny policy of ``[model.tiny]`` is built."""

    tokenizer: str | None = None
    """Folder or hub name of the tokenizer. Unset: the model's own."""

    attention: str = "sinkflex"
    """Attention implementation given to transformers, used in rollout, reference and update alike."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    experts_implementation: str | None = None
    """How transformers runs mixture-of-experts layers: ``eager``, ``grouped_mm``, ... Unset: by device."""

    tiny: TinySection = Field(default_factory=TinySection)
    """Shape of the built policy."""

    lora: LoraSection = Field(default_factory=LoraSection)
    """Adapter training."""


class ChatSection(Section):
    """How a conversation becomes tokens."""

    renderer: str = "harmony"
    """Chat format: ``harmony`` (gpt-oss), ``hermes`` (Qwen) or ``json``."""

    style: Literal["compact", "full"] = "compact"
    """``compact`` leaves out boilerplate a small policy need not read; ``full`` is the published format."""
