"""τ² environments that share what they can and leak nothing into the next episode.

Three things of the package outlive an episode there and are held back here: rows of the database, the VPN details
that the telecom user's toolkit keeps on its *class* (one task that breaks the VPN changes it for every later one), and
random bill ids. A fourth, ``calculate`` on a tower of powers, would never come back.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import re
import warnings
from functools import cache
from typing import Any

from sinkflex.envs.tau2.records import Access, SharedDatabase

MAX_EXPRESSION_CHARS = 1_000
"""Longest expression ``calculate`` evaluates."""

_POWER = re.compile(r"\*\*")
_SAFE_POWER = re.compile(r"\*\*\s*\d{1,2}(?![\d.])")
_READING_KINDS = frozenset({"read", "think", "generic"})


class _GuardedToolkit:
    """Mixed into a toolkit class; every call by tool name passes here, in play and when gold actions are replayed."""

    access: Access

    def use_tool(self, tool_name: str, **arguments: Any) -> Any:
        if tool_name == "calculate":
            _check_expression(arguments.get("expression"))
        if not self.has_tool(tool_name):  # type: ignore[attr-defined]
            return super().use_tool(tool_name=tool_name, **arguments)  # type: ignore[misc]
        self.access.reading = self.tool_type(tool_name).value in _READING_KINDS  # type: ignore[attr-defined]
        try:
            return super().use_tool(tool_name=tool_name, **arguments)  # type: ignore[misc]
        finally:
            self.access.reading = False

    def _apply_one_time_charge(self, customer_id: str, amount: float, description: str) -> None:
        customer = self.get_customer_by_id(customer_id)  # type: ignore[attr-defined]
        known = set(customer.bill_ids)
        super()._apply_one_time_charge(customer_id, amount, description)  # type: ignore[misc]
        for position, bill_id in enumerate(customer.bill_ids):
            if bill_id not in known:
                digest = hashlib.sha256(f"{customer_id}/{position}".encode()).hexdigest()
                customer.bill_ids[position] = f"B{digest[:8]}"
                self._get_bill_by_id(bill_id).bill_id = f"B{digest[:8]}"  # type: ignore[attr-defined]


def _check_expression(expression: Any) -> None:
    if not isinstance(expression, str):
        return
    powers = len(_POWER.findall(expression))
    if len(expression) > MAX_EXPRESSION_CHARS or powers > 1 or (powers and not _SAFE_POWER.search(expression)):
        raise ValueError(
            f"expression too expensive: at most {MAX_EXPRESSION_CHARS} characters and one power, exponent below 100"
        )


class _QuietEnvironment:
    """Mixed into an environment class: values of a wrong type that a tool stored are no reason to warn on stderr."""

    def get_response(self, message: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return super().get_response(message)  # type: ignore[misc]


@cache
def _guarded(base: Any) -> Any:
    return type(f"Guarded{base.__name__}", (_GuardedToolkit, base), {})


@cache
def _quiet(base: Any) -> Any:
    return type(f"Quiet{base.__name__}", (_QuietEnvironment, base), {})


class EnvironmentStore:
    """Makes private environments of one domain from one pristine template.

    Args:
        template: a τ² environment in the domain's start state. Owned by the store; nothing ever acts on it.
    """

    def __init__(self, template: Any) -> None:
        self.template = template
        self._toolkits = {
            side: kit
            for side, kit in (("tools", template.tools), ("user_tools", template.user_tools))
            if kit is not None
        }
        for kit in self._toolkits.values():
            _own_class_models(kit)
        self._shared: dict[int, SharedDatabase] = {
            id(kit.db): SharedDatabase(kit.db) for kit in self._toolkits.values() if kit.db is not None
        }

    def pristine(self) -> Any:
        """Return an environment in the domain's start state; its rows are shared until written."""
        access = Access()
        views = {key: shared.view(access) for key, shared in self._shared.items()}
        states = {}
        for side, kit in self._toolkits.items():
            state = {name: copy.deepcopy(value) for name, value in vars(kit).items() if name != "db"}
            states[side] = {**state, "db": views.get(id(kit.db))}
        return self._assemble(states, access)

    def freeze(self, environment: Any) -> bytes:
        """Return the state of an environment, to be thawed any number of times."""
        states = {}
        for side in self._toolkits:
            state = vars(getattr(environment, side)).copy()
            state.pop("access")
            states[side] = state
        return pickle.dumps(states, protocol=pickle.HIGHEST_PROTOCOL)

    def thaw(self, blob: bytes) -> Any:
        """Return a private environment in a frozen state."""
        return self._assemble(pickle.loads(blob), Access())

    def shared_databases(self) -> tuple[SharedDatabase, ...]:
        """Return the databases whose rows episodes share."""
        return tuple(self._shared.values())

    def _assemble(self, states: dict[str, dict[str, Any]], access: Access) -> Any:
        kind: Any = type(self.template)
        environment = object.__new__(_quiet(kind))
        environment.__dict__.update(vars(self.template))
        for side, state in states.items():
            kit_kind: Any = type(self._toolkits[side])
            kit = object.__new__(_guarded(kit_kind))
            kit.__dict__.update(state, access=access)
            setattr(environment, side, kit)
        return environment


def _own_class_models(kit: Any) -> None:
    """Copy pydantic models kept on the toolkit's class to the instance, so that changing them stays in one episode."""
    for name, value in vars(type(kit)).items():
        if hasattr(value, "model_copy") and not isinstance(value, type) and name not in vars(kit):
            setattr(kit, name, value.model_copy(deep=True))
