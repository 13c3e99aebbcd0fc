"""What breaks in one episode is recorded there, tried again with the same seeds, and never becomes a reward."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import gymnasium
import pytest

import sinkflex.envs  # noqa: F401  (registers the ids)
from sinkflex.errors import RolloutError
from sinkflex.rollout import Collector, EpisodeLimits, FailurePolicy, GroupSpec

GROUPS = [GroupSpec(task_id=task, split="train", group_seed=5, size=2) for task in ("a", "b", "c")]
TOLERANT = FailurePolicy(retries=1, max_share=0.5)


@pytest.mark.parametrize("turn", [0, 1, 3])
@pytest.mark.parametrize("mode", ["inline", "threads"])
def test_an_environment_that_raises_loses_its_episodes_only(
    make_bench: Callable[..., Any], fault_type: Any, turn: int, mode: str
) -> None:
    healthy = make_bench().collector.run(GROUPS, seed=1)
    fault = fault_type(kind="raise", turn=turn, tasks=frozenset({"b"}))
    groups = make_bench(fault=fault, failures=TOLERANT, env_mode=mode).collector.run(GROUPS, seed=1)
    assert groups[0] == healthy[0]
    assert groups[2] == healthy[2]
    assert groups[1].trajectories == ()
    assert [failure.episode_id for failure in groups[1].failures] == ["train/b/5/0", "train/b/5/1"]
    failure = groups[1].failures[0]
    assert (failure.kind, failure.message, failure.attempts) == ("ZeroDivisionError", "the world broke", 2)
    assert failure.turn == turn


@pytest.mark.parametrize(("kind", "mode"), [("spin", "inline"), ("sleep", "inline"), ("sleep", "threads")])
def test_an_environment_that_hangs_is_given_up(
    make_bench: Callable[..., Any], fault_type: Any, kind: str, mode: str
) -> None:
    fault = fault_type(kind=kind, turn=2, tasks=frozenset({"a"}))
    policy = FailurePolicy(retries=0, max_share=0.5)
    bench = make_bench(fault=fault, failures=policy, env_mode=mode, step_timeout_s=0.2)
    groups = bench.collector.run(GROUPS, seed=1)
    assert [len(group.trajectories) for group in groups] == [0, 2, 2]
    failure = groups[0].failures[0]
    assert (failure.kind, failure.turn, failure.attempts) == ("DeadlineError", 2, 1)
    assert "env.step took longer than 0.2 s" in failure.message


@pytest.mark.parametrize("kind", ["raise", "infrastructure", "raise_and_stuck"])
def test_a_passing_failure_is_made_good_by_the_same_episode(
    make_bench: Callable[..., Any], fault_type: Any, kind: str
) -> None:
    fault = fault_type(kind=kind, turn=2, times=1)
    bench = make_bench(fault=fault, failures=TOLERANT)
    assert bench.collector.run(GROUPS, seed=1) == make_bench().collector.run(GROUPS, seed=1)
    # The environment that failed is closed and replaced; its slot was given back before the second attempt.
    assert sum(env.closed for env in bench.envs) == 1
    assert len(bench.client.released) == 7


@pytest.mark.parametrize(
    ("kind", "turn", "match"),
    [
        ("no_tier", 0, "reset's info lacks tier"),
        ("no_messages", 1, "step's info lacks messages"),
        ("no_score", 3, "the last step's info lacks stop_reason or score"),
    ],
)
def test_a_broken_info_contract_is_named(
    make_bench: Callable[..., Any], fault_type: Any, kind: str, turn: int, match: str
) -> None:
    fault = fault_type(kind=kind, turn=turn, tasks=frozenset({"a"}))
    groups = make_bench(fault=fault, failures=TOLERANT).collector.run(GROUPS, seed=1)
    assert groups[0].failures[0].kind == "EnvError"
    assert match in groups[0].failures[0].message


def test_too_many_failures_name_the_most_common_cause(make_bench: Callable[..., Any], fault_type: Any) -> None:
    fault = fault_type(kind="infrastructure", tasks=frozenset({"a", "b"}))
    with pytest.raises(
        RolloutError,
        match=r"4 of 6 episodes failed \(tolerated share: 0.5\); the most common cause, 4 times, is "
        "InfrastructureError: user backend is down",
    ):
        make_bench(fault=fault, failures=TOLERANT).collector.run(GROUPS, seed=1)


def test_the_tolerated_share_is_inclusive(make_bench: Callable[..., Any], fault_type: Any) -> None:
    fault = fault_type(kind="raise", tasks=frozenset({"a"}))
    policy = FailurePolicy(retries=0, max_share=1 / 3)
    groups = make_bench(fault=fault, failures=policy).collector.run(GROUPS, seed=1)
    assert sum(len(group.failures) for group in groups) == 2
    stricter = FailurePolicy(retries=0, max_share=0.3)
    with pytest.raises(RolloutError, match="2 of 6 episodes failed"):
        make_bench(fault=fault, failures=stricter).collector.run(GROUPS, seed=1)


def test_an_environment_that_cannot_be_made_is_a_failure_too(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(failures=FailurePolicy(retries=0, max_share=0.0))

    def broken() -> Any:
        raise OSError("no such image")

    bench.collector._make_env = broken
    with pytest.raises(RolloutError, match=r"6 of 6 episodes failed .* OSError: no such image"):
        bench.collector.run(GROUPS, seed=1)


def test_a_reward_that_is_no_number_loses_the_episode_and_names_the_task(
    make_bench: Callable[..., Any], fault_type: Any
) -> None:
    fault = fault_type(kind="nan_reward", turn=1, tasks=frozenset({"a"}))
    groups = make_bench(fault=fault, failures=TOLERANT).collector.run(GROUPS, seed=1)
    assert groups[0].trajectories == ()
    assert "task 'a': the environment's reward is nan" in groups[0].failures[0].message


class OneGroupFails(BaseHTTPRequestHandler):
    """A user's endpoint that opens every dialogue and then has 503 for ever for the group it heard of first."""

    server: Any

    def log_message(self, *args: Any) -> None: ...

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seeds = self.server.seeds
        seeds.append(asked["seed"])
        doomed = len(asked["messages"]) > 2 and asked["seed"] - seeds[0] in (0, 1)
        message = {"role": "assistant", "content": "my lamp is dark"}
        reply = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "usage": None}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = json.dumps({**reply, "choices": [choice]}).encode()
        self.send_response(503 if doomed else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def failing_endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), OneGroupFails)
    server.daemon_threads = True
    server.seeds = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("mode", ["inline", "threads"])
