"""The scripted user: what it says, what it does with its phone, when it stops."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sinkflex.envs.tau2 import Tau2Env
from sinkflex.envs.tau2.device import outcome_check, understand
from sinkflex.envs.tau2.scenario import first_person, read_scenario
from sinkflex.envs.tau2.scripted import Tau2ScriptedUser
from sinkflex.types import Message, Role

pytestmark = pytest.mark.tau2


def a_task(**parts: str | None) -> Any:
    fields = {"reason_for_call": "", "known_info": None, "unknown_info": None, "task_instructions": "."}
    return SimpleNamespace(user_scenario=SimpleNamespace(instructions=SimpleNamespace(**{**fields, **parts})))


def user_of(*, has_phone: bool = False, **parts: str | None) -> Tau2ScriptedUser:
    return Tau2ScriptedUser(a_task(**parts), has_phone=has_phone, seed="1")


def agent(text: str) -> list[Message]:
    return [Message(role=Role.ASSISTANT, content=text)]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("You are Yusuf Rossi in zip code 19122.", "I am Yusuf Rossi in zip code 19122."),
        ("You name is Ivan Khan and your zip code is 28243.", "My name is Ivan Khan and my zip code is 28243."),
        ("You'd go for no backlight.", "I'd go for no backlight."),
        ("You want the agent to tell you the price.", "I want you to tell me the price."),
        ("If the agent says no, you are angry.", "If you say no, I am angry."),
        (
            "Your mobile data is not working. You want to fix it yourself.",
            "My mobile data is not working. I want to fix it myself.",
        ),
    ],
)
def test_instructions_are_said_in_the_first_person(told: str, said: str) -> None:
    assert first_person(told) == said


def test_a_scenario_keeps_directions_out_of_the_request() -> None:
    scenario = read_scenario(
        a_task(
            reason_for_call="You want to return the lamp. If the agent asks for confirmation, only return the mug.",
            known_info="You are Mei in zipcode 80217.",
            unknown_info="You do not remember your email.",
            task_instructions="You are in debt and sad. You prefer the gift card for refunds. Do not reveal your age.",
        )
    )
    assert scenario.request == "I want to return the lamp."
    assert scenario.on_confirmation == ("Only return the mug.",)
    assert scenario.identity == ("I am Mei in zipcode 80217.",)
    assert scenario.relevant("Which card should the refund go to?") == ("I prefer the gift card for refunds.",)
    assert scenario.relevant("What color?") == ()


def test_a_plain_text_scenario_is_the_request() -> None:
    task = SimpleNamespace(user_scenario=SimpleNamespace(instructions="You want to delete all your tasks."))
    assert read_scenario(task).request == "I want to delete all my tasks."


def test_facts_are_told_only_when_asked_for() -> None:
    user = user_of(
        reason_for_call="You want to cancel the order.",
        known_info="You are Mei Li in zipcode 80217.",
        unknown_info="You do not remember your email.",
    )
    assert user.open().content.endswith("I want to cancel the order.")
    assert user.act(agent("Let me look into it.")).message.content in ("Okay.", "Okay, thank you.", "Sure.")
    answer = user.act(agent("What is your email?"))
    assert answer.message.content == "I am Mei Li in zipcode 80217. I do not remember your email.".replace("your", "my")
    assert not answer.stops


def test_a_confirmation_is_answered_by_the_script_first_and_with_yes_after() -> None:
    user = user_of(reason_for_call="You want both. When the agent asks for confirmation, only take the lamp.")
    user.open()
    assert user.act(agent("Shall I proceed with both?")).message.content == "Only take the lamp."
    assert user.act(agent("Shall I proceed with the lamp?")).message.content.startswith("Yes")


def test_a_statement_ends_a_dialogue_without_phone_and_a_promise_does_not() -> None:
    user = user_of(reason_for_call="You want a refund.")
    user.open()
    assert not user.act(agent("I will check that.")).stops
    assert user.act(agent("The refund is on its way.")).stops


def test_patience_ends_with_repetition() -> None:
    user = user_of(has_phone=True, reason_for_call="Your phone has no service.")
    user.open()
    moves = [user.act(agent("Hello.")) for _ in range(4)]
    assert [move.stops for move in moves] == [False, False, False, True]


@pytest.mark.parametrize(
    ("said", "tools"),
    [
        ("Please toggle airplane mode.", ["toggle_airplane_mode"]),
        ("Could you turn off airplane mode and then restart your phone?", ["toggle_airplane_mode", "reboot_device"]),
        ("Please reseat the SIM card.", ["reseat_sim_card"]),
        ("Reset your APN settings, then reboot.", ["reset_apn_settings", "reboot_device"]),
        ("Please enable data roaming on your device.", ["toggle_roaming"]),
        ("Turn off data saver mode.", ["toggle_data_saver_mode"]),
        ("Turn Wi-Fi calling off please.", ["toggle_wifi_calling"]),
        ("Disconnect your VPN.", ["disconnect_vpn"]),
        ("What does your status bar show?", ["check_status_bar"]),
        ("Can you run a speed test?", ["run_speed_test"]),
        ("Is mobile data on?", ["check_network_status"]),
        ("Please make the payment.", ["make_payment"]),
        ("Do not toggle airplane mode.", []),
        ("Thank you for your patience.", []),
    ],
)
def test_instructions_are_understood_as_a_person_would(said: str, tools: list[str]) -> None:
    assert [intent.tool for intent in understand(said)] == tools


def test_arguments_are_read_from_the_words() -> None:
    (mode,) = understand("Please set the network mode preference to 4g_5g_preferred.")
    assert mode.arguments == {"mode": "4g_5g_preferred"}
    (only,) = understand("Change the network mode to 3G only.")
    assert only.arguments == {"mode": "3g_only"}
    sms, storage = understand("Please grant the sms and storage permissions to the messaging app.")
    assert sms.arguments == {"app_name": "messaging", "permission": "sms"}
    assert storage.arguments == {"app_name": "messaging", "permission": "storage"}
    (looked,) = understand("Which permissions does the messaging app have?")
    assert looked.tool == "check_app_permissions"


def test_a_user_without_a_phone_problem_checks_nothing() -> None:
    assert outcome_check(a_task(reason_for_call="You want a refund.")) is None


@pytest.fixture
def telecom(make_env: Callable[..., Tau2Env]) -> Tau2Env:
    return make_env("telecom")


def with_fault(env: Tau2Env, *faults: str) -> str:
    """Return a task with exactly these faults."""
    return next(
        task_id for task_id in env.domain.tasks if set(task_id.split("]")[1].split("[")[0].split("|")) == set(faults)
    )


def test_a_switch_is_looked_at_before_it_is_flipped(telecom: Tau2Env) -> None:
    telecom.reset(options={"task_id": with_fault(telecom, "airplane_mode_on")})
    phone = telecom.episode.environment.user_tools
    _, _, _, _, info = telecom.step("Please turn on airplane mode.")
    assert phone.device.airplane_mode
    assert "already on" in info["messages"][0].content
    _, reward, terminated, _, info = telecom.step("Please turn off airplane mode.")
    assert not phone.device.airplane_mode
    assert terminated, "its own check shows the signal, so it stops"
    assert "\U0001f4f6" in info["messages"][0].content
    assert reward == 1.0


def test_the_user_does_not_stop_before_its_own_check_shows_the_fix(telecom: Tau2Env) -> None:
    telecom.reset(options={"task_id": with_fault(telecom, "data_mode_off", "data_saver_mode_on"), "group_seed": 0})
    _, _, terminated, _, info = telecom.step("It is fixed now. Anything else?")
    assert not terminated
    assert "Speed test failed" in info["messages"][0].content
    _, _, terminated, _, info = telecom.step("Please turn on mobile data.")
    assert not terminated
    assert "(Excellent)" not in info["messages"][0].content
    _, reward, terminated, _, _ = telecom.step("Please turn off data saver mode.")
    assert terminated
    assert reward == 1.0


def test_status_is_told_from_the_tools_reply(telecom: Tau2Env) -> None:
    telecom.reset(options={"task_id": with_fault(telecom, "airplane_mode_on")})
    _, _, _, _, info = telecom.step("What does your status bar show?")
    assert "Airplane Mode" in info["messages"][0].content


def test_openings_never_hold_a_gold_argument_the_scenario_does_not(make_env: Callable[..., Tau2Env]) -> None:
    for domain in ("retail", "airline"):
        env = make_env(domain)
        for task_id in env.task_ids("base"):
            task = env.domain.task(task_id)
            told = str(task.user_scenario).lower()
            opening = env.reset(options={"task_id": task_id})[1]["messages"][-1].content.lower()
            for action in task.evaluation_criteria.actions or []:
                for value in action.arguments.values():
                    if isinstance(value, str) and any(char.isdigit() for char in value):
                        assert value.lower() not in opening or value.lower() in told
