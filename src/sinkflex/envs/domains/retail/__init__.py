"""Retail support: the shop's records are the agent's, but only the customer's device approves a change."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import ClassVar

from sinkflex.envs.domains.retail.agent_tools import AGENT_TOOLS
from sinkflex.envs.domains.retail.oracle import (
    current_wish,
    is_looked_up,
    likely_slips,
    next_message,
    other_orders,
    wish_is_settled,
)
from sinkflex.envs.domains.retail.script import build_script
from sinkflex.envs.domains.retail.speech import (
    agrees,
    mentions_wish,
    opening_of,
    proposed_keys,
    said_secrets,
    wish_in_words,
)
from sinkflex.envs.domains.retail.state import CANCELLED, carry_out, new_session
from sinkflex.envs.domains.retail.tasks import TIERS, RetailTask, Wish, build_tables, build_task, task_ids
from sinkflex.envs.domains.retail.user_tools import USER_TOOLS
from sinkflex.envs.protocol import Domain
from sinkflex.envs.session import facts, note
from sinkflex.envs.tools import Side, Toolkit
from sinkflex.envs.users.scripted import Script
from sinkflex.envs.world import World
from sinkflex.types import JSONObject, Message

_BRIEF = (
    "retail support. ask id and pin first, or name and zip. look the order up. ask before any change. "
    "refund or exchange only delivered, change or cancel only pending. hand off only held orders."
)
_SHOP_TABLES = ("customers", "orders", "items", "stock")
_MAX_HEARD_CHARS = 2000


class RetailDomain(Domain[RetailTask]):
    """See ``policy.md`` for the rules and ``tasks`` for what customers want."""

    name: ClassVar[str] = "retail"
    tiers: ClassVar[tuple[str, ...]] = TIERS
    max_steps: ClassVar[Mapping[str, int]] = {"easy": 16, "medium": 32, "long": 72}
    agent_tools: ClassVar[Toolkit] = AGENT_TOOLS
    user_tools: ClassVar[Toolkit] = USER_TOOLS
    rules: ClassVar[Mapping[str, str]] = {
        "identify_first": "Find the customer before you look up or change anything of theirs.",
        "confirm_first": "Change only what the customer said yes to, named by its id.",
        "hand_off_held_only": "Hand over only when an order you looked up is held.",
    }
    confirmation_rules: ClassVar[frozenset[str]] = frozenset({"confirm_first"})

    def tier_task_ids(self, split: str, tier: str) -> tuple[str, ...]:
        """Return the ids of one split and tier."""
        return task_ids(split, tier)

    def task(self, task_id: str) -> RetailTask:
        """Return a task, rebuilt from its id."""
        return build_task(task_id)

    def system_prompt(self, style: str) -> str:
        """Return the policy, in short or in full."""
        return _BRIEF if style == "brief" else _policy()

    def user_prompt(self, task: RetailTask) -> str:
        """Return the role of an LLM or a person playing the customer."""
        if task.knows_id:
            identity = f"Your customer id is {task.customer_id} and your PIN {task.pin}."
        else:
            identity = f"Your name is {task.customer_name} and your zip {task.zip_code}; you know no id and no PIN."
        return (
            f"You are a customer of a shop. {identity} Tell them only when asked. "
            f"What you want, one thing after the other: {'; '.join(map(_wish_for_player, task.wishes))}. "
            "Say yes only to a proposal that is exactly what you want. Your device lists the requests that the agent "
            "makes for you; approve one only when the agent tells you to and it is what you want. When the agent says "
            "that an order is cancelled or that something cannot be done, check the order on your device and accept "
            "what it shows. Stop when everything is settled, or when the agent does not get you any further."
        )

    def build_world(self, task: RetailTask) -> World:
        """Return the start state: the customer, two others, their orders and the stock."""
        return World({**build_tables(task.task_id), "session": new_session()}, bags=(("orders", "items"),))

    def script(self, task: RetailTask) -> Script:
        """Return the scripted customer."""
        return build_script(task)

    def components(self, task: RetailTask, world: World, *, handed_off: bool) -> Mapping[str, float | None]:
        """Grade the shop's records, the device's requests, what the customer saw, and the hand-off."""
        expected = _expected_world(task)
        records = all(
            {key: dict(row) for key, row in world.items(table)}
            == {key: dict(row) for key, row in expected.items(table)}
            for table in _SHOP_TABLES
        )
        wanted = {key: row["state"] for key, row in expected.items("requests")}
        filed = {key: row["state"] for key, row in world.items("requests")}
        shown = [wish for wish in task.wishes if _is_shown(wish)]
        return {
            "records": float(records),
            "requests": float(wanted == filed) if wanted or filed else None,
            "informed": float(all(_is_informed(world, wish) for wish in shown)) if shown else None,
            "hand_off": float(handed_off) if task.hand_off else (0.0 if handed_off else None),
        }

    def oracle(self, task: RetailTask, world: World) -> Message:
        """Return the best next message."""
        return next_message(task, world)

    def slips(self, task: RetailTask, world: World) -> tuple[Message, ...]:
        """Return plausible mistakes."""
        return likely_slips(task, world)

    def alternatives(self, task: RetailTask, world: World) -> tuple[Message, ...]:
        """Return the other orders to read where the right one must be searched."""
        return other_orders(task, world)

    def observe(self, task: RetailTask, world: World, *, speaker: Side, text: str) -> None:
        """Note what the agent proposes, what the user agrees to, and what the user tells."""
        text = text[:_MAX_HEARD_CHARS].lower()
        known = facts(world)
        changes: JSONObject = {}
        if speaker is Side.AGENT:
            keys = proposed_keys(world, text)
            if keys != known["proposed"]:
                note(world, proposed=keys)
            return
        if known["proposed"]:
            changes["proposed"] = []
            if agrees(text):
                changes["consent"] = sorted({*known["consent"], *known["proposed"]})
        changes |= said_secrets(text)
        heard = _newly_heard(task, world, text)
        if heard:
            changes["heard"] = [*known["heard"], *heard]
        if changes:
            note(world, **changes)


def _newly_heard(task: RetailTask, world: World, text: str) -> list[str]:
    """Return what an utterance tells beyond identity: wish numbers, a second color, that no id is known."""
    known = facts(world)["heard"]
    number = current_wish(task, world)
    wish = task.wishes[number]
    found = {
        f"{number}": mentions_wish(text, wish),
        f"{number} {wish.fallback}": bool(wish.fallback) and wish.fallback in text,
        "no id": not task.knows_id and "name and zip" in text,
    }
    return [entry for entry, is_told in found.items() if is_told and entry not in known]


def _is_shown(wish: Wish) -> bool:
    """Return whether the customer must see an order's state: a cancellation, or why nothing can be done."""
    return wish.form.twist == "too_late" or (wish.form.kind == "cancel" and wish.possible)


