"""From a recipe to a policy ready for reinforcement learning: built or loaded, warm-started, cached."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError

from sinkflex.attention import hf
from sinkflex.chat import FastTokenizer, HarmonyRenderer, Renderer, get_renderer
from sinkflex.config import Recipe
from sinkflex.errors import InfrastructureError, ModelError
from sinkflex.models import LoraSettings, Policy, TinyShape, build_tiny_model, load_policy, train_tokenizer
from sinkflex.models.load import DTYPES, finish_policy
from sinkflex.train.checkpoint import find_damage
from sinkflex.train.demonstrations import Dialogue, dialogue_texts, play_oracle, render_dialogue
from sinkflex.train.tasks import derive_seed
from sinkflex.train.warmstart import WarmstartPlan, cache_key, save_warmstart, train_warmstart

log = logging.getLogger(__name__)

OnWarmstartStep = Callable[[int, int, float], None]
"""Called with (step, steps, loss in nats per token)."""


@dataclass(frozen=True, kw_only=True)
class WarmstartRecord:
    """How the starting policy came about.

    Attributes:
        source: ``"trained"``, ``"cache"`` or ``"none"``.
        key: content hash of the warm start.
        loss: final loss on demonstrations, nats per trained token.
        demonstration_score: mean score of the demonstrations themselves, slips included.
    """

    source: str
    key: str
    loss: float | None
    demonstration_score: float | None


def make_renderer(recipe: Recipe, tokenizer: Any) -> Renderer:
    """Build the recipe's chat format over a Hugging Face tokenizer."""
    wrapped = FastTokenizer(tokenizer)
    if recipe.chat.renderer == "harmony":
        return HarmonyRenderer(wrapped, style=recipe.chat.style)
    return get_renderer(recipe.chat.renderer, wrapped)


def prepare_policy(
    recipe: Recipe, env: Any, task_ids: Sequence[str], *, on_step: OnWarmstartStep
) -> tuple[Policy, WarmstartRecord]:
    """Build or load the policy and warm-start it, from the cache when the same one was trained before.

    Args:
        recipe: the run.
        env: one environment of the run, for demonstrations.
        task_ids: training tasks to demonstrate.
        on_step: progress of supervised training.

    Returns:
        The policy and how its warm start came about.

    Raises:
        ModelError: the model cannot be loaded or its tokenizer lacks what the chat format needs.
    """
    hf.register()
    device = pick_device(recipe)
    if recipe.model.path is not None:
        lora = recipe.model.lora
        policy = load_policy(
            recipe.model.path,
            tokenizer_path=recipe.model.tokenizer,
            attention=recipe.model.attention,
            dtype=recipe.model.dtype,
            device=device,
            lora=LoraSettings(
                rank=lora.rank, alpha=lora.alpha, target_modules=lora.target_modules, seed=recipe.run.seed
            )
            if lora.enabled
            else None,
            gradient_checkpointing=recipe.model.gradient_checkpointing,
            experts_implementation=recipe.model.experts_implementation,
        )
        if not recipe.warmstart.enabled:
            return policy, WarmstartRecord(source="none", key="", loss=None, demonstration_score=None)
        dialogues = _demonstrations(recipe, env, task_ids)
        return _warm(recipe, policy, dialogues, on_step=on_step)
    dialogues = _demonstrations(recipe, env, task_ids)
    tokenizer = train_tokenizer(dialogue_texts(dialogues), vocab_size=recipe.model.tiny.vocab_size)
    model = build_tiny_model(
        TinyShape(**recipe.model.tiny.model_dump(exclude={"vocab_size"})),
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        attention=recipe.model.attention,
        experts_implementation=recipe.model.experts_implementation or "grouped_mm",
        seed=recipe.run.seed,
    )
    policy = finish_policy(
        cast(Any, model).to(DTYPES[recipe.model.dtype]),
        tokenizer,
        device=device,
        lora=None,
        gradient_checkpointing=recipe.model.gradient_checkpointing,
    )
    if not recipe.warmstart.enabled:
        return policy, WarmstartRecord(source="none", key="", loss=None, demonstration_score=None)
    return _warm(recipe, policy, dialogues, on_step=on_step)


