"""Retail's task generator: any task and its start state are rebuilt from the task's id alone.

Train and test share neither ids nor combinations of wishes; each single wish is seen in training.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import TypeAlias

from sinkflex.envs.domains.entities import draw_ids
from sinkflex.envs.domains.retail.state import (
    DELIVERED,
    HELD,
    NEEDED_STATUS,
    PENDING,
    SHIPPED,
    action_key,
    new_customer,
    new_item,
    new_order,
)
from sinkflex.envs.protocol import Task
from sinkflex.envs.users.scripted import Persona
from sinkflex.errors import TaskError
from sinkflex.types import JSONObject

Tables: TypeAlias = dict[str, dict[str, JSONObject]]
"""Table name to (key to record), without the session."""

TIERS = ("easy", "medium", "long")
COUNTS = {"train": 2000, "test": 400}
"""Tasks a tier and split."""

WISH_COUNTS = {"easy": 1, "medium": 2, "long": 6}
NAMES = ("ann", "ben", "cora", "dan", "eva", "finn", "gina", "hugo", "ida", "jon")
PRODUCTS = ("lamp", "mug", "chair", "desk", "shirt", "coat", "bag", "clock")
COLORS = ("red", "blue", "green", "white", "black", "pink")
ROADS = ("oak road", "elm road", "pine road", "lake road", "hill road", "main road")

_HAND_OFF_EVERY = 25
_TEST_SHARE = 4
_OTHER_CUSTOMERS = 2
_STOCK = 5
# Easy has so few combinations that a hash would not leave the splits alike in what they ask for.
_EASY_TEST = frozenset({"zip+refund/id//0", "id+exchange/order//0", "id+address/id//0", "zip+refund/id/too_late/0"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """The shape of a wish, ids left out; combinations of forms are what the splits divide.

    Attributes:
        kind: ``refund``, ``exchange``, ``address`` or ``cancel``.
        reference: how the user names it: ``id`` of the item or order, ``order`` (description and order id),
            or ``search`` (description only).
        twist: ``too_late`` (the order's state forbids it), ``out_of_stock`` (the first color is gone),
            ``changes_mind`` (the user declines on the device), ``held`` (a case for a human), or empty.
        vague: True when the user says what it is about only when asked.
    """

    kind: str
    reference: str
    twist: str = ""
    vague: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """One thing the user wants.

    Attributes:
        form: its shape.
        order_id: the order it is about.
        item_id: the item, empty for ``address`` and ``cancel``.
        what: color and product of the item, or of one item of the order.
        status: the order's state at the start.
        color: for ``exchange`` the color first asked for.
        fallback: the color asked for when that one is out of stock, or empty.
        target: what is filed: the swap's id, the new address, or empty.
        request_id: id the request gets on the device, empty for ``cancel``.
    """

    form: Form
    order_id: str
    item_id: str
    what: str
    status: str
    color: str = ""
    fallback: str = ""
    target: str = ""
    request_id: str = ""

    @property
    def entity_id(self) -> str:
        """The item's id, or the order's where the wish is about the whole order."""
        return self.item_id or self.order_id

    @property
    def possible(self) -> bool:
        """Whether the policy lets the agent do it."""
        return self.form.twist not in ("too_late", "held")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetailTask(Task):
    """A customer with one or more wishes.

    Attributes:
        customer_id: four digits.
        customer_name: first name.
        pin: four digits.
        zip_code: four digits.
        knows_id: True when the user identifies by id and PIN, False by name and zip.
        wrong_secret: the PIN or zip the user says when first asked, or None.
        wishes: in the order they come up.
        persona: the scripted user's temper.
    """

    customer_id: str
    customer_name: str
    pin: str
    zip_code: str
    knows_id: bool
    wrong_secret: str | None
    wishes: tuple[Wish, ...]
    persona: Persona


def task_ids(split: str, tier: str) -> tuple[str, ...]:
    """Return the ids of one split and tier."""
    return tuple(f"retail-{tier}-{split}-{index:04d}" for index in range(COUNTS[split]))


@lru_cache(maxsize=4)
def forms(tier: str) -> tuple[Form, ...]:
    """Return every form of wish a tier may hold, hand-offs aside."""
    if tier == "easy":
        plain = [Form(kind=kind, reference="id") for kind in NEEDED_STATUS]
        described = [Form(kind=kind, reference="order") for kind in ("refund", "exchange")]
        return (*plain, *described, Form(kind="refund", reference="id", twist="too_late"))
    references = ("id", "order", "search") if tier == "medium" else ("id", "order")
    twists = {
        "refund": ("", "too_late", "changes_mind"),
        "exchange": ("", "out_of_stock"),
        "address": ("", "too_late", "changes_mind"),
        "cancel": ("", "too_late"),
    }
    return tuple(
        Form(kind=kind, reference=reference, twist=twist, vague=vague)
        for kind, reference, vague in product(NEEDED_STATUS, references, (False, True))
        for twist in twists[kind]
        if not (reference == "order" and kind in ("address", "cancel"))
    )


def combination_key(knows_id: bool, picked: tuple[Form, ...]) -> str:
    """Return a name for what a task combines, whatever the order of its wishes."""
    names = sorted(f"{form.kind}/{form.reference}/{form.twist}/{form.vague:d}" for form in picked)
    return "+".join(("id" if knows_id else "zip", *names))


def combination_split(tier: str, key: str) -> str:
    """Return ``train`` or ``test`` for a combination; one in four is ``test``."""
    if tier == "easy" and "held" not in key:
        return "test" if key in _EASY_TEST else "train"
    return "test" if zlib.crc32(key.encode()) % _TEST_SHARE == 0 else "train"


def build_task(task_id: str) -> RetailTask:
    """Return the task of an id.

    Raises:
        TaskError: the id is not one of ``task_ids``.
    """
    return _build(task_id)[0]


def build_tables(task_id: str) -> Tables:
    """Return the start state of a task; the tables are fresh, their records are shared and must not be
    changed.

    Raises:
        TaskError: the id is not one of ``task_ids``.
    """
    return {name: dict(rows) for name, rows in _build(task_id)[1].items()}


@lru_cache(maxsize=4096)
def _build(task_id: str) -> tuple[RetailTask, Tables]:
    tier, split, index = _read_id(task_id)
    rng = random.Random(task_id)
    hand_off = index % _HAND_OFF_EVERY == _HAND_OFF_EVERY - 1
    knows_id, picked = _combine(rng, split, tier, hand_off=hand_off)
    shelf = _Shelf(rng, split)
    wishes = tuple(shelf.add_wish(form) for form in picked)
    shelf.add_spare_order()
    tables = shelf.finish(wishes)
    customer = tables["customers"][shelf.customer_id]
    task = RetailTask(
        task_id=task_id,
        split=split,
        tier=tier,
        dual=not hand_off and any(wish.possible and wish.form.kind != "cancel" for wish in wishes),
        hand_off=hand_off,
        customer_id=shelf.customer_id,
        customer_name=customer["name"],
        pin=customer["pin"],
        zip_code=customer["zip"],
        knows_id=knows_id,
        wrong_secret=shelf.take_id() if tier != "easy" and rng.random() < 0.2 else None,
        wishes=wishes,
        persona=_persona(rng, tier),
    )
    return task, tables


def _read_id(task_id: str) -> tuple[str, str, int]:
    parts = task_id.split("-")
    if len(parts) == 4 and parts[0] == "retail" and parts[1] in TIERS and parts[2] in COUNTS:
        number = parts[3]
        if len(number) == 4 and number.isdecimal() and int(number) < COUNTS[parts[2]]:
            return parts[1], parts[2], int(number)
    raise TaskError(
        f"unknown retail task {task_id!r}; ids read retail-TIER-SPLIT-NNNN, for example 'retail-easy-train-0000'"
    )


def _combine(rng: random.Random, split: str, tier: str, *, hand_off: bool) -> tuple[bool, tuple[Form, ...]]:
    """Draw forms until their combination belongs to the split."""
    pool = forms(tier)
    while True:
        knows_id = rng.random() < 0.5
        picked = [rng.choice(pool) for _ in range(WISH_COUNTS[tier])]
        if hand_off:
            picked[-1] = replace(picked[-1], twist="held")
        late = sum(form.twist == "too_late" for form in picked)
        distinct_kinds = len({form.kind for form in picked})
        # A long task must stay long, and a medium one must not ask for the same thing twice.
        if late <= 1 and distinct_kinds >= min(2, len(picked)):
            key = combination_key(knows_id, tuple(picked))
            if combination_split(tier, key) == split:
                return knows_id, tuple(picked)


def _persona(rng: random.Random, tier: str) -> Persona:
    if tier == "easy":
        return Persona(patience=2)
    return Persona(patience=rng.choice((2, 3)), chatty=rng.random() < 0.25, hesitant=rng.random() < 0.25)


class _Shelf:
    """Collects the records of one task while its wishes are drawn."""

    def __init__(self, rng: random.Random, split: str) -> None:
        self._rng = rng
        self._ids = iter(draw_ids(rng, split, 80))
        self._things = [f"{color} {kind}" for color, kind in product(COLORS, PRODUCTS)]
        rng.shuffle(self._things)
        self._exchanged: set[str] = set()
        self.customer_id = self.take_id()
        self._tables: Tables = {"orders": {}, "items": {}, "stock": {}, "requests": {}, "tickets": {}}

    def take_id(self) -> str:
        """Return an id not used yet."""
        return next(self._ids)

    def add_wish(self, form: Form) -> Wish:
        """Create the order, items and stock that a wish needs."""
        # Two exchanges of one product would have to share its stock; each gets a product of its own.
        avoid = frozenset(self._exchanged) if form.kind == "exchange" else frozenset()
        order_id = self._add_order(_start_status(form), owner=self.customer_id, avoid=avoid)
        order = self._tables["orders"][order_id]
        item_id = self._rng.choice(order["items"])
        what = self._tables["items"][item_id]["what"]
        is_item_wish = form.kind in ("refund", "exchange")
        wish = Wish(
            form=form,
            order_id=order_id,
            item_id=item_id if is_item_wish else "",
            what=what,
            status=order["status"],
            target=self._address(unlike=order["address"]) if form.kind == "address" else "",
        )
        if form.kind == "exchange":
            wish = self._with_swap(wish)
        if form.kind == "cancel":
            return wish
        wish = replace(wish, request_id=self.take_id())
        self._tables["tickets"][action_key(form.kind, wish.entity_id, wish.target)] = {"request": wish.request_id}
        return wish

    def add_spare_order(self) -> None:
        """Give the customer an order that no wish is about."""
        self._add_order(self._rng.choice((DELIVERED, PENDING, SHIPPED)), owner=self.customer_id)

    def finish(self, wishes: tuple[Wish, ...]) -> Tables:
        """Add the other customers, shuffle the orders and return all tables."""
        name = self._rng.choice(NAMES)
        customers = {self.customer_id: self._customer(name)}
        for number in range(_OTHER_CUSTOMERS):
            other = self.take_id()
            # One of the others has the same name: a name alone identifies nobody.
            customers[other] = self._customer(self._rng.choice(NAMES) if number else name)
            self._add_order(DELIVERED, owner=other)
        rows = list(self._tables["orders"].items())
        self._rng.shuffle(rows)
        self._tables["orders"] = dict(rows)
        device = {"owner": {"customer": self.customer_id}}
        return {"customers": customers, **self._tables, "device": device}

    def _customer(self, name: str) -> JSONObject:
        return new_customer(name=name, pin=self.take_id(), zip_code=self.take_id())

    def _add_order(self, status: str, *, owner: str, avoid: frozenset[str] = frozenset()) -> str:
        order_id = self.take_id()
        items = [self.take_id(), self.take_id()]
        self._tables["orders"][order_id] = new_order(owner, status=status, address=self._address(), items=items)
        for item_id in items:
            price = self._rng.randrange(10, 100)
            self._tables["items"][item_id] = new_item(order_id, what=self._take_thing(avoid), price=price)
        return order_id

    def _take_thing(self, avoid: frozenset[str]) -> str:
        thing = next(thing for thing in self._things if thing.split()[1] not in avoid)
        self._things.remove(thing)
        return thing

    def _address(self, *, unlike: str = "") -> str:
        while True:
            address = f"{self._rng.randrange(10, 100)} {self._rng.choice(ROADS)}"
            if address != unlike:
                return address

    def _with_swap(self, wish: Wish) -> Wish:
        own_color, kind = wish.what.split()
        self._exchanged.add(kind)
        first, second, third = self._rng.sample([color for color in COLORS if color != own_color], 3)
        gone = wish.form.twist == "out_of_stock"
        swaps = {color: self._stock(f"{color} {kind}", left=_STOCK) for color in (second, third)}
        swaps[first] = self._stock(f"{first} {kind}", left=0 if gone else _STOCK)
        wanted = second if gone else first
        return replace(wish, color=first, fallback=second if gone else "", target=swaps[wanted])

    def _stock(self, what: str, *, left: int) -> str:
        swap_id = self.take_id()
        self._tables["stock"][swap_id] = {"what": what, "left": left}
        return swap_id


def _start_status(form: Form) -> str:
    if form.twist == "held":
        return HELD
    if form.twist != "too_late":
        return NEEDED_STATUS[form.kind]
    return SHIPPED
