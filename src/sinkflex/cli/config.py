"""``sinkflex config``: look at recipes and at the keys they may have."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sinkflex.config import dump_recipe, find_recipe, load_recipe, schema_keys, shipped_recipes
from sinkflex.errors import ConfigError

app = typer.Typer(help="Look at recipes and their keys.", no_args_is_help=True)

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key; may be given again."),
]


@app.command()
def show(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of one that ships.")] = "quickstart",
    overrides: Overrides = None,
) -> None:
    """Print a recipe as it would run: every key, defaults and overrides included, as TOML."""
    typer.echo(dump_recipe(load_recipe(find_recipe(recipe), overrides or ())), nl=False)


@app.command("list")
def list_recipes() -> None:
    """Print the recipes that ship."""
    for name, path in shipped_recipes().items():
        typer.echo(f"{name:<20} {path}")


@app.command()
def keys(
    section: Annotated[str | None, typer.Argument(help="Only this section, for example rollout.")] = None,
) -> None:
    """Explain every key: type, default, meaning."""
    found = [key for key in schema_keys() if section is None or key.name.startswith(f"{section}.")]
    if not found:
        sections = sorted({key.name.split(".")[0] for key in schema_keys()})
        raise ConfigError(f"no section {section!r}; there are {', '.join(sections)}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("key", no_wrap=True, style="cyan")
    table.add_column("type")
    table.add_column("default")
    table.add_column("meaning", ratio=1)
    for key in found:
        table.add_row(key.name, key.type, key.default, key.meaning)
    Console().print(table, markup=False)
