"""The best next move in telecom from any state, and the mistakes one would make there.

Both go by what the dialogue has revealed: ids and PIN once the user said them, the line once it was looked up, the
phone once its status was reported.
"""

from __future__ import annotations

from sinkflex.envs.domains.telecom.tasks import TelecomTask
from sinkflex.envs.protocol import call, say
from sinkflex.envs.session import facts
from sinkflex.envs.world import Record, World
from sinkflex.types import Message

ASK_IDENTITY = say("what is your line and pin?")
ASK_PIN_AGAIN = say("wrong pin, what is it?")
ASK_CHARGE = say("add data for a fee?")
ASK_STATUS = say("please check your phone status")
ASK_TEST = say("please run a speed test")
PAY_BILL = say("please pay your bill")
CLAIM_DONE = say("it is fixed now, bye")

_PHONE_FIXES: tuple[tuple[str, str, Message], ...] = (
    ("sim", "loose", say("take the sim out and put it back")),
    ("airplane", "on", say("turn airplane mode off")),
    ("data", "off", say("turn mobile data on")),
    ("vpn", "on", say("turn vpn off")),
    ("network", "lost", say("please reboot your phone")),
)
ROAMING_ON = say("turn roaming on")


def next_message(task: TelecomTask, world: World) -> Message:
    """Return the oracle's next message."""
    known = facts(world)
    return _identify(known) or _fix_line(known, world) or _fix_phone(known, world)


def other_orders(world: World) -> tuple[Message, ...]:
    """Return the phone's next step while the line still needs one; both orders are as good, the test comes last."""
    known = facts(world)
    if not known["verified"] or not known["said_line"]:
        return ()
    line = _fix_line(known, world)
    if line is None or (line.tool_calls and line.tool_calls[0].name == "transfer_to_human"):
        return ()
    phone = _fix_phone(known, world)
    return () if phone == ASK_TEST else (phone,)


def likely_slips(task: TelecomTask, world: World) -> tuple[Message, ...]:
    """Return one to four plausible mistakes for this state."""
    known = facts(world)
    best = next_message(task, world)
    if not known["said_lines"]:
        return (ASK_STATUS, ASK_TEST, call("transfer_to_human", reason="fraud"))
    line_id = str(known["said_line"] or known["said_lines"][0])
    if not known["verified"]:
        return (call("get_line", line_id=line_id), call("resume_line", line_id=line_id), ASK_STATUS)
    if not known["said_line"]:
        return tuple(call("get_line", line_id=name) for name in known["said_lines"])
    wrong_line = next((name for name in known["said_lines"] if name != line_id), "")
    if best.tool_calls:
        return _slips_of_call(best, line_id, wrong_line)
    if best == ASK_CHARGE:
        return (call("add_data", line_id=line_id, gb=2), call("add_data", line_id=line_id, gb=5), ASK_TEST)
    if best == ASK_TEST:
        return (CLAIM_DONE, call("enable_roaming", line_id=line_id), ASK_CHARGE)
    if best == ASK_STATUS:
        return (
            ASK_TEST,
            call("enable_roaming", line_id=line_id),
            CLAIM_DONE,
            _other_fix(best, world, line_id),
        )
    return (_other_fix(best, world, line_id), ASK_TEST, call("transfer_to_human", reason="dead_sim"))


def _identify(known: Record) -> Message | None:
    if not known["said_pin"]:
        return ASK_IDENTITY
    if not known["verified"]:
        if known["pin_failed"] == known["said_pin"]:
            return ASK_PIN_AGAIN
        return call("verify_pin", line_id=known["said_lines"][0], pin=known["said_pin"])
    if not known["said_line"]:
        return say(f"which line, {' or '.join(known['said_lines'])}?")
    return None


def _fix_line(known: Record, world: World) -> Message | None:
    line_id = str(known["said_line"])
    if line_id not in known["read"]:
        return call("get_line", line_id=line_id)
    line = world.get("lines", line_id)
    if line["state"] == "fraud" or line["sim"] == "dead":
        return call("transfer_to_human", reason="fraud" if line["state"] == "fraud" else "dead_sim")
    if line["state"] == "unpaid":
        return PAY_BILL
    if line["state"] == "suspended":
        return call("resume_line", line_id=line_id)
    if line["sim"] == "locked":
        return call("unlock_sim", line_id=line_id)
    if line["gb"] == 0:
        consent = known["consent"]
        if not consent:
            return ASK_CHARGE
        return call("add_data" if "gb" in consent else "set_plan", line_id=line_id, **consent)
    return None


def _fix_phone(known: Record, world: World) -> Message:
    line_id = str(known["said_line"])
    if line_id not in known["seen"]:
        return ASK_STATUS
    line, phone = world.get("lines", line_id), world.get("phones", line_id)
    if phone["place"] == "abroad" and line["roaming"] == "off":
        return call("enable_roaming", line_id=line_id)
    for name, value, instruction in _PHONE_FIXES:
        if phone[name] == value:
            return instruction
    if phone["place"] == "abroad" and phone["roaming"] == "off":
        return ROAMING_ON
    return ASK_TEST


def _other_fix(best: Message, world: World, line_id: str) -> Message:
    """Return an instruction that would not help now; which one depends on the line, so that slips vary."""
    others = [fix for _, _, fix in _PHONE_FIXES if fix != best]
    return others[int(line_id) % len(others)]


def _slips_of_call(best: Message, line_id: str, wrong_line: str) -> tuple[Message, ...]:
    name = best.tool_calls[0].name
    arguments = dict(best.tool_calls[0].arguments)
    slips = [call(name, **{**arguments, "line_id": wrong_line})] if wrong_line and "line_id" in arguments else []
    if name == "get_line":
        slips += [call("resume_line", line_id=line_id), ASK_STATUS]
    elif name == "add_data":
        slips += [call(name, **{**arguments, "gb": 7 - arguments["gb"]}), ASK_TEST]
    elif name == "set_plan":
        slips += [call("add_data", line_id=line_id, gb=5), call(name, **{**arguments, "plan": "plus"})]
    elif name == "transfer_to_human":
        slips += [ASK_STATUS, call("resume_line", line_id=line_id), ASK_TEST]
    else:
        fixes = ("resume_line", "unlock_sim", "enable_roaming")
        slips += [call(fix, line_id=line_id) for fix in fixes if fix != name]
        slips.append(ASK_TEST)
    return tuple(slips)
