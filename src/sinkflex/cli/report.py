"""``sinkflex report``: draw a run's curves again, print its summary, or read one of its dialogues."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    trajectory: Annotated[
        int | None, typer.Option(help="Show this trajectory, counted from 1, instead of the summary.")
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(help="Trajectory file: step_000010, validation_000000, ... The last step's by default."),
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show exact tokens instead of the dialogue.")] = False,
) -> None:
    """Report on a run: curves.png, summary.json and a summary in the terminal; or one dialogue."""
    console = Console(soft_wrap=True)
    if trajectory is None:
        show_report(run, console)
        return
    from sinkflex.report import read_trajectory, render_trajectory

    record, title = read_trajectory(run, trajectory, name=step)
    console.print(render_trajectory(record, title, tokens=tokens), highlight=False)


def show_report(folder: Path, console: Console) -> None:
    """Write ``curves.png`` and ``summary.json`` and print the summary.

    Args:
        folder: the run folder.
        console: where to print.
    """
    from sinkflex.report import draw_curves, read_run, render_summary, write_summary

    history = read_run(folder)
    draw_curves(history)
    console.print(render_summary(history, write_summary(history)), highlight=False)
