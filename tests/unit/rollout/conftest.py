"""A two-letter-alphabet chat format, an environment that fails on request, and a client that needs no model."""

from __future__ import annotations

import asyncio
import hashlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sinkflex.errors import InfrastructureError
from sinkflex.rollout import Collector, EpisodeLimits, FailurePolicy, Generation, SamplingParams
from sinkflex.types import Message, Role, StopReason, ToolSchema

# engine_lab serves two test files, which importlib mode does not let import each other.
sys.path.append(str(Path(__file__).parent))
from engine_lab import make_engine, model  # noqa: F401 (fixtures)

PAD, START, STOP = 0, 1, 2
FIRST_LETTER = 3
LETTERS = "abcdefghijklmnopqrstuvwxyz .?"
VOCABULARY = FIRST_LETTER + len(LETTERS)


class LetterRenderer:
    """One token a letter; ``START`` opens a message or the generation, ``STOP`` ends a sampled turn."""

    name = "letters"
    stop_ids = frozenset({STOP})

    def prompt(self, *, system: str, tools: Sequence[ToolSchema], messages: Sequence[Message]) -> list[int]:
        names = " ".join(tool.name for tool in tools)
        return [*self._text(system + names), *self._body(messages), START]

    def observation(self, messages: Sequence[Message], *, last_id: int) -> list[int]:
        return [*([] if last_id == STOP else [STOP]), *self._body(messages), START]

    def action_text(self, ids: Sequence[int]) -> str:
        return "".join(LETTERS[i - FIRST_LETTER] if i >= FIRST_LETTER else "" for i in ids)

    def action_ids(self, message: Message) -> list[int]:
        return [*self._text(message.content), STOP]

    def _body(self, messages: Sequence[Message]) -> list[int]:
        return [token for message in messages for token in (START, *self._text(message.content))]

    def _text(self, text: str) -> list[int]:
        return [FIRST_LETTER + LETTERS.index(letter) for letter in text.lower() if letter in LETTERS]


@dataclass(kw_only=True)
class Fault:
    """What goes wrong, in which episodes and when: ``turn`` 0 is the reset, ``times`` how often it happens at all."""

    kind: str
    turn: int = 1
    tasks: frozenset[str] = frozenset({"a", "b", "c"})
    times: int = 10**9


