"""``sinkflex verify-attention MODEL``: is this model under sinkflex what it is under eager?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from sinkflex.bench.verify import Verdict, verify_model
from sinkflex.errors import ConfigError, MissingExtraError, ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def verify_attention(
    model: Annotated[str, typer.Argument(help="A folder with a transformers model, or its name on the hub.")],
    implementation: Annotated[str, typer.Option(help="sinkflex, or a variant that forces an impl.")] = "sinkflex",
    length: Annotated[
        int | None, typer.Option(help="Tokens of a row; by default more than the model's window.", min=2)
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows.", min=1)] = 2,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="File for the verdict as JSON.")] = None,
) -> None:
    """Compare a model's outputs and gradients under sinkflex with eager attention; exit status 1 if they differ."""
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    loaded = _load(model, DTYPES[dtype]).to(torch.device(device))
    verdict = verify_model(loaded, name=model, implementation=implementation, batch=batch, length=length)
    console = Console()
    console.print(_table(verdict))
    if verdict.untested:
        console.print(f"not tested: {verdict.untested}; pass a larger --length", style="yellow")
    console.print("PASS" if verdict.passed else "FAIL", style="bold green" if verdict.passed else "bold red")
    if out is not None:
        out.write_text(json.dumps(verdict.to_dict(), indent=2) + "\n")
        console.print(f"wrote {out}")
    if not verdict.passed:
        raise typer.Exit(1)


def _load(name: str, dtype: torch.dtype) -> Any:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise MissingExtraError("verify-attention needs transformers: pip install 'sinkflex[hf]'") from error
    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation="eager")
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot load {name!r} as a causal language model: {error}") from error


def _table(verdict: Verdict) -> Table:
    table = Table(
        title=f"{verdict.model}: {verdict.implementation} against eager, {verdict.dtype}, {verdict.length} tokens"
    )
    for name in ("case", "place", "sinks", "output error", "gradient error", "budget", "", "worst parameter"):
        table.add_column(name, justify="right" if "error" in name or name == "budget" else "left")
    for check in verdict.checks:
        table.add_row(
            check.case,
            check.place,
            "yes" if check.has_sink else "",
            f"{check.output_error:.1e}",
            f"{check.gradient_error:.1e}",
            f"{check.budget:.1e}",
            "ok" if check.passed else "DIFFERS",
            check.worst,
        )
    return table
