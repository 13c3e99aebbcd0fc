from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from sinkflex.chat.parsing import MalformedAction, ParsedAction
from sinkflex.envs.domains.mock import MockDomain, MockTask
from sinkflex.envs.dual_control import Budget, Episode
from sinkflex.envs.protocol import UserMove
from sinkflex.envs.tools import Side
from sinkflex.envs.users.scripted import ScriptedUser
from sinkflex.envs.world import World
from sinkflex.errors import EnvError, InfrastructureError
from sinkflex.types import Message, Role, StopReason, ToolCall


def start(*, max_steps: int = 10, max_invalid: int = 3, task: str = "mock-both") -> Episode[MockTask]:
    domain = MockDomain()
    user = ScriptedUser(domain.script(domain.task(task)), seed="0")
    episode = Episode(
        domain=domain,
        task=domain.task(task),
        user=user,
        budget=Budget(max_steps=max_steps, max_invalid_actions=max_invalid),
    )
    episode.start()
    return episode


def tell(text: str) -> ParsedAction:
    return ParsedAction(content=text)


def use(*names: str, **arguments: Any) -> ParsedAction:
    return ParsedAction(tool_calls=tuple(ToolCall(name=name, arguments=arguments, call_id=name) for name in names))


def finish(episode: Episode[MockTask]) -> None:
    for action in (use("read_mains"), tell("may i turn the mains on?"), use("turn_on_mains")):
        episode.act(action)
    episode.act(tell("please turn the switch on"))


def test_a_perfect_episode_scores_one_and_counts() -> None:
    episode = start()
    finish(episode)
    turn = episode.act(tell("look at the lamp"))
    assert turn.stop_reason is StopReason.USER_STOP
    outcome = episode.outcome()
    assert outcome.score == 1.0
    assert outcome.components == {"mains": 1.0, "seen": 1.0, "policy": 1.0, "ended": 1.0}
    assert outcome.metrics == {
        "steps": 5.0,
        "agent_calls": 2.0,
        "user_calls": 2.0,
        "user_turns": 3.0,
        "invalid_actions": 0.0,
        "invalid_calls": 0.0,
        "tool_errors": 0.0,
        "repeated_calls": 0.0,
        "policy_breaches": 0.0,
        "writes_before_confirmation": 0.0,
    }


def test_a_breach_zeroes_the_score_and_is_counted() -> None:
    episode = start()
    episode.act(use("turn_on_mains"))
    episode.act(tell("please turn the switch on"))
    episode.act(tell("look at the lamp"))
    outcome = episode.outcome()
    assert outcome.score == 0.0
    assert outcome.components == {"mains": 1.0, "seen": 1.0, "policy": 0.0, "ended": 1.0}
    assert outcome.breaches == ("unasked_mains",)
    assert outcome.metrics["writes_before_confirmation"] == 1.0


def test_the_score_is_zero_until_the_episode_terminates() -> None:
    episode = start()
    finish(episode)
    assert episode.outcome().components["ended"] == 0.0
    assert episode.outcome().score == 0.0


def test_a_stop_outranks_the_budget_used_up_by_the_same_step() -> None:
    episode = start(max_steps=5)
    finish(episode)
    assert episode.act(tell("look at the lamp")).stop_reason is StopReason.USER_STOP


def test_budgets_truncate() -> None:
    episode = start(max_steps=2)
    assert episode.act(use("read_mains")).stop_reason is None
    assert episode.act(use("read_mains")).stop_reason is StopReason.MAX_STEPS
    episode = start(max_invalid=2)
    assert episode.act(MalformedAction(reason="Close the brace.")).stop_reason is None
    assert episode.act(use("no_such_tool")).stop_reason is StopReason.MAX_INVALID_ACTIONS


def test_a_malformed_action_is_a_step_whose_message_says_why_and_the_user_never_hears_it() -> None:
    episode = start()
    turn = episode.act(MalformedAction(reason="Close the brace."))
    assert turn.messages == (Message(role=Role.SYSTEM, content="Close the brace."),)
    assert turn.invalid_action == "Close the brace."
    assert len(episode.transcript) == 1
    assert episode.outcome().metrics["steps"] == 1.0


