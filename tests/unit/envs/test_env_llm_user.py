from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from sinkflex.envs.gym import DualControlEnv
from sinkflex.envs.users.cassette import Cassette
from sinkflex.envs.users.endpoint import ChatEndpoint, EndpointConfig, Usage
from sinkflex.envs.users.modelled import STOP_MARK
from sinkflex.errors import EnvError, InfrastructureError, MissingExtraError
from sinkflex.types import Message, Role, ToolSchema

Reply = dict[str, Any]


def text(content: str | None, **usage: int) -> Reply:
    return {"message": {"role": "assistant", "content": content}, "usage": usage}


def calls(name: str, arguments: str = "{}", call_id: str = "c1") -> Reply:
    function = {"name": name, "arguments": arguments}
    made = {"id": call_id, "type": "function", "function": function}
    return {"message": {"role": "assistant", "content": None, "tool_calls": [made]}, "usage": {}}


class FakeServer(ThreadingHTTPServer):
    """Speaks the chat completions API; ``script`` says what to answer, one entry a request, the last for ever."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: list[Any] = [text("hello")]
        self.answer: Callable[[Reply], Reply] | None = None
        self.requests: list[Reply] = []
        self.lock = threading.Lock()
        self.busy = self.most_busy = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up on a slow answer is what the time-out test is about."""


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *args: Any) -> None: ...

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(asked)
            self.server.busy += 1
            self.server.most_busy = max(self.server.most_busy, self.server.busy)
            script = self.server.script
            step = script.pop(0) if len(script) > 1 else script[0]
        if self.server.answer is not None:
            step = self.server.answer(asked)
        try:
            self._send(step, asked)
        finally:
            with self.server.lock:
                self.server.busy -= 1

    def _send(self, step: Any, asked: Reply) -> None:
        status, body, wait = 200, b"", None
        if isinstance(step, tuple):
            step, wait = step
        if isinstance(step, float):
            time.sleep(step)
            step = text("too late")
        if isinstance(step, int):
            status, body = step, json.dumps({"error": {"message": "injected", "type": "x"}}).encode()
        elif isinstance(step, bytes):
            body = step
        else:
            usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0, **step["usage"]}
            choice = {"index": 0, "finish_reason": "stop", "message": step["message"]}
            reply = {"id": "x", "object": "chat.completion", "created": 0, "model": asked["model"]}
            body = json.dumps({**reply, "choices": [choice], "usage": usage}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        if wait is not None:
            self.send_header("Retry-After", wait)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True


@pytest.fixture
def server() -> Iterator[FakeServer]:
    running = FakeServer()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.fixture
def make_endpoint(server: FakeServer) -> Iterator[Callable[..., ChatEndpoint]]:
    made: list[ChatEndpoint] = []

    def make(cassette: Cassette | None = None, **changes: Any) -> ChatEndpoint:
        fields: dict[str, Any] = {"model": "m", "base_url": server.url, "backoff_s": 0.0, "timeout_s": 20.0}
        made.append(ChatEndpoint(config=EndpointConfig(**{**fields, **changes}), cassette=cassette))
        return made[-1]

    yield make
    for endpoint in made:
        endpoint.close()


SAY_HI = [Message(role=Role.USER, content="hi")]
LOOK = ToolSchema(name="look", description="Look.", parameters={"type": "object", "properties": {}})


def ask(endpoint: ChatEndpoint, *, tools: tuple[ToolSchema, ...] = (), seed: int = 3) -> Message:
    return endpoint.complete(SAY_HI, tools, seed=seed, usage=Usage())


def test_a_request_carries_conversation_tools_and_seed(server: FakeServer, make_endpoint: Any) -> None:
    endpoint = make_endpoint(temperature=0.2, max_tokens=9)
    assert ask(endpoint, tools=(LOOK,)) == Message(role=Role.ASSISTANT, content="hello")
    assert server.requests == [
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "temperature": 0.2,
            "max_tokens": 9,
            "seed": 3,
            "tools": [LOOK.to_openai()],
        }
    ]


