"""The next message of a perfect agent: τ²'s gold actions, with the talk that they need around them.

Gold actions alone are no dialogue: ids in their arguments come from what the user says or from look-ups. The oracle
asks for what was not said yet, tells the telecom user what to do on the phone, says what must be communicated, and
closes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sinkflex.envs.tau2.catalogue import HAND_OFF_TOOL, Domain
from sinkflex.envs.tau2.lookups import find_lookup, ids_in
from sinkflex.envs.tau2.records import canonical_json
from sinkflex.types import Message, Role, ToolCall

_ASK_IDENTITY = "Could you please tell me your name, email, zip code or user id?"
_ASK_PHONE = "Could you please tell me your name and phone number?"
_CLOSING = "Your request is complete. Is there anything else I can help you with?"
_TRY_NOW = "Please check now whether it works."
_BEFORE_HAND_OFF = "Let me transfer you to a human agent."

_INSTRUCTIONS: dict[str, str] = {
    "toggle_airplane_mode": "Please toggle airplane mode.",
    "toggle_roaming": "Please toggle data roaming.",
    "toggle_data": "Please toggle mobile data.",
    "toggle_data_saver_mode": "Please toggle data saver mode.",
    "toggle_wifi_calling": "Please toggle Wi-Fi calling.",
    "set_network_mode_preference": "Please set the network mode preference to {mode}.",
    "disconnect_vpn": "Please disconnect the VPN.",
    "reseat_sim_card": "Please reseat the SIM card.",
    "reset_apn_settings": "Please reset the APN settings.",
    "reboot_device": "Please reboot the phone.",
    "make_payment": "I sent you a payment request. Please make the payment.",
    "grant_app_permission": "Please grant the {permission} permission to the {app_name} app.",
}


class Oracle:
    """Replays one task's gold actions whatever has happened before.

    Args:
        domain: the task's domain.
        task_id: the task.
    """

    def __init__(self, domain: Domain, task_id: str) -> None:
        criteria = domain.task(task_id).evaluation_criteria
        actions = list((criteria and criteria.actions) or [])
        self._domain = domain
        self._has_phone = bool(domain.user_tools)
        self._gold = sorted(actions, key=lambda action: bool(action.name == HAND_OFF_TOOL))
        self._wanted = [str(info) for info in (criteria and criteria.communicate_info) or []]

    def next_message(self, trajectory: Sequence[Any], *, grounded: bool = False) -> Message:
        """Return the best next assistant message.

        Args:
            trajectory: the package's messages so far, the user's calls included.
            grounded: look ids up before a gold action uses them, so that a policy can copy instead of guess.
        """
        step = self._next_action(trajectory)
        if step is None or step.name == HAND_OFF_TOOL:
            missing = self._missing_info(trajectory)
            if missing:
                tail = _BEFORE_HAND_OFF if step is not None else _CLOSING
                return _say(f"For your information: {', '.join(missing)}. {tail}")
        if step is None:
            return _say(_TRY_NOW if self._has_phone else _CLOSING)
        if step.requestor == "user":
            template = _INSTRUCTIONS.get(step.name, f"Please use {step.name} on your phone.")
            return _say(template.format(**step.arguments))
        if self._should_ask(step, trajectory, grounded=grounded):
            return _say(_ASK_PHONE if self._has_phone else _ASK_IDENTITY)
        if grounded:
            call = find_lookup(self._domain, step.arguments, _read_by_agent(trajectory))
            if call is not None and not self._made(call, trajectory):
                return Message(role=Role.ASSISTANT, tool_calls=(call,))
        return Message(role=Role.ASSISTANT, tool_calls=(ToolCall(name=step.name, arguments=step.arguments),))

    @staticmethod
    def _made(call: ToolCall, trajectory: Sequence[Any]) -> bool:
        return _key(call.name, call.arguments) in {_key(made.name, made.arguments) for made in _calls(trajectory)}

    def _next_action(self, trajectory: Sequence[Any]) -> Any:
        made = Counter(_key(call.name, call.arguments) for call in _calls(trajectory))
        for action in self._gold:
            key = _key(action.name, action.arguments)
            if made[key] > 0:
                made[key] -= 1
            else:
                return action
        return None

    def _missing_info(self, trajectory: Sequence[Any]) -> list[str]:
        said = [
            message.content.lower().replace(",", "")
            for message in trajectory
            if message.role == "assistant" and message.has_text_content()
        ]
        return [info for info in self._wanted if not any(info.lower() in text for text in said)]

    def _should_ask(self, step: Any, trajectory: Sequence[Any], *, grounded: bool) -> bool:
        """Return whether to ask who the user is: once, before any own call, when an argument was not heard yet."""
        spoken = [message.content or "" for message in trajectory if message.role in ("user", "assistant")]
        if any(_ASK_IDENTITY in text or _ASK_PHONE in text for text in spoken):
            return False
        own = any(call.requestor == "assistant" for call in _calls(trajectory))
        if self._has_phone:
            return grounded and not own and bool(ids_in(canonical_json(step.arguments)))
        heard = " ".join(spoken).lower()
        return not own and any(word.lower() not in heard for word in _strings(step.arguments))


def _read_by_agent(trajectory: Sequence[Any]) -> str:
    """Return everything the agent has read or written, the user's own tool talk left out."""
    parts = []
    for message in trajectory:
        if message.role == "tool" and message.requestor == "user":
            continue
        parts.append(message.content or "")
        if message.role == "assistant":
            parts += [json.dumps(call.arguments) for call in message.tool_calls or ()]
    return "\n".join(parts)


def _calls(trajectory: Iterable[Any]) -> Iterable[Any]:
    return (call for message in trajectory for call in getattr(message, "tool_calls", None) or ())


def _key(name: str, arguments: Any) -> str:
    return f"{name} {json.dumps(arguments, sort_keys=True, default=str)}"


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield from re.findall(r"\S+", value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _say(text: str) -> Message:
    return Message(role=Role.ASSISTANT, content=text)
