"""Gymnasium wrappers that make sense for text; they need only the info contract, so they fit every SinkFlex id."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.utils import RecordConstructorArgs

from sinkflex.errors import EnvError
from sinkflex.types import JSONObject, StopReason


class EpisodeTimeout(gymnasium.Wrapper[str, str, str, str], RecordConstructorArgs):
    """Truncates an episode once a wall-clock limit has passed, with score 0 and ``stop_reason`` ``episode_timeout``.

    The clock is read between steps: a step that hangs is the caller's to interrupt. For a limit in steps, pass
    ``max_steps`` to ``gymnasium.make``; Gymnasium's own ``TimeLimit`` knows nothing of scores.

    Args:
        env: the environment.
        timeout_s: seconds from ``reset``.

    Raises:
        EnvError: the limit is not positive.
    """

    def __init__(self, env: gymnasium.Env[str, str], *, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise EnvError(f"timeout_s must be positive, got {timeout_s}")
        RecordConstructorArgs.__init__(self, timeout_s=timeout_s)
        gymnasium.Wrapper.__init__(self, env)
        self._timeout_s = timeout_s
        self._deadline = float("inf")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode and the clock."""
        started = super().reset(seed=seed, options=options)
        self._deadline = time.monotonic() + self._timeout_s
        return started

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Step; past the deadline an episode that goes on is truncated."""
        observation, reward, terminated, truncated, info = super().step(action)
        if not (terminated or truncated) and time.monotonic() > self._deadline:
            truncated = True
            info |= {
                "stop_reason": str(StopReason.EPISODE_TIMEOUT),
                "score": 0.0,
                "components": {"ended": 0.0},
                "metrics": self._metrics(),
            }
        return observation, float(reward), terminated, truncated, info

    def _metrics(self) -> dict[str, float]:
        """What the environment counted so far; an environment without such counts has none."""
        count = getattr(self.unwrapped, "metrics", None)
        return {} if count is None else dict(count())


class RecordTrajectories(gymnasium.Wrapper[str, str, str, str], RecordConstructorArgs):
    """Appends every episode that ends to a JSON-lines file.

    A line holds ``task_id``, ``split``, ``tier``, ``system``, ``opening`` (messages), ``steps`` (each the raw action
    and the messages that followed), ``score``, ``components``, ``metrics`` and ``stop_reason``.

    Args:
        env: the environment.
        path: the file; its folder must exist.

    Raises:
        EnvError: the folder does not exist.
    """

    def __init__(self, env: gymnasium.Env[str, str], *, path: str | Path) -> None:
        self._path = Path(path)
        if not self._path.parent.is_dir():
            raise EnvError(f"cannot record to {self._path}: its folder does not exist")
        RecordConstructorArgs.__init__(self, path=str(path))
        gymnasium.Wrapper.__init__(self, env)
        self._record: JSONObject = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode and its record; an episode cut short by ``reset`` leaves none."""
        observation, info = super().reset(seed=seed, options=options)
        self._record = {
            **{name: info[name] for name in ("task_id", "split", "tier", "system")},
            "opening": [message.to_dict() for message in info["messages"]],
            "steps": [],
        }
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Step and record; the episode's last step writes the line."""
        observation, reward, terminated, truncated, info = super().step(action)
        messages = [message.to_dict() for message in info["messages"]]
        self._record["steps"].append({"action": action, "messages": messages})
        if terminated or truncated:
            self._record |= {name: info[name] for name in ("score", "components", "metrics", "stop_reason")}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self._record, ensure_ascii=False) + "\n")
        return observation, float(reward), terminated, truncated, info