class EchoEnv:
    """Answers each action with letters that depend on task, group seed, turn and action; ends after ``turns``."""

    def __init__(self, *, turns: int = 3, fault: Fault | None = None, jitter_s: float = 0.0) -> None:
        self.turns = turns
        self.fault = fault
        self.jitter_s = jitter_s
        self.closed = 0
        self.resets: list[dict[str, Any]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        assert options is not None
        self.options = options
        self.turn = 0
        self.resets.append({"seed": seed, **options})
        self._maybe_fail()
        info = {
            "task_id": options["task_id"],
            "split": options["split"],
            "tier": "easy",
            "system": "be kind.",
            "tools": (ToolSchema(name="look", description="", parameters={}),),
            "messages": (Message(role=Role.USER, content=f"task {options['task_id']}"),),
        }
        if self._fails("no_tier"):
            del info["tier"]
        return "", info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        self._maybe_fail()
        if self.jitter_s:
            time.sleep(random.random() * self.jitter_s)
        token = f"{self.options['task_id']}/{self.options['group_seed']}/{self.turn}/{action}"
        digest = hashlib.sha256(token.encode()).digest()
        reply = "".join(LETTERS[byte % 26] for byte in digest[:6])
        invalid = None if action else "an action needs text"
        info: dict[str, Any] = {
            "messages": (Message(role=Role.USER, content=reply),),
            "invalid_action": invalid,
            "stop_reason": None,
        }
        ended = self.turn == self.turns
        if ended:
            score = float(digest[0] % 2)
            info |= {
                "stop_reason": str(StopReason.USER_STOP),
                "score": score,
                "components": {"world": score, "payment": None},
                "metrics": {"steps": float(self.turn)},
            }
        if self._fails("no_messages"):
            del info["messages"]
        if ended and self._fails("no_score"):
            del info["score"]
        reward = float("nan") if self._fails("nan_reward") else info.get("score", 0.0)
        return "", reward, ended, False, info

    def close(self) -> None:
        self.closed += 1
        if self.fault is not None and self.fault.kind == "raise_and_stuck":
            raise OSError("close failed too")

    def _fails(self, kind: str) -> bool:
        fault = self.fault
        if fault is None or fault.kind != kind or self.options["task_id"] not in fault.tasks:
            return False
        if fault.turn != self.turn or fault.times <= 0:
            return False
        fault.times -= 1
        return True

    def _maybe_fail(self) -> None:
        if self._fails("raise") or self._fails("raise_and_stuck"):
            raise ZeroDivisionError("the world broke")
        if self._fails("infrastructure"):
            raise InfrastructureError("user backend is down")
        if self._fails("spin"):
            while True:
                pass
        if self._fails("sleep"):
            time.sleep(2.0)


class LetterClient:
    """Samples letters from (seed, request id, position) alone and remembers what it was asked."""

    def __init__(self, *, turn_length: int = 4) -> None:
        self.turn_length = turn_length
        self.prompts: dict[str, list[tuple[int, ...]]] = {}
        self.sampling: list[SamplingParams] = []
        self.released: list[str] = []
        self.error: Exception | None = None

    async def generate(self, request_id: str, *, prompt_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        if self.error is not None:
            raise self.error
        self.prompts.setdefault(request_id, []).append(tuple(prompt_ids))
        self.sampling.append(sampling)
        await asyncio.sleep(0)
        rng = random.Random(f"{sampling.seed}/{request_id}/{len(prompt_ids)}")
        ids = [rng.randrange(FIRST_LETTER, VOCABULARY) for _ in range(self.turn_length - 1)] + [STOP]
        stopped = len(ids) <= sampling.max_new_tokens
        ids = ids[: sampling.max_new_tokens]
        return Generation(
            token_ids=tuple(ids),
            logprobs=tuple(-rng.random() for _ in ids),
            finish="stop" if stopped else "length",
        )

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


@dataclass(kw_only=True)
class Bench:
    """A collector with its parts in reach."""

    collector: Collector
    client: LetterClient
    envs: list[EchoEnv] = field(default_factory=list)


@pytest.fixture
def renderer() -> LetterRenderer:
    return LetterRenderer()


@pytest.fixture
def make_bench() -> Callable[..., Bench]:
    """Build a bench; keyword arguments are the environment's, the limits' or the collector's by name."""

    def build(
        *,
        fault: Fault | None = None,
        turns: int = 3,
        jitter_s: float = 0.0,
        max_length: int = 200,
        max_new_tokens: int = 8,
        step_timeout_s: float = 5.0,
        turn_length: int = 4,
        failures: FailurePolicy | None = None,
        **collector: Any,
    ) -> Bench:
        client = collector.pop("client", None) or LetterClient(turn_length=turn_length)
        envs: list[EchoEnv] = []

        def make_env() -> EchoEnv:
            envs.append(EchoEnv(turns=turns, fault=fault, jitter_s=jitter_s))
            return envs[-1]

        built = Collector(
            make_env=make_env,
            renderer=LetterRenderer(),
            client=client,
            limits=EpisodeLimits(max_length=max_length, max_new_tokens=max_new_tokens, step_timeout_s=step_timeout_s),
            failures=failures,
            **collector,
        )
        return Bench(collector=built, client=client, envs=envs)

    return build


@pytest.fixture
def fault_type() -> type[Fault]:
    return Fault


@pytest.fixture
def vocabulary() -> int:
    return VOCABULARY


@pytest.fixture
def echo_env() -> type[EchoEnv]:
    return EchoEnv
