from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkflex.envs.world import World
from sinkflex.errors import EnvError, ToolError


def make_world() -> World:
    return World(
        {
            "orders": {"1001": {"items": ["b", "a", "a"], "total": 3, "note": {"x": 1.0}}},
            "users": {"7": {"orders": ["1001"], "ok": True}},
        },
        bags=[("orders", "items")],
    )


def test_restore_undoes_updates_inserts_and_deletes() -> None:
    world = make_world()
    before, mark = world.hash(), world.snapshot()
    world.update("orders", "1001", total=9)
    world.insert("orders", "1002", {"items": [], "total": 1, "note": {}})
    world.delete("users", "7")
    assert world.hash() != before
    assert world.writes == 3
    world.restore(mark)
    assert world.hash() == before
    assert world.writes == 0
    assert world.keys("orders") == ("1001",)
    assert world.get("users", "7")["orders"] == ["1001"]


def test_hash_normalises_numbers_key_order_and_bags() -> None:
    same = World(
        {
            "users": {"7": {"ok": True, "orders": ["1001"]}},
            "orders": {"1001": {"note": {"x": 1}, "total": 3.0, "items": ["a", "b", "a"]}},
        },
        bags=[("orders", "items")],
    )
    assert same.hash() == make_world().hash()


@pytest.mark.parametrize(
    "change",
    [{"items": ["a", "b"]}, {"items": ["a", "b", "b"]}, {"total": 3.5}, {"note": {"x": True}}, {"note": {"x": "1"}}],
    ids=["bag-multiplicity", "bag-member", "fraction", "bool-is-no-number", "text-is-no-number"],
)
def test_hash_tells_apart(change: dict[str, object]) -> None:
    world = make_world()
    world.update("orders", "1001", **change)
    assert world.hash() != make_world().hash()


def test_order_matters_in_a_list_that_is_no_bag() -> None:
    world = make_world()
    world.update("users", "7", orders=["1002", "1001"])
    first = world.hash()
    world.update("users", "7", orders=["1001", "1002"])
    assert world.hash() != first


@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "add", "drop", "mark", "undo"]), st.integers(0, 5), st.integers(0, 3)),
        max_size=40,
    )
)
def test_incremental_hash_equals_a_fresh_one_after_any_history(steps: list[tuple[str, int, int]]) -> None:
    world = World({"t": {str(key): {"value": 0} for key in range(3)}})
    marks = []
    for action, number, value in steps:
        key = str(number)
        if action == "set" and world.has("t", key):
            world.update("t", key, value=value)
        elif action == "add" and not world.has("t", key):
            world.insert("t", key, {"value": value})
        elif action == "drop" and world.has("t", key):
            world.delete("t", key)
        elif action == "mark":
            marks.append((world.snapshot(), world.hash(), world.keys("t")))
        elif action == "undo" and marks:
            mark, digest, keys = marks.pop()
            world.restore(mark)
            assert world.hash() == digest
            assert world.keys("t") == keys
        assert world.hash() == World(world.to_dict()).hash()
    world.audit()


def test_a_write_to_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(EnvError, match=r"unknown field of orders 'totl'.*Did you mean 'total'"):
        make_world().update("orders", "1001", totl=4)


def test_missing_keys_are_the_callers_mistake_and_missing_tables_the_authors() -> None:
    world = make_world()
    with pytest.raises(ToolError, match="orders has no '9999'"):
        world.get("orders", "9999")
    with pytest.raises(ToolError, match="orders has no '9999'"):
        world.update("orders", "9999", total=1)
    with pytest.raises(ToolError, match="orders has no '9999'"):
        world.delete("orders", "9999")
    with pytest.raises(EnvError, match=r"unknown table 'order'.*Did you mean 'orders'"):
        world.get("order", "1001")
    with pytest.raises(EnvError, match="already has '1001'; use update"):
        world.insert("orders", "1001", {})


def test_records_read_are_read_only() -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        make_world().get("orders", "1001")["total"] = 5  # type: ignore[index]


def test_audit_names_a_record_changed_in_place() -> None:
    world = make_world()
    world.hash()
    world.get("orders", "1001")["items"].append("c")
    with pytest.raises(EnvError, match=r"orders\['1001'\] was changed in place; write with World.update"):
        world.audit()


def test_a_snapshot_of_an_undone_future_is_refused() -> None:
    world = make_world()
    start = world.snapshot()
    world.update("orders", "1001", total=4)
    future = world.snapshot()
    world.restore(start)
    with pytest.raises(EnvError, match="not in this world's past"):
        world.restore(future)
    world.update("orders", "1001", total=5)
    with pytest.raises(EnvError, match="not in this world's past"):
        world.restore(future)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_cannot_be_hashed(number: float) -> None:
    world = make_world()
    world.update("orders", "1001", total=number)
    with pytest.raises(EnvError, match="state must be finite"):
        world.hash()


def test_snapshot_and_restore_cost_what_changed_not_the_whole() -> None:
    world = World({"t": {str(key): {"value": key, "tags": ["a", "b"]} for key in range(1000)}})
    world.hash()
    rng = random.Random(0)
    timings = []
    for _ in range(200):
        key = str(rng.randrange(1000))
        started = time.perf_counter()
        mark = world.snapshot()
        world.update("t", key, value=-1)
        world.restore(mark)
        timings.append(time.perf_counter() - started)
    assert sorted(timings)[len(timings) // 2] < 50e-6
