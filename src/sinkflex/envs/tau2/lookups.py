"""Read-only calls that bring an id into the dialogue before a gold action uses it.

A quarter of the ids in retail's gold actions, and nearly all in telecom's, appear nowhere before they are used: the
gold list leaves out how an agent comes to know them. Given such an id, this module finds the look-up whose reply holds
it, working back from the row that contains it to an id that is already known.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from sinkflex.envs.tau2.catalogue import Domain
from sinkflex.envs.tau2.records import canonical_json
from sinkflex.types import JSONValue, ToolCall

_IDS = re.compile(r"#?[A-Za-z0-9_]*\d[A-Za-z0-9_]*")
_PHONE = re.compile(r"\b\d{3}-\d{3}-\d{4}\b")
_MIN_ID_CHARS = 5
_MAX_DEPTH = 4

_READERS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "retail": {
        "users": ("get_user_details", "user_id"),
        "orders": ("get_order_details", "order_id"),
        "products": ("get_product_details", "product_id"),
    },
    "airline": {
        "users": ("get_user_details", "user_id"),
        "reservations": ("get_reservation_details", "reservation_id"),
    },
}
"""Domain to table to the tool that shows one row, and its argument."""


def ids_in(text: str) -> frozenset[str]:
    """Return the tokens of a text that may be ids: with a digit, five characters or more."""
    return frozenset(token for token in _IDS.findall(text) if len(token) >= _MIN_ID_CHARS)


def find_lookup(domain: Domain, arguments: Mapping[str, JSONValue], transcript: str) -> ToolCall | None:
    """Return a call whose reply brings the arguments' unknown ids closer, None when nothing is missing or can be.

    Args:
        domain: where to look things up.
        arguments: of the action to come.
        transcript: everything the agent has read and written so far.
    """
    if domain.name.startswith("telecom"):
        return _telecom(arguments, transcript)
    if domain.name not in _READERS:
        return None
    known = ids_in(transcript)
    for wanted in sorted(ids_in(canonical_json(dict(arguments))) - known):
        call = _flight(domain, wanted, arguments) or _chain(domain, wanted, known, transcript, depth=0)
        if call is not None:
            return call
    return None


def _telecom(arguments: Mapping[str, JSONValue], transcript: str) -> ToolCall | None:
    customer, phone = arguments.get("customer_id"), _PHONE.search(transcript)
    if customer is not None and str(customer) not in transcript and phone:
        return ToolCall(name="get_customer_by_phone", arguments={"phone_number": phone.group()})
    bill = arguments.get("bill_id")
    if customer is not None and bill is not None and str(bill) not in transcript:
        return ToolCall(name="get_bills_for_customer", arguments={"customer_id": customer})
    return None


def _chain(domain: Domain, wanted: str, known: frozenset[str], transcript: str, *, depth: int) -> ToolCall | None:
    readers = _READERS[domain.name]
    if depth == 0 and domain.name == "retail":
        found = _identify(domain, wanted, transcript)
        if found is not None:
            return found
    holders = [(table, key) for table, key in _index(domain)[wanted] if table in readers]
    for table, key in holders:
        if key in known:
            tool, argument = readers[table]
            return ToolCall(name=tool, arguments={argument: key})
    if depth >= _MAX_DEPTH:
        return None
    for _, key in holders:
        call = _identify(domain, key, transcript) if domain.name == "retail" else None
        call = call or (_chain(domain, key, known, transcript, depth=depth + 1) if key != wanted else None)
        if call is not None:
            return call
    return None


def _identify(domain: Domain, user_id: str, transcript: str) -> ToolCall | None:
    """Return retail's own way to a user id, from the email or from name and zip code the user gave."""
    user = domain.store.template.tools.db.users.get(user_id)
    if user is None:
        return None
    heard = transcript.lower()
    if user.email.lower() in heard:
        return ToolCall(name="find_user_id_by_email", arguments={"email": user.email})
    parts = {"first_name": user.name.first_name, "last_name": user.name.last_name, "zip": user.address.zip}
    if all(part.lower() in heard for part in parts.values()):
        return ToolCall(name="find_user_id_by_name_zip", arguments=parts)
    return None


def _flight(domain: Domain, wanted: str, arguments: Mapping[str, JSONValue]) -> ToolCall | None:
    """Return the search that lists an airline's flight number."""
    if domain.name != "airline" or wanted not in domain.store.template.tools.db.flights:
        return None
    flight = domain.store.template.tools.db.flights[wanted]
    dates = [leg.get("date") for leg in _legs(arguments) if leg.get("flight_number") == wanted]
    if not dates:
        return None
    search = {"origin": flight.origin, "destination": flight.destination, "date": dates[0]}
    return ToolCall(name="search_direct_flight", arguments=search)


def _legs(arguments: Mapping[str, JSONValue]) -> Iterable[dict[str, Any]]:
    flights = arguments.get("flights")
    return [leg for leg in flights if isinstance(leg, dict)] if isinstance(flights, list) else []


@cache
def _index(domain: Domain) -> Mapping[str, list[tuple[str, str]]]:
    """Return id to the (table, key) of the rows of the start state that mention it."""
    index: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for table in _READERS[domain.name]:
        for key, row in getattr(domain.store.template.tools.db, table).items():
            for token in ids_in(canonical_json(row)):
                index[token].append((table, key))
    return index
