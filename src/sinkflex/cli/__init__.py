"""The ``sinkflex`` command.

Starting it imports no tensor library: a command's own imports happen when it runs, and the commands of other parts
are imported only when they are the one asked for.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from sinkflex import __version__
from sinkflex.cli import config, doctor, report, train
from sinkflex.cli import eval as evaluation
from sinkflex.errors import SinkFlexError

EXIT_ERROR = 2
TRACEBACK = "SINKFLEX_TRACEBACK"


@dataclass(frozen=True, kw_only=True)
class LateCommand:
    """A command that is imported only when it is asked for.

    Attributes:
        module: where it is defined.
        attribute: a ``typer.Typer`` with commands of its own, or one function.
        summary: its line in ``sinkflex --help``.
    """

    module: str
    attribute: str
    summary: str


LATE_COMMANDS: dict[str, LateCommand] = {
    "env": LateCommand(
        module="sinkflex.cli.env", attribute="app", summary="List, check, play and measure environments."
    ),
    "bench": LateCommand(
        module="sinkflex.cli.bench", attribute="app", summary="Measure attention and train steps side by side."
    ),
    "verify-attention": LateCommand(
        module="sinkflex.cli.verify_attention",
        attribute="verify_attention",
        summary="Compare a model's outputs and gradients under sinkflex with eager attention.",
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    A failure that SinkFlex raises on purpose, and a full disk, end with one message on standard error and exit
    status 2; ``--traceback`` or ``SINKFLEX_TRACEBACK=1`` shows where it came from. Anything else is a bug and shows
    itself whole.

    Args:
        arguments: what stands after ``sinkflex``; None takes the process's.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        build_app(given)(given)
    except SinkFlexError as error:
        if os.environ.get(TRACEBACK):
            raise
        complain(str(error))
    except OSError as error:
        if error.errno != errno.ENOSPC or os.environ.get(TRACEBACK):
            raise
        complain(f"the disk is full ({error}); free some space, then continue a run with --resume")


def complain(message: str) -> None:
    """Print an error in red on standard error and exit with status 2."""
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), (message, "red")))
    raise SystemExit(EXIT_ERROR)


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """Build the command tree, importing of the late commands only the one that ``arguments`` ask for."""
    app = typer.Typer(
        name="sinkflex",
        help="Train tool-using agents with reinforcement learning, and models with attention sinks exactly.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        callback=_options,
    )
    app.command()(train.train)
    app.command("eval")(evaluation.evaluate)
    app.command()(report.report)
    app.command()(doctor.doctor)
    app.add_typer(config.app, name="config")
    completing = "_SINKFLEX_COMPLETE" in os.environ
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, late in LATE_COMMANDS.items():
        if completing or name == asked:
            _mount(app, name, late)
        else:
            app.command(name, help=late.summary)(_not_mounted)
    return app


def _mount(app: typer.Typer, name: str, late: LateCommand) -> None:
    target = getattr(importlib.import_module(late.module), late.attribute)
    if isinstance(target, typer.Typer):
        app.add_typer(target, name=name, help=late.summary)
    else:
        app.command(name, help=late.summary)(target)


def _not_mounted() -> None:
    """Stand for a late command in the list of commands; asking for it mounts the real one instead."""
    raise AssertionError("a late command was called without being mounted")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sinkflex {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True),
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    if traceback:
        os.environ[TRACEBACK] = "1"
