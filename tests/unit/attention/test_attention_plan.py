"""The plans: how many kernel calls, what they copy, and what they cost."""

from __future__ import annotations

import random

import torch

from sinkflex.attention import SequenceLayout
from sinkflex.attention.plan import Plan, build_plan
from sinkflex.attention.windowed import block_size

CPU = torch.device("cpu")


def _plan(layout: SequenceLayout, window: int | None = None, num_sink_tokens: int = 0) -> Plan:
    return build_plan(layout, device=CPU, num_heads=2, window=window, num_sink_tokens=num_sink_tokens, mask_mod=None)


def _pairs(plan: Plan) -> int:
    return sum(call.q.n * call.q.length * call.k.length for call in plan.calls)


def test_plain_causal_is_one_call_without_copies() -> None:
    for batch in (1, 3):
        plan = _plan(SequenceLayout.causal(batch, 50))
        assert plan.whole
        assert plan.calls[0].causal
        assert plan.calls[0].hidden is None


def test_one_new_token_needs_no_mask() -> None:
    plan = _plan(SequenceLayout.causal(4, 50, num_queries=1))
    assert plan.whole
    assert plan.calls[0].hidden is None


def test_one_new_token_in_a_window_reads_only_the_window() -> None:
    plan = _plan(SequenceLayout.causal(4, 500, num_queries=1), window=64)
    assert [call.k.length for call in plan.calls] == [64]
    assert plan.calls[0].k.gather is None
    ragged = _plan(SequenceLayout.decode([500, 90, 70], 500), window=64)
    assert [call.k.length for call in ragged.calls] == [64]


def test_a_window_wider_than_everything_is_no_window() -> None:
    layout = SequenceLayout.from_documents([30, 50, 20])
    assert _plan(layout, 50) is _plan(layout)
    assert _plan(layout, 49) is not _plan(layout)


def test_plans_are_kept_on_the_layout() -> None:
    layout = SequenceLayout.causal(1, 300)
    assert _plan(layout, 20) is _plan(layout, 20)


def test_documents_share_few_calls_with_little_padding() -> None:
    lengths = random.Random(0).choices(range(100, 401), k=100)
    plan = _plan(SequenceLayout.from_documents(lengths))
    assert len(plan.calls) <= 20
    assert _pairs(plan) <= 1.15 * sum(length**2 for length in lengths)


def test_equal_documents_are_one_call_without_copies() -> None:
    plan = _plan(SequenceLayout.from_documents([64] * 10))
    assert len(plan.calls) == 1
    assert plan.calls[0].q.gather is None


def test_work_on_documents_is_linear_in_their_number() -> None:
    once = _plan(SequenceLayout.from_documents([100, 200, 300] * 10))
    twice = _plan(SequenceLayout.from_documents([100, 200, 300] * 20))
    assert _pairs(twice) == 2 * _pairs(once)
    assert len(twice.calls) == len(once.calls)


def test_work_in_a_window_is_linear_in_the_length() -> None:
    for layouts in (
        [SequenceLayout.causal(1, length) for length in (2048, 4096)],
        [SequenceLayout.from_documents([300] * number) for number in (10, 20)],
    ):
        half, whole = (_plan(layout, 128) for layout in layouts)
        assert _pairs(whole) <= 2.1 * _pairs(half)


def test_the_inside_of_a_long_document_is_read_through_views_under_one_mask() -> None:
    plan = _plan(SequenceLayout.causal(1, 4096), 128)
    largest = max(plan.calls, key=lambda call: call.q.n)
    assert largest.q.n >= 4096 / block_size(128) - 2
    assert largest.q.gather is None
    assert largest.k.gather is None
    assert largest.hidden is not None
    assert largest.hidden().shape[0] == 1


def test_a_group_meets_its_prefix_in_one_call() -> None:
    plan = _plan(SequenceLayout.from_prefix_tree([1000] + [50] * 8, [-1] + [0] * 8))
    crossing = [call for call in plan.calls if not call.causal]
    assert [(call.q.n, call.q.length, call.k.length) for call in crossing] == [(1, 400, 1000)]
    assert _pairs(plan) == 1000**2 + 8 * 50**2 + 400 * 1000


def test_always_visible_tokens_leave_the_window_linear() -> None:
    half, whole = (_plan(SequenceLayout.causal(1, n), 128, 16) for n in (2048, 4096))
    assert _pairs(whole) <= 2.1 * _pairs(half)
