"""Held-out evaluation: mean@1, mean@k, pass^k with intervals, and the floors beside them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sinkflex.algo.evaluation import Estimate, mean_at_k, pass_hat_k
from sinkflex.errors import RolloutError
from sinkflex.rollout.collector import GroupSpec
from sinkflex.rollout.trajectory import EpisodeFailure, Trajectory
from sinkflex.train.demonstrations import plain_action
from sinkflex.train.sampling import Collect
from sinkflex.train.tasks import derive_seed
from sinkflex.train.timed_env import TimedEnv
from sinkflex.types import Message, Role, ToolCall, ToolSchema

_MAX_FLOOR_ACTIONS = 400
HAND_OFF_PREFIX = "transfer_to_human"
"""How hand-off tools are named, here and in tau2-bench."""


@dataclass(frozen=True, kw_only=True)
class ValidationResult:
    """Scores on held-out tasks.

    Attributes:
        mean_at_1: the first trial of each task, with its 95 % interval and n.
        mean_at_k: all trials; equal to ``mean_at_1`` when there is one.
        pass_hat_k: k to pass^k.
        trajectories: what was played.
        failures: episodes that infrastructure lost; their tasks are left out of the scores.
        seconds: wall time.
    """

    mean_at_1: Estimate
    mean_at_k: Estimate
    pass_hat_k: dict[int, float]
    trajectories: tuple[Trajectory, ...]
    failures: tuple[EpisodeFailure, ...]
    seconds: float

    def metrics(self, source: str) -> dict[str, float]:
        """Figures under verl's ``val-core`` names, for the environment called ``source``."""
        prefix = f"val-core/{source}/reward"
        figures = {
            f"{prefix}/mean@1": self.mean_at_1.value,
            f"{prefix}/mean@1/low": self.mean_at_1.low,
            f"{prefix}/mean@1/high": self.mean_at_1.high,
            f"{prefix}/mean@1/n": float(self.mean_at_1.tasks),
            "timing_s/validation": self.seconds,
        }
        if self.mean_at_k.trials > 1:
            trials = self.mean_at_k.trials
            figures |= {
                f"{prefix}/mean@{trials}": self.mean_at_k.value,
                f"{prefix}/mean@{trials}/low": self.mean_at_k.low,
                f"{prefix}/mean@{trials}/high": self.mean_at_k.high,
            }
        return figures | {f"{prefix}/pass^{k}": value for k, value in self.pass_hat_k.items()}


def validate(
    collect: Collect,
    task_ids: Sequence[str],
    *,
    split: str,
    samples: int,
    pass_k: Sequence[int],
) -> ValidationResult:
    """Play held-out tasks and score them.

    Args:
        collect: samples the groups of some specs at the validation temperature.
        task_ids: the tasks, the same ones every time.
        split: their split.
        samples: trials a task.
        pass_k: values of k for pass^k, none above ``samples``.

    Raises:
        RolloutError: infrastructure failures left no task with all its trials.
    """
    start = time.perf_counter()
    specs = [
        GroupSpec(task_id=task_id, split=split, group_seed=derive_seed("validation", task_id), size=samples)
        for task_id in task_ids
    ]
    groups = collect(specs, derive_seed("validation"))
    failures = tuple(failure for group in groups for failure in group.failures)
    whole = [group for group in groups if len(group.trajectories) == samples]
    if not whole:
        raise RolloutError(f"no validation task has all its {samples} trials; first failure: {failures[0].message}")
    table = [[trajectory.score for trajectory in group.trajectories] for group in whole]
    successes = [sum(score >= 1.0 for score in row) for row in table]
    return ValidationResult(
        mean_at_1=mean_at_k([row[:1] for row in table]),
        mean_at_k=mean_at_k(table),
        pass_hat_k={k: pass_hat_k(successes, trials=samples, k=k) for k in pass_k},
        trajectories=tuple(trajectory for group in groups for trajectory in group.trajectories),
        failures=failures,
        seconds=time.perf_counter() - start,
    )


