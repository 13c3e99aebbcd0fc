"""Plausible mistakes, each planted in a copy of the source: the comparison that guards the code must reject all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sinkflex.attention import SequenceLayout, flash, plan, tree, windowed
from sinkflex.attention.cpu import CpuEngine

FLASH = "sinkflex.attention.flash"
WINDOWED = "sinkflex.attention.windowed"
TREE = "sinkflex.attention.tree"
TOTAL = "total = torch.logaddexp(lse, sink)"
RESCALE = "out, lse = out.mul_(weight[..., None]), total"

MUTANTS = {
    "sink counted twice": (FLASH, TOTAL, "total = torch.logaddexp(torch.logaddexp(lse, sink), sink)"),
    "sink never counted": (FLASH, TOTAL, "total = lse"),
    "sink in lse but not in out": (FLASH, RESCALE, "lse = total"),
    "lse in log2": (FLASH, RESCALE, "out, lse = out.mul_(weight[..., None]), total / 0.6931471805599453"),
    "lse cast to bf16": (FLASH, RESCALE, "out, lse = out.mul_(weight[..., None]), total.bfloat16().to(total.dtype)"),
    "dlse dropped": (FLASH, "if grad_lse is None:", "if True:"),
    "dlse dropped for the sink": (FLASH, "delta = delta - grad_lse", "pass"),
    "dlse with the wrong sign": (FLASH, "_summands(-grad_lse", "_summands(grad_lse"),
    "sink gradient with the wrong sign": (FLASH, "total: Tensor = -(share", "total: Tensor = (share"),
    "window one too wide": (WINDOWED, "(back < window)", "(back <= window)"),
    "window one too narrow": (WINDOWED, "(back < window)", "(back < window - 1)"),
    "window over packed columns": (WINDOWED, "= node.position + inside", "= node.start + inside"),
    "path end one short": (WINDOWED, "path_end(nodes, i, start - node.start, window - 1)",
                           "path_end(nodes, i, start - node.start, window - 2)"),
    "documents see each other": (WINDOWED, " & (chain[self._halo :, None] == chain)", ""),
    "siblings see each other": (TREE, "node.parent] + 1 if node.parent >= 0 else 0)\n",
                                "node.parent] + 1 if node.parent >= 0 else 0)\n        below[0].append([0, 1])\n"),
}  # fmt: skip


def _run(monkeypatch: pytest.MonkeyPatch, through: Any, module: Any, name: str) -> Any:
    # A mutant's calls pass through unmutated code, which checks their class.
    if name == WINDOWED:
        module.WindowCall = windowed.WindowCall
        monkeypatch.setattr(plan, "window_calls", module.window_calls)
    if name == TREE:
        module.Job = tree.Job
        monkeypatch.setattr(plan, "tree_jobs", module.tree_jobs)

    def run(*inputs: torch.Tensor, layout: SequenceLayout, window: int | None) -> Any:
        calls = plan.build_plan(
            layout, device=torch.device("cpu"), num_heads=4, window=window, num_sink_tokens=0, mask_mod=None
        )
        return through.sink_attention_through(CpuEngine(calls, 8**-0.5), *inputs)

    return run


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_mutant_is_rejected(lab: Any, mutate: Any, monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    name, original, replacement = MUTANTS[mutant]
    module = mutate(name, original, replacement)
    window = None if name == TREE else 5
    case = lab.case(_layout())
    expected = lab.reference(case, window=window)
    run = _run(monkeypatch, module if name == FLASH else flash, module, name)
    errors = lab.errors(lab.results(run, case, window=window), expected)
    # A mistake must show far above the fp64 grid's 1e-12, in at least one result (NaN counts as shown).
    assert not all(error < 1e-4 for error in errors.values()), errors
    # And the comparison itself must accept the source as it is.
    original_run = _run(monkeypatch, flash, None, "")
    monkeypatch.undo()
    lab.assert_close(lab.results(original_run, lab.case(_layout()), window=window), expected, 1e-12)


def _layout() -> SequenceLayout:
    """A tree and three short documents that share a strip of keys; fresh each time, since plans are kept on it."""
    return SequenceLayout.from_prefix_tree([20, 9, 11, 6, 13, 7, 9, 8], [-1, 0, 0, 2, -1, -1, -1, -1])
