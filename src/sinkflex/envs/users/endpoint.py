"""One OpenAI-compatible chat endpoint: retries, time limits, a concurrency limit, counts and recorded answers."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sinkflex.envs.users.cassette import Cassette
from sinkflex.errors import EnvError, InfrastructureError, MissingExtraError
from sinkflex.types import JSONObject, Message, Role, ToolCall, ToolSchema

MAX_BACKOFF_S = 30.0
_RETRIED_STATUS = frozenset({408, 409, 425, 429})


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointConfig:
    """How to reach and use an endpoint.

    Attributes:
        model: the model's name there.
        base_url: the endpoint's address up to ``/v1``; None takes the SDK's default.
        api_key_env: environment variable that holds the key; unset is fine for a server that wants none.
        temperature: sampling temperature.
        max_tokens: longest answer.
        timeout_s: seconds one request may go without an answer.
        deadline_s: seconds one answer may take with all its attempts and waits; no attempt starts after it.
        max_attempts: requests made for one answer before giving up.
        backoff_s: seconds before the second attempt; doubles with each, with jitter, up to ``MAX_BACKOFF_S``. A server
            that names a longer wait (``Retry-After``) is given it.
        max_concurrency: requests in flight at once, over all episodes of the process that share this endpoint.
        usd_per_million_input: price of prompt tokens, for ``cost_usd``.
        usd_per_million_output: price of completion tokens.

    Raises:
        EnvError: a limit is not positive.
    """

    model: str
    base_url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    temperature: float = 0.7
    max_tokens: int = 512
    timeout_s: float = 60.0
    deadline_s: float = 600.0
    max_attempts: int = 6
    backoff_s: float = 1.0
    max_concurrency: int = 16
    usd_per_million_input: float = 0.0
    usd_per_million_output: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_tokens", "timeout_s", "deadline_s", "max_attempts", "max_concurrency"):
            if getattr(self, name) <= 0:
                raise EnvError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(slots=True)
class Usage:
    """What an endpoint, or one episode on it, has used; answers from a cache cost nothing.

    Attributes:
        requests: answers obtained over the network.
        retries: attempts that failed before them.
        cached: answers taken from the cassette.
        prompt_tokens: as the endpoint counts them.
        completion_tokens: as the endpoint counts them.
        cost_usd: by the configured prices.
    """

    requests: int = 0
    retries: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0

    def to_metrics(self) -> dict[str, float]:
        """Return the counts as episode metrics, each led by ``user_``."""
        return {f"user_{name}": float(getattr(self, name)) for name in self.__slots__}


class _Refused(Exception):
    """An answer that is no use; the request is worth repeating, no sooner than ``wait_s`` from now."""

    def __init__(self, reason: str, *, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass(slots=True)
class ChatEndpoint:
    """Asks an endpoint for chat completions, with tools.

    Attributes:
        config: how.
        cassette: where answers are recorded and replayed, or None.
        usage: totals over all episodes.
    """

    config: EndpointConfig
    cassette: Cassette | None = None
    usage: Usage = field(default_factory=Usage)
    _client: Any = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _slots: threading.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._slots = threading.Semaphore(self.config.max_concurrency)

    def complete(self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, seed: int, usage: Usage) -> Message:
        """Return the model's next message.

        Args:
            messages: the conversation, with the model as assistant.
            tools: what it may call.
            seed: sent along and part of the cassette's key: equal seed and conversation get one answer.
            usage: one episode's counts, added to beside the totals.

        Raises:
            InfrastructureError: every attempt failed, or the endpoint refuses the request as such.
            MissingExtraError: the SDK is not installed.
        """
        request = self._request(messages, tools, seed)
        if self.cassette is not None:
            kept = self.cassette.find(request)
            if kept is not None:
                self._count(usage, cached=1)
                return Message.from_dict(kept)
        answer = self._ask(request, frozenset(tool.name for tool in tools), usage)
        if self.cassette is not None:
            answer = Message.from_dict(self.cassette.keep(request, answer.to_dict()))
        return answer

    def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        with self._lock:
            if self._client is not None:
                self._client.close()
            self._client = None

    def _request(self, messages: Sequence[Message], tools: Sequence[ToolSchema], seed: int) -> JSONObject:
        request: JSONObject = {
            "model": self.config.model,
            "messages": [_to_openai(message) for message in messages],
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_tokens,
            "seed": seed,
        }
        if tools:
            request["tools"] = [tool.to_openai() for tool in tools]
        return request

    def _ask(self, request: JSONObject, tool_names: frozenset[str], usage: Usage) -> Message:
        deadline = time.monotonic() + self.config.deadline_s
        for attempt in range(self.config.max_attempts):
            try:
                with self._slots:
                    # Another seed: a server that honours it would repeat an empty or broken answer for ever.
                    return self._attempt({**request, "seed": request["seed"] + attempt}, tool_names, usage)
            except _Refused as refusal:
                last, tried = refusal, attempt + 1
            if tried == self.config.max_attempts:
                break
            wait_s = max(self._backoff_s(tried), last.wait_s)
            if time.monotonic() + wait_s > deadline:
                raise InfrastructureError(
                    f"{self._where()} gave no usable answer in {tried} attempts, and the next would come after "
                    f"deadline_s = {self.config.deadline_s:g}; the last: {last}"
                )
            self._count(usage, retries=1)
            time.sleep(wait_s)
        raise InfrastructureError(f"{self._where()} gave no usable answer in {tried} attempts; the last: {last}")

    def _attempt(self, request: JSONObject, tool_names: frozenset[str], usage: Usage) -> Message:
        client = self._sdk()
        import openai

        try:
            reply = client.chat.completions.create(**request)
        except openai.APIStatusError as error:
            if error.status_code in _RETRIED_STATUS or error.status_code >= 500:
                raise _Refused(f"status {error.status_code}", wait_s=_retry_after_s(error.response)) from error
            raise InfrastructureError(
                f"{self._where()} refuses the request with status {error.status_code}: {error.message}; check the "
                f"model's name, base_url and the key in {self.config.api_key_env}"
            ) from error
        except openai.APITimeoutError as error:
            raise _Refused(f"no answer within {self.config.timeout_s} s") from error
        except (openai.APIError, ValueError) as error:
            raise _Refused(f"{type(error).__name__}: {error}") from error
        counted = getattr(reply, "usage", None)
        self._count(
            usage,
            requests=1,
            prompt_tokens=getattr(counted, "prompt_tokens", 0) or 0,
            completion_tokens=getattr(counted, "completion_tokens", 0) or 0,
        )
        return _read_reply(reply, tool_names)

    def _sdk(self) -> Any:
        with self._lock:
            if self._client is None:
                try:
                    import openai
                except ImportError as error:
                    raise MissingExtraError("the LLM user needs the openai SDK: pip install 'sinkflex[llm]'") from error
                self._client = openai.OpenAI(
                    base_url=self.config.base_url,
                    api_key=os.environ.get(self.config.api_key_env) or "none",
                    timeout=self.config.timeout_s,
                    max_retries=0,
                )
            return self._client

    def _count(self, usage: Usage, **counts: int) -> None:
        cost = (
            counts.get("prompt_tokens", 0) * self.config.usd_per_million_input
            + counts.get("completion_tokens", 0) * self.config.usd_per_million_output
        ) / 1e6
        with self._lock:
            for target in (usage, self.usage):
                for name, count in counts.items():
                    setattr(target, name, getattr(target, name) + count)
                target.cost_usd += cost

    def _backoff_s(self, tried: int) -> float:
        # Jitter keeps a group's members from retrying in step; it changes when an answer comes, not which.
        longest: float = min(self.config.backoff_s * 2 ** (tried - 1), MAX_BACKOFF_S)
        return longest * random.SystemRandom().uniform(0.5, 1.0)

    def _where(self) -> str:
        return f"model {self.config.model!r} at {self.config.base_url or 'the default endpoint'}"


def _retry_after_s(response: Any) -> float:
    """The wait that a server asks for; 0 where it names none, or a date, as its clock may not be ours."""
    try:
        return max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:
        return 0.0


def _to_openai(message: Message) -> JSONObject:
    record: JSONObject = {"role": str(message.role), "content": message.content}
    if message.tool_calls:
        record["content"] = message.content or None
        record["tool_calls"] = [
            {
                "id": made.call_id,
                "type": "function",
                "function": {"name": made.name, "arguments": json.dumps(dict(made.arguments))},
            }
            for made in message.tool_calls
        ]
    if message.role is Role.TOOL:
        record["tool_call_id"] = message.call_id
    return record


def _read_reply(reply: Any, tool_names: frozenset[str]) -> Message:
    """Return the answer as a message; an empty or broken one is refused."""
    choices = getattr(reply, "choices", None)
    if not choices or choices[0].message is None:
        raise _Refused("the reply holds no message")
    said = choices[0].message
    calls = [_read_call(made, number, tool_names) for number, made in enumerate(said.tool_calls or ())]
    if calls:
        return Message(role=Role.ASSISTANT, tool_calls=tuple(calls))
    content = (said.content or "").strip()
    if not content:
        raise _Refused("the reply is empty")
    return Message(role=Role.ASSISTANT, content=content)


def _read_call(made: Any, number: int, tool_names: frozenset[str]) -> ToolCall:
    name = getattr(made.function, "name", None)
    if name not in tool_names:
        raise _Refused(f"the reply calls {name!r}, which is none of the user's tools")
    try:
        arguments = json.loads(made.function.arguments or "{}")
    except (TypeError, ValueError) as error:
        raise _Refused(f"the arguments of {name} are broken JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise _Refused(f"the arguments of {name} are no JSON object")
    return ToolCall(name=name, arguments=arguments, call_id=made.id or f"call_{number}")
