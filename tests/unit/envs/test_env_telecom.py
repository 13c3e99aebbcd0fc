from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest

from sinkflex.envs.domains.entities import entity_ids, split_of
from sinkflex.envs.domains.telecom import TelecomDomain
from sinkflex.envs.domains.telecom.state import TOP_UP_GB
from sinkflex.envs.domains.telecom.tasks import (
    AGENT_FAULTS,
    TIERS,
    USER_FAULTS,
    Case,
    TelecomTask,
    build_task,
    combinations,
    task_ids,
)
from sinkflex.envs.tools import Side
from sinkflex.envs.users.scripted import Persona, ScriptedUser
from sinkflex.errors import TaskError
from sinkflex.types import JSONObject, Message, Role, ToolCall

Play = Callable[..., tuple[float, int, dict[str, Any]]]


@pytest.fixture
def env() -> Iterator[gymnasium.Env[str, str]]:
    made = gymnasium.make("sinkflex/Telecom-v0")
    yield made
    made.close()


def one_case(*faults: str, **changes: Any) -> TelecomTask:
    case = Case(line_id="4783", faults=faults, plan="basic", gb=3, wants_plan=None, wants_gb=5, symptom="signal")
    fields: dict[str, Any] = {
        "task_id": "made-up",
        "split": "train",
        "tier": "easy",
        "dual": True,
        "customer_id": "3391",
        "pin": "2951",
        "wrong_pin": None,
        "cases": (case,),
        "spare_lines": (),
        "persona": Persona(patience=20),
    }
    return TelecomTask(**{**fields, **changes})


def test_ids_are_four_digits_and_splits_share_none_but_all_their_halves() -> None:
    train, test = entity_ids("train"), entity_ids("test")
    assert not set(train) & set(test)
    assert len(train) + len(test) == 9000
    assert 0.2 < len(test) / 9000 < 0.3
    for part in (slice(0, 2), slice(2, 4)):
        assert {name[part] for name in train} == {name[part] for name in test}


@pytest.mark.parametrize("tier", TIERS)
def test_tasks_are_distinct_and_splits_share_neither_ids_nor_fault_combinations(tier: str) -> None:
    tasks = {split: [build_task(task_id) for task_id in task_ids(split, tier)] for split in ("train", "test")}
    for split, least in (("train", 500), ("test", 200)):
        contents = {(task.customer_id, task.pin, task.cases) for task in tasks[split]}
        assert len(contents) == len(tasks[split]) >= least
        for task in tasks[split]:
            ids = (task.customer_id, task.pin, *task.spare_lines, *(case.line_id for case in task.cases))
            assert {split_of(name) for name in ids} == {split}
        assert sum(task.hand_off for task in tasks[split]) <= 0.05 * len(tasks[split])
        assert sum(task.dual for task in tasks[split]) > (0.3 if tier == "easy" else 0.9) * len(tasks[split])
    used = {split: {case.faults for task in tasks[split] for case in task.cases} for split in tasks}
    assert not used["train"] & used["test"]
    seen = {fault for faults in used["train"] for fault in faults}
    assert {fault for faults in used["test"] for fault in faults} <= seen
    assert not set(combinations("train", tier)) & set(combinations("test", tier))


@pytest.mark.parametrize("tier", TIERS)
def test_the_oracle_solves_tasks_of_every_tier(env: gymnasium.Env[str, str], play_oracle: Play, tier: str) -> None:
    for split in ("train", "test"):
        for task_id in task_ids(split, tier)[::4]:
            score, steps, info = play_oracle(env, task_id)
            assert score == 1.0, (task_id, info)
            assert info["metrics"]["policy_breaches"] == 0
            assert info["metrics"]["invalid_calls"] == info["metrics"]["tool_errors"] == 0
            if tier == "long":
                assert steps >= 20
            elif tier == "easy":
                assert steps <= 9


def test_an_easy_dialogue_fits_a_tiny_policy(env: gymnasium.Env[str, str], play_oracle: Play) -> None:
    words: set[str] = set()
    for task_id in task_ids("train", "easy")[:150]:
        play_oracle(env, task_id, group_seed=1)
        spoken = [message.content for side, message in env.unwrapped.episode.transcript if message.role is Role.USER]
        words |= {word for text in spoken for word in text.replace(",", " ").split() if not word.isdigit()}
        assert max(len(text.replace(",", " ").split()) for text in spoken) <= 14
    assert len(words) < 120


def test_a_confirmed_top_up_is_what_the_user_asked_for_and_anything_else_scores_zero(
    env: gymnasium.Env[str, str], play_oracle: Play
) -> None:
    task_id = next(i for i in task_ids("train", "easy") if build_task(i).cases[0].faults == ("no_data",))
    case = build_task(task_id).cases[0]
    steps = ("ask", "verify", "get", "charge", "add", "status", "test")
    other = next(gb for gb in TOP_UP_GB if gb != case.wants_gb)
    for gb, at, wanted in ((case.wants_gb, "add", 1.0), (other, "add", 0.0), (case.wants_gb, "charge", 0.0)):
        action = json.dumps({"name": "add_data", "arguments": {"line_id": case.line_id, "gb": gb}})
        score, _, info = play_oracle(env, task_id, override={steps.index(at): action})
        assert score == wanted
        assert info["breaches"] == (() if wanted else ("unconfirmed_charge",))


