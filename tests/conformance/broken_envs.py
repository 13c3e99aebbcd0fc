"""Environments that break the Gymnasium side of the contract, registered under ``broken/NAME-v0``.

``CASES`` maps an id to the check that must fail and its cause. The module registers the ids when imported, so that
other processes can build them as ``broken_envs:broken/NAME-v0``.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import gymnasium

from sinkflex.envs.domains.mock import MockDomain, MockTask
from sinkflex.envs.gym import DualControlEnv
from sinkflex.envs.users.scripted import Script

CASES: dict[str, tuple[str, str]] = {}
Step = tuple[str, float, bool, bool, dict[str, Any]]


def expect(check: str, cause: str) -> Any:
    def register(kind: type[DualControlEnv]) -> type[DualControlEnv]:
        env_id = f"broken/{kind.__name__}-v0"
        gymnasium.register(env_id, entry_point=kind, kwargs={"domain": "mock"})
        CASES[env_id] = (check, cause)
        return kind

    return register


@expect("reset_info", r"lacks \['system'\]")
class NoSystem(DualControlEnv):
    def reset(self, **given: Any) -> tuple[str, dict[str, Any]]:
        observation, info = super().reset(**given)
        del info["system"]
        return observation, info


@expect("reset_info", "two resets share tool schemas")
class SharedSchemas(DualControlEnv):
    def reset(self, **given: Any) -> tuple[str, dict[str, Any]]:
        observation, info = super().reset(**given)
        self.kept = getattr(self, "kept", info["tools"])
        return observation, {**info, "tools": self.kept}


@expect("step_info", "a step's info lacks one of")
class BareStep(DualControlEnv):
    def step(self, action: str) -> Step:
        *rest, info = super().step(action)
        info.pop("invalid_action")
        return (*rest, info)


@expect("step_info", "lacks .*metrics.*nothing could be trained on")
class NoMetrics(DualControlEnv):
    def step(self, action: str) -> Step:
        *rest, info = super().step(action)
        info.pop("metrics", None)
        return (*rest, info)


@expect("step_info", "the reward is the score, paid once at the end")
class Pocket(DualControlEnv):
    def step(self, action: str) -> Step:
        observation, reward, *rest = super().step(action)
        return (observation, reward or 0.1, *rest)


@expect("step_info", "stop_reason user_stop does not fit terminated=False")
class AllTruncated(DualControlEnv):
    def step(self, action: str) -> Step:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, False, terminated or truncated, info


@expect("step_info", "an observation is empty or outside observation_space")
class Mute(DualControlEnv):
    def step(self, action: str) -> Step:
        _, *rest = super().step(action)
        return ("", *rest)


@expect("malformed_actions", "not reported in info")
class Forgiving(DualControlEnv):
    def step(self, action: str) -> Step:
        *rest, info = super().step(action)
        return (*rest, {**info, "invalid_action": None})


@expect("malformed_actions", "an empty action is answered with nothing")
class Wordless(DualControlEnv):
    def step(self, action: str) -> Step:
        *rest, info = super().step(action)
        return (*rest, {**info, "messages": info["messages"] if action else ()})


@expect("survival", "raised ValueError: boom")
class Explosive(DualControlEnv):
    def step(self, action: str) -> Step:
        if len(action) > 5000:
            raise ValueError("boom")
        return super().step(action)


@expect("survival", "took .* s of processor time; bound how much of a message is read")
class Slow(DualControlEnv):
    def step(self, action: str) -> Step:
        if action.startswith("turn off turn off"):
            started = time.process_time()
            while time.process_time() - started < 1.2:
                pass
        return super().step(action)


@expect("survival", "is malformed, but the observation does not say why")
class Curt(DualControlEnv):
    def step(self, action: str) -> Step:
        observation, *rest, info = super().step(action)
        return ("no." if info["invalid_action"] else observation, *rest, info)


@expect("housekeeping", "does not pickle")
class Pickled(DualControlEnv):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._ezpickle_kwargs["hook"] = lambda: None


@expect("housekeeping", "does not show the user's opening")
class Blind(DualControlEnv):
    def render(self) -> str | None:
        return "..."


class HashOrderDomain(MockDomain):
    """Opens with whatever a set yields first."""

    def script(self, task: MockTask) -> Script:
        script = super().script(task)
        words = tuple({f"my lamp {number} is dark" for number in range(50)})
        return dataclasses.replace(script, stages=(dataclasses.replace(script.stages[0], opening=words),))


gymnasium.register(
    "broken/HashOrder-v0",
    entry_point="sinkflex.envs.gym:DualControlEnv",
    kwargs={"domain": "broken_envs:HashOrderDomain"},
)
CASES["broken_envs:broken/HashOrder-v0"] = ("processes", "look for iteration over a set")