def measure_floors(
    env: Any, task_ids: Sequence[str], *, split: str, step_timeout_s: float = 60.0
) -> dict[str, Estimate]:
    """Score three agents that know nothing: what a score must be compared with.

    ``do_nothing`` says one farewell until the episode ends; ``hand_off`` passes every user on to a human at once, where
    there is a tool for it; ``random`` calls tools at random with arguments picked from what it has seen, and now and
    then says something.

    Args:
        env: an environment with action format auto.
        task_ids: the tasks.
        split: their split.
        step_timeout_s: seconds a reset or a step may take.

    Raises:
        EnvError: the environment raised.
        DeadlineError: a reset or a step took too long.
    """
    scores: dict[str, list[list[float]]] = {"do_nothing": [], "random": [], "hand_off": []}
    for task_id in task_ids:
        rng = random.Random(derive_seed("floor", task_id))
        timed = TimedEnv(env, task_id=task_id, step_timeout_s=step_timeout_s)
        for name, agent in (("do_nothing", _do_nothing), ("random", _random_action), ("hand_off", _hand_off)):
            scores[name].append([_play(timed, task_id, split, agent, rng)])
    return {name: mean_at_k(table) for name, table in scores.items()}


Agent = Callable[[Sequence[ToolSchema], Sequence[str], random.Random], Message]


def _play(env: TimedEnv, task_id: str, split: str, agent: Agent, rng: random.Random) -> float:
    options = {"task_id": task_id, "split": split, "group_seed": derive_seed("validation", task_id)}
    _, info = env.reset(options=options)
    tools, seen = info["tools"], _words(info["messages"])
    for _ in range(_MAX_FLOOR_ACTIONS):
        _, _, terminated, truncated, info = env.step(plain_action(agent(tools, seen, rng)))
        if terminated or truncated:
            return float(info["score"])
        seen += _words(info["messages"])
    raise RolloutError(f"task {task_id!r} did not end within {_MAX_FLOOR_ACTIONS} actions; set env.max_steps")


def _do_nothing(tools: Sequence[ToolSchema], seen: Sequence[str], rng: random.Random) -> Message:
    return Message(role=Role.ASSISTANT, content="Goodbye.")


def _hand_off(tools: Sequence[ToolSchema], seen: Sequence[str], rng: random.Random) -> Message:
    tool = next((tool for tool in tools if tool.name.startswith(HAND_OFF_PREFIX)), None)
    if tool is None:
        return _do_nothing(tools, seen, rng)
    schemas = tool.parameters.get("properties", {})
    arguments = {name: _random_value(schema, ["other"], rng) for name, schema in schemas.items()}
    return Message(role=Role.ASSISTANT, tool_calls=(ToolCall(name=tool.name, arguments=arguments),))


def _random_action(tools: Sequence[ToolSchema], seen: Sequence[str], rng: random.Random) -> Message:
    if not tools or rng.random() < 0.3:
        return Message(role=Role.ASSISTANT, content=" ".join(rng.choices(seen, k=6)) if seen else "Hello.")
    tool = rng.choice(tools)
    arguments = {
        name: _random_value(schema, seen, rng) for name, schema in tool.parameters.get("properties", {}).items()
    }
    return Message(role=Role.ASSISTANT, tool_calls=(ToolCall(name=tool.name, arguments=arguments),))


def _random_value(schema: dict[str, Any], seen: Sequence[str], rng: random.Random) -> Any:
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema.get("type", "string")
    if kind == "boolean":
        return rng.random() < 0.5
    if kind in ("integer", "number"):
        return rng.randint(0, 9)
    return rng.choice(seen) if seen else ""


def _words(messages: Sequence[Message]) -> list[str]:
    text = " ".join(message.content for message in messages)
    return [word.strip('.,!?:;"{}[]') for word in text.replace('"', " ").replace(":", " ").split()]
