"""A query that sees nothing gives exactly 0, a key that nobody sees gets exactly 0, and nothing is ever NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sinkflex.attention import SequenceLayout, dense_mask, sink_attention

SINKS = {"none": None, "random": "random", "+30": 30.0, "-30": -30.0, "-inf": float("-inf")}


def padded() -> SequenceLayout:
    """Padding on the left, on both sides, and everywhere."""
    column = torch.arange(50)
    return SequenceLayout.from_padding(torch.stack([column >= 10, (column >= 3) & (column < 30), column < 0]))


def nothing() -> SequenceLayout:
    return SequenceLayout.from_padding(torch.zeros(1, 5, dtype=torch.bool))


def tree_with_padding() -> SequenceLayout:
    return SequenceLayout.from_prefix_tree([[9, 4, 5], [6]], [[-1, 0, 0], [-1]], length=24)


def blind_queries(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Odd queries of odd heads see nothing; nobody sees key 4."""
    return ((h + q) % 2 == 0) & (k != 4)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "padded": (padded, {}),
    "padded, window": (padded, {"window": 7, "num_sink_tokens": 3}),
    "nothing": (nothing, {}),
    "nothing, window": (nothing, {"window": 2}),
    "tree": (tree_with_padding, {}),
    "tree, window": (tree_with_padding, {"window": 4}),
    "mask_mod": (padded, {"mask_mod": blind_queries}),
}


def flash(*inputs: Any, **options: Any) -> Any:
    return sink_attention(*inputs, **options, impl="flash", return_lse=True)


@pytest.mark.parametrize("lse_grad", [True, False])
@pytest.mark.parametrize("sink", sorted(SINKS))
@pytest.mark.parametrize("name", sorted(CASES))
def test_what_sees_nothing_is_exactly_zero(lab: Any, name: str, sink: str, lse_grad: bool) -> None:
    build, options = CASES[name]
    runs = {"reference": lab.run_reference, "flash": flash, "flex": lab.run_flex}
    if "mask_mod" not in options:
        runs["varlen"] = lab.run_varlen
    for dtype in (torch.float64, torch.bfloat16):
        case = lab.case(build(), sink=SINKS[sink], lse_grad=lse_grad).to(dtype)
        seen = dense_mask(case.layout, num_heads=4, **options).expand(-1, 4, -1, -1)
        blind = ~seen.any(-1)
        unseen = ~seen.any(-2).unflatten(1, (2, 2)).any(2)
        assert bool(blind.any())
        assert bool(unseen.any())
        for run in runs.values():
            got = lab.results(run, case, **options)
            assert not any(bool(x.isnan().any()) for x in got.values())
            assert bool((got["out"][blind] == 0).all())
            assert bool((got["d_query"][blind] == 0).all())
            assert bool((got["d_key"][unseen] == 0).all())
            assert bool((got["d_value"][unseen] == 0).all())
            assert all(bool(x.isfinite().all()) for result, x in got.items() if result != "lse")
            empty_lse = torch.full((4,), -torch.inf) if case.sink_logits is None else case.sink_logits
            wanted = empty_lse[None, :, None].expand_as(blind)[blind].to(got["lse"].dtype)
            assert torch.equal(got["lse"][blind], wanted)


@pytest.mark.parametrize("sink", ["random", "+30", "-30", "-inf"])
def test_only_the_lse_of_blind_rows_teaches_the_sink(lab: Any, sink: str) -> None:
    """Where all rows are blind, lse is the sink itself: d_sink is the sum of dlse, and 0 for a sink of -inf."""
    case = lab.case(nothing(), sink=SINKS[sink])
    wanted = case.grad_lse.sum((0, 2)) * (sink != "-inf")
    for run in (lab.run_reference, flash, lab.run_varlen, lab.run_flex):
        torch.testing.assert_close(lab.results(run, case)["d_sink_logits"], wanted, rtol=1e-14, atol=0.0)
    case = lab.case(nothing(), sink=SINKS[sink], lse_grad=False)
    for run in (lab.run_reference, flash, lab.run_varlen, lab.run_flex):
        assert bool((lab.results(run, case)["d_sink_logits"] == 0).all())
