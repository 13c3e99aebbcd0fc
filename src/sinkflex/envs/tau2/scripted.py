"""A scripted user for τ² tasks: states its request, tells facts when asked, works its phone when told, then stops.

It never sees the gold actions, so it cannot leak them: when it stops depends on what the agent says and on its own
phone only. A language model is the better user; this one is free, fast and the same every time.
"""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from sinkflex.envs.protocol import UserMove
from sinkflex.envs.tau2.device import MAX_HEARD, Intent, OutcomeCheck, outcome_check, understand
from sinkflex.envs.tau2.scenario import Scenario, read_scenario
from sinkflex.types import Message, Role, ToolCall

_QUESTION = re.compile(
    r"\?|\b(?:please|could you|can you|may i|would you|tell me|provide|share|let me know|confirm|verify|i need your)\b"
)
_ASKS_IDENTITY = re.compile(
    r"\bnames?\b|\bemail|\bzip\b|\buser.?id\b|\bidentity\b|\bphone number\b|\bwho (?:are|am)\b|\bdate of birth\b"
    r"|\bwhere\b|\bcustomer.?id\b|\babroad\b|\blocation\b|\baddress\b|\breservation\b|\bconfirmation number\b"
)
_ASKS_CONFIRMATION = re.compile(
    r"\bconfirm|\bproceed\b|\bgo ahead\b|\byes or no\b|\(yes|\bis that (?:ok|okay|correct|right|fine)\b|\bshall i\b"
    r"|\bdo you agree|\bwould you like me to\b|\bdo you want me to\b"
)
_ASKS_FOR_MORE = re.compile(
    r"\banything else\b|\bany ?(?:thing)? (?:more|other)\b|\bfurther (?:help|assist)|\belse (?:i|can)\b"
)
_PROMISES = re.compile(
    r"\blet me\b|\bi will\b|\bi'll\b|\bone moment\b|\bhold on\b|\bplease wait\b|\bi am (?:going|looking)\b"
)
_READY = re.compile(r"\b(?:try|check|test|see if|works?|working|resolved|fixed|now)\b")

_OPENINGS = ("{request}", "Hi. {request}", "Hello, {request}")
_AGREES = ("Yes.", "Yes, please.", "Yes, go ahead.")
_WAITS = ("Okay.", "Okay, thank you.", "Sure.")
_PUZZLED = ("I am not sure.", "I do not know.")
_BYES = ("Thank you, bye.", "Thanks, that is all.", "Thank you.")
_FIXED = ("It works now, thank you.", "Great, that fixed it.")
_GIVES_UP = ("This is taking too long. Goodbye.", "I give up for now. Goodbye.")

PATIENCE = 30
"""Utterances after which the user gives up."""

MAX_INTENTS = 6
"""Instructions of one message the user follows."""


