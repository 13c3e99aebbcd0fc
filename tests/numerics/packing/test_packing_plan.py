from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from sinkflex.errors import RolloutError
from sinkflex.rollout.packing import PackedRow, pack, plan_packing

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def row(prompt: list[int], sampled: list[int], after: int = 0) -> Row:
    """A prompt, a sampled action, and ``after`` tokens of observation that nothing is trained on."""
    ids = (*prompt, *sampled, *[0] * after)
    return Row(ids, (False,) * len(prompt) + (True,) * len(sampled) + (False,) * after)


def group(prompt: list[int], count: int, length: int, seed: int = 0) -> list[Row]:
    draw = random.Random(f"{prompt[0]}/{seed}")
    return [row(prompt, [draw.randrange(100, 200) for _ in range(length)]) for _ in range(count)]


def test_the_example_of_the_docstring() -> None:
    rows = [row([7, 8], [3, 1]), row([7, 8], [5, 2])]
    plan = plan_packing(rows, token_budget=100, min_saved_tokens=1)
    assert (plan.rows, plan.shares_prefixes) == (((0, 1),), True)
    (packed,) = pack(rows, plan, device=CPU)
    assert packed.members == (0, 1)
    assert packed.input_ids.tolist() == [[7, 8, 3, 5]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 2]]
    assert packed.predictors.tolist() == [1, 2, 1, 3]
    assert packed.targets.tolist() == [3, 1, 5, 2]
    assert packed.flat.tolist() == [0, 1, 2, 3]


def test_a_token_sampled_by_several_trajectories_counts_for_each() -> None:
    # both sampled the 3; it is one token of the row and two terms of the loss
    rows = [row([7, 8], [3, 1]), row([7, 8], [3, 2])]
    (packed,) = pack(rows, plan_packing(rows, token_budget=9, min_saved_tokens=1), device=CPU)
    assert packed.input_ids.tolist() == [[7, 8, 3]]
    assert packed.predictors.tolist() == [1, 2, 1, 2]
    assert packed.targets.tolist() == [3, 1, 3, 2]


def test_without_sharing_documents_lie_side_by_side() -> None:
    rows = [row([7, 8], [3, 1]), row([9], [5, 2, 6])]
    plan = plan_packing(rows, token_budget=100)
    assert (plan.rows, plan.shares_prefixes, plan.saved_fraction) == (((0, 1),), False, 0.0)
    (packed,) = pack(rows, plan, device=CPU)
    assert packed.input_ids.tolist() == [[7, 8, 3, 9, 5, 2]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert packed.predictors.tolist() == [1, 2, 3, 4, 5]


def test_tokens_after_the_last_prediction_are_left_out() -> None:
    rows = [row([7, 8], [3, 1], after=5)]
    (packed,) = pack(rows, plan_packing(rows, token_budget=9), device=CPU)
    assert packed.input_ids.tolist() == [[7, 8, 3]]


def test_the_plan_reports_what_it_saves() -> None:
    rows = group(list(range(100)), count=8, length=21)
    plan = plan_packing(rows, token_budget=1000)
    # 8 * (100 + 20) tokens become 100 + 8 * 20
    assert (plan.tokens_before, plan.tokens_after) == (960, 260)
    assert plan.saved_fraction == pytest.approx(700 / 960)
    assert plan.describe() == "8 trajectories of 960 tokens in 1 packed rows of 260: shared prefixes save 72.9%"


def test_sharing_that_saves_too_little_is_not_used_and_said_so() -> None:
    rows = group(list(range(20)), count=2, length=400)
    assert plan_packing(rows, token_budget=4000, min_saved_tokens=1).shares_prefixes is False
    plan = plan_packing(rows, token_budget=4000, min_saved_tokens=1, pays_from=0.01)
    assert plan.shares_prefixes is True
    off = plan_packing(group(list(range(100)), count=8, length=9), token_budget=4000, pays_from=2.0)
    assert (off.shares_prefixes, off.tokens_after) == (False, off.tokens_before)
    assert off.describe().endswith("in 1 packed rows of 864: no prefix sharing")


def random_rows(seed: int) -> list[Row]:
    draw = random.Random(seed)
    rows = []
    for task in range(6):
        prompt = [1, 2, 3, *[task + 10] * draw.randrange(20, 60)]
        turns = [draw.randrange(100, 103) for _ in range(12)]
        for _ in range(draw.randrange(1, 9)):
            common = draw.randrange(12)
            tail = [draw.randrange(200, 400) for _ in range(draw.randrange(2, 30))]
            rows.append(row(prompt, turns[:common] + tail, after=draw.randrange(3)))
    draw.shuffle(rows)
    return rows


def expected_terms(rows: list[Row]) -> dict[int, tuple[tuple[int, ...], int]]:
    """For each trained token of the list, end to end: the tokens it is predicted from, and itself."""
    terms: dict[int, tuple[tuple[int, ...], int]] = {}
    for r in rows:
        for at, trained in enumerate(r.loss_mask):
            if trained:
                terms[len(terms)] = (r.ids[:at], r.ids[at])
    return terms


def seen_tokens(packed: PackedRow, column: int) -> tuple[int, ...]:
    layout = packed.layout
    enter, leave, position = layout.enter[0], layout.exit[0], layout.position[0]
    seen = (enter <= enter[column]) & (enter[column] < leave) & (position <= position[column])
    order = position[seen].argsort()
    return tuple(packed.input_ids[0][seen][order].tolist())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("budget", "pays_from"), [(150, 0.0), (400, 0.0), (100_000, 0.0), (400, 2.0)])
