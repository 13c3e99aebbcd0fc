"""Checks of what every SinkFlex environment promises, the embedded domains and τ²-bench alike."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

from sinkflex.envs.checks.play import Bench, oracle_policy, play_episode, play_step, start_episode
from sinkflex.types import Message, StopReason, ToolSchema

RESET_KEYS = {"task_id", "split", "tier", "system", "tools", "messages"}
STEP_KEYS = {"messages", "invalid_action", "stop_reason"}
END_KEYS = {"score", "components", "metrics"}
PROCESSES = 3


def reset_info(bench: Bench) -> Iterator[str]:
    """``reset`` returns the promised info, with fresh objects."""
    env = bench.make()
    infos = [start_episode(env, bench.task_ids[0], group_seed=0).resets for _ in range(2)]
    missing = RESET_KEYS - infos[0].keys()
    if missing:
        yield f"reset's info lacks {sorted(missing)}; the rollout needs them to build the prompt"
        return
    if not infos[0]["messages"] or not all(isinstance(item, Message) for item in infos[0]["messages"]):
        yield "reset's info['messages'] must hold the user's opening as Message objects; it is empty or something else"
    if not infos[0]["system"].strip():
        yield "reset's info['system'] is empty; the agent would know no policy"
    if not all(isinstance(item, ToolSchema) for item in infos[0]["tools"]):
        yield "reset's info['tools'] must hold ToolSchema objects"
    pairs = zip(infos[0]["tools"], infos[1]["tools"], strict=False)
    if any(first.parameters is second.parameters for first, second in pairs):
        yield "two resets share tool schemas; a caller that changes one changes all: build them anew in each reset"


def step_info(bench: Bench) -> Iterator[str]:
    """Each step returns the promised info, reward only at the end, and an end that fits its reason."""
    for task_id in bench.task_ids:
        env = bench.make()
        played = play_episode(env, task_id, policy=oracle_policy)
        if any(STEP_KEYS - info.keys() for info in played.infos):
            yield f"{task_id}: a step's info lacks one of {sorted(STEP_KEYS)}"
            return
        last = played.infos[-1]
        if not last.keys() >= END_KEYS:
            yield f"{task_id}: the last step's info lacks {sorted(END_KEYS - last.keys())}; nothing could be trained on"
            return
        if any(played.rewards[:-1]):
            yield f"{task_id}: a step before the last pays a reward; the reward is the score, paid once at the end"
        if played.rewards[-1] != last["score"] or not 0.0 <= played.score <= 1.0:
            yield f"{task_id}: reward {played.rewards[-1]!r} and score {last['score']!r} must agree and lie in [0, 1]"
        if played.terminated == played.truncated:
            yield f"{task_id}: terminated and truncated are both {played.terminated}; exactly one ends an episode"
        if last["stop_reason"] not in set(StopReason):
            yield f"{task_id}: stop_reason {last['stop_reason']!r} is not a StopReason"
        elif StopReason(last["stop_reason"]).is_termination != played.terminated:
            yield f"{task_id}: stop_reason {last['stop_reason']} does not fit terminated={played.terminated}"
        if any(not env.observation_space.contains(seen) or not seen.strip() for seen in played.observations):
            yield f"{task_id}: an observation is empty or outside observation_space"


def malformed_actions(bench: Bench) -> Iterator[str]:
    """A malformed action is a counted step that says why, and nobody but the agent learns of it."""
    env = bench.make()
    played = start_episode(env, bench.task_ids[0], group_seed=0)
    for action, what in (
        ('{"name": "x", "arguments": {', "broken JSON"),
        ("", "an empty action"),
        ('{"name":"no_such_tool","arguments":{}}', "an unknown tool"),
    ):
        ended = play_step(env, played, action)
        info = played.infos[-1]
        if not info["invalid_action"]:
            yield f"{what} is not reported in info['invalid_action']; a policy could not be kept from it"
        if not info["messages"] or not info["messages"][-1].content.strip():
            yield f"{what} is answered with nothing; say in an observation what is wrong and what to send instead"
        if ended:
            return


def repeatability(bench: Bench) -> Iterator[str]:
    """Equal task and group seed give equal transcripts, whatever else runs and whatever the global generators hold."""
    for task_id in bench.task_ids:
        digests = []
        for seed in (1, 2):
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002  (the legacy global generator is what must not matter)
            before = _global_generators()
            digests.append(bench.oracle(task_id, group_seed=5)[1].digest)
            if before != _global_generators():
                yield f"{task_id}: the episode drew from a global random generator; use the one it is given"
                return
        if len(set(digests)) > 1:
            yield (
                f"{task_id}: two episodes with the same task and group_seed differ; look for state kept between "
                "episodes (class attributes, module globals, default arguments), the clock, or object ids"
            )
            return


def _global_generators() -> tuple[object, str]:
    return random.getstate(), repr(np.random.get_state(legacy=False))  # noqa: NPY002


def isolation(bench: Bench) -> Iterator[str]:
    """Two environments played in turn do not see each other."""
    first_id, second_id = bench.task_ids[0], bench.task_ids[-1]
    alone = bench.oracle(first_id)[1].digest
    first, second = bench.make(), bench.make()
    played, other = (start_episode(env, name, group_seed=0) for env, name in ((first, first_id), (second, second_id)))
    ended = other_ended = False
    while not ended:
        if not other_ended:
            other_ended = play_step(second, other, oracle_policy(second.unwrapped, 0))
        ended = play_step(first, played, oracle_policy(first.unwrapped, 0))
    if played.digest != alone:
        yield (
            f"{first_id} plays differently beside another environment; state is shared between instances: keep it in "
            "the World or in the environment, never in a module or class"
        )


def processes(bench: Bench) -> Iterator[str]:
    """Three processes with different hash seeds play identical transcripts."""
    if bench.env_id is None:
        return
    script = (
        "import sys, gymnasium\n"
        "from sinkflex.envs.checks.play import oracle_policy, play_episode\n"
        "env = gymnasium.make(sys.argv[1], disable_env_checker=True)\n"
        "for task_id in sys.argv[2:]:\n"
        "    print(play_episode(env, task_id, policy=oracle_policy, group_seed=7).digest)\n"
    )
    spread = bench.task_ids[:: max(1, len(bench.task_ids) // 8)]
    command = [sys.executable, "-c", script, bench.env_id, *spread]
    outputs = set()
    for hash_seed in range(PROCESSES):
        path = os.pathsep.join(filter(None, sys.path))
        environ = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": path}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
        if done.returncode:
            yield f"a fresh process cannot play {bench.env_id}: {done.stderr.strip().splitlines()[-1:]}"
            return
        outputs.add(done.stdout)
    if len(outputs) > 1:
        yield (
            "processes with different hash seeds play different transcripts; look for iteration over a set, hash(), "
            "or a seed made from either"
        )


def housekeeping(bench: Bench) -> Iterator[str]:
    """A registered environment pickles; any closes twice and renders what happened."""
    if bench.registered:
        try:
            pickle.loads(pickle.dumps(bench.make().unwrapped))
        except Exception as error:  # any failure to pickle is the finding
            yield f"the environment does not pickle ({error}); vector environments and workers need it to"
    shown = bench.make(render_mode="ansi")
    opening = start_episode(shown, bench.task_ids[0], group_seed=0).resets["messages"][0].content
    if opening not in str(shown.render()):
        yield "render() in mode 'ansi' does not show the user's opening; return the dialogue so far as text"
    shown.close()
    shown.close()


CHECKS = (reset_info, step_info, malformed_actions, repeatability, isolation, processes, housekeeping)
