"""``sinkflex bench``: attention and train steps, side by side in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from sinkflex.bench.attention import AttentionPlan, AttentionResult, run_attention
from sinkflex.bench.contenders import CONTENDERS, Shape
from sinkflex.bench.render import (
    attention_table,
    parse_lengths,
    train_step_table,
    train_step_verdicts,
    write,
)
from sinkflex.bench.train_step import IMPLEMENTATIONS, LENGTHS, TrainStepPlan, TrainStepResult, run_train_steps
from sinkflex.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Measure attention and train steps side by side.")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

OutOption = Annotated[Path | None, typer.Option(help="Folder for the JSON record and the plot.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto takes a GPU if there is one.")]


@app.command()
def attention(
    lengths: Annotated[str, typer.Option(help="Tokens, comma-separated.")] = "1024,2048,4096",
    shape: Annotated[str, typer.Option(help="Batch, query heads, key heads, head dim.")] = "1,8,8,64",
    window: Annotated[int, typer.Option(help="Keys a query sees, its own included; 0 means all.", min=0)] = 0,
    contenders: Annotated[str, typer.Option(help="Comma-separated, or all.")] = "all",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: DeviceOption = "auto",
    repeats: Annotated[int, typer.Option(help="Timed calls of each; the best counts.", min=1)] = 3,
    out: OutOption = None,
) -> None:
    """Time, peak memory and share of the matmul peak of one attention call, forward and backward."""
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    plan = AttentionPlan(
        shape=_shape(shape, window),
        lengths=_lengths(lengths),
        contenders=list(CONTENDERS) if contenders == "all" else contenders.split(","),
        dtype=DTYPES[dtype],
        device=_device(device),
        repeats=repeats,
    )
    console = Console()

    def show(result: AttentionResult) -> None:
        figure = result.status if result.seconds is None else f"{result.seconds:.3f} s"
        console.print(f"{result.tokens:>7,} {result.contender}: {figure}", style="dim")

    report = run_attention(plan, progress=show)
    console.print(attention_table(report))
    if out is not None:
        name = f"attention-{plan.device.type}-{dtype}" + (f"-window{window}" if window else "")
        for path in write(report, out, name):
            console.print(f"wrote {path}")


@app.command()
def train_step(
    lengths: Annotated[str, typer.Option(help="Tokens of the one row, comma-separated.")] = ",".join(
        str(length) for length in LENGTHS
    ),
    implementations: Annotated[
        str, typer.Option(help="attn_implementation names; sink-free is transformers' SDPA without the sink.")
    ] = ",".join(IMPLEMENTATIONS),
    cap_gib: Annotated[float, typer.Option(help="Memory one process may reach, in GiB.", min=0.5)] = 3.5,
    checkpointing: Annotated[bool, typer.Option(help="Recompute each layer in backward.")] = False,
    device: DeviceOption = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads; 0 keeps torch's choice.", min=0)] = 0,
    timeout_s: Annotated[float, typer.Option(help="A longer step is recorded as a timeout.")] = 600.0,
    out: OutOption = None,
) -> None:
    """Peak memory and time of a training step at growing lengths; running out of memory is a result."""
    plan = TrainStepPlan(
        implementations=implementations.split(","),
        lengths=_lengths(lengths),
        cap_bytes=int(cap_gib * 2**30),
        device=str(_device(device)),
        threads=threads or torch.get_num_threads(),
        checkpointing=checkpointing,
        timeout_s=timeout_s,
    )
    console = Console()

    def show(result: TrainStepResult) -> None:
        figure = result.status if result.seconds is None else f"{result.seconds:.2f} s"
        console.print(f"{result.tokens:>7,} {result.implementation}: {figure}", style="dim")

    report = run_train_steps(plan, progress=show)
    console.print(train_step_table(report))
    for line in train_step_verdicts(report):
        console.print(line)
    if out is not None:
        for path in write(report, out, f"train-step-{torch.device(plan.device).type}"):
            console.print(f"wrote {path}")


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device is {name!r}; expected cpu, cuda, cuda:N or auto") from error


def _lengths(text: str) -> list[int]:
    try:
        return list(parse_lengths(text))
    except ValueError as error:
        raise ConfigError(f"--lengths is {text!r}; expected positive numbers, as in 1024,4096") from error


def _shape(text: str, window: int) -> Shape:
    try:
        batch, heads, kv_heads, head_dim = (int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--shape is {text!r}; expected batch,heads,kv_heads,head_dim, as in 1,8,8,64") from error
    if min(batch, heads, kv_heads, head_dim) < 1 or heads % kv_heads:
        raise ConfigError(f"--shape is {text!r}; expected positive numbers, with heads a multiple of kv_heads")
    return Shape(batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, tokens=0, window=window or None)