def _is_informed(world: World, wish: Wish) -> bool:
    """Return whether the customer saw the state, and a refusal rests on a look at the order."""
    return wish_is_settled(world, wish) and (wish.possible or is_looked_up(world, wish))


def _wish_for_player(wish: Wish) -> str:
    text = f"{wish.form.kind} {wish_in_words(wish)}"
    if wish.form.vague:
        text += f" (at first you only say: {opening_of(wish)[0]})"
    if wish.fallback:
        text += f" (or for {wish.fallback} if that color is out of stock)"
    if wish.form.twist == "changes_mind":
        text += " (but when it shows on your device, you change your mind and decline it)"
    return text


@lru_cache(maxsize=512)
def _expected_world(task: RetailTask) -> World:
    """Return the world as it should end, session aside."""
    world = World(build_tables(task.task_id))
    for wish in task.wishes:
        if not wish.possible:
            continue
        if wish.form.kind == "cancel":
            world.update("orders", wish.order_id, status=CANCELLED)
            continue
        declined = wish.form.twist == "changes_mind"
        request: JSONObject = {
            "customer": task.customer_id,
            "kind": wish.form.kind,
            "order": wish.order_id,
            "item": wish.item_id,
            "target": wish.target,
            "state": "declined" if declined else "approved",
        }
        world.insert("requests", wish.request_id, request)
        if not declined:
            carry_out(world, request)
    return world


@lru_cache(maxsize=1)
def _policy() -> str:
    return resources.files(__package__).joinpath("policy.md").read_text(encoding="utf-8")
