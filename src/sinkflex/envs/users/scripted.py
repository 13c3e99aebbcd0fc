"""A finite-state user: understands by keyword, acts when told to, and believes only its own device.

A domain describes the user as a ``Script`` of cues. The user tells facts only when a cue asks for them, runs its own
tools only when a cue instructs it, words its claims from the tool's result, and stops when its own check shows the
fix, after a hand-off, or when patience runs out.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from sinkflex.envs.protocol import UserMove
from sinkflex.types import JSONObject, Message, Role, ToolCall

Phrases: TypeAlias = tuple[str, ...]
"""Paraphrases of one utterance, one of which a seed picks; braces are fields of ``str.format``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Persona:
    """Temper of a scripted user.

    Attributes:
        patience: how many unhelpful turns the user bears; the next one makes it give up.
        chatty: True adds a few words that carry no information.
        hesitant: True questions the first instruction and complies only when it is repeated.
    """

    patience: int = 3
    chatty: bool = False
    hesitant: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Cue:
    """One thing in an agent's message that the user understands.

    Attributes:
        name: identifies the cue; also seeds the choice of paraphrase.
        pattern: matched against one lower-case clause of the message.
        calls: own tool calls to make; ``report`` then words the result.
        answer: what to say, for a cue that asks; a function may consult the number of times it was asked (from 1).
        unless: a clause that also matches this is not the cue.
        helpful: False for what gets the user no further, such as a claim that all is well; it costs patience.
    """

    name: str
    pattern: re.Pattern[str]
    calls: tuple[ToolCall, ...] = ()
    answer: Phrases | Callable[[int], Phrases] = ()
    unless: re.Pattern[str] | None = None
    helpful: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """How the user words one tool result.

    Attributes:
        phrases: what it says.
        stage_done: True when this result shows that the present problem is solved.
        helpful: False when the result shows that it is not; costs patience.
    """

    phrases: Phrases
    stage_done: bool = False
    helpful: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One problem the user brings.

    Attributes:
        opening: how it is brought up.
        cues: what the user understands while it is open, most specific first.
    """

    opening: Phrases
    cues: tuple[Cue, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """All a scripted user needs for one task.

    Attributes:
        stages: problems in the order they are brought up; the user stops after the last is solved.
        report: words a result of the user's own tool.
        persona: the user's temper.
        thanks: said when stopping satisfied.
        confused: said when no cue matches.
        give_up: said when patience has run out.
        hesitate: said by a hesitant user before its first instruction.
        filler: put before what a chatty user says.
    """

    stages: tuple[Stage, ...]
    report: Callable[[ToolCall, JSONObject], Report]
    persona: Persona = field(default_factory=Persona)
    thanks: Phrases = ("thanks, bye",)
    confused: Phrases = ("sorry, what do you mean?",)
    give_up: Phrases = ("this does not help, bye",)
    hesitate: Phrases = ("is that really needed?",)
    filler: Phrases = ("well,", "hmm,")


_CLAUSES = re.compile(r"[.;!\n]+|(?<=\?)|,? (?:and|then|but) ")
_NEGATED = re.compile(r"\b(?:do not|don't|never|no need to|without)\b")
MAX_HEARD_CHARS = 1000
"""How much of one message a scripted user takes in; bounds the work whatever an agent sends."""

MAX_HEARD_CLAUSES = 16
"""How many clauses of it."""

MAX_CALLS_PER_TURN = 3
"""A scripted user follows at most this many instructions of one message."""


class ScriptedUser:
    """Plays a ``Script``; equal script and seed behave equally whatever the order of questions.

    Args:
        script: what the user knows, understands and says.
        seed: picks the paraphrases.
    """

    def __init__(self, script: Script, *, seed: str) -> None:
        self._script = script
        self._seed = seed
        self._stage = 0
        self._patience = script.persona.patience
        self._hesitates = script.persona.hesitant
        self._asked: dict[str, int] = {}
        self._pending: deque[ToolCall] = deque()
        self._said: list[str] = []
        self._last_call: ToolCall | None = None
        self._stops = False

    def open(self) -> Message:
        """Return the opening utterance."""
        return Message(role=Role.USER, content=self._phrase("opening", self._script.stages[0].opening))

    def act(self, incoming: Sequence[Message]) -> UserMove:
        """Return own tool calls one at a time, then one utterance; see ``User.act``."""
        first = incoming[0]
        if first.role is Role.TOOL:
            self._read_reply(first)
        else:
            self._said.clear()
            self._listen(first.content)
        if self._pending and not self._stops:
            self._last_call = self._pending.popleft()
            return UserMove(message=Message(role=Role.USER, tool_calls=(self._last_call,)))
        return self._speak()

    def metrics(self) -> dict[str, float]:
        """Nothing to count."""
        return {}

    def close(self) -> None:
        """Nothing to release."""

    def _listen(self, text: str) -> None:
        helpful = False
        understood = False
        for clause in _clauses(text):
            cue = self._match(clause)
            if cue is None or _NEGATED.search(clause):
                continue
            understood = True
            helpful |= cue.helpful
            self._follow(cue)
        if not understood:
            self._said.append(self._phrase("confused", self._script.confused))
        if not helpful:
            self._lose_patience()

    def _match(self, clause: str) -> Cue | None:
        for cue in self._script.stages[self._stage].cues:
            if cue.pattern.search(clause) and (cue.unless is None or not cue.unless.search(clause)):
                return cue
        return None

    def _follow(self, cue: Cue) -> None:
        if cue.calls and self._hesitates:
            self._hesitates = False
            self._said.append(self._phrase("hesitate", self._script.hesitate))
        elif cue.calls and len(self._pending) < MAX_CALLS_PER_TURN:
            self._pending.extend(cue.calls)
        elif cue.answer:
            asked = self._asked.get(cue.name, 0) + 1
            self._asked[cue.name] = asked
            phrases = cue.answer(asked) if callable(cue.answer) else cue.answer
            self._said.append(self._phrase(f"{cue.name}/{asked}", phrases))

    def _read_reply(self, reply: Message) -> None:
        assert self._last_call is not None  # replies come only to calls this user made
        call = self._last_call
        report = self._script.report(call, json.loads(reply.content))
        self._said.append(self._phrase(f"{call.name}/{self._stage}", report.phrases))
        if report.stage_done:
            self._pending.clear()
            self._finish_stage()
        elif not report.helpful:
            self._lose_patience()

    def _finish_stage(self) -> None:
        self._stage += 1
        if self._stage < len(self._script.stages):
            self._said.append(self._phrase(f"opening/{self._stage}", self._script.stages[self._stage].opening))
            return
        self._said.append(self._phrase("thanks", self._script.thanks))
        self._stops = True

    def _lose_patience(self) -> None:
        self._patience -= 1
        if self._patience < 0:
            self._said = [self._phrase("give_up", self._script.give_up)]
            self._stops = True

    def _speak(self) -> UserMove:
        text = ", ".join(dict.fromkeys(self._said))
        if self._script.persona.chatty and not self._stops:
            text = f"{self._phrase(text, self._script.filler)} {text}"
        return UserMove(message=Message(role=Role.USER, content=text), stops=self._stops)

    def _phrase(self, key: str, phrases: Phrases) -> str:
        return phrases[zlib.crc32(f"{self._seed}/{key}".encode()) % len(phrases)]


def _clauses(text: str) -> list[str]:
    """Split a message into what is matched at a time."""
    clauses = _CLAUSES.split(text[:MAX_HEARD_CHARS].lower())
    return [clause for clause in clauses if clause.strip(" ?,")][:MAX_HEARD_CLAUSES]