def pick_device(recipe: Recipe) -> str:
    """Return the torch device of the run: the recipe's, or CUDA where there is one.

    Raises:
        ModelError: CUDA is asked for and absent.
    """
    if recipe.run.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("run.device = 'cuda', but torch sees no CUDA device; set it to 'auto' or 'cpu'")
    if recipe.run.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return recipe.run.device


def _demonstrations(recipe: Recipe, env: Any, task_ids: Sequence[str]) -> list[Dialogue]:
    """Play the oracle over the training tasks, in a seeded order, until there are enough dialogues."""
    seed = recipe.run.seed if recipe.warmstart.seed is None else recipe.warmstart.seed
    rng = random.Random(derive_seed(seed, "demonstrations"))
    order = [task_ids[index % len(task_ids)] for index in range(recipe.warmstart.dialogues)]
    rng.shuffle(order)
    return [
        play_oracle(
            env,
            task_id=task_id,
            split=recipe.env.train_split,
            group_seed=derive_seed(seed, "demonstration", index),
            slip_rate=recipe.warmstart.slip_rate,
            rng=rng,
            step_timeout_s=recipe.env.step_timeout_s,
        )
        for index, task_id in enumerate(order)
    ]


def _warm(
    recipe: Recipe, policy: Policy, dialogues: Sequence[Dialogue], *, on_step: OnWarmstartStep
) -> tuple[Policy, WarmstartRecord]:
    settings = recipe.warmstart
    renderer = make_renderer(recipe, policy.tokenizer)
    rows = [render_dialogue(dialogue, renderer, with_tools=recipe.env.prompt == "full") for dialogue in dialogues]
    rows = [row for row in rows if len(row.ids) <= recipe.rollout.max_length]
    if not rows:
        raise ModelError(
            f"no demonstration fits rollout.max_length = {recipe.rollout.max_length} tokens; raise it or choose a "
            "shorter tier"
        )
    plan = WarmstartPlan(
        steps=settings.steps,
        batch_tokens=settings.batch_tokens,
        lr=settings.lr,
        copy_steps=settings.copy_sequences_steps,
        bare_steps=settings.bare_steps,
        prefix_tree=settings.prefix_tree,
        seed=recipe.run.seed if settings.seed is None else settings.seed,
    )
    key = cache_key(
        plan,
        rows,
        model=recipe.model.model_dump(mode="json"),
        init_seed=recipe.run.seed,
        vocabulary=sorted(policy.tokenizer.get_vocab().items()),
        versions=[torch.__version__, transformers.__version__],
    )
    folder = cache_folder(recipe) / f"warmstart-{key}"
    if folder.is_dir():
        damage = find_damage(folder)
        if damage is None:
            policy.load_weights(folder / "policy")
            record = json.loads((folder / "warmstart.json").read_text())
            return policy, WarmstartRecord(**{**record, "source": "cache"})
        log.warning("warm start %s in the cache is damaged (%s); training it again", folder.name, damage)
    losses = train_warmstart(
        policy,
        rows,
        plan,
        copy_token_ids=copy_tokens(policy.tokenizer),
        on_step=lambda step, loss: on_step(step, plan.steps, loss),
    )
    record = WarmstartRecord(
        source="trained",
        key=key,
        loss=sum(losses[-10:]) / len(losses[-10:]),
        demonstration_score=sum(dialogue.score for dialogue in dialogues) / len(dialogues),
    )
    try:
        save_warmstart(policy, folder, asdict(record))
    except (InfrastructureError, OSError, RuntimeError, SafetensorError) as error:
        log.warning(
            "the warm start could not be kept in %s (%s); the run goes on, but a resume has to train it again. "
            "Set warmstart.cache_dir to a folder that can be written.",
            folder.parent,
            error,
        )
    return policy, record


def cache_folder(recipe: Recipe) -> Path:
    """Where warm starts are kept."""
    chosen = recipe.warmstart.cache_dir
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "sinkflex"


def copy_tokens(tokenizer: Any) -> list[int]:
    """Ids of the pieces that copying is practised on: digit pairs where the tokenizer has them, else plain words."""
    vocabulary = tokenizer.get_vocab()
    pairs = [vocabulary[f"{number:02d}"] for number in range(100) if f"{number:02d}" in vocabulary]
    if len(pairs) >= 50:
        return pairs
    return sorted(index for piece, index in vocabulary.items() if piece.isalnum())[:400]
