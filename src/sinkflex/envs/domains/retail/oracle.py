"""The best next move in retail from any state, and the mistakes one would make there.

Both go by what the dialogue has revealed: the identity once the user told it, ids once they were said or
looked up, an order's state once it was read.
"""

from __future__ import annotations

import re

from sinkflex.envs.domains.retail.speech import subject_in_words
from sinkflex.envs.domains.retail.state import CANCELLED, HELD, NEEDED_STATUS, action_key
from sinkflex.envs.domains.retail.tasks import RetailTask, Wish
from sinkflex.envs.protocol import call, say
from sinkflex.envs.session import facts
from sinkflex.envs.world import Record, World
from sinkflex.types import Message, Role, ToolCall

ASK_IDENTITY = say("what is your customer id and pin?")
ASK_NAME = say("what is your name and zip?")
ASK_PIN_AGAIN = say("wrong pin, what is it?")
ASK_ZIP_AGAIN = say("wrong zip, what is it?")
CLAIM_DONE = say("it is done, bye")
HAND_OVER = call("transfer_to_human", reason="held")

_ID = re.compile(r"\b\d{4}\b")

_WISH_QUESTIONS = {
    "refund": say("which item?"),
    "exchange": say("which item?"),
    "address": say("which order?"),
    "cancel": say("which order?"),
}


def next_message(task: RetailTask, world: World) -> Message:
    """Return the oracle's next message."""
    known = facts(world)
    number = current_wish(task, world)
    wish = task.wishes[number]
    if not known["verified"]:
        return _identify(task, known)
    stray = _stray_request(task, world)
    if stray is not None:
        return call("withdraw_request", request_id=stray)
    if str(number) not in known["heard"]:
        return _WISH_QUESTIONS[wish.form.kind]
    return _look_up(task, known, world, wish) or _settle(known, world, number, wish)


def other_orders(task: RetailTask, world: World) -> tuple[Message, ...]:
    """Return the other unread orders where the oracle searches them one by one; any order of reading is as good."""
    wish = task.wishes[current_wish(task, world)]
    best = next_message(task, world)
    if wish.form.reference != "search" or is_looked_up(world, wish) or not best.tool_calls:
        return ()
    if best.tool_calls[0].name != "get_order":
        return ()
    read = facts(world)["read"]
    own = [order_id for order_id, order in world.items("orders") if order["customer"] == task.customer_id]
    others = (call("get_order", order_id=order_id) for order_id in own if f"order {order_id}" not in read)
    return tuple(other for other in others if other != best)


def current_wish(task: RetailTask, world: World) -> int:
    """Return the number of the first wish that is not settled, the last one's when all are."""
    for number, wish in enumerate(task.wishes):
        if not wish_is_settled(world, wish):
            return number
    return len(task.wishes) - 1


def is_looked_up(world: World, wish: Wish) -> bool:
    """Return whether the agent has read the wish's order, or its item."""
    read = facts(world)["read"]
    return f"order {wish.order_id}" in read or f"item {wish.item_id}" in read


def _stray_request(task: RetailTask, world: World) -> str | None:
    """Return an open request that no wish asks for; it must not stay."""
    wanted = {wish.request_id for wish in task.wishes}
    for request_id, request in world.items("requests"):
        if request_id not in wanted and request["state"] == "open":
            return request_id
    return None


def wish_is_settled(world: World, wish: Wish) -> bool:
    """Return whether a wish is done on both sides, or the user saw why it cannot be."""
    checked = facts(world)["checked"]
    if not wish.possible:
        return f"{wish.order_id} {wish.status}" in checked
    if wish.form.kind == "cancel":
        return f"{wish.order_id} {CANCELLED}" in checked
    wanted = "declined" if wish.form.twist == "changes_mind" else "approved"
    return world.has("requests", wish.request_id) and world.get("requests", wish.request_id)["state"] == wanted


