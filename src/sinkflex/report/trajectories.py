"""Reading a dialogue in the terminal: who said what, which tools were called, and how it was scored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from sinkflex.errors import ConfigError

_SPEAKERS = {"system": "bright_black", "user": "green", "assistant": "cyan", "tool": "yellow"}
_WRAPPED_JSON = 600


def trajectory_files(folder: Path) -> list[Path]:
    """Return a run's trajectory files, oldest first: those of train steps, then those of validations.

    Raises:
        ConfigError: the run wrote none.
    """
    files = sorted((folder / "trajectories").glob("*.jsonl"))
    if not files:
        raise ConfigError(f"{str(folder)!r} has no trajectories; train with logging.trajectories_every above 0")
    return files


def read_trajectory(folder: Path, number: int, *, name: str | None = None) -> tuple[dict[str, Any], str]:
    """Return one recorded episode and a line that says which it is.

    Args:
        folder: the run folder.
        number: which episode of the file, from 1.
        name: the file, for example ``"step_000010"``; None takes the last train step's.

    Raises:
        ConfigError: there is no such file or number; the message says what there is.
    """
    files = trajectory_files(folder)
    if name is None:
        steps = [path for path in files if path.stem.startswith("step_")]
        path = (steps or files)[-1]
    else:
        path = folder / "trajectories" / f"{name}.jsonl"
        if path not in files:
            raise ConfigError(f"no trajectory file {name!r}; there are {', '.join(file.stem for file in files)}")
    lines = path.read_text(encoding="utf-8").splitlines()
    if not 1 <= number <= len(lines):
        raise ConfigError(f"{path.name} has trajectories 1 to {len(lines)}, but number {number} was asked for")
    return json.loads(lines[number - 1]), f"{path.name}, trajectory {number} of {len(lines)}"


def render_trajectory(record: Mapping[str, Any], title: str, *, tokens: bool = False) -> RenderableType:
    """Lay an episode out for a terminal.

    Args:
        record: one line of a trajectory file.
        title: which episode this is.
        tokens: show the exact text of every segment, special tokens included and the policy's own tokens underlined,
            instead of the dialogue.
    """
    body = _token_lines(record) if tokens else _dialogue_lines(record)
    return Group(*_head_lines(record, title), Text(""), *body, Text(""), *_verdict_lines(record))


def _head_lines(record: Mapping[str, Any], title: str) -> list[Text]:
    return [
        Text(title, style="bold"),
        Text(
            f"task {record['task_id']} ({record['split']}, {record['tier']})   group {record['group_id']}   "
            f"temperature {record['temperature']:g}",
            style="dim",
        ),
    ]


def _dialogue_lines(record: Mapping[str, Any]) -> list[Text]:
    lines = []
    for message in record["messages"]:
        role = message["role"]
        speaker = f"{message['name']}" if role == "tool" and message.get("name") else role
        style = _SPEAKERS.get(role, "white")
        if message.get("reasoning"):
            lines.append(_speech("(thinks)", message["reasoning"], "bright_black"))
        if message.get("content"):
            lines.append(_speech(speaker, _shortened(message["content"]), style))
        for call in message.get("tool_calls", ()):
            arguments = ", ".join(f"{key}={json.dumps(value)}" for key, value in call["arguments"].items())
            lines.append(_speech(f"{role} calls", f"{call['name']}({arguments})", style))
    return lines


def _token_lines(record: Mapping[str, Any]) -> list[Text]:
    return [
        _speech(
            f"{segment['kind']} {segment['turn']}",
            segment["text"],
            "cyan underline" if segment["kind"] == "sampled" else "bright_black",
        )
        for segment in record.get("text", ())
    ]


def _verdict_lines(record: Mapping[str, Any]) -> list[Text]:
    parts = ", ".join(f"{name} {_figure(value)}" for name, value in record["components"].items())
    good = record["score"] >= 1.0
    return [
        Text.assemble(
            (f"score {record['score']:g}", "bold green" if good else "bold red"),
            f"   reward {record['reward']:g}   ended by {record['stop_reason']}   {record['turns']} agent turns, "
            f"{record['invalid_actions']} invalid",
        ),
        *([Text(f"components: {parts}", style="dim")] if parts else []),
    ]


def _speech(speaker: str, text: str, style: str) -> Text:
    return Text.assemble((f"{speaker:>18}  ", "dim"), (text.replace("\n", "\n" + " " * 20), style))


def _shortened(text: str) -> str:
    return text if len(text) <= _WRAPPED_JSON else f"{text[:_WRAPPED_JSON]} ... ({len(text):,} characters)"


def _figure(value: float | None) -> str:
    return "does not apply" if value is None else f"{value:g}"
