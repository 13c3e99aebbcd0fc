"""Episodes a second of the τ² adapter against the package's own Gymnasium wrapper, on the same episodes, in one run.

    python benchmarks/tau2_throughput.py --write benchmarks/results

Both sides play the same gold-action dialogues. The wrapper cannot take a scripted user, so its LLM user's
``generate_next_message`` is answered from the replies the scripted user gave; no network is involved on either side.
Also counts the threads left by 1,000 abandoned episodes and how memory grows over them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from sinkflex.envs.tau2 import Tau2Env
from sinkflex.types import Message

ABANDONED = 1_000


def action_text(message: Message) -> str:
    if not message.tool_calls:
        return message.content
    (call,) = message.tool_calls
    return json.dumps({"name": call.name, "arguments": dict(call.arguments)})


def record_gold(env: Tau2Env, task_id: str) -> tuple[list[str], list[Any]]:
    """Return the oracle's actions and the user's messages, as the package's own objects."""
    env.reset(options={"task_id": task_id, "split": "base", "group_seed": 0})
    actions: list[str] = []
    while True:
        actions.append(action_text(env.oracle_message()))
        _, _, terminated, truncated, _ = env.step(actions[-1])
        if terminated or truncated:
            return actions, [item for item in env.episode.trajectory if item.role == "user"]


def play_ours(env: Tau2Env, task_id: str, actions: list[str]) -> float:
    env.reset(options={"task_id": task_id, "split": "base", "group_seed": 0})
    reward = 0.0
    for action in actions:
        _, reward, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            break
    return reward


def play_wrapper(domain: str, task_id: str, actions: list[str], user_turns: list[Any], wrapper: Any) -> float:
    """Play one episode on the package's ``AgentGymEnv`` with the recorded user."""
    env = wrapper.AgentGymEnv(domain=domain, task_id=task_id, max_steps=500)
    turns = iter(user_turns)

    def next_turn(user: Any, message: Any, state: Any) -> tuple[Any, Any]:
        turn = next(turns, None) or _farewell(user_turns)
        # The package sorts a trajectory by wall clock, so a recorded message must look as if it were said now.
        return turn.model_copy(update={"timestamp": datetime.now().isoformat()}), state

    wrapper.UserSimulator.generate_next_message = next_turn
    env.reset()
    reward = 0.0
    for action in actions:
        _, reward, terminated, _, _ = env.step(action)
        if terminated:
            return float(reward)
    # The adapter ends an episode with the hand-off itself; the wrapper waits for the agent's word to the user.
    _, reward, _, _, _ = env.step("YOU ARE BEING TRANSFERRED TO A HUMAN AGENT.")
    return float(reward)


def _farewell(user_turns: list[Any]) -> Any:
    return type(user_turns[0])(role="user", content="###TRANSFER###")


def timed(plays: list[Callable[[], float]]) -> tuple[float, float]:
    """Return episodes a second and the mean reward."""
    started = time.perf_counter()
    rewards = [play() for play in plays]
    return len(plays) / (time.perf_counter() - started), sum(rewards) / len(rewards)


def compare(domain: str, *, episodes: int, repeats: int, wrapper: Any) -> dict[str, Any]:
    env = Tau2Env(domain=domain, split="base")
    tasks = env.task_ids("base")[:: max(1, len(env.task_ids("base")) // episodes)][:episodes]
    recorded = {task_id: record_gold(env, task_id) for task_id in tasks}
    ours, our_score = timed(
        [lambda t=task_id: play_ours(env, t, recorded[t][0]) for task_id in tasks for _ in range(repeats)]  # type: ignore[misc]
    )
    theirs, their_score = timed(
        [lambda t=task_id: play_wrapper(domain, t, *recorded[t], wrapper) for task_id in tasks]  # type: ignore[misc]
    )
    return {
        "episodes": len(tasks),
        "adapter_episodes_per_s": round(ours, 2),
        "wrapper_episodes_per_s": round(theirs, 3),
        "ratio": round(ours / theirs, 1),
        "adapter_mean_score": our_score,
        "wrapper_mean_score": their_score,
    }


def abandon(domain: str) -> dict[str, Any]:
    """Start episodes, take one step, and walk away; memory is read after the first hundred and after the last."""
    env = Tau2Env(domain=domain, split="base")
    tasks = env.task_ids("base")
    threads = threading.active_count()
    readings = []
    for number in range(ABANDONED):
        env.reset(options={"task_id": tasks[number % len(tasks)], "group_seed": number})
        env.step("Could you please tell me your name?")
        if number + 1 in (200, ABANDONED):
            gc.collect()
            readings.append(psutil.Process().memory_info().rss / 2**20)
    return {
        "abandoned_episodes": ABANDONED,
        "threads_left": threading.active_count() - threads,
        "memory_after_200_mib": round(readings[0], 1),
        "memory_after_1000_mib": round(readings[1], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="folder for tau2_throughput.json and .txt")
    options = parser.parse_args()
    package = Tau2Env(domain="mock", split="base").domain.package.label
    from tau2.gym import gym_agent as wrapper  # after the adapter has told LiteLLM not to fetch its price list

    report: dict[str, Any] = {
        "command": "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "package": package,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg()[0],
        "abandoned": {domain: abandon(domain) for domain in ("retail", "telecom")},
        "throughput": {
            "retail": compare("retail", episodes=5, repeats=10, wrapper=wrapper),
            "airline": compare("airline", episodes=3, repeats=10, wrapper=wrapper),
            "telecom": compare("telecom", episodes=3, repeats=10, wrapper=wrapper),
        },
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.write is not None:
        options.write.mkdir(parents=True, exist_ok=True)
        (options.write / "tau2_throughput.json").write_text(text + "\n")
        (options.write / "tau2_throughput.txt").write_text(describe(report))


def describe(report: dict[str, Any]) -> str:
    lines = [
        f"{report['package']}, Python {report['python']}, {report['machine']}, load {report['load_average']:.1f}",
        f"$ {report['command']}",
        "",
        f"{'domain':<10}{'adapter/s':>12}{'wrapper/s':>12}{'ratio':>9}{'scores':>14}",
    ]
    for domain, row in report["throughput"].items():
        scores = f"{row['adapter_mean_score']:.2f} / {row['wrapper_mean_score']:.2f}"
        rates = f"{row['adapter_episodes_per_s']:>12.1f}{row['wrapper_episodes_per_s']:>12.3f}{row['ratio']:>8.0f}x"
        lines.append(f"{domain:<10}{rates}{scores:>14}")
    lines.append("")
    for domain, row in report["abandoned"].items():
        lines.append(
            f"{domain}: {row['abandoned_episodes']} abandoned episodes leave {row['threads_left']} threads; memory "
            f"{row['memory_after_200_mib']} MiB after 200, {row['memory_after_1000_mib']} MiB after all"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
