"""What the retail customer knows, understands and says."""

from __future__ import annotations

import re

from sinkflex.envs.domains.retail.speech import (
    ANY_KIND,
    opening_of,
    proposal_pattern,
    wish_in_words,
)
from sinkflex.envs.domains.retail.state import CANCELLED
from sinkflex.envs.domains.retail.tasks import RetailTask, Wish
from sinkflex.envs.users.scripted import Cue, Phrases, Report, Script, Stage
from sinkflex.types import JSONObject, ToolCall

_CANNOT = (
    r"\b(?:cannot|can't|can not|could not|couldn't|unable|impossible|not (?:possible|allowed|eligible)|too late)\b"
)
_APPROVE = r"\b(?:approv|accept|device)"
_OUT = r"\b(?:out of stock|in stock|sold out|(?:other|another|different) colou?r|not available)\b"


def build_script(task: RetailTask) -> Script:
    """Return the script of a task's customer."""
    stages = []
    for number, wish in enumerate(task.wishes):
        opening = opening_of(wish)
        if number:
            opening = tuple(f"{start} {phrase}" for phrase in opening for start in ("also", "and"))
        stages.append(Stage(opening=opening, cues=(*_wish_cues(wish), *_identity_cues(task), *_late_cues(wish))))
    return Script(
        stages=tuple(stages),
        report=lambda call, result: report(task, call, result),
        persona=task.persona,
        thanks=("thanks, bye", "thank you, bye"),
        confused=("sorry, what do you mean?", "i do not understand"),
        give_up=("this does not help, bye", "i give up, bye"),
        hesitate=("are you sure?", "is that right?"),
    )


def report(task: RetailTask, call: ToolCall, result: JSONObject) -> Report:
    """Word the result of one of the user's tools."""
    if "error" in result:
        return Report(phrases=(f"it says {result['error']}",), helpful=False)
    if call.name == "check_order":
        wish = next(wish for wish in task.wishes if wish.order_id == call.arguments["order_id"])
        status = result["status"]
        if status == CANCELLED or (status == wish.status and not wish.possible):
            return Report(phrases=(f"ok, i see it is {status}", f"yes, it is {status}"), stage_done=True)
        return Report(phrases=(f"it is still {status}", f"no, it is {status}"), helpful=False)
    if call.name == "list_requests":
        mine = [wish.request_id for wish in task.wishes if wish.request_id in result]
        if mine:
            return Report(phrases=(f"i see request {mine[0]}", f"there is request {mine[0]}"))
        if result:
            return Report(phrases=("i did not ask for that", "that is not what i want"), helpful=False)
        return Report(phrases=("i see no request", "there is no request"), helpful=False)
    if result["state"] == "declined":
        return Report(phrases=("i changed my mind, i declined it", "i declined it after all"), stage_done=True)
    return Report(phrases=("done, it is approved", "ok, i approved it"), stage_done=True)


def _wish_cues(wish: Wish) -> tuple[Cue, ...]:
    cues = []
    if wish.fallback:
        cues.append(
            Cue(
                name="fallback",
                pattern=re.compile(_OUT),
                answer=(f"then {wish.fallback}", f"{wish.fallback} then", f"{wish.fallback} is fine"),
            )
        )
    check = ToolCall(name="check_order", arguments={"order_id": wish.order_id})
    if wish.form.twist == "too_late":
        cues.append(Cue(name="cannot", pattern=re.compile(_CANNOT), calls=(check,)))
    else:
        cues.append(
            Cue(
                name="cannot",
                pattern=re.compile(_CANNOT),
                answer=("but i want it", "please try again"),
                helpful=False,
            )
        )
    if wish.form.kind == "cancel":
        cues.append(
            Cue(
                name="cancelled",
                pattern=re.compile(r"\bcancell?ed\b"),
                unless=re.compile(r"\?"),
                calls=(check,),
            )
        )
    else:
        answer = "decline_request" if wish.form.twist == "changes_mind" else "approve_request"
        decide = ToolCall(name=answer, arguments={"request_id": wish.request_id})
        mine = rf"\A(?=.*{_APPROVE})(?=.*\b{wish.request_id}\b)"
        cues.append(Cue(name="decide", pattern=re.compile(mine), calls=(decide,)))
    cues.append(Cue(name="look", pattern=re.compile(_APPROVE), calls=(ToolCall(name="list_requests"),)))
    cues.append(
        Cue(name="agree", pattern=re.compile(proposal_pattern(wish)), answer=("yes", "yes please", "yes, go ahead"))
    )
    restated = tuple(f"no, {phrase}" for phrase in _restated(wish))
    cues.append(
        Cue(
            name="disagree",
            pattern=re.compile(rf"\A(?=.*(?:{ANY_KIND}))(?=.*\b\d{{4}}\b)"),
            answer=restated,
            helpful=False,
        )
    )
    details = (wish_in_words(wish), f"it is {wish_in_words(wish)}")
    asks = r"\b(?:which|where|what (?:item|order|product|colou?r|address))\b|\b(?:item|order|product) (?:id|number)\b"
    cues.append(Cue(name="which", pattern=re.compile(asks), answer=details))
    return tuple(cues)


def _restated(wish: Wish) -> Phrases:
    words = wish_in_words(wish)
    verbs = {"refund": "refund", "exchange": "exchange", "address": "send", "cancel": "cancel"}
    return (f"i want to {verbs[wish.form.kind]} {words}", f"{verbs[wish.form.kind]} {words}")


def _identity_cues(task: RetailTask) -> tuple[Cue, ...]:
    secret = task.pin if task.knows_id else task.zip_code

    def tell_secret(asked: int) -> Phrases:
        number = task.wrong_secret if task.wrong_secret is not None and asked == 1 else secret
        word = "pin" if task.knows_id else "zip"
        return (f"{word} {number}", f"my {word} is {number}") if asked == 1 else (f"sorry, {word} {number}",)

    if task.knows_id:
        known: Phrases = (f"id {task.customer_id}", f"my id is {task.customer_id}")
        return (
            Cue(name="id", pattern=re.compile(r"\bid\b|\bcustomer number\b|\bwho are you\b"), answer=known),
            Cue(name="pin", pattern=re.compile(r"\bpin\b|\bcode\b|\bpassword\b"), answer=tell_secret),
            Cue(name="name", pattern=re.compile(r"\bname\b"), answer=(f"name {task.customer_name}",)),
            Cue(name="zip", pattern=re.compile(r"\bzip\b|\bpostal\b"), answer=("i do not know my zip",)),
        )
    unknown: Phrases = ("i only know name and zip",)
    who = (f"name {task.customer_name}", f"my name is {task.customer_name}")
    return (
        Cue(name="id", pattern=re.compile(r"\bid\b|\bcustomer number\b|\bwho are you\b"), answer=unknown),
        Cue(name="pin", pattern=re.compile(r"\bpin\b|\bpassword\b"), answer=unknown),
        Cue(name="name", pattern=re.compile(r"\bname\b"), answer=who),
        Cue(name="zip", pattern=re.compile(r"\bzip\b|\bcode\b|\bpostal\b"), answer=tell_secret),
    )


def _late_cues(wish: Wish) -> tuple[Cue, ...]:
    return (
        Cue(
            name="unclear",
            pattern=re.compile(ANY_KIND),
            answer=("which number do you mean?", "what number is that?"),
            helpful=False,
        ),
        Cue(
            name="claim",
            pattern=re.compile(r"\b(?:done|fixed|all set|anything else|bye|goodbye)\b"),
            answer=("it is not done", "i see no change"),
            helpful=False,
        ),
    )