def likely_slips(task: RetailTask, world: World) -> tuple[Message, ...]:
    """Return one to five plausible mistakes for this state; they use only ids that were said or read."""
    number = current_wish(task, world)
    wish = task.wishes[number]
    heard = str(number) in facts(world)["heard"]
    best = next_message(task, world)
    if not facts(world)["verified"]:
        slips = _slips_before_identity(facts(world), wish)
    elif not heard:
        slips = (_read(wish), CLAIM_DONE, HAND_OVER)
    elif best.tool_calls:
        slips = _slips_of_call(best.tool_calls[0], world, wish)
    else:
        slips = _slips_of_speech(best, world, wish)
    seen = _seen_ids(task, world)
    return tuple(slip for slip in slips if _ids_in(slip) <= seen) or (HAND_OVER,)


def _slips_before_identity(known: Record, wish: Wish) -> tuple[Message, ...]:
    swapped = call("find_customer", customer_id=known["said_pin"], pin=known["said_id"])
    return (_read(wish), _write(wish), *([swapped] if known["said_pin"] else []))


def _slips_of_call(best: ToolCall, world: World, wish: Wish) -> tuple[Message, ...]:
    other = _other_id(world, wish)
    fields = [field for field in ("order_id", "item_id") if field in best.arguments]
    wrong = [Message(role=Role.ASSISTANT, tool_calls=(_with(best, field, other),)) for field in fields]
    if best.name == HAND_OVER.tool_calls[0].name:
        return (_write(wish), _proposal(wish), CLAIM_DONE)
    if best.name in ("get_order", "get_item", "find_swap"):
        return (*wrong, _proposal(wish), _write(wish), HAND_OVER)
    return (*wrong, _other_kind(wish), CLAIM_DONE)


def _slips_of_speech(best: Message, world: World, wish: Wish) -> tuple[Message, ...]:
    if best == _proposal(wish):
        wrong = say(best.content.replace(wish.entity_id, _other_id(world, wish)))
        return (_write(wish), wrong, _other_kind(wish), say(f"i cannot {_VERBS[wish.form.kind]} it"))
    if "approve" in best.content:
        return (say(f"please approve request {wish.entity_id}"), CLAIM_DONE, _other_kind(wish))
    return (_write(wish), _proposal(wish), CLAIM_DONE, HAND_OVER)


def _with(tool_call: ToolCall, field: str, value: str) -> ToolCall:
    return ToolCall(name=tool_call.name, arguments={**tool_call.arguments, field: value})


def _ids_in(message: Message) -> set[str]:
    spoken = [message.content, *(str(value) for item in message.tool_calls for value in item.arguments.values())]
    return set(_ID.findall(" ".join(spoken)))


def _seen_ids(task: RetailTask, world: World) -> set[str]:
    """Return the ids that the dialogue has shown the agent."""
    known = facts(world)
    seen = {str(known[fact]) for fact in ("said_id", "said_pin", "said_zip")}
    for number, wish in enumerate(task.wishes):
        if str(number) in known["heard"]:
            seen |= set(_ID.findall(subject_in_words(wish)))
    if known["verified"]:
        seen |= {order_id for order_id, order in world.items("orders") if order["customer"] == known["verified"]}
    for kind, name, *color in (entry.split() for entry in known["read"]):
        if kind == "order":
            seen |= {name, *world.get("orders", name)["items"]}
        elif kind == "item":
            seen |= {name, str(world.get("items", name)["order"])}
        else:
            what = f"{color[0]} {world.get('items', name)['what'].split()[1]}"
            seen |= {swap_id for swap_id, swap in world.items("stock") if swap["what"] == what and swap["left"]}
    return seen | set(world.keys("requests"))


