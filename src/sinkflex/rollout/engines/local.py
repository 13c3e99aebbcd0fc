"""The local engine: continuous batching over key/value slots, in this process, on the trainer's own module."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from sinkflex.attention.layout import SequenceLayout
from sinkflex.errors import ModelError, RolloutError
from sinkflex.rollout.client import FinishReason, Generation, SamplingParams
from sinkflex.rollout.engines.sampling import request_key, sample_tokens, uniforms
from sinkflex.rollout.engines.slots import IntArray, SlotCache, SlotTable

# A stretch of known tokens longer than this is prefilled in a pass of its own; a shorter one rides along with the other
# rows' decoding, a token a pass. A pass costs much the same for few tokens as for many, so what counts is how many
# passes an episode takes one after the other: riding along with 24 made a collection take half as long again.
RIDE_ALONG_TOKENS = 2
# A shared prefix shorter than this is not worth a copy.
MIN_SHARED_TOKENS = 8


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

    def __init__(self, model: nn.Module, *, max_slots: int, max_length: int, prefill_chunk: int = 4096) -> None:
        """Wrap a model; memory for keys and values is taken at the first call.

        Args:
            model: causal LM with ``attn_implementation="sinkflex"`` (a peft wrapper is fine). It stays shared with the
                trainer: call ``reset_cache`` after every update of its weights.
            max_slots: requests in flight at once.
            max_length: longest transcript, in tokens, prompt and sampled together.
            prefill_chunk: most tokens in one prefill pass, over all its rows; bounds activation memory.

        Raises:
            RolloutError: a size is below 1.
            ModelError: the model attends by something else than sinkflex.
        """
        for name, value in (("max_slots", max_slots), ("max_length", max_length), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise RolloutError(f"{name} must be at least 1, got {value}")
        implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
        if not str(implementation).startswith("sinkflex"):
            raise ModelError(
                f"the model's attn_implementation is {implementation!r}; the local engine needs 'sinkflex' (call "
                "sinkflex.attention.hf.register() and load the model with attn_implementation='sinkflex')"
            )
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
        self._in_flight: set[str] = set()
        self._pump: asyncio.Task[None] | None = None
        self._tainted = False

    # -- the client's side ---------------------------------------------------------------------------------------------

    async def generate(self, request_id: str, *, prompt_ids: Sequence[int], sampling: SamplingParams) -> Generation:
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
        if not self._table.slot_of and not self._in_flight:
            # What earlier collections left behind must not change the rounding of this one.
            self._table.forget()
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
        self._table.release(request_id)

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
        except BaseException as error:
            self._fail_all(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._model.train(was_training)

    def _fail_all(self, error: BaseException) -> None:
        """Hand an error of the model or the machine to everyone who waits; nothing computed is trusted after it."""
        for request in (*self._running.values(), *self._waiting):
            if isinstance(error, asyncio.CancelledError):
                request.future.cancel()
            elif not request.future.done():
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
        """Give waiting requests their slots, in order; then compute what is long, shared prefixes once."""
        fresh: list[int] = []
        resumed: list[int] = []
        while self._waiting:
            claim = self._table.claim(self._waiting[0].request_id, busy=self._running)
            if claim is None:
                break
            request = self._waiting.popleft()
            self._running[claim.slot] = request
            self._table.extend(claim.slot, request.prompt)
            self.stats.evictions += claim.evicts
            (fresh if claim.is_new else resumed).append(claim.slot)
        self._share_prefixes(fresh)
        self._prefill([slot for slot in resumed if self._table.missing(slot) > RIDE_ALONG_TOKENS])

    def _share_prefixes(self, slots: list[int]) -> None:
        """Compute new prompts in rounds: what several share is computed by the first and copied by the others."""
        table = self._table
        while slots:
            ready: list[int] = []
            later: list[int] = []
            wanted: set[int] = set()
            copies: dict[tuple[int, int], list[int]] = {}
            for slot in slots:
                prefix = table.common_prefix(slot)
                prefix[slot] = table.computed[slot]
                available = np.minimum(prefix, table.computed)
                best = int(available.argmax())
                ahead = ready + later
                planned = ahead[int(prefix[ahead].argmax())] if ahead else slot
                if prefix[planned] - available[best] >= MIN_SHARED_TOKENS:
                    later.append(slot)
                    wanted.add(planned)
                    continue
                ready.append(slot)
                if available[best] - table.computed[slot] >= MIN_SHARED_TOKENS:
                    copies.setdefault((best, int(available[best])), []).append(slot)
            for (source, length), targets in copies.items():
                self._cache.copy_prefix(source=source, targets=targets, length=length)
                table.computed[targets] = length
                self.stats.copied_tokens += length * len(targets)
            self._prefill([s for s in ready if s in wanted or table.missing(s) > RIDE_ALONG_TOKENS])
            slots = later

    def _prefill(self, slots: list[int]) -> None:
        """Compute all but the last known token of each slot, rows of similar length together."""
        table = self._table
        pending = [slot for slot in slots if table.missing(slot) > 0]
        while pending:
            pending.sort(key=lambda slot: (-table.missing(slot), slot))
            chunk = min(table.missing(pending[0]), self.prefill_chunk)
            batch = [
                slot
                for slot in pending
                if 2 * table.missing(slot) >= chunk and table.computed[slot] + chunk <= self.max_length
            ][: max(1, self.prefill_chunk // chunk)]
            counts = np.array([min(table.missing(slot), chunk) for slot in batch])
            rows = np.array(batch)
            # A shorter row runs on into its padding. What that writes lies beyond its end, where no query looks before
            # a real token has been written there.
            positions = table.computed[rows][:, None] + np.arange(chunk)
            tokens = table.tokens[rows[:, None], positions]
            self._forward(rows, tokens, positions)
            table.computed[rows] += counts
            self.stats.prefill_passes += 1
            self.stats.prefilled_tokens += int(counts.sum())
            pending = [slot for slot in pending if table.missing(slot) > 0]

    def _compact(self) -> None:
        """Move running slots to the front when too many idle rows would be carried through the decode pass."""
        count = len(self._running)
        if max(self._running) + 1 <= count + count // 4 + 1:
            return
        gaps = [slot for slot in range(count) if slot not in self._running]
        for gap, slot in zip(gaps, sorted(slot for slot in self._running if slot >= count), strict=True):
            self._cache.swap(gap, slot, length=int(self._table.known[[gap, slot]].max()))
            self._table.swap(gap, slot)
            self._running[gap] = self._running.pop(slot)

    def _decode(self) -> None:
        """Feed one token of every running request and sample where the transcript's end is reached."""
        table = self._table
        top = max(self._running) + 1
        running = np.array(sorted(self._running))
        positions = table.computed[:top].copy()
        tokens = table.tokens[np.arange(top), positions]
        # An idle row between running ones writes its dummy token behind its own end, or to the scratch index.
        logits = self._forward(None, tokens[:, None], positions[:, None])
        table.computed[running] += 1
        sampling = running[table.computed[running] == table.known[running]]
        self.stats.decode_passes += 1
        self.stats.sampled_tokens += len(sampling)
        self.stats.forced_tokens += len(running) - len(sampling)
        if len(sampling):
            rows = logits[:, -1] if len(sampling) == top else logits[torch.from_numpy(sampling).to(logits.device), -1]
            self._sample(sampling, rows)

    def _sample(self, slots: IntArray, logits: Tensor) -> None:
        """Draw the next token of ``slots`` [n] from ``logits`` [n, V]; answer the requests that are done."""
        table = self._table
        requests = [self._running[slot] for slot in slots.tolist()]
        positions = table.known[slots]
        noise = uniforms(np.array([request.key for request in requests], dtype=np.uint64), positions)
        top_p = [request.sampling.top_p for request in requests]
        tokens, logprobs, log_normaliser = sample_tokens(
            logits,
            temperature=logits.new_tensor([r.sampling.temperature for r in requests], dtype=torch.float32),
            top_p=logits.new_tensor(top_p, dtype=torch.float64) if min(top_p) < 1.0 else None,
            noise=torch.from_numpy(noise).to(logits.device),
        )
        if not bool(log_normaliser.isfinite().all()):
            broken = int((~log_normaliser.isfinite()).nonzero()[0, 0])
            raise ModelError(
                f"request {requests[broken].request_id!r}: the model returned NaN or infinite logits for position "
                f"{int(positions[broken])}; the weights or the learning rate have diverged"
            )
        new = tokens.cpu().numpy()
        table.tokens[slots, positions] = new
        table.known[slots] += 1
        for slot, request, token, logprob in zip(
            slots.tolist(), requests, new.tolist(), logprobs.tolist(), strict=True
        ):
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            stopped = token in request.sampling.stop_ids
            if stopped or len(request.token_ids) == request.sampling.max_new_tokens:
                self._answer(slot, request, finish="stop" if stopped else "length")

    def _answer(self, slot: int, request: _Request, *, finish: FinishReason) -> None:
        del self._running[slot]
        request.future.set_result(
            Generation(token_ids=tuple(request.token_ids), logprobs=tuple(request.logprobs), finish=finish)
        )

    def _forward(self, rows: IntArray | None, tokens: IntArray, positions: IntArray) -> Tensor:
        """Run ``tokens`` [m, T] at ``positions`` [m, T] of slots ``rows`` [m] (None: the first m); [m, 1, V] logits."""
        device = next(self._causal_lm.parameters()).device
        places = torch.from_numpy(positions).to(device)
        limit = int(positions.max()) + 1
        self._cache.route(
            rows=None if rows is None else torch.from_numpy(rows).to(device), positions=places, limit=limit
        )
        output = self._causal_lm(
            input_ids=torch.from_numpy(tokens).to(device),
            position_ids=places,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self._cache},
            layout=SequenceLayout.decode(
                (positions[:, -1] + 1).tolist(), limit, num_queries=positions.shape[1], device=device
            ),
        )
        logits: Tensor = output.logits
        return logits


def _unwrap(model: nn.Module) -> nn.Module:
    """Take peft's wrapper off; the layers it injected stay in place."""
    unwrap = getattr(model, "get_base_model", None)
    inner: nn.Module = model if unwrap is None else unwrap()
    return inner


def _cache_argument(model: nn.Module) -> str:
    """Newer transformers call it ``cache`` and warn about ``past_key_values``; older ones only know the latter."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