class Tau2ScriptedUser:
    """Plays the user of one task.

    Args:
        task: the package's task.
        has_phone: True where the user holds tools (telecom).
        seed: picks wordings, the only chance in it.
    """

    def __init__(self, task: Any, *, has_phone: bool, seed: str) -> None:
        self._scenario: Scenario = read_scenario(task)
        self._check: OutcomeCheck | None = outcome_check(task) if has_phone else None
        self._has_phone = has_phone
        self._seed = seed
        self._confirmations = deque(self._scenario.on_confirmation)
        self._told: set[str] = set()
        self._intents: deque[Intent] = deque()
        self._looking: Intent | None = None
        self._checking = False
        self._reports: list[str] = []
        self._spoken = 0
        self._heard: list[str] = []

    def open(self) -> Message:
        """Return the request."""
        return Message(role=Role.USER, content=self._pick(_OPENINGS).format(request=self._scenario.request))

    def act(self, incoming: Sequence[Message]) -> UserMove:
        """Follow the agent's instructions one call at a time, then answer; see ``User.act``."""
        if incoming[0].role is Role.TOOL:
            done = self._read(incoming[0])
            if done is not None:
                return done
        else:
            text = incoming[0].content[:MAX_HEARD]
            self._heard.append(text)
            self._reports.clear()
            self._checking = False
            if self._has_phone:
                self._intents.extend(understand(text)[:MAX_INTENTS])
                ready = _READY.search(text.lower()) or _ASKS_FOR_MORE.search(text.lower())
                if not self._intents and ready and self._check is not None:
                    self._intents.append(Intent(tool=self._check.tool))
        return self._next_call() or self._answer(self._heard[-1])

    def close(self) -> None:
        """Nothing to release."""

    def _next_call(self) -> UserMove | None:
        if self._intents:
            intent = self._intents[0]
            if intent.switch is not None and intent.wanted is not None:
                self._looking = intent
                return _calls(ToolCall(name=intent.switch.look, arguments={}))
            return _calls(intent.call)
        if self._reports and self._check is not None and not self._checking:
            self._checking = True
            return _calls(ToolCall(name=self._check.tool, arguments={}))
        return None

    def _read(self, reply: Message) -> UserMove | None:
        """Take in a tool's reply; return the farewell when it shows that the problem is solved."""
        if self._looking is not None and self._looking.switch is not None:
            intent, self._looking = self._looking, None
            if bool(self._looking_shows_on(intent, reply.content)) != intent.wanted:
                self._intents[0] = Intent(tool=intent.tool)
                return None
            self._intents.popleft()
            self._reports.append(f"It is already {'on' if intent.wanted else 'off'}.")
            return None
        if self._check is not None and reply.name == self._check.tool and self._check.solved.search(reply.content):
            return self._say(f"{reply.content} {self._pick(_FIXED)}", stops=True)
        if self._intents:
            self._intents.popleft()
            self._checking = self._check is not None and reply.name == self._check.tool
        self._reports.append(reply.content)
        return None

    @staticmethod
    def _looking_shows_on(intent: Intent, text: str) -> bool:
        return intent.switch is not None and intent.switch.shown_on.search(text) is not None

    def _answer(self, heard: str) -> UserMove:
        text = heard.lower()
        if self._spoken >= PATIENCE or self._heard.count(heard) > 3:
            return self._say(self._pick(_GIVES_UP), stops=True)
        if self._reports:
            return self._say("\n".join(dict.fromkeys(self._reports)))
        if not _QUESTION.search(text):
            if _PROMISES.search(text) or self._has_phone:
                return self._say(self._pick(_WAITS))
            return self._say(self._pick(_BYES), stops=True)
        facts = self._facts(text)
        if facts:
            return self._say(" ".join(facts))
        if _ASKS_FOR_MORE.search(text):
            return self._say(self._pick(_BYES), stops=not self._has_phone)
        return self._say(self._pick(_AGREES if _ASKS_CONFIRMATION.search(text) else _PUZZLED))

    def _facts(self, question: str) -> list[str]:
        """Return what a question is entitled to: identity when asked for, then details that it is about."""
        if _ASKS_CONFIRMATION.search(question) and not _ASKS_IDENTITY.search(question):
            return [self._confirmations.popleft()] if self._confirmations else []
        facts: list[str] = []
        if _ASKS_IDENTITY.search(question):
            facts += [*self._scenario.identity, *(self._scenario.unknown if "email" in question else ())]
        facts += [detail for detail in self._scenario.relevant(question) if detail not in self._told]
        if not facts and not _ASKS_FOR_MORE.search(question) and not _ASKS_CONFIRMATION.search(question):
            facts = [fact for fact in (*self._scenario.identity, *self._scenario.details) if fact not in self._told]
        self._told.update(facts)
        return facts

    def _say(self, text: str, *, stops: bool = False) -> UserMove:
        self._spoken += 1
        return UserMove(message=Message(role=Role.USER, content=text), stops=stops)

    def _pick(self, phrases: Sequence[str]) -> str:
        return phrases[zlib.crc32(f"{self._seed}/{phrases[0]}/{self._spoken}".encode()) % len(phrases)]


def _calls(call: ToolCall) -> UserMove:
    return UserMove(message=Message(role=Role.USER, tool_calls=(call,)))
