"""What is said in retail and how it is understood, on both sides.

The scripted customer and ``observe`` read the agent's words with the same patterns, so the customer's "yes"
and the consent on record cannot drift apart.
"""

from __future__ import annotations

import re

from sinkflex.envs.domains.retail.state import action_key
from sinkflex.envs.domains.retail.tasks import COLORS, Wish
from sinkflex.envs.users.scripted import Phrases
from sinkflex.envs.world import World

KIND_WORDS = {
    "refund": r"\b(?:refund|money back|return)\w*",
    "exchange": r"\b(?:exchang|swap|replac)\w*",
    "address": r"\b(?:address|send|ship|deliver)\b",
    "cancel": r"\bcancel\w*",
}
"""Kind of request to the words that mean it."""

ANY_KIND = "|".join(KIND_WORDS.values())

_NUMBER = re.compile(r"\b\d{4}\b")
_ADDRESS = re.compile(r"\b\d{1,3} [a-z]+ (?:road|street|lane|avenue)\b")
_COLOR = re.compile(rf"\b(?:{'|'.join(COLORS)})\b")
_ASKS = re.compile(r"\?|\bconfirm\b")
_AGREES = re.compile(r"\b(?:yes|yep|sure|correct|right|go ahead|please do)\b")
_REFUSES = re.compile(r"\b(?:no|not|don't|wrong)\b")
_SECRETS = {
    "said_id": re.compile(r"\bid\b\D{0,10}(\d{4})\b"),
    "said_pin": re.compile(r"\bpin\b\D{0,10}(\d{4})\b"),
    "said_name": re.compile(r"\bname\b(?: is)? ([a-z]+)\b"),
    "said_zip": re.compile(r"\bzip\b\D{0,10}(\d{4})\b"),
}


def wish_in_words(wish: Wish) -> str:
    """Return the clause in which the user names what a wish is about and what should become of it."""
    subject = subject_in_words(wish)
    if wish.form.kind == "exchange":
        return f"{subject} for {wish.color}"
    if wish.form.kind == "address":
        return f"{subject} to {wish.target}"
    return subject


def subject_in_words(wish: Wish) -> str:
    """Return how the user refers to the item or the order."""
    if not wish.item_id:
        is_known = wish.form.reference == "id"
        return f"order {wish.order_id}" if is_known else f"the order with the {wish.what}"
    if wish.form.reference == "id":
        return f"item {wish.item_id}"
    if wish.form.reference == "order":
        return f"the {wish.what} in order {wish.order_id}"
    return f"the {wish.what}"


def opening_of(wish: Wish) -> Phrases:
    """Return how the user brings a wish up."""
    words = wish_in_words(wish)
    full: dict[str, Phrases] = {
        "refund": ("i want a refund for {}", "please refund {}", "i want my money back for {}"),
        "exchange": ("i want to exchange {}", "please exchange {}", "please swap {}"),
        "address": ("please send {}", "i want to send {}", "please ship {}"),
        "cancel": ("please cancel {}", "i want to cancel {}", "cancel {} please"),
    }
    vague: dict[str, Phrases] = {
        "refund": ("i want a refund", "i want my money back"),
        "exchange": ("i want to exchange something", "can i swap something?"),
        "address": ("i moved", "i have a new address"),
        "cancel": ("i want to cancel something", "please cancel an order"),
    }
    if wish.form.vague:
        return vague[wish.form.kind]
    return tuple(phrase.format(words) for phrase in full[wish.form.kind])


def mentions_wish(text: str, wish: Wish) -> bool:
    """Return whether a user's utterance says all that a wish needs."""
    parts = [subject_in_words(wish)]
    parts += [wish.color] if wish.form.kind == "exchange" else []
    parts += [wish.target] if wish.form.kind == "address" else []
    return all(re.search(rf"\b{re.escape(part)}\b", text) for part in parts)


def proposal_pattern(wish: Wish) -> str:
    """Return the pattern of a clause that proposes exactly what the user wants."""
    parts = [KIND_WORDS[wish.form.kind], rf"\b{wish.entity_id}\b"]
    if wish.form.kind == "exchange":
        parts.append(rf"\b(?:{wish.target}|{wish.fallback or wish.color})\b")
    elif wish.form.kind == "address":
        parts.append(rf"\b{wish.target}\b")
    return r"\A" + "".join(f"(?=.*(?:{part}))" for part in parts)


def proposed_keys(world: World, text: str) -> list[str]:
    """Return the changes that an agent's utterance asks leave for, as ``action_key`` names; empty if it asks
    nothing.

    Only changes named by id count: "shall i refund it?" asks for nothing in particular.
    """
    if not _ASKS.search(text):
        return []
    numbers = list(dict.fromkeys(_NUMBER.findall(text)))
    items = [number for number in numbers if world.has("items", number)]
    orders = [number for number in numbers if world.has("orders", number)]
    swaps = [number for number in numbers if world.has("stock", number)] + _COLOR.findall(text)
    kinds = [kind for kind, words in KIND_WORDS.items() if re.search(words, text)]
    keys: list[str] = []
    if "refund" in kinds:
        keys += [action_key("refund", item) for item in items]
    if "exchange" in kinds:
        keys += [action_key("exchange", item, swap) for item in items for swap in swaps]
    if "address" in kinds:
        keys += [action_key("address", order, place) for order in orders for place in _ADDRESS.findall(text)]
    if "cancel" in kinds:
        keys += [action_key("cancel", order) for order in orders]
    return keys


def agrees(text: str) -> bool:
    """Return whether a user's utterance says yes and does not also say no."""
    return bool(_AGREES.search(text)) and not _REFUSES.search(text)


def said_secrets(text: str) -> dict[str, str]:
    """Return the session facts about the user's identity that an utterance tells."""
    found = {fact: pattern.search(text) for fact, pattern in _SECRETS.items()}
    return {fact: match[1] for fact, match in found.items() if match is not None}
