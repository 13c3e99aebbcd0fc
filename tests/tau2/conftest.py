"""Fixtures for the tests on the real τ²-bench: environments, players, and the package's own evaluator."""

from __future__ import annotations

import gc
import json
import pickle
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from sinkflex.envs.tau2 import Tau2Env
from sinkflex.envs.tau2.catalogue import load_domain
from sinkflex.envs.tau2.package import load_package
from sinkflex.types import Message

_ENVIRONMENTS: dict[tuple[str, str], Tau2Env] = {}


def action_text(message: Message) -> str:
    if not message.tool_calls:
        return message.content
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
    return json.dumps(calls[0] if len(calls) == 1 else calls)


@pytest.fixture
def make_env() -> Callable[..., Tau2Env]:
    """Return environments, one a domain where no options are given: making one loads nothing twice."""

    def make(domain: str, **options: Any) -> Tau2Env:
        if options:
            return Tau2Env(domain=domain, split="base", **options)
        return _ENVIRONMENTS.setdefault((domain, ""), Tau2Env(domain=domain, split="base"))

    return make


@pytest.fixture
def say() -> Callable[[Message], str]:
    return action_text


@pytest.fixture
def play_gold() -> Callable[..., tuple[list[Message], float, dict[str, Any]]]:
    """Play the oracle to the end; returns its messages, the reward and the last info."""

    def play(env: Tau2Env, task_id: str, *, group_seed: int = 0) -> tuple[list[Message], float, dict[str, Any]]:
        env.reset(options={"task_id": task_id, "split": "base", "group_seed": group_seed})
        sent: list[Message] = []
        while True:
            sent.append(env.oracle_message())
            _, reward, terminated, truncated, info = env.step(action_text(sent[-1]))
            if terminated or truncated:
                return sent, reward, info

    return play


@pytest.fixture
def play_open_loop() -> Callable[..., tuple[float, dict[str, Any]]]:
    """Play a fixed list of messages, then farewells until the episode is over."""

    def play(
        env: Tau2Env, task_id: str, messages: list[Message], *, farewells: int = 8
    ) -> tuple[float, dict[str, Any]]:
        env.reset(options={"task_id": task_id, "split": "base", "group_seed": 0})
        for text in [*map(action_text, messages), *["Goodbye."] * farewells]:
            _, reward, terminated, truncated, info = env.step(text)
            if terminated or truncated:
                return reward, info
        raise AssertionError(f"the user of {task_id} does not take {farewells} goodbyes for an end")

    return play


@pytest.fixture
def own_evaluation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Tau2Env], float]]:
    """Return the package's ``evaluate_simulation`` on the episode an environment just played.

    Only its database files are cached. The class attribute that a broken VPN leaks into (see the fidelity page) is
    fresh for every evaluation, as it is when the package runs one task a process.
    """
    from tau2.data_model.simulation import SimulationRun
    from tau2.domains.telecom.user_tools import TelecomUserTools
    from tau2.environment.db import DB
    from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation

    load = DB.load.__func__  # type: ignore[attr-defined]

    @cache
    def pickled(kind: type, path: str) -> bytes:
        return pickle.dumps(load(kind, path), protocol=pickle.HIGHEST_PROTOCOL)

    monkeypatch.setattr(DB, "load", classmethod(lambda kind, path: pickle.loads(pickled(kind, str(path)))))
    pristine = pickle.dumps(TelecomUserTools.default_vpn_details)

    def evaluate(env: Tau2Env) -> float:
        monkeypatch.setattr(TelecomUserTools, "default_vpn_details", pickle.loads(pristine))
        episode = env.episode
        assert episode.stop_reason is not None
        run = SimulationRun(
            id="check",
            task_id=episode.task_id,
            start_time="",
            end_time="",
            duration=0.0,
            termination_reason="user_stop" if episode.stop_reason.is_termination else "max_steps",
            messages=list(episode.trajectory),
        )
        reward: float = evaluate_simulation(
            simulation=run,
            task=load_domain(env.domain.name).task(episode.task_id),
            evaluation_type=EvaluationType.ALL,
            solo_mode=False,
            domain=env.domain.name,
        ).reward
        return reward

    gc.disable()  # each evaluation loads and drops two whole databases, which would trigger it all the time
    yield evaluate
    gc.enable()


PERTURBATIONS = ("drop", "swap", "repeat", "wrong_argument", "early_stop", "invalid_call")


def perturbed(kind: str, messages: list[Message], rng: random.Random) -> list[Message]:
    """Return a copy of an oracle's messages with one thing wrong."""
    changed = list(messages)
    calling = [index for index, message in enumerate(changed) if message.tool_calls]
    spot = rng.choice(calling or range(len(changed)))
    if kind == "drop":
        del changed[spot]
    elif kind == "swap":
        other = rng.randrange(len(changed))
        changed[spot], changed[other] = changed[other], changed[spot]
    elif kind == "repeat":
        changed.insert(spot, changed[spot])
    elif kind == "early_stop":
        del changed[spot:]
    elif kind == "invalid_call":
        changed.insert(spot, _call(rng.choice(["no_such_tool", "calculate"]), {"expr": "1 +"}))
    elif changed[spot].tool_calls:
        call = changed[spot].tool_calls[0]
        changed[spot] = _call(call.name, _spoiled(dict(call.arguments), rng))
    return changed


def _call(name: str, arguments: dict[str, Any]) -> Message:
    return Message.from_dict({"role": "assistant", "tool_calls": [{"name": name, "arguments": arguments}]})


def _spoiled(arguments: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    if not arguments:
        return {"surprise": 1}
    name = rng.choice(sorted(arguments))
    value = arguments[name]
    options: list[Any] = [None, "", 7, [], {}, f"{value}x"]
    if isinstance(value, list):
        options += [value[::-1], value[:1], [*value, *value]]
    if isinstance(value, float | int):
        options += [value + 1, -value, str(value)]
    return {**arguments, name: rng.choice(options)}


@pytest.fixture
def perturb() -> Callable[[str, list[Message], random.Random], list[Message]]:
    return perturbed


@pytest.fixture(scope="session")
def package() -> Any:
    return load_package()
