"""What the telecom customer knows, understands and says."""

from __future__ import annotations

import re
from functools import lru_cache

from sinkflex.envs.domains.telecom.tasks import Case, TelecomTask
from sinkflex.envs.domains.telecom.user_tools import SWITCH_NAMES
from sinkflex.envs.users.scripted import Cue, Phrases, Report, Script, Stage
from sinkflex.types import JSONObject, ToolCall

_OPENINGS: dict[str, Phrases] = {
    "signal": ("my phone has no signal", "i have no service", "my phone does not work", "there is no signal"),
    "data": ("my mobile data does not work", "i have no internet", "the internet is down on my phone"),
    "slow": ("my internet is very slow", "the phone is so slow"),
}
_NEXT_OPENINGS: dict[str, Phrases] = {
    "signal": ("now line {line} has no signal", "also line {line} has no service"),
    "data": ("now line {line} has no internet", "also the data of line {line} is down"),
    "slow": ("now line {line} is slow", "also line {line} is very slow"),
}
_ON = r"\b(?:on|enable|activate)\b"
_OFF = r"\b(?:off|disable|deactivate|leave|exit|out of)\b"
_SWITCHES = (
    ("airplane", "toggle_airplane_mode", r"air ?plane|aeroplane|flight"),
    ("roaming", "toggle_roaming", r"roaming"),
    ("vpn", "toggle_vpn", r"\bvpn\b"),
    ("data", "toggle_data", r"\bdata\b"),
)
_BY_AGENT = re.compile(
    r"\bi(?:'ve| have| did| will|'ll| am| just)?\b.*\b(?:enabl|turn|activat|switch)|your line|our side"
)
_STATUS_WORDS = {
    ("airplane", "on"): "airplane mode is on",
    ("data", "off"): "mobile data is off",
    ("sim", "loose"): "the sim is loose",
    ("network", "lost"): "the network is lost",
    ("vpn", "on"): "vpn is on",
    ("place", "abroad"): "i am abroad",
}


def build_script(task: TelecomTask) -> Script:
    """Return the script of a task's customer."""
    stages = [
        Stage(
            opening=(_NEXT_OPENINGS if number else _OPENINGS)[case.symptom],
            cues=(*_identity_cues(task, case), *_device_cues(), *_late_cues()),
        )
        for number, case in enumerate(task.cases)
    ]
    for number, case in enumerate(task.cases[1:], start=1):
        opening = tuple(text.format(line=case.line_id) for text in stages[number].opening)
        stages[number] = Stage(opening=opening, cues=stages[number].cues)
    return Script(
        stages=tuple(stages),
        report=report,
        persona=task.persona,
        confused=("sorry, i do not understand", "what do you mean?"),
        give_up=("this does not help, bye", "i give up, bye"),
        hesitate=("do i have to?", "is that safe?"),
    )


def report(call: ToolCall, result: JSONObject) -> Report:
    """Word the result of one of the user's tools."""
    if "error" in result:
        # Told to do what is done already: the agent guesses, and the customer notices.
        return Report(phrases=(f"it says {result['error']}",), helpful=False)
    if call.name == "run_speed_test":
        speed = result["speed"]
        if speed == "good":
            return Report(phrases=("speed is good", "it works now"), stage_done=True)
        words: Phrases = (
            ("it is still slow", "speed is slow") if speed == "slow" else ("the test fails", "still nothing")
        )
        return Report(phrases=words, helpful=False)
    if call.name == "check_status":
        return Report(phrases=_status(result))
    if result.get("changed") is False:
        return Report(phrases=("done, but nothing changed",), helpful=False)
    if call.name == "reboot":
        return Report(phrases=("ok, it is on again", "done, phone is back"))
    if call.name == "reseat_sim":
        return Report(phrases=("ok, sim is in", "done, sim is back"))
    if call.name == "pay_bill":
        return Report(phrases=("ok, i paid it", "done, bill is paid"))
    name, value = next(iter(result.items()))
    return Report(phrases=tuple(f"{start}, {SWITCH_NAMES[name]} is {value}" for start in ("ok", "done")))