@pytest.mark.parametrize(
    "failure",
    [429, 500, 503, 408, text(""), text(None), text("   "), b"{not json", b'{"choices":[]}', calls("fly"), 0.6]
    + [calls("look", broken) for broken in ("{broken", "[1]")],
    ids=str,
)
def test_a_passing_failure_is_retried(server: FakeServer, make_endpoint: Any, failure: Any) -> None:
    server.script = [failure, failure, text("at last")]
    endpoint = make_endpoint(timeout_s=0.3 if isinstance(failure, float) else 20.0)
    usage = Usage()
    answer = endpoint.complete(SAY_HI, (LOOK,), seed=3, usage=usage)
    assert answer.content == "at last"
    assert usage.retries == 2
    assert [request["seed"] for request in server.requests] == [3, 4, 5]


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (429, "status 429"),
        (500, "status 500"),
        (text(""), "the reply is empty"),
        (b'{"choices":[]}', "the reply holds no message"),
        (calls("fly"), "calls 'fly', which is none of the user's tools"),
        (calls("look", "{broken"), "the arguments of look are broken JSON"),
        (calls("look", "[1]"), "the arguments of look are no JSON object"),
        (0.5, r"no answer within 0\.2 s"),
    ],
    ids=str,
)
def test_a_failure_that_outlasts_its_retries_is_an_infrastructure_error(
    server: FakeServer, make_endpoint: Any, failure: Any, cause: str
) -> None:
    server.script = [failure]
    endpoint = make_endpoint(max_attempts=2, timeout_s=0.2 if isinstance(failure, float) else 20.0)
    with pytest.raises(
        InfrastructureError, match=f"model 'm' at .* no usable answer in 2 attempts; the last: .*{cause}"
    ):
        ask(endpoint, tools=(LOOK,))
    assert len(server.requests) == 2


def test_an_endpoint_that_is_not_there_is_an_infrastructure_error(make_endpoint: Any) -> None:
    with pytest.raises(InfrastructureError, match="no usable answer in 2 attempts; the last: APIConnectionError"):
        ask(make_endpoint(base_url="http://127.0.0.1:9/v1", max_attempts=2))


def test_a_refused_request_is_not_repeated(server: FakeServer, make_endpoint: Any) -> None:
    server.script = [401]
    with pytest.raises(InfrastructureError, match=r"refuses the request with status 401: .*the key in OPENAI_API_KEY"):
        ask(make_endpoint())
    assert len(server.requests) == 1