def test_a_write_before_the_pin_check_scores_zero(env: gymnasium.Env[str, str], play_oracle: Play) -> None:
    task_id = next(i for i in task_ids("train", "easy") if build_task(i).cases[0].faults == ("suspended",))
    line = build_task(task_id).cases[0].line_id
    action = json.dumps({"name": "resume_line", "arguments": {"line_id": line}})
    score, _, info = play_oracle(env, task_id, override={1: action})
    assert (score, info["breaches"]) == (0.0, ("unverified_write",))


def test_changing_the_other_line_scores_zero(env: gymnasium.Env[str, str], play_oracle: Play) -> None:
    task_id = next(i for i in task_ids("train", "medium") if not build_task(i).hand_off)
    spare = build_task(task_id).spare_lines[0]
    action = json.dumps({"name": "enable_roaming", "arguments": {"line_id": spare}})
    score, _, info = play_oracle(env, task_id, override={4: action})
    assert score == 0.0
    assert info["components"]["lines"] == 0.0


def test_floors(env: gymnasium.Env[str, str], play_oracle: Play) -> None:
    hand_off = json.dumps({"name": "transfer_to_human", "arguments": {"reason": "fraud"}})
    for tier in TIERS:
        for task_id in task_ids("test", tier)[:50]:
            for action in ("bye", hand_off):
                assert play_oracle(env, task_id, override=dict.fromkeys(range(60), action))[0] == 0.0


def test_hand_off_on_a_fixable_task_scores_zero(env: gymnasium.Env[str, str], play_oracle: Play) -> None:
    hand_off = json.dumps({"name": "transfer_to_human", "arguments": {"reason": "fraud"}})
    task_id = task_ids("train", "easy")[0]
    score, _, info = play_oracle(env, task_id, override={3: hand_off})
    assert (score, info["stop_reason"], info["components"]["hand_off"]) == (0.0, "hand_off", 0.0)


def test_after_slips_that_do_not_doom_it_the_oracle_recovers(env: gymnasium.Env[str, str], play_oracle: Play) -> None:
    task_id = next(i for i in task_ids("train", "easy") if build_task(i).cases[0].faults[:1] == ("suspended",))
    line = build_task(task_id).cases[0].line_id
    harmless = {
        0: "please check your phone status",
        2: json.dumps({"name": "get_line", "arguments": {"line_id": "0000"}}),
        4: json.dumps({"name": "verify_pin", "arguments": {"line_id": line, "pin": line}}),
        5: "turn airplane mode on",
        7: "please run a speed test",
    }
    assert play_oracle(env, task_id, override=harmless)[0] == 1.0


def test_slips_differ_from_the_oracle_and_are_few(env: gymnasium.Env[str, str], to_text: Callable[..., str]) -> None:
    for task_id in task_ids("train", "medium")[:60]:
        env.reset(options={"task_id": task_id, "group_seed": 0})
        done = False
        while not done:
            best, slips = env.unwrapped.oracle_message(), env.unwrapped.slip_messages()
            assert best not in slips
            assert 1 <= len(slips) <= 4
            _, _, terminated, truncated, _ = env.step(to_text(best))
            done = terminated or truncated


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("Could you please switch off Airplane Mode?", [("toggle_airplane_mode", {"on": False})]),
        ("Go to settings and disable flight mode.", [("check_status", {}), ("toggle_airplane_mode", {"on": False})]),
        ("Please enable mobile data on your phone.", [("toggle_data", {"on": True})]),
        ("Turn roaming on, then run a speed test.", [("toggle_roaming", {"on": True}), ("run_speed_test", {})]),
        ("I have enabled roaming on our side.", []),
        ("Please remove the SIM card, then put it back in.", [("reseat_sim", {})]),
        ("Restart the phone please.", [("reboot", {})]),
        ("Please pay the outstanding bill.", [("pay_bill", {})]),
        ("Is airplane mode on?", [("check_status", {})]),
        ("What do you see on the status screen?", [("check_status", {})]),
        ("Does it work now?", [("run_speed_test", {})]),
        ("Do not turn airplane mode on.", []),
        ("Please disable the VPN!", [("toggle_vpn", {"on": False})]),
    ],
)
def test_the_user_understands_agents_by_intent(text: str, calls: list[tuple[str, dict[str, bool]]]) -> None:
    task = one_case("suspended", "airplane")
    domain = TelecomDomain()
    world = domain.build_world(task)
    user = ScriptedUser(domain.script(task), seed="0")
    move = user.act([Message(role=Role.ASSISTANT, content=text)])
    made: list[tuple[str, dict[str, Any]]] = []
    while move.message.tool_calls:
        made += [(call.name, dict(call.arguments)) for call in move.message.tool_calls]
        reply = domain.user_tools.call(world, move.message.tool_calls[0])
        move = user.act([Message(role=Role.TOOL, name=made[-1][0], content=reply.text)])
    assert made == calls


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("May I have your line number and PIN?", "line 4783"),
        ("Which line is it?", "line 4783"),
        ("That costs a fee. Shall I add data?", "5 gb"),
        ("Do you want to change your plan?", "5 gb"),
        ("All done, anything else?", "test"),
    ],
)
def test_the_user_answers_questions(text: str, answer: str) -> None:
    user = ScriptedUser(TelecomDomain().script(one_case("no_data")), seed="0")
    assert answer in user.act([Message(role=Role.ASSISTANT, content=text)]).message.content