def _status(result: JSONObject) -> Phrases:
    odd = [words for (name, value), words in _STATUS_WORDS.items() if result[name] == value]
    if result["place"] == "abroad":
        odd.append(f"roaming is {result['roaming']}")
    if not odd:
        return ("all looks fine", "i see nothing odd")
    told = " and ".join(odd)
    return (told, f"i see {told}", f"it says {told}")


def _identity_cues(task: TelecomTask, case: Case) -> tuple[Cue, ...]:
    told = sorted((case.line_id, *task.spare_lines))
    who = f"line {told[0]}" if len(told) == 1 else f"lines {' and '.join(told)}"
    here = f"line {case.line_id}"

    def pin(asked: int) -> Phrases:
        number = task.wrong_pin if task.wrong_pin is not None and asked == 1 else task.pin
        if asked > 1:
            return (f"sorry, pin {number}", f"then pin {number}")
        return (f"{who}, pin {number}", f"{who} and pin {number}", f"it is {who}, pin {number}")

    return (
        Cue(name="pin", pattern=re.compile(r"\bpin\b|passcode|password"), answer=pin),
        Cue(
            name="which",
            pattern=re.compile(r"\bwhich\b|\bwhat (?:line|number)\b"),
            answer=(f"{here}", f"it is {here}"),
        ),
        Cue(
            name="charge",
            pattern=re.compile(
                r"\b(?:fee|charged?|costs?|top.?up|gb|plan)\b|\b(?:add|buy|more|extra)\b.{0,40}\bdata\b"
            ),
            answer=_consent(case),
        ),
        Cue(
            name="line",
            pattern=re.compile(r"\b(?:line|phone|account) (?:number|id)\b|\byour (?:id|number)\b|\bwho are you\b"),
            answer=(who, f"it is {who}"),
        ),
    )


def _consent(case: Case) -> Phrases:
    if "no_data" not in case.faults:
        return ("no, i did not ask for that", "no, i do not want that")
    if case.wants_plan is not None:
        return (f"no, but plan {case.wants_plan} please", f"i take plan {case.wants_plan}, yes")
    return (f"yes, add {case.wants_gb} gb", f"ok, {case.wants_gb} gb please")


@lru_cache(maxsize=1)
def _device_cues() -> tuple[Cue, ...]:
    cues = [
        _do("pay_bill", r"\bpay\b|\bsettle\b.{0,30}\bbill\b"),
        _do("reboot", r"\breboot|\brestart|\bpower\b"),
        _do("reseat_sim", r"\A(?=.*\bsim\b)(?=.*\b(?:re-?seat|re-?insert|remove|take|pull|push|put)\b)"),
        _do("run_speed_test", r"\bspeed|\btest\b|\btry\b|\bdoes it work\b|\bis it working\b"),
    ]
    for name, tool_name, word in _SWITCHES:
        for state, switch in ((False, _OFF), (True, _ON)):
            cues.append(
                Cue(
                    name=f"{name}-{'on' if state else 'off'}",
                    pattern=re.compile(rf"\A(?=.*(?:{word}))(?=.*{switch})(?!\s*(?:is|are)\b)"),
                    unless=_BY_AGENT,
                    calls=(ToolCall(name=tool_name, arguments={"on": state}),),
                )
            )
    return tuple(cues)


@lru_cache(maxsize=1)
def _late_cues() -> tuple[Cue, ...]:
    return (
        _do("check_status", r"\bstatus\b|\bcheck\b|\bsettings?\b|\bscreen\b|\bsee\b|\blook|\A\s*(?:is|are)\b"),
        Cue(
            name="claim",
            pattern=re.compile(r"\b(?:fixed|solved|resolved|done|works?|working|anything else|bye|goodbye)\b"),
            answer=("i did not test it yet", "not tested yet"),
            helpful=False,
        ),
    )


def _do(tool_name: str, pattern: str) -> Cue:
    return Cue(name=tool_name, pattern=re.compile(pattern), calls=(ToolCall(name=tool_name),))
