"""What a customer's words agree to pay for."""

from __future__ import annotations

import re

from sinkflex.envs.domains.telecom.state import PLAN_GB
from sinkflex.types import JSONObject

_AGREES = re.compile(r"\b(?:yes|ok|okay|sure|please|agreed|go ahead|take)\b")
_REFUSES = re.compile(r"\b(?:no|not|nor|never|none|nothing|neither|without|rather|cancel|stop|\w+n['’]?t)\b")
_POLITE = re.compile(r"\b(?:no|not a) problem\b|\bwhy not\b|\bno worries\b")
_CLAUSES = re.compile(r"[.!?;:]+(?=\s|$)|\b(?:but|instead)\b")
_AMOUNT = re.compile(r"\b(\d{1,2}) ?gb\b")
_PLAN = re.compile(rf"\b({'|'.join(PLAN_GB)})\b")
_PLAN_ASKED = re.compile(rf"\bplan ({'|'.join(PLAN_GB)})\b|\b({'|'.join(PLAN_GB)}) plan\b")


def agreed_charge(text: str, *, question: str) -> JSONObject | None:
    """Return the charge that an utterance agrees to, as arguments of ``set_plan`` or ``add_data``, or None.

    A clause that refuses agrees to nothing; another one may still ("no, but plan max please"). What is bought may be
    left to the question only where nothing is refused.

    Args:
        text: what the user said, in lower case.
        question: what the agent said last, in lower case.
    """
    clauses = _CLAUSES.split(_POLITE.sub("ok", text))
    refused = [_REFUSES.search(clause) is not None for clause in clauses]
    agreeing = [
        clause for clause, no in zip(clauses, refused, strict=True) if not no and _AGREES.search(clause) is not None
    ]
    if not agreeing:
        return None
    for clause in reversed(agreeing):
        plan, amount = _PLAN.search(clause), _AMOUNT.search(clause)
        if plan is not None:
            return {"plan": plan[1]}
        if amount is not None:
            return {"gb": int(amount[1])}
    if any(refused):
        return None
    asked, amount = _PLAN_ASKED.search(question), _AMOUNT.search(question)
    if asked is not None:
        return {"plan": asked[1] or asked[2]}
    return {"gb": int(amount[1])} if amount is not None else None
