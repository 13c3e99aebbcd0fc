"""What the agent loop needs from whatever samples tokens: one coroutine and one release.

The shape is verl's on purpose (``generate(request_id, prompt_ids=..., sampling=...)``), so the same loop runs on the
local engine, on vLLM and inside verl.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from sinkflex.errors import RolloutError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one assistant turn is sampled.

    Attributes:
        temperature: logits are divided by it; 0 means greedy. Log-probabilities are of the tempered distribution,
            and of the untempered one when greedy.
        top_p: nucleus mass in (0, 1]. Below 1 the sampled distribution is not the one whose log-probabilities are
            returned, so it is for evaluation only; the collector refuses to train on it.
        max_new_tokens: at least 1.
        stop_ids: sampling ends after one of these; it is kept as the last sampled id.
        seed: with the request id and the token's position it fixes the sampling noise.

    Raises:
        RolloutError: a field is outside its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int
    stop_ids: frozenset[int]
    seed: int

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise RolloutError(f"temperature must be finite and >= 0 (0 is greedy), got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise RolloutError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.max_new_tokens < 1:
            raise RolloutError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One sampled assistant turn.

    Attributes:
        token_ids: sampled ids, at least one; the last is a stop id when ``finish`` is ``"stop"``.
        logprobs: natural-log probability of each sampled id under the full distribution, at the sampling temperature.
        finish: ``"stop"`` after a stop id, ``"length"`` when ``max_new_tokens`` ran out first.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason


@runtime_checkable
class LLMClient(Protocol):
    """Samples the next assistant turn of a transcript."""

    async def generate(self, request_id: str, *, prompt_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Sample a continuation of ``prompt_ids``, which is the whole transcript so far.

        Args:
            request_id: the episode's id; equal ids let the engine keep keys and values between turns.
            prompt_ids: every token of the transcript, sampled ones included.
            sampling: see ``SamplingParams``.
        """
        ...

    def release(self, request_id: str) -> None:
        """Forget a request and free what is kept for it; unknown ids are ignored."""
        ...
