"""The local engine: continuous batching over key/value slots, in this process, on the trainer's own module."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor, nn

from sinkflex.errors import ModelError, RolloutError
from sinkflex.rollout.client import FinishReason, Generation, SamplingParams
from sinkflex.rollout.engines.sampling import request_key, sample_tokens, uniforms
from sinkflex.rollout.engines.slots import IntArray, SlotCache, SlotTable

# A stretch of known tokens longer than this is prefilled in one pass; a shorter one rides along with the other rows'
# decoding, where a token costs far less than a pass of its own. Also the least prefix worth waiting for.
RIDE_ALONG_TOKENS = 24


@dataclass(kw_only=True)
class EngineStats:
    """What the engine did since it was made or ``reset_stats`` was called; counts of tokens and forward passes."""

    decode_passes: int = 0
    prefill_passes: int = 0
    sampled_tokens: int = 0
    forced_tokens: int = 0
    prefilled_tokens: int = 0
    copied_tokens: int = 0
    evictions: int = 0

    @property
    def processed_tokens(self) -> int:
        """Tokens that went through the model (copied ones did not)."""
        return self.sampled_tokens + self.forced_tokens + self.prefilled_tokens


@dataclass(kw_only=True, eq=False)
class _Request:
    """One call of ``generate`` while it runs."""

    request_id: str
    prompt: IntArray
    sampling: SamplingParams
    key: int
    future: asyncio.Future[Generation]
    slot: int = -1
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class LocalEngine:
    """An ``LLMClient`` over a Hugging Face causal LM.

    Every pass feeds one token of every running request: a known one (prompt, observation) or the one just sampled. Keys
    and values stay in the request's slot between turns. A new request copies the longest prefix that any slot already
    holds, so a group's prompt is computed once. Requests beyond ``max_slots`` wait in order; a slot whose request waits
    on its environment may be taken, and is computed again later.

    There are no threads and no hidden clocks: the same calls in the same order give bit-identical results. Sampling
    noise depends on (seed, request id, position) only, so who shares the batch matters to rounding and nothing else.
    """

    def __init__(self, model: nn.Module, *, max_slots: int, max_length: int, prefill_chunk: int = 256) -> None:
        """Wrap a model; memory for keys and values is taken at the first call.

        Args:
            model: causal LM with ``attn_implementation="sinkflex"`` (a peft wrapper is fine). It stays shared with the
                trainer: call ``reset_cache`` after every update of its weights.
            max_slots: requests in flight at once.
            max_length: longest transcript, in tokens, prompt and sampled together.
            prefill_chunk: most tokens of one request in one prefill pass.

        Raises:
            RolloutError: a size is below 1.
            ModelError: the model attends by something else than sinkflex.
        """
        for name, value in (("max_slots", max_slots), ("max_length", max_length), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise RolloutError(f"{name} must be at least 1, got {value}")
        self.max_slots = max_slots
        self.max_length = max_length
        self.prefill_chunk = prefill_chunk
        self.stats = EngineStats()
        self._model = model
        self._causal_lm = _unwrap(model)
        self._cache = SlotCache(slots=max_slots, max_length=max_length)
        self._cache_argument = _cache_argument(self._causal_lm)
        self._table = SlotTable(slots=max_slots, max_length=max_length)
        self._waiting: deque[_Request] = deque()
        self._running: dict[int, _Request] = {}
        self._slot_of: dict[str, int] = {}
        self._in_flight: set[str] = set()
        self._pump: asyncio.Task[None] | None = None
        self._clock = 0
        self._tainted = False

    # -- the client's side ---------------------------------------------------------------------------------------------

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling: SamplingParams
    ) -> Generation:
        """Sample one turn after ``prompt_ids``, the whole transcript so far.

        What the slot holds of it is reused; a transcript that departs from what was held is computed again from there.

        Raises:
            RolloutError: the prompt is empty, prompt and ``max_new_tokens`` exceed ``max_length``, or the same request
                is already generating.
            ModelError: the model returned NaN or infinite logits; names the request and the position.
        """
        self._check(request_id, prompt_ids, sampling)
        loop = asyncio.get_running_loop()
        request = _Request(
            request_id=request_id,
            prompt=np.asarray(prompt_ids, dtype=np.int64),
            sampling=sampling,
            key=request_key(request_id, seed=sampling.seed),
            future=loop.create_future(),
        )
        self._in_flight.add(request_id)
        self._waiting.append(request)
        if self._pump is None or self._pump.done():
            self._pump = loop.create_task(self._run())
        try:
            return await request.future
        finally:
            self._in_flight.discard(request_id)

    def release(self, request_id: str) -> None:
        """Give the request's slot back; its contents still serve as a prefix for others until overwritten."""
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            self._table.owner[slot] = None

    def reset_cache(self) -> None:
        """Forget all keys and values; must follow every update of the weights.

        Requests between turns keep their place and are computed again under the new weights.

        Raises:
            RolloutError: a request is generating.
        """
        if self._in_flight:
            raise RolloutError(
                f"reset_cache while {len(self._in_flight)} requests generate (one is {min(self._in_flight)!r}); "
                "update weights between rollouts"
            )
        self._table.forget()
        if self._tainted:
            self._cache.clear()
            self._tainted = False

    def reset_stats(self) -> EngineStats:
        """Return the counts so far and start new ones."""
        stats, self.stats = self.stats, EngineStats()
        return stats

    def _check(self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        if request_id in self._in_flight:
            raise RolloutError(f"request {request_id!r} is already generating; request ids must be unique")
        if not len(prompt_ids):
            raise RolloutError(f"request {request_id!r}: prompt_ids is empty; a transcript has at least one token")
        if len(prompt_ids) + sampling.max_new_tokens > self.max_length:
            raise RolloutError(
                f"request {request_id!r}: {len(prompt_ids)} prompt tokens and max_new_tokens="
                f"{sampling.max_new_tokens} exceed max_length={self.max_length}; shorten the budget or raise it"
            )

    # -- the engine's side ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Step until nothing is left; between steps, whoever got an answer runs and may ask again."""
        was_training = self._model.training
        self._model.eval()
        try:
            while self._waiting or self._running:
                with torch.no_grad():
                    self._step()
                await asyncio.sleep(0)
        except Exception as error:
            self._fail_all(error)
        finally:
            self._model.train(was_training)

    def _fail_all(self, error: Exception) -> None:
        """Hand an error of the model or the machine to everyone who waits; nothing computed is trusted after it."""
        for request in (*self._running.values(), *self._waiting):
            if not request.future.done():
                request.future.set_exception(error)
        self._running.clear()
        self._waiting.clear()
        self._table.forget()
        self._tainted = True

    def _step(self) -> None:
        self._drop_cancelled()
        self._admit()
        if not self._running:
            return
        self._compact()
        self._decode()

    def _drop_cancelled(self) -> None:
        for slot, request in list(self._running.items()):
            if request.future.done():
                del self._running[slot]
        if any(request.future.done() for request in self._waiting):
            self._waiting = deque(request for request in self._waiting if not request.future.done())

    def _admit(self) -> None:
        """Give waiting requests their slots, in order, then share prefixes and prefill what is long."""
        fresh: list[_Request] = []
        resumed: list[int] = []
        while self._waiting:
            request = self._waiting[0]
            slot = self._slot_of.get(request.request_id)
            is_new = slot is None
            if slot is None:
                slot = self._claim_slot()
            if slot is None:
                break
            self._waiting.popleft()
            request.slot = slot
            self._running[slot] = request
            if is_new:
                self._table.owner[slot] = request.request_id
                self._slot_of[request.request_id] = slot
                self._table.known[slot] = self._table.computed[slot] = 0
                fresh.append(request)
            elif self._table.computed[slot] == 0:
                fresh.append(request)
            else:
                resumed.append(slot)
            self._clock += 1
            self._table.last_used[slot] = self._clock
            if not is_new or True:
                self._table.extend(slot, request.prompt)
        self._prefill(resumed)
        self._share_prefixes(fresh)