def test_backoff_doubles_up_to_a_limit(monkeypatch: pytest.MonkeyPatch, server: FakeServer, make_endpoint: Any) -> None:
    slept: list[float] = []
    monkeypatch.setattr("sinkflex.envs.users.endpoint.time.sleep", slept.append)
    server.script = [500]
    with pytest.raises(InfrastructureError, match="in 7 attempts"):
        ask(make_endpoint(backoff_s=2.0, max_attempts=7))
    longest = [2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert len(slept) == len(longest)
    assert all(limit / 2 <= pause <= limit for pause, limit in zip(slept, longest, strict=True))


@pytest.mark.parametrize(("asked", "slept"), [("7", 7.0), ("0.5", 2.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 2.0)])
def test_a_server_that_names_a_longer_wait_is_given_it(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer, make_endpoint: Any, asked: str, slept: float
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("sinkflex.envs.users.endpoint.time.sleep", pauses.append)
    monkeypatch.setattr("sinkflex.envs.users.endpoint.random.SystemRandom.uniform", lambda self, low, high: high)
    server.script = [(429, asked), text("ok")]
    assert ask(make_endpoint(backoff_s=2.0)).content == "ok"
    assert pauses == [slept]


def test_no_attempt_starts_after_the_deadline(server: FakeServer, make_endpoint: Any) -> None:
    server.script = [500, (429, "90")]
    started = time.monotonic()
    with pytest.raises(InfrastructureError, match=r"in 2 attempts, .* after deadline_s = 60; the last: status 429"):
        ask(make_endpoint(deadline_s=60.0))
    assert len(server.requests) == 2
    assert time.monotonic() - started < 30


def test_the_missing_sdk_is_named(monkeypatch: pytest.MonkeyPatch, make_endpoint: Any) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingExtraError, match=r"needs the openai SDK: pip install 'sinkflex\[llm\]'"):
        ask(make_endpoint())


def test_tokens_and_cost_are_counted_per_episode_and_in_total(server: FakeServer, make_endpoint: Any) -> None:
    server.script = [text("a", prompt_tokens=1000, completion_tokens=10), text("b", prompt_tokens=3000)]
    endpoint = make_endpoint(usd_per_million_input=2.0, usd_per_million_output=50.0)
    first, second = Usage(), Usage()
    endpoint.complete(SAY_HI, (), seed=0, usage=first)
    endpoint.complete(SAY_HI, (), seed=1, usage=second)
    assert (first.prompt_tokens, first.completion_tokens) == (1000, 10)
    assert first.cost_usd == pytest.approx(1000 * 2e-6 + 10 * 50e-6)
    assert second.to_metrics() == {
        "user_requests": 1.0,
        "user_retries": 0.0,
        "user_cached": 0.0,
        "user_prompt_tokens": 3000.0,
        "user_completion_tokens": 0.0,
        "user_cost_usd": pytest.approx(0.006),
    }
    assert endpoint.usage.prompt_tokens == 4000
    assert endpoint.usage.cost_usd == pytest.approx(0.0085)


def test_no_more_requests_than_allowed_are_in_flight(server: FakeServer, make_endpoint: Any) -> None:
    server.answer = lambda asked: (time.sleep(0.05), text("ok"))[1]
    endpoint = make_endpoint(max_concurrency=3)
    threads = [threading.Thread(target=ask, args=(endpoint,), kwargs={"seed": seed}) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.requests) == 12
    assert 2 <= server.most_busy <= 3


def test_a_recorded_run_repeats_offline(server: FakeServer, make_endpoint: Any, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    server.script = [text("one"), calls("look", '{"x":1}'), text("three")]
    recording = make_endpoint(Cassette(path, mode="record"))
    said = [ask(recording, tools=(LOOK,), seed=seed) for seed in (0, 1, 0)]
    assert [message.content for message in said] == ["one", "", "one"]
    assert len(server.requests) == 2
    offline = make_endpoint(Cassette(path, mode="replay"), base_url="http://127.0.0.1:9/v1")
    assert [ask(offline, tools=(LOOK,), seed=seed) for seed in (0, 1, 0)] == said
    assert offline.usage.cached == 3
    assert offline.usage.requests == 0
    with pytest.raises(InfrastructureError, match="holds no answer to this request; the run differs"):
        ask(offline, tools=(LOOK,), seed=9)
    with pytest.raises(InfrastructureError, match="holds no answer"):
        ask(offline, seed=0)


def test_wrong_options_are_named(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="cache_mode must be one of record, replay, got 'play'"):
        Cassette(tmp_path / "x", mode="play")
    with pytest.raises(EnvError, match="does not exist; record one first with cache_mode='record'"):
        Cassette(tmp_path / "x", mode="replay")
    with pytest.raises(EnvError, match="timeout_s must be positive, got 0"):
        EndpointConfig(model="m", timeout_s=0)
    with pytest.raises(EnvError, match=r"user 'llm' does not take options \['model', 'mood'\]"):
        DualControlEnv(domain="mock", user="llm", user_options={"model": "m", "mood": 1})


def lamp_owner(asked: Reply) -> Reply:
    """A stand-in for a model that plays the mock domain's user well."""
    last = asked["messages"][-1]
    if last["role"] == "tool":
        return text(f"it shines {STOP_MARK}" if last["content"] == '{"shines":true}' else "ok")
    heard = last["content"].lower()
    if "help" in heard:
        return text("my lamp is dark")
    if "mains" in heard:
        return text("yes, do it", prompt_tokens=7)
    if "switch" in heard:
        return calls("flip_switch", call_id="a")
    return calls("look_at_lamp", call_id="b") if "look" in heard else text(STOP_MARK)


@pytest.fixture
def llm_env(server: FakeServer) -> Iterator[gymnasium.Env[str, str]]:
    options = {"model": "m", "base_url": server.url, "backoff_s": 0.0, "max_attempts": 2}
    env = gymnasium.make("sinkflex/Mock-v0", user="llm", user_options=options)
    yield env
    env.close()


def test_an_llm_plays_the_user(server: FakeServer, llm_env: gymnasium.Env[str, str], play_oracle: Any) -> None:
    server.answer = lamp_owner
    score, _, info = play_oracle(llm_env, "mock-both")
    assert (score, info["stop_reason"]) == (1.0, "user_stop")
    assert info["messages"][-1].content == "it shines"
    assert info["metrics"]["user_requests"] == 6.0
    assert info["metrics"]["user_prompt_tokens"] == 7.0
    opening, second = server.requests[0], server.requests[1]
    assert "tools" not in opening
    assert [tool["function"]["name"] for tool in second["tools"]] == ["flip_switch", "look_at_lamp"]
    assert second["messages"][0]["content"].startswith("Your lamp is dark.")
    after_flip = server.requests[3]["messages"]
    assert after_flip[-2]["tool_calls"][0]["id"] == after_flip[-1]["tool_call_id"] == "a"


def test_a_wordless_stop_says_goodbye(server: FakeServer, llm_env: gymnasium.Env[str, str]) -> None:
    server.answer = lamp_owner
    llm_env.reset(options={"task_id": "mock-both"})
    _, reward, terminated, _, info = llm_env.step("nice weather")
    assert (reward, terminated, info["messages"][-1].content) == (0.0, True, "bye")


def test_an_outage_raises_and_never_scores(server: FakeServer, llm_env: gymnasium.Env[str, str]) -> None:
    server.answer = lamp_owner
    llm_env.reset(options={"task_id": "mock-both"})
    server.answer = None
    server.script = [503]
    with pytest.raises(InfrastructureError, match="status 503"):
        llm_env.step("look at the lamp")


def test_self_play_through_a_callable(play_oracle: Any) -> None:
    heard: list[tuple[Message, ...]] = []

    def sample(messages: Any, tools: Any, seed: int) -> str:
        heard.append(tuple(messages))
        reply = lamp_owner({"messages": [message.to_dict() for message in messages]})["message"]
        made = reply.get("tool_calls")
        if not made:
            return str(reply["content"])
        return f"<|channel|>commentary to=functions.{made[0]['function']['name']}<|message|>{{}}<|call|>"

    env = DualControlEnv(domain="mock", user="selfplay", user_options={"sample": sample})
    score, _, info = play_oracle(env, "mock-both")
    assert score == 1.0
    assert info["metrics"]["user_malformed"] == 0.0
    assert heard[0][0].role is Role.SYSTEM
    assert {message.role for message in heard[-1]} == {Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL}


def test_self_play_falls_back_when_the_policy_babbles() -> None:
    seeds: list[int] = []

    def babble(messages: Any, tools: Any, seed: int) -> str:
        seeds.append(seed)
        return "" if len(seeds) % 2 else '{"name":"turn_on_mains","arguments":{}}'

    env = DualControlEnv(domain="mock", user="selfplay", user_options={"sample": babble, "max_attempts": 4})
    _, info = env.reset(options={"task_id": "mock-both", "group_seed": 1})
    assert info["messages"][0].content == "sorry, can you say that again?"
    assert len(set(seeds)) == 4
    assert env.episode.outcome().metrics["user_malformed"] == 4.0
    with pytest.raises(EnvError, match="max_attempts must be at least 1, got 0"):
        DualControlEnv(domain="mock", user="selfplay", user_options={"sample": babble, "max_attempts": 0})
