"""``sinkflex doctor``: what this machine has, and what SinkFlex will make of it."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from rich.console import Console
from rich.text import Text

from sinkflex import __version__

_EXTRAS = {
    "train": "training, LoRA, TensorBoard, curves",
    "hf": "sinkflex.attention inside Hugging Face models",
    "llm": "LLM-played users over an endpoint",
    "tau2": "the real tau2-bench tasks",
    "wandb": "Weights & Biases",
    "mlflow": "MLflow",
}

_SINK_MODELS = (
    "gpt_oss",
    "granite_swa",
    "granitemoe_swa",
    "mimo_v2_flash",
    "flint",
    "deepseek_v4",
    "hy_v4",
    "openai_privacy_filter",
)


def doctor() -> None:
    """Show versions, devices, the attention impl each model kind will get and why, and missing extras."""
    console = Console(soft_wrap=True)
    for title, rows in (
        ("versions", versions()),
        ("devices", devices()),
        ("attention, as impl='auto' chooses it here", attention()),
        ("extras", extras()),
    ):
        console.print(Text(title, style="bold"))
        console.print(_lines(rows))
        console.print()


def versions() -> list[tuple[str, str]]:
    """Return what is installed, by name."""
    packages = ("torch", "transformers", "peft", "tensordict", "gymnasium", "pydantic", "vllm", "verl", "flash-attn")
    return [
        ("sinkflex", __version__),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        *((package, _version(package) or "not installed") for package in packages),
    ]


def devices() -> list[tuple[str, str]]:
    """Return the processors that torch can use."""
    import torch

    rows = [
        (
            "CPU",
            f"{available_cores()} of {os.cpu_count()} cores usable, {torch.get_num_threads()} threads, "
            f"{torch.backends.cpu.get_cpu_capability()}",
        )
    ]
    if not torch.cuda.is_available():
        return [*rows, ("CUDA", "no device; SinkFlex trains on the CPU")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        rows.append(
            (
                f"CUDA {index}",
                f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
                f"compute capability {properties.major}.{properties.minor}",
            )
        )
    return rows


def attention() -> list[tuple[str, str]]:
    """Return the impl that each kind of model gets on this machine's fastest device, and why."""
    import torch

    from sinkflex.attention.dispatch import explain_impl

    device = "cuda" if torch.cuda.is_available() else "cpu"
    kinds = (
        ("models with sinks or without, bfloat16", torch.bfloat16, 64, False),
        ("models with sinks or without, float32", torch.float32, 64, False),
        ("models with head dim 512, bfloat16", torch.bfloat16, 512, False),
        ("any model with a mask_mod of your own", torch.bfloat16, 64, True),
    )
    rows = []
    for kind, dtype, head_dim, own_mask in kinds:
        impl, reason = explain_impl(device, dtype, head_dim=head_dim, mask_mod=own_mask)
        rows.append((kind, f"{impl}: {reason}"))
    return [*rows, ("models with sinks that are installed", ", ".join(_sink_models()) or "none: install sinkflex[hf]")]


def extras() -> list[tuple[str, str]]:
    """Return each optional part: installed, or the command that installs it."""
    rows = []
    for extra in metadata("sinkflex").get_all("Provides-Extra") or ():
        if extra not in _EXTRAS:
            continue
        missing = [package for package in _packages_of(extra) if _version(package) is None]
        state = "installed" if not missing else f"missing {', '.join(missing)}: pip install 'sinkflex[{extra}]'"
        rows.append((extra, f"{_EXTRAS[extra]}: {state}"))
    return rows


def available_cores() -> int:
    """Return the cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _sink_models() -> list[str]:
    """Architectures of the installed transformers whose attention has learned sinks."""
    package = importlib.util.find_spec("transformers")
    if package is None or not package.submodule_search_locations:
        return []
    models = Path(package.submodule_search_locations[0]) / "models"
    return [name for name in _SINK_MODELS if (models / name).is_dir()]


def _packages_of(extra: str) -> list[str]:
    marked = re.compile(rf"""extra\s*==\s*['"]{extra}['"]""")
    lines = [line for line in requires("sinkflex") or () if marked.search(line)]
    return [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in lines]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _lines(rows: list[tuple[str, str]]) -> Text:
    """One line a row, whatever its length: what doctor prints is pasted into reports."""
    width = max(len(name) for name, _ in rows)
    return Text("\n").join(Text.assemble((f"  {name:<{width}}  ", "cyan"), value) for name, value in rows)
