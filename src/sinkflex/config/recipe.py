"""The whole recipe: its sections and the rules between them."""

from __future__ import annotations

from pydantic import Field, model_validator

from sinkflex.config.learning import (
    AlgoSection,
    OptimSection,
    RolloutSection,
    TrainSection,
    WarmstartSection,
)
from sinkflex.config.recording import CheckpointSection, LoggingSection, ValidationSection
from sinkflex.config.section import Section
from sinkflex.config.setting import ChatSection, EnvSection, ModelSection, RunSection


class Recipe(Section):
    """Everything a run depends on. Frozen: what was validated is what runs."""

    run: RunSection = Field(default_factory=RunSection)
    """Name, seed, folder, device."""

    env: EnvSection = Field(default_factory=EnvSection)
    """Environment, tasks, budgets."""

    model: ModelSection = Field(default_factory=ModelSection)
    """Policy."""

    chat: ChatSection = Field(default_factory=ChatSection)
    """Chat format."""

    warmstart: WarmstartSection = Field(default_factory=WarmstartSection)
    """Supervised start."""

    rollout: RolloutSection = Field(default_factory=RolloutSection)
    """Sampling of episodes."""

    algo: AlgoSection = Field(default_factory=AlgoSection)
    """Objective."""

    optim: OptimSection = Field(default_factory=OptimSection)
    """Optimiser."""

    train: TrainSection = Field(default_factory=TrainSection)
    """Loop."""

    validation: ValidationSection = Field(default_factory=ValidationSection)
    """Held-out evaluation."""

    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    """What is kept."""

    logging: LoggingSection = Field(default_factory=LoggingSection)
    """Where metrics go."""

    @model_validator(mode="after")
    def _check_between_sections(self) -> Recipe:
        problems = [
            *_model_problems(self),
            *_sampling_problems(self),
            *_objective_problems(self),
            *_validation_problems(self),
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self


def _model_problems(recipe: Recipe) -> list[str]:
    """Shapes that do not fit each other."""
    tiny = recipe.model.tiny
    problems = []
    if tiny.heads % tiny.kv_heads:
        problems.append(
            f"model.tiny.heads = {tiny.heads} is not a multiple of model.tiny.kv_heads = {tiny.kv_heads}; "
            "each key head serves a whole number of query heads"
        )
    if tiny.head_dim % 2:
        problems.append(f"model.tiny.head_dim = {tiny.head_dim} is odd; rotary positions need pairs")
    if tiny.experts_per_token > tiny.experts:
        problems.append(
            f"model.tiny.experts_per_token = {tiny.experts_per_token} exceeds model.tiny.experts = {tiny.experts}"
        )
    if recipe.model.path is None and recipe.rollout.max_length > tiny.max_positions:
        problems.append(
            f"rollout.max_length = {recipe.rollout.max_length} exceeds model.tiny.max_positions = "
            f"{tiny.max_positions}; raise the latter or shorten episodes"
        )
    if recipe.model.lora.enabled and recipe.model.path is None:
        problems.append("model.lora.enabled needs model.path: the tiny policy is trained in full")
    return problems


def _sampling_problems(recipe: Recipe) -> list[str]:
    """Batches that cannot be built or would teach nothing."""
    rollout, algo = recipe.rollout, recipe.algo
    problems = []
    if rollout.group_size < 2:
        problems.append(
            f"rollout.group_size = {rollout.group_size}: a lone trajectory has no group to compare with; use at least 2"
        )
    if rollout.max_new_tokens >= rollout.max_length:
        problems.append(
            f"rollout.max_new_tokens = {rollout.max_new_tokens} leaves no room for a prompt in "
            f"rollout.max_length = {rollout.max_length}"
        )
    trajectories = rollout.group_size * rollout.tasks_per_step
    if algo.minibatches > trajectories:
        problems.append(
            f"algo.minibatches = {algo.minibatches} exceeds the {trajectories} trajectories of a step "
            "(rollout.group_size x rollout.tasks_per_step)"
        )
    if algo.overlong == "penalty" and algo.overlong_buffer >= rollout.max_length:
        problems.append(
            f"algo.overlong_buffer = {algo.overlong_buffer} must be below rollout.max_length = {rollout.max_length}"
        )
    return problems


def _objective_problems(recipe: Recipe) -> list[str]:
    """Settings that the loss or the optimiser would refuse once the warm start is over."""
    algo, problems = recipe.algo, []
    if algo.loss == "grpo" and algo.clip_low != algo.clip_high:
        problems.append(
            f"algo.loss = 'grpo' clips on both sides alike, but algo.clip_low = {algo.clip_low} and algo.clip_high = "
            f"{algo.clip_high}; set both to one value, or take loss = 'dapo', which clips higher above"
        )
    if algo.dual_clip is not None and algo.loss in ("gspo", "cispo"):
        problems.append(f"algo.dual_clip = {algo.dual_clip} has no meaning for algo.loss = {algo.loss!r}; unset it")
    outside = [beta for beta in recipe.optim.betas if not 0 <= beta < 1]
    if outside:
        problems.append(f"optim.betas holds {outside[0]}; each must lie in [0, 1)")
    return problems


def _validation_problems(recipe: Recipe) -> list[str]:
    """Scores that would not mean what they say."""
    validation = recipe.validation
    problems = []
    if recipe.env.train_split == recipe.env.validation_split:
        problems.append(
            f"env.train_split and env.validation_split are both {recipe.env.train_split!r}; "
            "a score on the training tasks is not validation"
        )
    too_many = [k for k in validation.pass_k if not 1 <= k <= validation.samples]
    if too_many:
        problems.append(
            f"validation.pass_k has {too_many[0]}, but validation.samples = {validation.samples}; "
            "pass^k needs at least k episodes a task"
        )
    if validation.samples > 1 and validation.temperature == 0:
        problems.append(
            f"validation.samples = {validation.samples} with validation.temperature = 0 repeats one greedy "
            "episode; raise the temperature or take one sample"
        )
    return problems
