from __future__ import annotations

import pytest

from sinkflex.envs.domains.entities import split_of
from sinkflex.envs.domains.retail.state import HELD, NEEDED_STATUS
from sinkflex.envs.domains.retail.tasks import (
    TIERS,
    WISH_COUNTS,
    build_tables,
    build_task,
    combination_key,
    combination_split,
    forms,
    task_ids,
)
from sinkflex.errors import TaskError

SAMPLE = 200


def sample(split: str, tier: str) -> tuple[str, ...]:
    return task_ids(split, tier)[:SAMPLE]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("tier", TIERS)
def test_tasks_are_distinct_and_keep_to_their_split(split: str, tier: str) -> None:
    tasks = [build_task(task_id) for task_id in sample(split, tier)]
    assert len({(task.customer_id, task.pin, task.wishes) for task in tasks}) == len(tasks)
    for task in tasks:
        assert (task.split, task.tier, len(task.wishes)) == (split, tier, WISH_COUNTS[tier])
        picked = tuple(wish.form for wish in task.wishes)
        assert combination_split(tier, combination_key(task.knows_id, picked)) == split
        tables = build_tables(task.task_id)
        for table in ("customers", "orders", "items", "stock"):
            assert all(split_of(entity_id) == split for entity_id in tables[table])
        assert all(split_of(wish.request_id) == split for wish in task.wishes if wish.request_id)


@pytest.mark.parametrize("tier", TIERS)
def test_every_form_of_wish_is_seen_in_training(tier: str) -> None:
    seen = {wish.form for task_id in task_ids("train", tier)[:400] for wish in build_task(task_id).wishes}
    assert set(forms(tier)) <= seen


def test_easy_combinations_of_train_and_test_are_disjoint_and_both_there() -> None:
    keys = {
        split: {
            combination_key(task.knows_id, tuple(wish.form for wish in task.wishes))
            for task in (build_task(task_id) for task_id in sample(split, "easy"))
        }
        for split in ("train", "test")
    }
    assert not keys["train"] & keys["test"]
    assert len({key for key in keys["test"] if "held" not in key}) == 4
    assert len({key for key in keys["train"] if "held" not in key}) == 10


@pytest.mark.parametrize("tier", TIERS)
def test_wishes_fit_the_start_state(tier: str) -> None:
    for task_id in sample("train", tier):
        task, tables = build_task(task_id), build_tables(task_id)
        assert tables["device"]["owner"]["customer"] == task.customer_id
        described = [row["what"] for row in tables["items"].values()]
        assert len(described) == len(set(described)), "a description names one item"
        swaps = [row["what"] for row in tables["stock"].values()]
        assert len(swaps) == len(set(swaps)), "a color of a product names one swap"
        for wish in task.wishes:
            order = tables["orders"][wish.order_id]
            assert order["customer"] == task.customer_id
            assert order["status"] == wish.status
            assert (order["status"] == NEEDED_STATUS[wish.form.kind]) == wish.possible
            if wish.form.kind == "exchange":
                stock = tables["stock"][wish.target]
                assert stock["left"] > 0
                assert stock["what"].split() == [wish.fallback or wish.color, wish.what.split()[1]]
            if wish.form.kind == "address":
                assert wish.target != order["address"]


def test_hand_offs_are_declared_rare_and_about_held_orders() -> None:
    for tier in TIERS:
        tasks = [build_task(task_id) for task_id in sample("test", tier)]
        handed = [task for task in tasks if task.hand_off]
        assert 0 < len(handed) <= 0.05 * len(tasks)
        for task in tasks:
            held = [wish for wish in task.wishes if wish.status == HELD]
            assert bool(held) == task.hand_off
            assert held in ([], [task.wishes[-1]])


def test_a_name_alone_identifies_nobody() -> None:
    for task_id in sample("train", "easy"):
        customers = build_tables(task_id)["customers"]
        task = build_task(task_id)
        assert sum(row["name"] == task.customer_name for row in customers.values()) >= 2


def test_tables_are_fresh() -> None:
    task_id = task_ids("train", "easy")[0]
    build_tables(task_id)["orders"].clear()
    assert build_tables(task_id)["orders"]


@pytest.mark.parametrize(
    "task_id", ["retail-easy-train-2000", "retail-hard-train-0000", "retail-easy-dev-0000", "retail-easy-train-00", ""]
)
def test_unknown_tasks_are_refused(task_id: str) -> None:
    with pytest.raises(TaskError, match=r"unknown retail task .* ids read retail-TIER-SPLIT-NNNN"):
        build_task(task_id)
