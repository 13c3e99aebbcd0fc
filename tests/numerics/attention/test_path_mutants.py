"""Plausible mistakes in the GPU paths and in how a tree's parts are joined: the grid's comparison must reject all.

Each mutant replaces one internal function by a wrong one made from the right one, ``real``. It must fail even at a
tolerance a million times the grid's, so that what is rejected is the mistake and not its rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sinkflex.attention import SequenceLayout, cpu, flash, flex, kernels, plan, sink_attention, varlen
from sinkflex.attention.masks import visible
from sinkflex.attention.tree import Job

TOLERANCE = 1e-12
SINK = 0.4
Wrong = Callable[[Any], Any]


def tree() -> SequenceLayout:
    """Two levels of replies and two documents behind them; fresh each time, since plans are kept on it."""
    return SequenceLayout.from_prefix_tree([20, 9, 11, 6, 13, 7], [-1, 0, 0, 2, -1, -1])


def padded() -> SequenceLayout:
    column = torch.arange(40)
    return SequenceLayout.from_padding(torch.stack([column >= 15, column < 30, column < 0]))


def odd_keys_in_odd_heads(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (h % 2 == 0) | (k % 2 == 1)


def assert_rejected(
    lab: Any, monkeypatch: pytest.MonkeyPatch, run: Any, patches: list[tuple[Any, str, Wrong]], **options: Any
) -> None:
    build = options.pop("layout", tree)
    expected = lab.reference(lab.case(build(), sink=SINK), **options)
    lab.assert_close(lab.results(run, lab.case(build(), sink=SINK), **options), expected, TOLERANCE)
    for owner, name, wrong in patches:
        monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    got = lab.results(run, lab.case(build(), sink=SINK), **options)
    with pytest.raises(AssertionError):
        lab.assert_close(got, expected, 1e6 * TOLERANCE)


# -- the sink, behind any flex kernel ---------------------------------------------------------------------------------

ADD_SINK: dict[str, Wrong] = {
    "sink counted twice": lambda real: lambda out, lse, sink: real(*real(out, lse, sink), sink),
    "sink not in out": lambda real: lambda out, lse, sink: (out, real(out, lse, sink)[1]),
    "sink not in lse": lambda real: lambda out, lse, sink: (real(out, lse, sink)[0], lse),
    "kernel's lse taken for log2": lambda real: lambda out, lse, sink: real(out, lse * math.log(2), sink),
    "lse returned in log2": lambda real: lambda *x: (real(*x)[0], real(*x)[1] / math.log(2)),
    "kernel's lse cast to bf16": lambda real: lambda out, lse, sink: real(out, lse.bfloat16().to(lse.dtype), sink),
    "kernel's dlse dropped": lambda real: lambda out, lse, sink: real(out, lse.detach(), sink),
    "returned dlse dropped": lambda real: lambda *x: (real(*x)[0], real(*x)[1].detach()),
    "sink's gradient only from out": lambda real: (
        lambda out, lse, sink: (
            real(out, lse, sink)[0],
            real(out, lse, sink.detach())[1],
        )
    ),
    "sink's gradient only from lse": lambda real: (
        lambda out, lse, sink: (
            real(out, lse, sink.detach())[0],
            real(out, lse, sink)[1],
        )
    ),
    "sink's sign": lambda real: lambda out, lse, sink: real(out, lse, -sink),
    "sinks of other heads": lambda real: lambda out, lse, sink: real(out, lse, sink + torch.arange(4)),
}


@pytest.mark.parametrize("mutant", sorted(ADD_SINK))
def test_flex_sink_mutants(lab: Any, monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    assert_rejected(lab, monkeypatch, lab.run_flex, [(flex, "add_sink", ADD_SINK[mutant])], window=7)


# -- flex: who sees whom ----------------------------------------------------------------------------------------------


def with_arguments(**changed: Callable[[Any], Any]) -> Wrong:
    """The same function with some keyword arguments changed."""
    return lambda real: (
        lambda *x, **options: real(*x, **{k: changed.get(k, lambda v: v)(v) for k, v in options.items()})
    )


def with_positions_of_columns(real: Any) -> Any:
    def wrong(
        q_position: Tensor, q_enter: Tensor, position: Tensor, enter: Tensor, leave: Tensor, **options: Any
    ) -> Any:
        columns, q_columns = torch.arange(position.shape[1]), torch.arange(q_position.shape[1])
        return real(q_columns.expand_as(q_position), q_enter, columns.expand_as(position), enter, leave, **options)

    return wrong


def with_one_node(real: Any) -> Any:
    def wrong(
        q_position: Tensor, q_enter: Tensor, position: Tensor, enter: Tensor, leave: Tensor, **options: Any
    ) -> Any:
        one = (q_enter.clamp(max=0), position, enter.clamp(max=0), leave.clamp(min=1))
        return real(q_position, *one, **options)

    return wrong


MASK = "_layout_mask_mod"
FLEX_MASKS: dict[str, tuple[str, Wrong, dict[str, Any]]] = {
    "window one too wide": (MASK, with_arguments(window=lambda w: w + 1), {"window": 7}),
    "window one too narrow": (MASK, with_arguments(window=lambda w: w - 1), {"window": 7}),
    "window forgotten": (MASK, with_arguments(window=lambda w: None), {"window": 7}),
    "window over packed columns": (MASK, with_positions_of_columns, {"window": 7}),
    "first keys forgotten": (
        MASK,
        with_arguments(num_sink_tokens=lambda n: 0),
        {"window": 7, "num_sink_tokens": 3},
    ),
    "first keys one too many": (
        MASK,
        with_arguments(num_sink_tokens=lambda n: n + 1),
        {"window": 7, "num_sink_tokens": 3},
    ),
    "documents and siblings see each other": (MASK, with_one_node, {}),
    "rows taken for alike": ("_rows_alike", lambda real: lambda layout: True, {"layout": padded}),
    "caller's mask forgotten": (
        "_inside",
        lambda real: lambda mask, *x: mask,
        {"mask_mod": odd_keys_in_odd_heads},
    ),
    "caller's mask instead of the layout's": (
        "_inside",
        lambda real: lambda mask, mask_mod, *x: real(lambda b, h, q, k: q >= k, mask_mod, *x),
        {"mask_mod": odd_keys_in_odd_heads},
    ),
}


@pytest.mark.parametrize("mutant", sorted(FLEX_MASKS))
def test_flex_mask_mutants(lab: Any, monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    name, wrong, options = FLEX_MASKS[mutant]
    assert_rejected(lab, monkeypatch, lab.run_flex, [(flex, name, wrong)], **options)


# -- varlen: the plan, the kernel's promises, the joining -------------------------------------------------------------


def changed_jobs(change: Callable[[Any], Any]) -> Wrong:
    return lambda real: lambda *x: change(real(*x))


def kernel_lse(change: Callable[[Tensor], Tensor]) -> Wrong:
    """The engine believes a log-sum-exp that is not what it takes it for."""

    def wrong(real: Any) -> Any:
        def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Any:
            return real(out_a, lse_a, out_b, change(lse_b))

        return merge

    return wrong


VARLEN: dict[str, tuple[Any, str, Wrong, int | None]] = {
    "window one too wide": (kernels.Sequences, "left", lambda real: property(lambda s: s.window or -1), 7),
    "window one too narrow": (
        kernels.Sequences,
        "left",
        lambda real: property(lambda s: -1 if s.window is None else s.window - 2),
        7,
    ),
    "window forgotten": (kernels.Sequences, "left", lambda real: property(lambda s: -1), 7),
    "not causal": (kernels.Sequences, "right", lambda real: property(lambda s: -1), None),
    "path end one short": (
        varlen,
        "path_end",
        lambda real: lambda nodes, index, own, count: real(nodes, index, own, count - 1),
        7,
    ),
    "prefix not seen": (varlen, "tree_jobs", changed_jobs(lambda jobs: jobs._replace(full=[])), None),
    "siblings see each other": (
        varlen,
        "tree_jobs",
        changed_jobs(lambda jobs: jobs._replace(full=[*jobs.full, Job(29, 11, 20, 9, 1)])),
        None,
    ),
    "part overwrites part": (varlen, "merge_parts", lambda real: lambda *x: x[2:], None),
    "parts averaged": (
        varlen,
        "merge_parts",
        lambda real: lambda *x: ((x[0] + x[2]) / 2, real(*x)[1]),
        None,
    ),
    "part's lse in log2": (varlen, "merge_parts", kernel_lse(lambda lse: lse / math.log(2)), None),
    "part's lse in bf16": (varlen, "merge_parts", kernel_lse(lambda lse: lse.bfloat16().to(lse.dtype)), None),
    "dlse dropped": (
        flash,
        "_backward_with_lse",
        lambda real: lambda engine, grad, grad_lse, *x: engine.backward(grad, *x),
        None,
    ),
    "dlse with the wrong sign": (
        flash,
        "_backward_with_lse",
        lambda real: lambda engine, grad, grad_lse, *x: real(engine, grad, -grad_lse, *x),
        None,
    ),
    "dlse dropped for the sink": (
        flash,
        "_sink_gradient",
        lambda real: lambda grad, grad_lse, *x: real(grad, None, *x),
        None,
    ),
    "sink's gradient with the wrong sign": (flash, "_sink_gradient", lambda real: lambda *x: -real(*x), None),
    "sink's gradient of one row only": (
        flash,
        "_sink_gradient",
        lambda real: (
            lambda grad, grad_lse, sink, out, lse: real(
                grad[:, :, 1:], grad_lse[:, :, 1:], sink, out[:, :, 1:], lse[:, :, 1:]
            )
        ),
        None,
    ),
}


@pytest.mark.parametrize("mutant", sorted(VARLEN))
def test_varlen_mutants(lab: Any, monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    owner, name, wrong, window = VARLEN[mutant]
    assert_rejected(lab, monkeypatch, lab.run_varlen, [(owner, name, wrong)], window=window)


@pytest.mark.parametrize("mutant", ["dlse dropped", "dlse with the wrong sign"])
def test_two_pass_mutants(lab: Any, monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    """The way that kernels at their widest head dimension take has a gradient of the log-sum-exp of its own."""
    monkeypatch.setattr(varlen.VarlenEngine, "max_head_dim", 8)
    wrong = {
        "dlse dropped": lambda real: lambda engine, grad, grad_lse, *x: real(engine, grad, grad_lse * 0.0, *x),
        "dlse with the wrong sign": lambda real: lambda engine, grad, grad_lse, *x: real(engine, grad, -grad_lse, *x),
    }[mutant]
    assert_rejected(lab, monkeypatch, lab.run_varlen, [(flash, "_backward_in_two", wrong)])


# -- a sink per part --------------------------------------------------------------------------------------------------


def sink_in_each_part(real: Any) -> Any:
    """What a tree gives that calls sink-aware attention on every part: a query below n prefixes has n + 1 sinks."""

    def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Any:
        total = torch.logaddexp(lse_b, torch.full_like(lse_b, SINK))
        return real(out_a, lse_a, out_b * torch.exp(lse_b - total)[..., None], total)

    return merge


def flash_on_cpu(*inputs: Any, **options: Any) -> Any:
    return sink_attention(*inputs, **options, impl="flash", return_lse=True)


@pytest.mark.parametrize("path", ["cpu", "varlen"])
def test_a_sink_per_part_is_rejected(lab: Any, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    owner, run = {"cpu": (cpu, flash_on_cpu), "varlen": (varlen, lab.run_varlen)}[path]
    assert_rejected(lab, monkeypatch, run, [(owner, "merge_parts", sink_in_each_part)])


def test_a_sink_per_part_does_not_show_without_a_tree(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant is what it says: documents are one part each, and there it is right."""
    monkeypatch.setattr(cpu, "merge_parts", sink_in_each_part(cpu.merge_parts))
    case = lab.case(SequenceLayout.from_documents([9, 5, 12]), sink=SINK)
    lab.assert_close(lab.results(flash_on_cpu, case), lab.reference(case), TOLERANCE)


# -- the CPU plan -----------------------------------------------------------------------------------------------------

CPU_PLAN: dict[str, tuple[str, Wrong, dict[str, Any]]] = {
    "prefix not seen": ("tree_jobs", changed_jobs(lambda jobs: jobs._replace(full=[])), {}),
    "own tokens not seen": ("tree_jobs", changed_jobs(lambda jobs: jobs._replace(causal=jobs.causal[1:])), {}),
    "window one too wide": (
        "window_calls",
        lambda real: lambda layout, nodes, window: real(layout, nodes, window + 1),
        {"window": 7},
    ),
    "caller's mask forgotten": (
        "dense_mask",
        lambda real: lambda layout, *, num_heads, mask_mod, **options: visible(layout, **options)[:, None],
        {"mask_mod": odd_keys_in_odd_heads},
    ),
}


@pytest.mark.parametrize("mutant", sorted(CPU_PLAN))
def test_cpu_plan_mutants(lab: Any, monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    name, wrong, options = CPU_PLAN[mutant]
    assert_rejected(lab, monkeypatch, flash_on_cpu, [(plan, name, wrong)], **options)
