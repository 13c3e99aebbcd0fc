from __future__ import annotations

from collections.abc import Callable

import gymnasium
import pytest
from typer.testing import CliRunner

from sinkflex.cli.env import app, measure_snapshot, measure_steps
from sinkflex.cli.play import Player, tool_completion
from sinkflex.envs.users.person import read_line
from sinkflex.errors import EnvError, ToolError
from sinkflex.types import ToolCall, ToolSchema


def run(*arguments: str, typed: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), input=typed, env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_list_shows_every_id() -> None:
    code, text = run("list")
    assert code == 0
    for name in ("sinkflex/Mock-v0", "sinkflex/Retail-v0", "sinkflex/Telecom-v0", "sinkflex/Tau2-Retail-v0"):
        assert name in text
    assert "6000/1200" in text


def test_check_passes_and_fails() -> None:
    code, text = run("check", "sinkflex/Mock-v0", "--tasks", "3", "--fuzz", "20")
    assert code == 0
    assert text.endswith("sound\n")

    class Broken(gymnasium.Env):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.split = "train"

        def task_ids(self, split: str) -> tuple[str, ...]:
            return ("t",)

    gymnasium.register("sinkflex/BrokenForTheTest-v0", entry_point=Broken)
    try:
        code, text = run("check", "sinkflex/BrokenForTheTest-v0")
    finally:
        del gymnasium.registry["sinkflex/BrokenForTheTest-v0"]
    assert code == 1
    assert "FAIL reset_info" in text
    assert "the environment raised" in text


def test_an_unknown_id_names_the_nearest() -> None:
    with pytest.raises(EnvError, match=r"unknown environment 'sinkflex/Mok-v0'.*Did you mean 'sinkflex/Mock-v0'"):
        run("check", "sinkflex/Mok-v0")
    with pytest.raises(EnvError, match=r"unknown side 'agnt'.*Did you mean 'agent'"):
        run("play", "sinkflex/Mock-v0", "--as", "agnt")


def test_a_person_plays_the_agent() -> None:
    typed = "\n".join(
        [
            "",
            "/help",
            "/hint",
            "/raed_mains",
            "/read_mains x",
            '/read_mains "x',
            "/read_mains",
            "may i turn the mains on?",
            "/turn_on_mains",
            "please turn the switch on",
            "look at the lamp",
        ]
    )
    code, text = run("play", "sinkflex/Mock-v0", "--task", "mock-both", "--seed", "1", typed=typed)
    assert code == 0
    assert "assistant calls read_mains()" in text
    assert "Did you mean 'read_mains'?" in text
    assert "'x' is no argument; write name=value" in text
    assert "cannot read" in text
    assert 'tool read_mains: {"mains":false}' in text
    assert text.endswith("user_stop: score 1 (mains=1 seen=1 policy=1 ended=1)\n")


def test_a_broken_rule_is_explained_and_leaving_gives_no_score() -> None:
    typed = "/turn_on_mains\nplease turn the switch on\nlook at the lamp\n"
    _, text = run("play", "sinkflex/Mock-v0", "--task", "mock-both", typed=typed)
    assert text.endswith("broken rule: Ask before you turn the mains on.\n")
    assert "score 0" in text
    for typed in ("/quit\n", ""):
        assert run("play", "sinkflex/Mock-v0", typed=typed)[1].endswith("left; no score\n")


def test_a_person_plays_the_user_against_the_oracle() -> None:
    lines = iter(["it is dark", "yes", "/flip_switch", "done", "/look_at_lmp", "/look_at_lamp", "it shines /stop"])
    shown: list[str] = []
    env = gymnasium.make(
        "sinkflex/Mock-v0", user="person", user_options={"ask": lambda prompt: next(lines), "show": shown.append}
    )
    score = Player(env, show=shown.append).play_user(seed=0, options={"task_id": "mock-both"})
    assert score == 1.0
    assert shown[0].startswith("You are the user.\nYour lamp is dark.")
    assert "agent: may i turn the mains on?" in shown
    assert 'tool flip_switch: {"switch":true}' in shown
    assert any("Did you mean 'look_at_lamp'" in text for text in shown)


def test_the_command_plays_the_user_too() -> None:
    code, text = run("play", "sinkflex/Mock-v0", "--as", "user", "--task", "mock-both", typed="dark\n")
    assert code == 0
    assert "user_stop: score 0" in text


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("  hello there ", "hello there"),
        ("/buy", ToolCall(name="buy")),
        (
            '/buy name="two words" count=2 id=0042',
            ToolCall(name="buy", arguments={"name": "two words", "count": 2, "id": "0042"}),
        ),
        ("/buy count=many tags=[1]", ToolCall(name="buy", arguments={"count": "many", "tags": [1]})),
    ],
)
def test_lines_are_read_by_the_tools_types(line: str, read: ToolCall | str) -> None:
    kinds = {"name": "string", "id": "string", "count": "integer", "tags": "array"}
    schema = {"type": "object", "properties": {name: {"type": kind} for name, kind in kinds.items()}}
    assert read_line(line, [ToolSchema(name="buy", description="", parameters=schema)]) == read
    with pytest.raises(ToolError, match="unknown tool 'by'; choose one of buy"):
        read_line("/by", [ToolSchema(name="buy", description="", parameters=schema)])


def test_tools_complete_after_a_slash() -> None:
    readline = pytest.importorskip("readline")
    before = readline.get_completer()
    with tool_completion(["get_line", "get_plan", "pay"]):
        complete: Callable[[str, int], str | None] = readline.get_completer()
        assert [complete("/get", state) for state in range(3)] == ["/get_line ", "/get_plan ", None]
    assert readline.get_completer() is before


def test_bench_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, seconds = measure_steps("sinkflex/Mock-v0", 4)
    assert 3 * 4 <= steps <= 5 * 4
    assert seconds > 0
    assert 0 < measure_snapshot() < 50e-6
    code, text = run("bench", "sinkflex/Mock-v0", "--episodes", "4")
    assert code == 0
    assert "snapshot, one write and restore at 1,000 records" in text
