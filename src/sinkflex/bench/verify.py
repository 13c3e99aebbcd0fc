"""``verify-attention``: a user's model under sinkflex against eager, outputs and all gradients, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sinkflex.attention import hf
from sinkflex.errors import ModelError
from sinkflex.types import JSONObject

FP32_TOLERANCE = 1e-4
"""Largest relative error in fp32."""

LOW_PRECISION_FACTOR = 2.0
"""In bf16 and fp16 sinkflex may be this much further from fp32 than eager in the same precision is."""

CASES = ("plain", "left-padded")

SHORTEST = 192
"""Tokens of a row when none are asked for and the model has no longer window."""

LONGEST = 4096
"""Rows are not made longer than this of the check's own accord; eager's memory grows with the square."""

_GRADIENT_FLOOR = 1e-3


@dataclass(frozen=True, kw_only=True)
class LayerCheck:
    """One row of the verdict: the logits, or one layer.

    Attributes:
        case: "plain" or "left-padded".
        place: "logits" (with the parameters outside the layers), or "layer N".
        has_sink: the layer holds learned sinks.
        output_error: of the attention output (or logits), relative to its largest value.
        gradient_error: of the worst parameter, relative to that parameter's largest gradient (or a thousandth of
            the model's largest, if that is more); infinite where eager has a gradient and sinkflex none.
        budget: what each of the two may be.
        worst: the parameter behind ``gradient_error``.
    """

    case: str
    place: str
    has_sink: bool
    output_error: float
    gradient_error: float
    budget: float
    worst: str = ""

    @property
    def passed(self) -> bool:
        """Both errors are finite and within the budget."""
        return self.output_error <= self.budget and self.gradient_error <= self.budget


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All checks of one model.

    Attributes:
        model: its name.
        implementation: what was compared with eager.
        dtype: of the parameters.
        length: tokens of each row.
        checks: per case: the logits, then each layer.
        untested: what the rows were too short to show, or "".
    """

    model: str
    implementation: str
    dtype: str
    length: int
    checks: tuple[LayerCheck, ...]
    untested: str = ""

    @property
    def passed(self) -> bool:
        """Every check passed."""
        return all(check.passed for check in self.checks)

    def to_dict(self) -> JSONObject:
        """Return a JSON-ready record."""
        return asdict(self) | {"passed": self.passed}


@dataclass(frozen=True, kw_only=True)
class _Run:
    logits: Tensor
    attention: dict[str, Tensor]
    gradients: dict[str, Tensor]


def verify_model(
    model: nn.Module, *, name: str, implementation: str = "sinkflex", batch: int = 2, length: int | None = None
) -> Verdict:
    """Compare a loaded transformers causal LM with its own eager attention.

    In fp32 both must agree within ``FP32_TOLERANCE``. In a lower precision the yardstick is the model in fp32 under
    eager, and sinkflex may be ``LOW_PRECISION_FACTOR`` times as far from it as eager in that precision.

    Args:
        model: loaded with any attention implementation; weights stay as they are, gradients are cleared.
        name: to print.
        implementation: a registered name, see ``sinkflex.attention.hf.IMPLEMENTATIONS``.
        batch: rows.
        length: tokens of a row. None takes more than the model's window, so that the window counts, up to ``LONGEST``.

    Raises:
        ModelError: the model has no attention layers that this can find.
    """
    hf.register()
    hf_model: Any = model
    dtype = next(model.parameters()).dtype
    layers = [path for path, module in model.named_modules() if _layer_of(path) is not None and _is_attention(module)]
    if not layers:
        raise ModelError(f"{name} ({type(model).__name__}) has no attention modules named ...layers.N.<attention>")
    config = hf_model.config.get_text_config()
    window = _window(config)
    length = length or _length(config, window)
    checks: list[LayerCheck] = []
    was_training = model.training
    model.eval()
    for case in CASES:
        runs = {i: _run(hf_model, i, case, layers, batch, length) for i in ("eager", implementation)}
        truth = runs["eager"]
        if dtype != torch.float32:
            with _in_fp32(model):
                truth = _run(hf_model, "eager", case, layers, batch, length)
        checks += _compare(case, model, layers, runs["eager"], runs[implementation], truth)
    model.train(was_training)
    return Verdict(
        model=name,
        implementation=implementation,
        dtype=str(dtype),
        length=length,
        checks=tuple(checks),
        untested=""
        if window is None or length > window
        else f"a window of {window} keys, with rows of {length} tokens",
    )


