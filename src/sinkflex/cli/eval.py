"""``sinkflex eval``: score a run's checkpoint or any model on held-out tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sinkflex.cli.config import Overrides
from sinkflex.cli.train import CONFIG_FILE, quiet_when_piped
from sinkflex.config import Recipe, find_recipe, load_recipe
from sinkflex.errors import CheckpointError, ConfigError


def evaluate(
    target: Annotated[str, typer.Argument(help="A run folder, a checkpoint folder, or a model's path or hub name.")],
    recipe: Annotated[
        str | None, typer.Option(help="Recipe that says how to play; a run's own is taken by default.")
    ] = None,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="STEP", help="Of a run folder: step_000010, ... The best one by default.")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Episodes a task (k of mean@k and pass^k).")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Held-out tasks.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Score a policy on held-out tasks: mean@1, mean@k, pass^k, n, 95 % interval, and the floors beside them."""
    weights = find_weights(Path(target), checkpoint)
    settings = list(overrides or [])
    if samples is not None:
        settings += [f"validation.samples={samples}", f"validation.pass_k={list(_powers_of_two(samples))}"]
        if samples > 1 and not any(setting.startswith("validation.temperature=") for setting in settings):
            settings.append("validation.temperature=1.0")
    if tasks is not None:
        settings.append(f"validation.tasks={tasks}")
    resolved = _recipe_for(target, weights, recipe, settings)
    from sinkflex.train.preflight import check_environment

    check_environment(resolved)
    figures = _measure(resolved, weights)
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        console = Console(soft_wrap=True)
        console.print(_headline(figures), style="bold", highlight=False, markup=False)
        console.print(_table(figures), highlight=False)


def find_weights(target: Path, checkpoint: str | None) -> Path | None:
    """Return the checkpoint folder that ``target`` means, or None when it is a model and no run.

    Args:
        target: what the user named.
        checkpoint: a checkpoint of a run folder; None takes the one with the best validation score, or the newest.

    Raises:
        CheckpointError: the run has no such checkpoint, none at all, or it is damaged.
        ConfigError: ``checkpoint`` is given and ``target`` is no run folder.
    """
    if (target / CONFIG_FILE).is_file():
        from sinkflex.train.checkpoint import CheckpointStore

        store = CheckpointStore(target / "checkpoints", keep_last=1, keep_best=True)
        scored = [info for info in store.complete() if info.score is not None]
        best = max(scored, key=lambda info: (info.score, info.step)).path.name if scored else None
        return store.choose(checkpoint or best).path
    if checkpoint is not None:
        raise ConfigError(f"--checkpoint needs a run folder, but {str(target)!r} has no {CONFIG_FILE}")
    if (target / "manifest.json").is_file():
        from sinkflex.train.checkpoint import find_damage

        damage = find_damage(target)
        if damage is not None:
            raise CheckpointError(f"checkpoint {target} is damaged ({damage}); evaluate another one of its run")
        return target
    return None


def _recipe_for(target: str, weights: Path | None, recipe: str | None, settings: Sequence[str]) -> Recipe:
    """The recipe to play by, with the warm start off and the model pointed at what is evaluated."""
    path = find_recipe(recipe) if recipe is not None else None
    if path is None and weights is not None:
        path = weights.parents[1] / CONFIG_FILE
    if path is None:
        path = find_recipe("quickstart")
    base = load_recipe(path, [*settings, "warmstart.enabled=false"])
    if weights is not None and base.model.lora.enabled:
        return base
    model = str(weights / "policy") if weights is not None else target
    return load_recipe(
        path, [*settings, "warmstart.enabled=false", f"model.path={json.dumps(model)}", "model.lora.enabled=false"]
    )


def _measure(recipe: Recipe, weights: Path | None) -> dict[str, Any]:
    from sinkflex.train.build import build_parts
    from sinkflex.train.validation import measure_floors, validate

    quiet_when_piped()
    parts = build_parts(recipe, on_warmstart_step=lambda step, steps, loss: None)
    if weights is not None and recipe.model.lora.enabled:
        parts.policy.load_weights(weights / "policy")
    section = recipe.validation
    result = validate(
        parts.collect_validation,
        parts.validation_tasks,
        split=recipe.env.validation_split,
        samples=section.samples,
        pass_k=section.pass_k,
    )
    floors = measure_floors(parts.floor_env, parts.validation_tasks, split=recipe.env.validation_split)
    one, many = result.mean_at_1, result.mean_at_k
    return {
        "env": recipe.env.id,
        "split": recipe.env.validation_split,
        "tiers": list(recipe.env.tier),
        "temperature": section.temperature,
        "tasks": one.tasks,
        "samples": section.samples,
        "mean@1": {"value": one.value, "low": one.low, "high": one.high},
        f"mean@{many.trials}": {"value": many.value, "low": many.low, "high": many.high},
        "pass^k": {str(k): value for k, value in result.pass_hat_k.items()},
        "floors": {name: estimate.value for name, estimate in floors.items()},
        "failed_episodes": len(result.failures),
        "seconds": result.seconds,
    }


def _headline(figures: dict[str, Any]) -> str:
    tiers = ", ".join(figures["tiers"]) or "all tiers"
    return (
        f"{figures['env']} ({figures['split']}, {tiers}), n = {figures['tasks']} tasks, "
        f"temperature {figures['temperature']:g}"
    )


def _table(figures: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    table.add_column("score", justify="right")
    table.add_column("95 % interval")
    for name in dict.fromkeys(("mean@1", f"mean@{figures['samples']}")):
        figure = figures[name]
        table.add_row(name, f"{figure['value']:.3f}", f"[{figure['low']:.3f}, {figure['high']:.3f}]")
    for k, value in figures["pass^k"].items():
        table.add_row(f"pass^{k}", f"{value:.3f}", "")
    for name, value in figures["floors"].items():
        table.add_row(f"floor: {name.replace('_', ' ')}", f"{value:.3f}", "")
    if figures["failed_episodes"]:
        table.add_row("failed episodes", str(figures["failed_episodes"]), "their tasks are left out")
    return table


def _powers_of_two(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most]