def test_a_user_without_a_data_problem_refuses_a_top_up() -> None:
    user = ScriptedUser(TelecomDomain().script(one_case("airplane")), seed="0")
    text = user.act([Message(role=Role.ASSISTANT, content="add data for a fee?")]).message.content
    assert text.startswith("no,")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("turn airplane mode off", "it says airplane mode is already off"),
        ("please reboot your phone", "done, but nothing changed"),
        ("take the sim out and put it back", "done, but nothing changed"),
        ("please pay your bill", "it says no open bill"),
    ],
)
def test_needless_instructions_cost_patience(text: str, answer: str) -> None:
    task = one_case("suspended", persona=Persona(patience=1))
    domain = TelecomDomain()
    world = domain.build_world(task)
    user = ScriptedUser(domain.script(task), seed="0")
    said = []
    for _ in range(2):
        move = user.act([Message(role=Role.ASSISTANT, content=text)])
        reply = domain.user_tools.call(world, move.message.tool_calls[0])
        move = user.act([Message(role=Role.TOOL, content=reply.text)])
        said.append((move.message.content, move.stops))
    assert said[0] == (answer, False)
    assert said[1][1]


@pytest.mark.parametrize("fault", [*AGENT_FAULTS, *USER_FAULTS])
def test_every_fault_alone_breaks_the_connection(fault: str) -> None:
    task = one_case(fault)
    world = TelecomDomain().build_world(task)
    result = TelecomDomain().user_tools.call(world, ToolCall(name="run_speed_test")).result
    assert result == {"speed": "slow" if fault == "vpn" else "none"}


@pytest.mark.parametrize(
    ("question", "answer", "consent"),
    [
        ("Shall I add 2 GB for 10 euros?", "Sure, go ahead.", {"gb": 2}),
        ("Shall I add 2 GB for 10 euros?", "No problem, yes.", {"gb": 2}),
        ("Shall I move you to plan max with 20 GB?", "Yes, please.", {"plan": "max"}),
        ("Shall I add 5 GB?", "I take 2 GB, thanks.", {"gb": 2}),
        ("Add data for a fee?", "no, but plan plus please", {"plan": "plus"}),
        ("Add data for a fee?", "i take plan plus, yes", {"plan": "plus"}),
        ("Shall I add 5 GB?", "No. Please add 2 GB.", {"gb": 2}),
        ("Add data for a fee?", "Yes please.", {}),  # to what?
        ("Shall I add 2 GB?", "No, please do not add 2 GB.", {}),
        ("Shall I add 2 GB?", "Please don't add 2 GB.", {}),
        ("Shall I add 2 GB?", "Please don’t.", {}),
        ("Shall I add 2 GB?", "I am not sure.", {}),
        ("Shall I add 2 GB?", "I would rather cancel, ok?", {}),
        ("Shall I add 2 GB?", "I do not want 5 GB. Ok?", {}),
        ("Shall I add 2 GB?", "Ok, but not 5 GB.", {}),  # refuses something: the agent has to ask again
    ],
)
def test_consent_is_read_from_free_speech_and_never_from_a_refusal(
    question: str, answer: str, consent: JSONObject
) -> None:
    domain, task = TelecomDomain(), one_case("no_data")
    world = domain.build_world(task)
    domain.observe(task, world, speaker=Side.AGENT, text=question)
    domain.observe(task, world, speaker=Side.USER, text=answer)
    assert world.get("session", "facts")["consent"] == consent


def test_consent_stands_until_another_is_given() -> None:
    domain, task = TelecomDomain(), one_case("no_data")
    world = domain.build_world(task)
    domain.observe(task, world, speaker=Side.USER, text="Yes, add 2 GB.")
    domain.observe(task, world, speaker=Side.USER, text="My phone is on.")
    assert world.get("session", "facts")["consent"] == {"gb": 2}
    domain.observe(task, world, speaker=Side.USER, text="Yes, plan max.")
    assert world.get("session", "facts")["consent"] == {"plan": "max"}


def test_prompts() -> None:
    domain = TelecomDomain()
    assert len(domain.system_prompt("brief").split()) <= 40
    assert "transfer_to_human" in domain.system_prompt("full")
    prompt = domain.user_prompt(one_case("no_data"))
    assert "2951" in prompt
    assert "add 5 gb" in prompt


def test_unknown_ids_are_refused_with_an_example() -> None:
    for bad in ("telecom-easy-train-2000", "telecom-easy-train-1", "x", "telecom-hard-train-0001"):
        with pytest.raises(TaskError, match=r"unknown telecom task .*telecom-easy-train-0000"):
            build_task(bad)
