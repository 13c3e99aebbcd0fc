from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from sinkflex.envs.tools import Side, Toolkit, tool
from sinkflex.envs.world import World
from sinkflex.errors import EnvError, ToolError
from sinkflex.types import JSONObject, StopReason, ToolCall


@tool(side=Side.AGENT, writes=True, stops=StopReason.HAND_OFF)
def order(
    world: World,
    item_id: str,
    count: int,
    size: Literal["s", "m"],
    tags: list[str],
    price: float = 1.0,
    gift: bool = False,
    note: str | None = None,
) -> JSONObject:
    """Order an item
    for the customer.

    More words that the model does not read.

    Args:
        item_id: four digits,
            no more.
        count: how many.
    """
    world.update("stock", item_id, left=world.get("stock", item_id)["left"] - count)
    if count > 5:
        raise ToolError("too many")
    return {"left": world.get("stock", item_id)["left"]}


def kit(*tools: Any) -> Toolkit:
    return Toolkit(Side.AGENT, tools or [order])


def stock() -> World:
    return World({"stock": {"1001": {"left": 9}}})


GOOD: JSONObject = {"item_id": "1001", "count": 2, "size": "s", "tags": ["x"]}


def test_schema_comes_from_signature_and_docstring() -> None:
    schema = kit().schemas[0]
    assert schema.name == "order"
    assert schema.description == "Order an item for the customer."
    assert schema.parameters == {
        "type": "object",
        "properties": {
            "item_id": {"type": "string", "description": "four digits, no more."},
            "count": {"type": "integer", "description": "how many."},
            "size": {"type": "string", "enum": ["s", "m"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "price": {"type": "number"},
            "gift": {"type": "boolean"},
            "note": {"type": "string"},
        },
        "required": ["item_id", "count", "size", "tags"],
        "additionalProperties": False,
    }


def test_schemas_are_fresh_each_time() -> None:
    tools = kit()
    tools.schemas[0].parameters["properties"].clear()
    assert tools.schemas[0].parameters["properties"]


def test_a_call_runs_and_replies_in_compact_json() -> None:
    world = stock()
    reply = kit().call(world, ToolCall(name="order", arguments=GOOD))
    assert (reply.text, reply.error, reply.invalid) == ('{"left":7}', None, False)
    assert reply.tool is order


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"count": "2"}, "argument 'count' must be a integer, got 2"),
        ({"count": True}, "argument 'count' must be a integer, got True"),
        ({"count": 2.0}, "argument 'count' must be a integer, got 2.0"),
        ({"item_id": 1001}, "argument 'item_id' must be a string, got 1001"),
        ({"size": "l"}, "argument 'size' must be one of 's', 'm', got l"),
        ({"tags": ["x", 1]}, "argument 'tags' must be a list, each item a string"),
        ({"tags": "x"}, "argument 'tags' must be a list"),
        ({"price": "free"}, "argument 'price' must be a number"),
        ({"gift": 1}, "argument 'gift' must be a boolean"),
        ({"note": 3}, "argument 'note' must be a string or null"),
        ({"cuont": 2}, "unknown argument 'cuont'; .*Did you mean 'count'"),
        ({"item_id": ["x" * 10_000]}, r"must be a string, got \['xxx.*\.\.\."),
    ],
)
def test_arguments_that_do_not_fit_are_refused_unrun(change: JSONObject, reason: str) -> None:
    world = stock()
    before = world.hash()
    reply = kit().call(world, ToolCall(name="order", arguments={**GOOD, **change}))
    assert reply.invalid
    assert reply.error is not None
    assert pytest.approx(len(reply.error), abs=300) == 150
    with pytest.raises(ToolError, match=reason):
        raise ToolError(reply.error)
    assert json.loads(reply.text) == {"error": reply.error}
    assert world.hash() == before


def test_a_missing_argument_and_an_unknown_tool_are_named() -> None:
    assert kit().call(stock(), ToolCall(name="order", arguments={})).error == "order: argument 'item_id' is missing"
    reply = kit().call(stock(), ToolCall(name="ordr"))
    assert reply.error == "unknown tool 'ordr'; choose one of order. Did you mean 'order'?"
    assert reply.invalid


def test_null_is_accepted_where_the_type_says_so() -> None:
    assert kit().call(stock(), ToolCall(name="order", arguments={**GOOD, "note": None})).error is None


def test_a_tool_error_leaves_the_world_as_it_was_and_is_not_invalid() -> None:
    world = stock()
    reply = kit().call(world, ToolCall(name="order", arguments={**GOOD, "count": 6}))
    assert (reply.error, reply.invalid) == ("too many", False)
    assert world.get("stock", "1001")["left"] == 9


def test_a_broken_tool_is_an_environment_error_that_names_it() -> None:
    @tool(side=Side.AGENT, writes=False)
    def broken(world: World, n: int) -> JSONObject:
        """Break."""
        return {"x": 1 // n}

    with pytest.raises(EnvError, match=r"tool 'broken' broke on \{'n': 0\}: ZeroDivisionError"):
        kit(broken).call(stock(), ToolCall(name="broken", arguments={"n": 0}))


def test_a_read_tool_that_writes_is_caught() -> None:
    @tool(side=Side.AGENT, writes=False)
    def sly(world: World) -> JSONObject:
        """Peek."""
        world.update("stock", "1001", left=0)
        return {}

    with pytest.raises(EnvError, match="'sly' is declared writes=False but changed the world"):
        kit(sly).call(stock(), ToolCall(name="sly"))


def test_a_result_that_is_no_json_is_caught() -> None:
    @tool(side=Side.AGENT, writes=False)
    def odd(world: World) -> JSONObject:
        """Return a set."""
        return {"x": {1}}

    with pytest.raises(EnvError, match=r"tool 'odd' returned .* which is not JSON"):
        kit(odd).call(stock(), ToolCall(name="odd"))


def test_declaration_mistakes_are_named() -> None:
    def undocumented(world: World) -> JSONObject:
        return {}

    with pytest.raises(EnvError, match="'undocumented' has no docstring"):
        tool(side=Side.AGENT, writes=False)(undocumented)

    def worldless(item: str) -> JSONObject:
        """Lack the world."""
        return {}

    with pytest.raises(EnvError, match="'worldless' must take the World as its first parameter"):
        tool(side=Side.AGENT, writes=False)(worldless)

    def untyped(world: World, item) -> JSONObject:  # type: ignore[no-untyped-def]
        """Lack a type."""
        return {}

    with pytest.raises(EnvError, match=r"untyped\(item\) has type None; use str, int"):
        tool(side=Side.AGENT, writes=False)(untyped)
    with pytest.raises(EnvError, match="'order' belongs to the agent, not to the user toolkit"):
        Toolkit(Side.USER, [order])
    with pytest.raises(EnvError, match="'order' is declared twice in the agent toolkit"):
        Toolkit(Side.AGENT, [order, order])