def _identify(task: RetailTask, known: Record) -> Message:
    if not task.knows_id:
        # That the user knows no id is learnt by asking for one.
        if "no id" not in known["heard"]:
            return ASK_IDENTITY
        if not (known["said_name"] and known["said_zip"]):
            return ASK_NAME
        if known["refused"] == known["said_zip"]:
            return ASK_ZIP_AGAIN
        return call("find_customer_by_zip", customer_name=known["said_name"], zip_code=known["said_zip"])
    if not (known["said_id"] and known["said_pin"]):
        return ASK_IDENTITY
    if known["refused"] == known["said_pin"]:
        return ASK_PIN_AGAIN
    return call("find_customer", customer_id=known["said_id"], pin=known["said_pin"])


def _look_up(task: RetailTask, known: Record, world: World, wish: Wish) -> Message | None:
    """Return the read that finds the wish's order or item, None when it is found."""
    if is_looked_up(world, wish):
        return None
    if wish.form.reference != "search":
        return _read(wish)
    for order_id, order in world.items("orders"):
        if order["customer"] == task.customer_id and f"order {order_id}" not in known["read"]:
            return call("get_order", order_id=order_id)
    return None


def _settle(known: Record, world: World, number: int, wish: Wish) -> Message:
    status = world.get("orders", wish.order_id)["status"]
    if status == HELD:
        return HAND_OVER
    if wish.form.kind == "cancel" and status == CANCELLED:
        return say(f"order {wish.order_id} is cancelled")
    if status != NEEDED_STATUS[wish.form.kind]:
        return say(f"i cannot {_VERBS[wish.form.kind]} it, it is {status}")
    if wish.request_id and world.has("requests", wish.request_id):
        return say(f"please approve request {wish.request_id}")
    if wish.form.kind == "exchange":
        color = wish.fallback if f"{number} {wish.fallback}" in known["heard"] else wish.color
        if f"swap {wish.item_id} {color}" not in known["read"]:
            return call("find_swap", item_id=wish.item_id, color=color)
        if wish.fallback and color != wish.fallback:
            return say(f"{color} is out of stock, another color?")
    key = action_key(wish.form.kind, wish.entity_id, wish.target)
    by_color = action_key("exchange", wish.entity_id, wish.fallback or wish.color)
    if key not in known["consent"] and by_color not in known["consent"]:
        return _proposal(wish)
    return _write(wish)


_VERBS = {"refund": "refund", "exchange": "exchange", "address": "send", "cancel": "cancel"}


def _proposal(wish: Wish) -> Message:
    if wish.item_id:
        target = f" for {wish.target}" if wish.target else ""
        return say(f"shall i {_VERBS[wish.form.kind]} item {wish.item_id}{target}?")
    target = f" to {wish.target}" if wish.target else ""
    return say(f"shall i {_VERBS[wish.form.kind]} order {wish.order_id}{target}?")


def _read(wish: Wish) -> Message:
    if wish.item_id and wish.form.reference == "id":
        return call("get_item", item_id=wish.item_id)
    return call("get_order", order_id=wish.order_id)


def _write(wish: Wish) -> Message:
    if wish.form.kind == "refund":
        return call("request_refund", item_id=wish.item_id)
    if wish.form.kind == "exchange":
        return call("request_exchange", item_id=wish.item_id, swap_id=wish.target)
    if wish.form.kind == "address":
        return call("request_address_change", order_id=wish.order_id, address=wish.target)
    return call("cancel_order", order_id=wish.order_id)


def _other_kind(wish: Wish) -> Message:
    """Return a change of another kind to the same entity."""
    if wish.form.kind == "exchange":
        return call("request_refund", item_id=wish.item_id)
    if wish.form.kind in ("refund", "address"):
        return call("cancel_order", order_id=wish.order_id)
    return call("request_address_change", order_id=wish.order_id, address="10 oak road")


def _other_id(world: World, wish: Wish) -> str:
    """Return a near id of the same sort: the order's other item, or the customer's other order."""
    order = world.get("orders", wish.order_id)
    if wish.item_id:
        return str(next(item_id for item_id in order["items"] if item_id != wish.item_id))
    owner = order["customer"]
    others = [name for name, other in world.items("orders") if other["customer"] == owner and name != wish.order_id]
    return others[0]