def test_an_llm_users_outage_leaves_the_group_as_an_error_and_never_as_reward_zero(
    make_bench: Callable[..., Any], renderer: Any, failing_endpoint: str, mode: str
) -> None:
    options = {"model": "m", "base_url": failing_endpoint, "backoff_s": 0.0, "max_attempts": 2}
    collector = Collector(
        make_env=lambda: gymnasium.make("sinkflex/Mock-v0", user="llm", user_options=options),
        renderer=renderer,
        client=make_bench(turn_length=6).client,
        limits=EpisodeLimits(max_length=2000, max_new_tokens=8, step_timeout_s=20.0),
        env_mode=mode,
        max_concurrent=2,  # the first group opens first, so it is the one the endpoint fails
        failures=FailurePolicy(retries=0, max_share=0.5),
    )
    specs = [GroupSpec(task_id="mock-both", split="train", group_seed=seed, size=2) for seed in (1, 2)]
    lost, kept = collector.run(specs, seed=1)
    assert lost.trajectories == ()
    assert [(failure.kind, failure.turn) for failure in lost.failures] == [("InfrastructureError", 1)] * 2
    assert "no usable answer in 2 attempts; the last: status 503" in lost.failures[0].message
    assert [trajectory.reward for trajectory in kept.trajectories] == [0.0, 0.0]
    assert kept.failures == ()
