"""An environment played outside the rollout: demonstrations and floors, where a failure must still name its task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sinkflex.errors import EnvError, SinkFlexError
from sinkflex.rollout.deadline import call_with_deadline


class TimedEnv:
    """Calls of one environment under a deadline, with errors that say which task it was.

    Args:
        env: the environment.
        task_id: the task being played.
        step_timeout_s: seconds a reset or a step may take.
    """

    def __init__(self, env: Any, *, task_id: str, step_timeout_s: float) -> None:
        self._env = env
        self._task_id = task_id
        self._timeout_s = step_timeout_s

    def reset(self, *, options: dict[str, Any]) -> Any:
        """``env.reset``."""
        return self._call(lambda: self._env.reset(options=options), "env.reset")

    def step(self, action: str) -> Any:
        """``env.step``."""
        return self._call(lambda: self._env.step(action), "env.step")

    def _call(self, call: Callable[[], Any], what: str) -> Any:
        try:
            return call_with_deadline(call, timeout_s=self._timeout_s, what=f"task {self._task_id!r}: {what}")
        except SinkFlexError:
            raise
        except Exception as error:
            raise EnvError(f"task {self._task_id!r}: {what} raised {type(error).__name__}: {error}") from error
