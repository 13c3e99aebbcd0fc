"""``sinkflex train``: run a recipe, resume a run, or only look at what would run."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from sinkflex.cli.config import Overrides
from sinkflex.cli.report import show_report
from sinkflex.config import Recipe, dump_recipe, find_recipe, load_recipe
from sinkflex.errors import ConfigError

if TYPE_CHECKING:
    from sinkflex.train.preflight import Preflight

CONFIG_FILE = "config.toml"


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="A recipe file, or the name of one that ships. Left out: quickstart, or the resumed run's."
        ),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/<name>-seed<seed> when left out.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    resume_from: Annotated[
        str | None, typer.Option(metavar="STEP", help="Continue from this checkpoint, for example step_000010.")
    ] = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Resume under a recipe that differs from the stored one.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the resolved recipe and stop.")
    ] = False,
) -> None:
    """Train a recipe and report what was learned."""
    resuming = resume or resume_from is not None
    resolved = _load(recipe, overrides or [], out, resuming)
    from sinkflex.train import loop
    from sinkflex.train.preflight import preflight

    quiet_when_piped()
    found = preflight(resolved)
    if dry_run:
        _print_plan(resolved, out, found)
        return
    if found.lacking:
        raise found.lacking[0]
    folder = choose_folder(resolved, out, resuming=resuming)
    console = Console(soft_wrap=True)
    console.print(f"run folder: {folder}", highlight=False)
    try:
        loop.run(resolved, out=folder, resume=resume, resume_from=resume_from, allow_changes=allow_changes)
    except KeyboardInterrupt:
        console.print(f"\nstopped; continue with: sinkflex train --resume --out {folder}", highlight=False)
        raise typer.Exit(130) from None
    show_report(folder, console)


def quiet_when_piped() -> None:
    """Leave transformers' progress bars to terminals; in a log file they are noise."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        cast(Any, logging).disable_progress_bar()


def choose_folder(recipe: Recipe, out: Path | None, *, resuming: bool) -> Path:
    """Return the run folder: what was asked for, or a default that holds no other run.

    Without ``--out`` and ``run.out`` the default is ``runs/<name>-seed<seed>``, and ``-2``, ``-3``, ... after it when
    that is taken; a resumed run takes the newest of them.
    """
    if out is not None:
        return out
    if recipe.run.out is not None:
        return Path(recipe.run.out)
    base = f"runs/{recipe.run.name}-seed{recipe.run.seed}"
    taken = [Path(base)]
    for number in itertools.count(2):
        if not (taken[-1] / CONFIG_FILE).exists():
            break
        taken.append(Path(f"{base}-{number}"))
    return taken[-2] if resuming and len(taken) > 1 else taken[-1]


def _load(recipe: str | None, overrides: list[str], out: Path | None, resuming: bool) -> Recipe:
    if recipe is None and resuming and out is not None:
        return load_recipe(out / CONFIG_FILE, overrides)
    return load_recipe(find_recipe(recipe or "quickstart"), overrides)


def _print_plan(recipe: Recipe, out: Path | None, found: Preflight) -> None:
    """Print the resolved recipe on standard output, and what it amounts to on standard error."""
    text = dump_recipe(recipe)
    if out is None:
        typer.echo(text, nl=False)
    elif any((out / "checkpoints").glob("step_*")):
        raise ConfigError(f"{out} holds a run, whose {CONFIG_FILE} is not overwritten; choose another --out")
    else:
        out.mkdir(parents=True, exist_ok=True)
        (out / CONFIG_FILE).write_text(text, encoding="utf-8")
        typer.echo(f"wrote {out / CONFIG_FILE}")
    rollout, train_section = recipe.rollout, recipe.train
    episodes = rollout.group_size * rollout.tasks_per_step
    tasks = "" if found.train_tasks is None else f" ({found.train_tasks:,} training tasks)"
    held_out = "" if found.held_out_tasks is None else f"of {found.held_out_tasks:,} "
    validated = min(recipe.validation.tasks, found.held_out_tasks or recipe.validation.tasks)
    typer.echo(
        f"valid: {train_section.steps} steps of {episodes} episodes ({rollout.tasks_per_step} tasks x "
        f"{rollout.group_size}) on {recipe.env.id}{tasks}, validated on {validated:,} {held_out}held-out tasks; "
        "nothing was run",
        err=True,
    )
    for error in found.lacking:
        typer.echo(f"this machine cannot run it: {error}", err=True)
