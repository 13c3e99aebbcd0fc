"""What the telecom user does with its phone when the agent's words tell it to.

Free text is matched clause by clause against what a person would understand ("switch airplane mode off", "reseat the
SIM card"). A switch is looked at first: told to turn something off that is off, the user says so instead of turning it
on. Status claims are worded from the tool's own reply.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sinkflex.types import JSONValue, ToolCall

_VERBS = (
    "toggle|turn|switch|set|re\\w+|disable|enable|check|run|make|grant|disconnect|connect|tell|let|see|try|pay|allow|give|"
    "open|go|can|is|what|change|select|then|please"
)
_CLAUSES = re.compile(rf"[.;!\n]+|(?<=\?)|,? (?:then|but) |, |,? and (?=(?:{_VERBS})\b)")
_NEGATED = re.compile(r"\b(?:do not|don't|never|no need to|without|instead of|already)\b")
_ON = re.compile(r"\b(?:on|enable|activate)\b")
_OFF = re.compile(r"\b(?:off|disable|deactivate)\b")
_LOOK = re.compile(
    r"\b(?:check|what|which|is|are|see|show|status|tell|look|read|does|do you|can you see|verify|let me know|current)\b"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """A setting with two positions.

    Attributes:
        toggle: tool that flips it.
        look: tool that shows it.
        shown_on: pattern in the look's reply when it is on.
    """

    toggle: str
    look: str
    shown_on: re.Pattern[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Intent:
    """One thing the agent asked of the phone.

    Attributes:
        tool: the user's tool to call.
        arguments: its arguments.
        wanted: for a switch, the position asked for; None flips it as it is.
        switch: the switch concerned, if any.
    """

    tool: str
    arguments: Mapping[str, JSONValue] = field(default_factory=dict)
    wanted: bool | None = None
    switch: Switch | None = None

    @property
    def call(self) -> ToolCall:
        """The call that carries it out."""
        return ToolCall(name=self.tool, arguments=dict(self.arguments))


def _words(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


_NETWORK = "check_network_status"
_SWITCHES: tuple[tuple[re.Pattern[str], Switch], ...] = (
    (
        _words(r"air ?plane|flight mode"),
        Switch(toggle="toggle_airplane_mode", look=_NETWORK, shown_on=_words(r"airplane mode: on")),
    ),
    (
        _words(r"data saver|data saving"),
        Switch(toggle="toggle_data_saver_mode", look="check_data_restriction_status", shown_on=_words(r"mode is on")),
    ),
    (
        _words(r"wi-?fi calling"),
        Switch(toggle="toggle_wifi_calling", look="check_wifi_calling_status", shown_on=_words(r"turned on")),
    ),
    (_words(r"wi-?fi"), Switch(toggle="toggle_wifi", look="check_wifi_status", shown_on=_words(r"wi-fi is on"))),
    (_words(r"roaming"), Switch(toggle="toggle_roaming", look=_NETWORK, shown_on=_words(r"data roaming enabled: yes"))),
    (
        _words(r"mobile data|cellular data|toggle_data\b|\bdata connection"),
        Switch(toggle="toggle_data", look=_NETWORK, shown_on=_words(r"mobile data enabled: yes")),
    ),
)
_MODES: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        _words(r"4g[ _/]*(?:and|or|_|/)?[ _/]*5g|5g[ _/]*(?:and|or|_|/)?[ _/]*4g|4g_5g_preferred|preferred"),
        "4g_5g_preferred",
    ),
    (_words(r"\b4g"), "4g_only"),
    (_words(r"\b3g"), "3g_only"),
    (_words(r"\b2g"), "2g_only"),
)
_PERMISSIONS = ("sms", "storage", "location", "phone", "contacts", "camera", "microphone")
_ACTIONS: tuple[tuple[re.Pattern[str], str], ...] = (
    (_words(r"re-?(?:seat|insert)\w*|remove .*sim|take .*sim"), "reseat_sim_card"),
    (_words(r"re-?(?:boot|start)|power cycle"), "reboot_device"),
    (_words(r"(?:reset|restore).*\bapn|\bapn.*\breset"), "reset_apn_settings"),
    (_words(r"(?:disconnect|turn off|switch off|disable|stop).*\bvpn|\bvpn.*\b(?:off|disconnect)"), "disconnect_vpn"),
    (_words(r"(?:connect|turn on|switch on|enable).*\bvpn"), "connect_vpn"),
    (_words(r"make_payment|(?:make|complete|approve).*payment|\bpay\b.*\b(?:bill|it|request|now)\b"), "make_payment"),
)
_LOOKS: tuple[tuple[re.Pattern[str], str], ...] = (
    (_words(r"payment request"), "check_payment_request"),
    (_words(r"status bar|signal|no service|bars\b"), "check_status_bar"),
    (_words(r"speed ?test|internet speed|\bspeed\b|run_speed_test"), "run_speed_test"),
    (_words(r"\bmms\b|picture message"), "can_send_mms"),
    (_words(r"\bsim\b"), "check_sim_status"),
    (_words(r"\bapn\b"), "check_apn_settings"),
    (_words(r"\bvpn\b"), "check_vpn_status"),
    (_words(r"network (?:mode|preference)|preferred network"), "check_network_mode_preference"),
    (_words(r"data (?:restriction|saver)"), "check_data_restriction_status"),
    (_words(r"wi-?fi calling"), "check_wifi_calling_status"),
    (_words(r"wi-?fi"), "check_wifi_status"),
    (_words(r"installed apps|which apps"), "check_installed_apps"),
    (_words(r"network status|air ?plane|roaming|mobile data|connection"), _NETWORK),
)
_MESSAGING = {"app_name": "messaging"}


MAX_HEARD = 2_000
"""Characters of a message that the user follows; patterns over more would take time that grows with its square."""


def understand(text: str) -> list[Intent]:
    """Return what the agent's words ask of the phone, in order, repeats dropped.

    Args:
        text: the agent's message to the user.
    """
    intents: list[Intent] = []
    for clause in _CLAUSES.split(text[:MAX_HEARD].lower()):
        for intent in _clause(clause):
            if intent not in intents:
                intents.append(intent)
    return intents


def _clause(clause: str) -> list[Intent]:
    if _NEGATED.search(clause):
        return []
    for known in (_named_tool, _permission, _network_mode, _action, _switch, _look):
        found = known(clause)
        if found:
            return found
    return []


def _named_tool(clause: str) -> list[Intent]:
    """Understand a tool called by its own name, as in ``toggle_data``."""
    names = re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", clause)
    return [Intent(tool=name) for name in names if name in _ARGUMENT_FREE]


def _permission(clause: str) -> list[Intent]:
    if not re.search(r"\bpermission|\ballow|\bgrant|\baccess", clause):
        return []
    wanted = [name for name in _PERMISSIONS if re.search(rf"\b{name}\b", clause)]
    if wanted and re.search(r"\b(?:grant|allow|give|enable|turn on)\b", clause):
        return [Intent(tool="grant_app_permission", arguments={**_MESSAGING, "permission": name}) for name in wanted]
    return [Intent(tool="check_app_permissions", arguments=_MESSAGING)]


def _network_mode(clause: str) -> list[Intent]:
    if not re.search(r"\b(?:set|change|switch|select|choose|use)\b", clause):
        return []
    for pattern, mode in _MODES:
        if pattern.search(clause) and re.search(r"network|mode|preference|[2345]g", clause):
            return [Intent(tool="set_network_mode_preference", arguments={"mode": mode})]
    return []


def _action(clause: str) -> list[Intent]:
    return next(([Intent(tool=name)] for pattern, name in _ACTIONS if pattern.search(clause)), [])


def _switch(clause: str) -> list[Intent]:
    for pattern, switch in _SWITCHES:
        if not pattern.search(clause):
            continue
        if "toggle" in clause:
            return [Intent(tool=switch.toggle)]
        wanted = True if _ON.search(clause) else False if _OFF.search(clause) else None
        if wanted is not None and not re.search(r"\b(?:is|are|was|whether|if|what|check)\b", clause):
            return [Intent(tool=switch.toggle, wanted=wanted, switch=switch)]
        return []
    return []


def _look(clause: str) -> list[Intent]:
    if not _LOOK.search(clause) and "test" not in clause and "try" not in clause:
        return []
    return next(([Intent(tool=name)] for pattern, name in _LOOKS if pattern.search(clause)), [])


_ARGUMENT_FREE: frozenset[str] = frozenset(
    [name for _, name in (*_ACTIONS, *_LOOKS)] + [switch.toggle for _, switch in _SWITCHES]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeCheck:
    """How the user sees for itself that the problem is solved.

    Attributes:
        tool: what it looks at.
        solved: pattern in the reply when it is.
    """

    tool: str
    solved: re.Pattern[str]


def outcome_check(task: Any) -> OutcomeCheck | None:
    """Return the check that the task's user goes by, None where the user holds no phone.

    Args:
        task: the package's task; the request says whether it is about service, data or picture messages.
    """
    instructions = task.user_scenario.instructions
    text = (instructions if isinstance(instructions, str) else instructions.reason_for_call).lower()
    if "mms" in text:
        return OutcomeCheck(tool="can_send_mms", solved=_words(r"can send mms"))
    if "data" in text or "internet" in text:
        return OutcomeCheck(tool="run_speed_test", solved=_words(r"\(excellent\)"))
    if "no service" in text or "signal" in text:
        return OutcomeCheck(tool="check_status_bar", solved=_words(r"📶"))
    return None
