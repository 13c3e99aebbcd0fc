"""What a task's scenario lets the user say: facts in the first person, told when a question asks for them.

τ² writes scenarios for a language model ("You are Yusuf Rossi ... You do not remember your email"). The scripted user
needs sentences it can say, and three kinds apart: who it is, what it wants, and what it does when the agent asks for a
confirmation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_OBJECT_LEADS = (
    "to|for|with|of|from|by|about|at|on|gives?|gave|tells?|told|asks?|asked|offers?|helps?|sends?|sent|charges?|charged|"
    "refunds?|gets?|lets?|informs?|shows?|allows?|upgrades?|reminds?|causes?|caused|costs?|wants?|makes?|made"
)
_FIRST_PERSON: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        (r"\byou (?=name\b|mobile\b|phone\b|zip\b|email\b)", "my "),
        (r"\byou're\b", "I'm"),
        (r"\byou've\b", "I've"),
        (r"\byou'd\b", "I'd"),
        (r"\byou'll\b", "I'll"),
        (r"\byou are\b", "I am"),
        (r"\byou were\b", "I was"),
        (r"\bare you\b", "am I"),
        (r"\byourself\b", "myself"),
        (r"\byours\b", "mine"),
        (r"\byour\b", "my"),
        (
            rf"\b({_OBJECT_LEADS}) you\b(?! (?:want|need|have|would|can|will|do|did|just|also|only|prefer)\b)",
            r"\1 me",
        ),
        (r"\byou\b", "I"),
        (r"\bthe agent (says|asks|tells|gives|offers|provides|finds|refuses|insists)\b", r"you \1"),
        (r"\byou (say|ask|tell|give|offer|provide|find|refuse|insist)s\b", r"you \1"),
        (r"\bthe agent (?:is|has)\b", "you have"),
        (r"\b(?:the )?agent\b", "you"),
    )
)
_SENTENCES = re.compile(r"(?<=[.!?])\s+|\n+")
_STAGE_DIRECTION = re.compile(
    r"\b(?:if|when|once|unless|until|in case|before|after) (?:the )?agents? (?!can (?:help|do))"
    r"|\bif you are asked|\breveal|\bmention\b|\bdon't tell|\bdo not tell|\bif asked\b|\btool call|\bground your"
    r"|\bmake up\b|\bconversation\b|\bpersona\b|\brespond\b",
    re.IGNORECASE,
)
_ON_CONFIRMATION = re.compile(
    r"^(?:but |and )?(?:if|when|once) (?:the )?agent asks (?:you )?(?:again )?"
    r"(?:for (?:a |final )?confirm\w*|to confirm[^,]*)[^,]*,\s*(?P<answer>.+)$",
    re.IGNORECASE,
)
_TEMPER = re.compile(
    r"^you are (?:a |an |very )?(?!.*\b(?:zip|living|live|email|willing|abroad|at home)\b)[\w ,-]+\.?$", re.I
)
_WORD = re.compile(r"[a-z0-9#@]+")
_STOPWORDS = frozenset(
    re.findall(
        r"\w+",
        "a an and any are as at be been but by can could do does for from had has have i if in is it its just let like "
        "may me my need of on or our please so some that the their there these this to us was we were what when which "
        "who will with would you your yes no not help know tell want provide share give also about",
    )
)


def first_person(text: str) -> str:
    """Return second-person instructions as the user would say them."""
    for pattern, replacement in _FIRST_PERSON:
        text = pattern.sub(replacement, text)
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]


def keywords(text: str) -> frozenset[str]:
    """Return the content words of a text, lower case, plural s cut."""
    return frozenset(word.removesuffix("s") for word in _WORD.findall(text.lower()) if word not in _STOPWORDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A task's user, as sentences to say.

    Attributes:
        request: what the user wants, said in the opening.
        identity: who the user is; told when asked.
        unknown: what the user does not remember; told when asked.
        details: preferences and limits; told when a question is about them.
        on_confirmation: what the user answers when asked to confirm, in order; empty means "yes".
    """

    request: str
    identity: tuple[str, ...]
    unknown: tuple[str, ...]
    details: tuple[str, ...]
    on_confirmation: tuple[str, ...]

    def relevant(self, question: str) -> tuple[str, ...]:
        """Return the details that share a content word with the question."""
        asked = keywords(question)
        return tuple(detail for detail in self.details if keywords(detail) & asked)


def read_scenario(task: Any) -> Scenario:
    """Read a task's ``user_scenario``, structured or plain text.

    Args:
        task: the package's task.
    """
    instructions = task.user_scenario.instructions
    if isinstance(instructions, str):
        reason, known, unknown, manner = instructions, "", "", ""
    else:
        reason, known = instructions.reason_for_call, instructions.known_info or ""
        unknown, manner = instructions.unknown_info or "", instructions.task_instructions or ""
    wishes = _split(reason)
    spoken = [sentence for sentence in wishes if not _STAGE_DIRECTION.search(sentence)] or wishes[:1]
    directions = [sentence for sentence in (*wishes, *_split(manner)) if sentence not in spoken]
    return Scenario(
        request=" ".join(map(first_person, spoken)),
        identity=_first_persons(_split(known)),
        unknown=_first_persons(_split(unknown)),
        details=_first_persons(
            sentence for sentence in directions if not _STAGE_DIRECTION.search(sentence) and not _TEMPER.match(sentence)
        ),
        on_confirmation=tuple(
            first_person(found["answer"]) for sentence in directions if (found := _ON_CONFIRMATION.match(sentence))
        ),
    )


def _split(text: str) -> list[str]:
    return [part.strip() for part in _SENTENCES.split(text) if re.search(r"\w", part)]


def _first_persons(sentences: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(first_person, sentences))