def test_calls_of_one_action_reply_in_order_with_their_ids_and_an_invalid_one_is_reported() -> None:
    episode = start()
    turn = episode.act(use("read_mains", "reed_mains"))
    assert [(message.name, message.call_id) for message in turn.messages] == [
        ("read_mains", "read_mains"),
        ("reed_mains", "reed_mains"),
    ]
    assert turn.invalid_action == "unknown tool 'reed_mains'; choose one of read_mains, turn_on_mains. " + (
        "Did you mean 'read_mains'?"
    )
    assert episode.outcome().metrics["invalid_calls"] == 1.0


def test_the_agent_cannot_use_the_users_tools() -> None:
    assert "unknown tool 'flip_switch'" in (start().act(use("flip_switch")).invalid_action or "")


def test_a_call_that_repeats_one_with_the_same_answer_and_no_change_is_counted() -> None:
    episode = start()

    def repeats() -> float:
        return episode.outcome().metrics["repeated_calls"]

    episode.act(use("read_mains"))  # notes that it was read, so the world changed
    assert repeats() == 0.0
    episode.act(use("read_mains"))
    episode.act(use("read_mains", "read_mains"))
    assert repeats() == 3.0
    episode.act(tell("may i turn the mains on?"))
    episode.act(use("turn_on_mains", "read_mains"))  # the answer is another one now
    assert repeats() == 3.0
    episode.act(tell("please turn the switch on"))
    episode.act(use("read_mains"))  # the same answer, but the user changed something: looking again is no waste
    assert repeats() == 3.0
    episode.act(use("turn_on_mains"))
    assert repeats() == 3.0  # the switch changed since the last time
    episode.act(use("turn_on_mains"))
    assert repeats() == 4.0


def test_refused_calls_repeat_too_and_other_arguments_are_another_call() -> None:
    episode = start(max_invalid=9)
    for arguments in ({}, {}, {"again": 1}, {"again": 1}):
        episode.act(use("nothing", **arguments))
    assert episode.outcome().metrics["repeated_calls"] == 2.0


def test_reasoning_never_reaches_the_user() -> None:
    heard: list[Message] = []

    class Listener(ScriptedUser):
        def act(self, incoming: Sequence[Message]) -> UserMove:
            heard.extend(incoming)
            return super().act(incoming)

    episode = start()
    episode.user = Listener(MockDomain().script(episode.task), seed="0")
    episode.act(ParsedAction(content="hello", reasoning="the user is a fool"))
    assert heard == [Message(role=Role.ASSISTANT, content="hello")]
    assert episode.transcript[1][1].reasoning == "the user is a fool"


def test_acting_after_the_end_is_refused() -> None:
    episode = start(max_steps=1)
    episode.act(tell("hello"))
    with pytest.raises(EnvError, match="the episode ended with max_steps; call reset"):
        episode.act(tell("hello"))


def test_a_user_that_never_yields_the_turn_is_an_infrastructure_failure() -> None:
    class Busy:
        def open(self) -> Message:
            return Message(role=Role.USER, content="hi")

        def act(self, incoming: Sequence[Message]) -> UserMove:
            return UserMove(message=Message(role=Role.USER, tool_calls=(ToolCall(name="look_at_lamp"),)))

        def metrics(self) -> dict[str, float]:
            return {}

        def close(self) -> None: ...

    episode = start()
    episode.user = Busy()
    with pytest.raises(InfrastructureError, match="more than 10 rounds of tool calls without a word"):
        episode.act(tell("hello"))


def test_budgets_below_one_are_refused() -> None:
    with pytest.raises(EnvError, match="budgets must be at least 1"):
        Budget(max_steps=0, max_invalid_actions=1)


def test_a_component_outside_the_unit_interval_is_refused() -> None:
    class Generous(MockDomain):
        def components(self, task: MockTask, world: World, *, handed_off: bool) -> Mapping[str, float | None]:
            return {"mains": 2.0}

    episode = start()
    episode.domain = Generous()
    with pytest.raises(EnvError, match=r"mock: component 'mains' is 2.0; it must lie in \[0, 1\]"):
        episode.outcome()


def test_the_transcript_holds_both_sides_calls() -> None:
    episode = start()
    episode.act(tell("please turn the switch on"))
    assert [(side, message.role) for side, message in episode.transcript] == [
        (Side.USER, Role.USER),
        (Side.AGENT, Role.ASSISTANT),
        (Side.USER, Role.USER),
        (Side.USER, Role.TOOL),
        (Side.USER, Role.USER),
    ]
