"""Recorded answers of an endpoint, so that a run repeats offline."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

from sinkflex.errors import EnvError, InfrastructureError
from sinkflex.types import JSONObject, JSONValue

MODES = ("record", "replay")
"""``record`` reuses what is on file and adds what is not; ``replay`` never asks the endpoint."""


class Cassette:
    """A JSON-lines file of answers, keyed by everything that was asked, the seed included.

    Equal requests get equal answers for as long as the file lives; of two recorded at once the first on file stays.
    Safe to share between threads of one process.

    Args:
        path: the file; it is created on the first answer in mode ``record``.
        mode: one of ``MODES``.

    Raises:
        EnvError: unknown mode, a file to replay that does not exist, or a damaged line.
    """

    def __init__(self, path: str | Path, *, mode: str) -> None:
        if mode not in MODES:
            raise EnvError(f"cache_mode must be one of {', '.join(MODES)}, got {mode!r}")
        self._path = Path(path)
        self._replay = mode == "replay"
        self._lock = threading.Lock()
        self._answers: dict[str, JSONObject] = {}
        if self._path.exists():
            self._load()
        elif self._replay:
            raise EnvError(f"cache {self._path} does not exist; record one first with cache_mode='record'")

    def find(self, request: JSONValue) -> JSONObject | None:
        """Return the answer on file, or None.

        Raises:
            InfrastructureError: none is on file and the mode is ``replay``.
        """
        answer = self._answers.get(_key(request))
        if answer is None and self._replay:
            raise InfrastructureError(
                f"cache {self._path} holds no answer to this request; the run differs from the recorded one "
                "(another task, seed, prompt or policy): record it with cache_mode='record'"
            )
        return answer

    def keep(self, request: JSONValue, answer: JSONObject) -> JSONObject:
        """Put an answer on file and return the one that counts.

        Raises:
            OSError: the file cannot be written.
        """
        key = _key(request)
        with self._lock:
            if key not in self._answers:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "answer": answer}, ensure_ascii=False) + "\n")
                self._answers[key] = answer
            return self._answers[key]

    def _load(self) -> None:
        lines = self._path.read_text(encoding="utf-8").split("\n")
        complete = lines.pop() == ""
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                self._answers.setdefault(record["key"], record["answer"])
            except (ValueError, KeyError, TypeError) as error:
                raise EnvError(f"cache {self._path} is damaged in line {number}: {error}; remove that line") from error
        if not complete and not self._replay:
            # A process that died while writing leaves half a line; the next answer must not be glued to it.
            self._path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _key(request: JSONValue) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