def _window(config: Any) -> int | None:
    """The largest window or chunk that some layer of the model has."""
    kinds = getattr(config, "layer_types", None)
    found = []
    for field, kind in (("sliding_window", "sliding_attention"), ("attention_chunk_size", "chunked_attention")):
        used = kind in kinds if kinds else getattr(config, "use_sliding_window", True)
        if used and (size := getattr(config, field, None)):
            found.append(int(size))
    return max(found, default=None)


def _length(config: Any, window: int | None) -> int:
    wanted = max(SHORTEST, (window or 0) + SHORTEST // 3)
    return min(wanted, LONGEST, getattr(config, "max_position_embeddings", None) or LONGEST)


@contextmanager
def _in_fp32(model: nn.Module) -> Iterator[None]:
    """Widen the model for a while. What it had is put back as it was: rounding again would move wider tensors."""
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    buffers = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    try:
        model.float()
        yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.data = parameters[name]
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


def _run(model: Any, implementation: str, case: str, layers: list[str], batch: int, length: int) -> _Run:
    device = next(model.parameters()).device
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (batch, length), generator=made).to(device)
    mask = torch.ones_like(ids)
    if case == "left-padded":
        for row in range(batch):
            mask[row, : length // 3 * row // (batch - 1) if batch > 1 else length // 3] = 0
    weights = torch.randn(length, 1, generator=made).to(device) * torch.randn(
        model.config.get_text_config().vocab_size, generator=made
    ).to(device)
    model.set_attn_implementation(implementation)
    model.zero_grad(set_to_none=True)
    real = mask.bool()
    with _recorded(model, layers) as attention:
        inputs = {} if case == "plain" else {"attention_mask": mask}
        logits = model(input_ids=ids, use_cache=False, **inputs).logits
    (logits.float() * weights)[real].mean().backward()
    gradients = {n: p.grad.detach().float().cpu() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    kept = {path: out[real].float().cpu() for path, out in attention.items()}
    return _Run(logits=logits.detach()[real].float().cpu(), attention=kept, gradients=gradients)


@contextmanager
def _recorded(model: nn.Module, layers: list[str]) -> Iterator[dict[str, Tensor]]:
    """Collect what each attention module returns, [B, T, d]."""
    outputs: dict[str, Tensor] = {}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            outputs[path] = (output[0] if isinstance(output, tuple) else output).detach()

        return hook

    hooks = [model.get_submodule(path).register_forward_hook(keep(path)) for path in layers]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _compare(case: str, model: nn.Module, layers: list[str], eager: _Run, ours: _Run, truth: _Run) -> list[LayerCheck]:
    rest = [n for n in truth.gradients if not any(n.startswith(f"{_block(path)}.") for path in layers)]
    groups = [("logits", rest, (ours.logits, eager.logits, truth.logits), False)]
    for path in layers:
        names = [n for n in truth.gradients if n.startswith(f"{_block(path)}.")]
        outputs = (ours.attention[path], eager.attention[path], truth.attention[path])
        groups.append((f"layer {_layer_of(path)}", names, outputs, _has_sink(model.get_submodule(path))))
    # A parameter with next to no gradient is judged on the scale of the model's largest, or rounding would fail it.
    floor = _GRADIENT_FLOOR * max((float(g.abs().max()) for g in truth.gradients.values()), default=0.0)
    checks = []
    for place, names, (got, low, want), has_sink in groups:
        errors = {n: _error(ours.gradients.get(n), truth.gradients[n], floor) for n in names}
        worst = max(errors, key=lambda n: errors[n]) if errors else ""
        budget = FP32_TOLERANCE
        if truth is not eager:
            own = [_error(eager.gradients.get(n), truth.gradients[n], floor) for n in names]
            budget = LOW_PRECISION_FACTOR * max([_error(low, want), *own])
        checks.append(
            LayerCheck(
                case=case,
                place=place,
                has_sink=has_sink,
                output_error=_error(got, want),
                gradient_error=errors.get(worst, 0.0),
                budget=budget,
                worst=worst,
            )
        )
    return checks


def _error(got: Tensor | None, want: Tensor, floor: float = 1e-12) -> float:
    """Largest difference over the largest true value; infinite for NaN, and where there is nothing to compare."""
    if got is None:
        return float("inf")
    error = float((got - want).abs().max() / want.abs().max().clamp_min(max(floor, 1e-12)))
    return error if error == error else float("inf")


def _has_sink(attention: nn.Module) -> bool:
    """Models call it ``sinks``, ``sink`` or ``attention_sink_bias``."""
    return any("sink" in name.rpartition(".")[2] for name, _ in attention.named_parameters())


def _layer_of(path: str) -> int | None:
    found = re.search(r"(?:layers|h|blocks)\.(\d+)\.[^.]+$", path)
    return int(found.group(1)) if found else None


def _block(path: str) -> str:
    return path.rsplit(".", 1)[0]


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower()