def test_every_prediction_sees_exactly_its_own_past(seed: int, budget: int, pays_from: float) -> None:
    rows = random_rows(seed)
    plan = plan_packing(rows, token_budget=budget, min_saved_tokens=16, pays_from=pays_from)
    assert plan.shares_prefixes == (pays_from == 0.0)
    packed = pack(rows, plan, device=CPU)
    assert sorted(index for p in packed for index in p.members) == list(range(len(rows)))
    assert sum(p.input_ids.numel() for p in packed) == plan.tokens_after
    assert all(p.input_ids.shape[1] <= budget for p in packed)
    found = {
        flat: (seen_tokens(p, predictor), target)
        for p in packed
        for flat, predictor, target in zip(p.flat.tolist(), p.predictors.tolist(), p.targets.tolist(), strict=True)
    }
    assert found == expected_terms(rows)


def test_positions_are_logical() -> None:
    rows = random_rows(9)
    for packed in pack(rows, plan_packing(rows, token_budget=300, min_saved_tokens=16), device=CPU):
        for column in range(packed.input_ids.shape[1]):
            assert packed.position_ids[0, column] == len(seen_tokens(packed, column)) - 1


def test_a_trajectory_over_the_budget_gets_a_row_of_its_own() -> None:
    rows = [row([1] * 50, [2]), *group([3, 4], count=2, length=5)]
    plan = plan_packing(rows, token_budget=20)
    assert plan.rows == ((0,), (1, 2))


def test_groups_are_not_torn_apart_where_the_budget_allows() -> None:
    # each group takes 100 + 4 * 20 = 180 tokens; a row holds two of them and would hold half of a third
    rows = [member for task in range(3) for member in group([task] * 100, count=4, length=21)]
    plan = plan_packing(rows, token_budget=460)
    assert plan.tokens_after == 3 * 180
    assert sorted(sorted({index // 4 for index in members}) for members in plan.rows) == [[0, 1], [2]]


def test_a_group_over_the_budget_is_cut_where_least_is_repeated() -> None:
    # one prompt of 100 tokens, two sub-groups that share 40 more, each with three ends of 20
    prompt = list(range(100))
    rows = [member for turn in (50, 60) for member in group([*prompt, *[turn] * 40], count=3, length=21, seed=turn)]
    plan = plan_packing(rows, token_budget=260)
    assert sorted(sorted(members) for members in plan.rows) == [[0, 1, 2], [3, 4, 5]]
    assert plan.tokens_after == 2 * (140 + 60)


def test_first_fit_decreasing_fills_rows() -> None:
    # needs 60, 50, 40, 30, 20 tokens: 60 + 40 and 50 + 30 + 20 fill two rows of 100
    lengths = [20, 60, 40, 30, 50]
    rows = [row([index + 1] * lengths[index], [9]) for index in range(5)]
    plan = plan_packing(rows, token_budget=100)
    assert plan.rows == ((1, 2), (4, 3, 0))


@pytest.mark.parametrize(
    ("rows", "budget", "message"),
    [
        ([], 10, r"rows is empty, expected at least one trajectory to pack"),
        ([row([1], [2])], 0, r"token_budget is 0, expected at least 1 token"),
        ([row([1], [2]), row([1, 2], [])], 10, r"rows\[1\] has no trained token, expected at least one; leave it out"),
        ([row([], [2, 3])], 10, r"rows\[0\] trains its first token, which nothing predicts"),
    ],
)
def test_what_cannot_be_packed_is_refused(rows: list[Row], budget: int, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        plan_packing(rows, token_budget=budget)
