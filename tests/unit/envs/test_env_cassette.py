"""The file of recorded answers that lets a run with an LLM user repeat offline."""

from __future__ import annotations

from pathlib import Path

import pytest

from sinkflex.envs.users.cassette import Cassette
from sinkflex.errors import EnvError


def test_a_half_written_line_is_dropped_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    tape = Cassette(path, mode="record")
    first = tape.keep({"q": 1}, {"role": "user", "content": "a"})
    assert tape.keep({"q": 1}, {"role": "user", "content": "b"}) == first
    with path.open("a") as file:
        file.write('{"key": "x", "ans')
    again = Cassette(path, mode="record")
    again.keep({"q": 2}, {"role": "user", "content": "c"})
    assert Cassette(path, mode="replay").find({"q": 2}) == {"role": "user", "content": "c"}
    assert len(path.read_text().splitlines()) == 2
    path.write_text("nonsense\n" + path.read_text())
    with pytest.raises(EnvError, match=r"is damaged in line 1: .*; remove that line"):
        Cassette(path, mode="replay")
