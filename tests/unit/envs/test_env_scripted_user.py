from __future__ import annotations

import re
import time

import pytest

from sinkflex.envs.users.scripted import Cue, Persona, Report, Script, ScriptedUser, Stage
from sinkflex.types import JSONObject, Message, Role, ToolCall

LOOK = ToolCall(name="look")
FLIP = ToolCall(name="flip")


def report(call: ToolCall, result: JSONObject) -> Report:
    if call.name == "look":
        return (
            Report(phrases=("it shines",), stage_done=True)
            if result["on"]
            else Report(phrases=("it is dark",), helpful=False)
        )
    return Report(phrases=("ok",))


def make_user(persona: Persona | None = None, *, seed: str = "s", stages: int = 1) -> ScriptedUser:
    cues = (
        Cue(name="pin", pattern=re.compile(r"\bpin\b"), answer=lambda asked: (f"answer {asked}",)),
        Cue(name="flip", pattern=re.compile(r"\bflip\b"), calls=(FLIP,), unless=re.compile("i flip")),
        Cue(name="look", pattern=re.compile(r"\blook\b"), calls=(LOOK,)),
        Cue(name="claim", pattern=re.compile(r"\bfixed\b"), answer=("not seen yet",), helpful=False),
    )
    opening = tuple(f"opening {number}" for number in range(4))
    script = Script(
        stages=tuple(Stage(opening=opening, cues=cues) for _ in range(stages)),
        report=report,
        persona=persona or Persona(),
        thanks=("thanks",),
        confused=("what?",),
        give_up=("i quit",),
        hesitate=("must i?",),
        filler=("well,",),
    )
    return ScriptedUser(script, seed=seed)


def hear(user: ScriptedUser, text: str, *replies: str) -> tuple[str, bool, list[str]]:
    """Say something, feed the user's tool calls with replies; return what it says, whether it stops, its calls."""
    move = user.act([Message(role=Role.ASSISTANT, content=text)])
    called: list[str] = []
    feed = iter(replies)
    while move.message.tool_calls:
        called.append(move.message.tool_calls[0].name)
        move = user.act([Message(role=Role.TOOL, content=next(feed), name=called[-1])])
    return move.message.content, move.stops, called


def test_facts_only_when_asked_and_tools_only_when_instructed() -> None:
    user = make_user()
    assert hear(user, "Hello there.") == ("what?", False, [])
    assert hear(user, "Your PIN?") == ("answer 1", False, [])
    assert hear(user, "The pin again?") == ("answer 2", False, [])
    assert hear(user, "Do not flip it.") == ("what?", False, [])
    assert hear(user, "I flipped it; i flip things.") == ("what?", False, [])
    assert hear(user, "Now flip it.", "{}") == ("ok", False, ["flip"])


def test_several_instructions_of_one_message_are_followed_in_order() -> None:
    said = hear(make_user(), "Please flip it, and then look at it.", "{}", '{"on":false}')
    assert said == ("ok, it is dark", False, ["flip", "look"])


def test_it_stops_only_on_its_own_check() -> None:
    user = make_user()
    assert hear(user, "It is fixed!") == ("not seen yet", False, [])
    assert hear(user, "Look.", '{"on":true}') == ("it shines, thanks", True, ["look"])


def test_a_solved_stage_brings_up_the_next() -> None:
    user = make_user(stages=2)
    text, stops, _ = hear(user, "Look.", '{"on":true}')
    assert text.startswith("it shines, opening ")
    assert not stops
    assert hear(user, "Look.", '{"on":true}')[1]


def test_patience_runs_out_on_unhelpful_turns_only() -> None:
    user = make_user(Persona(patience=2))
    assert not hear(user, "mumble")[1]
    assert not hear(user, "pin?")[1]
    assert not hear(user, "look", '{"on":false}')[1]
    assert hear(user, "it is fixed") == ("i quit", True, [])


def test_a_failed_check_can_be_the_last_straw() -> None:
    assert hear(make_user(Persona(patience=0)), "look", '{"on":false}') == ("i quit", True, ["look"])


def test_a_hesitant_user_complies_when_told_again() -> None:
    user = make_user(Persona(hesitant=True))
    assert hear(user, "flip it") == ("must i?", False, [])
    assert hear(user, "flip it", "{}") == ("ok", False, ["flip"])


def test_a_chatty_user_adds_empty_words() -> None:
    assert hear(make_user(Persona(chatty=True)), "pin?")[0] == "well, answer 1"


def test_paraphrase_depends_on_the_seed_and_not_on_what_was_asked_before() -> None:
    openings = {make_user(seed=str(seed)).open().content for seed in range(40)}
    assert openings == {f"opening {number}" for number in range(4)}
    straight, detour = make_user(seed="7"), make_user(seed="7")
    hear(detour, "mumble")
    hear(detour, "pin?")
    assert hear(straight, "flip it", "{}") == hear(detour, "flip it", "{}")


@pytest.mark.parametrize("text", ["a" * 100_000, "flip " * 20_000, "." * 100_000, "and " * 25_000, "pin\n" * 25_000])
def test_a_huge_message_is_heard_at_once(text: str) -> None:
    started = time.process_time()
    hear(make_user(), text, *["{}"] * 10)
    assert time.process_time() - started < 0.25


def test_at_most_three_instructions_of_a_message_are_followed() -> None:
    assert hear(make_user(), "flip it. " * 9, *["{}"] * 9)[2] == ["flip"] * 3
