"""The local engine: slots, prefixes, queueing, determinism and what it says when something is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_lab import (
    LENGTH,
    SHAPE,
    STOP,
    VOCAB,
    build_model,
    close,
    perturb,
    play,
    sampling,
    tokens,
)

from sinkflex.attention import hf
from sinkflex.errors import ModelError, RolloutError
from sinkflex.models import build_tiny_model
from sinkflex.rollout import Generation, GroupSpec
from sinkflex.rollout.engines.local import RIDE_ALONG_TOKENS, LocalEngine


def test_an_answer_ends_with_a_stop_id_or_at_its_budget(make_engine: Callable[..., LocalEngine]) -> None:
    answers = play(make_engine(), {f"r{i}": tokens(10, seed=i) for i in range(4)}, turns=3)
    finishes = set()
    for answer in (answer for turns in answers.values() for answer in turns):
        finishes.add(answer.finish)
        assert len(answer.token_ids) == len(answer.logprobs) <= 8
        assert (answer.token_ids[-1] == STOP) == (answer.finish == "stop")
        assert STOP not in answer.token_ids[:-1]
        assert all(value <= 0 for value in answer.logprobs)
    everything = play(make_engine(), {"r": tokens(10, seed=0)}, params=sampling(stop_ids=frozenset(range(VOCAB))))
    assert everything["r"][0].finish == "stop"
    assert len(everything["r"][0].token_ids) == 1
    assert "length" in finishes


def test_same_calls_give_bit_identical_results(make_engine: Callable[..., LocalEngine]) -> None:
    prompts = {f"r{i}": tokens(30, seed=i // 2) for i in range(6)}
    engine = make_engine()
    first = play(engine, prompts, turns=3)
    assert play(make_engine(), prompts, turns=3) == first
    # Also on a used engine, whose slots hold other transcripts by now.
    play(engine, {"other": tokens(60, seed=9)}, turns=2)
    assert play(engine, prompts, turns=3) == first


def test_tokens_do_not_depend_on_who_shares_the_batch(make_engine: Callable[..., LocalEngine]) -> None:
    prompts = {f"r{i}": tokens(12 + 9 * i, seed=i) for i in range(4)}
    together = play(make_engine(), prompts, turns=3)
    for name, prompt in prompts.items():
        assert close(play(make_engine(), {name: prompt}, turns=3)[name], together[name])
    backwards = play(make_engine(), dict(reversed(prompts.items())), turns=3)
    assert all(close(backwards[name], together[name]) for name in prompts)


def test_noise_differs_by_seed_request_and_position(make_engine: Callable[..., LocalEngine]) -> None:
    prompt = tokens(20, seed=0)
    same = play(make_engine(), {"a": prompt, "b": prompt})
    assert same["a"] != same["b"]
    assert play(make_engine(), {"a": prompt}, params=sampling(seed=1))["a"] != same["a"]


def test_greedy_is_the_likeliest_token_at_each_step(model: Any, make_engine: Callable[..., LocalEngine]) -> None:
    prompt = tokens(20, seed=3)
    answer = play(make_engine(), {"a": prompt}, params=sampling(temperature=0.0, stop_ids=frozenset()))["a"][0]
    ids = list(prompt)
    with torch.no_grad():
        for token in answer.token_ids:
            assert token == int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)


def test_a_group_computes_its_prompt_once(make_engine: Callable[..., LocalEngine]) -> None:
    system, length = tokens(40, seed=0), 60
    prompts = {f"g{i // 4}/{i}": system + tokens(20, seed=1 + i // 4) for i in range(8)}
    engine = make_engine(max_slots=8)
    answers = play(engine, prompts)
    # First the leader, then the second group's user part behind the copied system prompt; all others copy.
    assert engine.stats.prefilled_tokens == (length - 1) + (length - 1 - len(system))
    assert engine.stats.copied_tokens == len(system) + 6 * (length - 1)
    alone = {name: play(make_engine(), {name: prompt})[name] for name, prompt in prompts.items()}
    assert all(close(answers[name], alone[name]) for name in prompts)


@pytest.mark.parametrize("observed", [1, RIDE_ALONG_TOKENS, RIDE_ALONG_TOKENS + 1, 40])
def test_turns_reuse_what_the_slot_holds(make_engine: Callable[..., LocalEngine], observed: int) -> None:
    engine = make_engine()
    prompt = tokens(30, seed=4)
    answers = play(engine, {"a": prompt}, turns=3, observed=observed)["a"]
    transcript = len(prompt) + sum(len(a.token_ids) for a in answers) + 2 * observed
    # Every token but the last sampled one went through the model exactly once.
    assert engine.stats.processed_tokens == transcript - 1
    assert engine.stats.copied_tokens == engine.stats.evictions == 0


def test_more_requests_than_slots_wait_or_are_evicted_without_a_difference(
    make_engine: Callable[..., LocalEngine],
) -> None:
    prompts = {f"r{i}": tokens(10 + 7 * i, seed=i) for i in range(7)}
    roomy = play(make_engine(max_slots=7), prompts, turns=3)
    for slots in (1, 2, 3):
        engine = make_engine(max_slots=slots)
        narrow = play(engine, prompts, turns=3)
        assert engine.stats.evictions > 0
        assert all(close(narrow[name], roomy[name]) for name in prompts)


def test_small_prefill_passes_change_nothing(make_engine: Callable[..., LocalEngine]) -> None:
    prompts = {f"r{i}": tokens(40 + 20 * i, seed=i) for i in range(4)}
    expected = play(make_engine(), prompts, turns=2, observed=30)
    for chunk in (1, 7, 33):
        engine = make_engine(prefill_chunk=chunk)
        answers = play(engine, prompts, turns=2, observed=30)
        assert all(close(answers[name], expected[name]) for name in prompts)


def test_a_rewritten_transcript_is_computed_again_from_where_it_departs(
    make_engine: Callable[..., LocalEngine],
) -> None:
    engine = make_engine()
    first, second = tokens(50, seed=1), tokens(50, seed=1)
    second[20:] = tokens(30, seed=2)

    async def both() -> Generation:
        await engine.generate("a", prompt_ids=first, sampling=sampling())
        return await engine.generate("a", prompt_ids=second, sampling=sampling())

    answer = asyncio.run(both())
    assert close([answer], play(make_engine(), {"a": second})["a"])


def test_the_same_transcript_twice_gives_the_same_answer(make_engine: Callable[..., LocalEngine]) -> None:
    engine = make_engine()

    async def twice() -> tuple[Generation, Generation]:
        prompt = tokens(30, seed=1)
        return (
            await engine.generate("a", prompt_ids=prompt, sampling=sampling()),
            await engine.generate("a", prompt_ids=prompt, sampling=sampling()),
        )

    one, two = asyncio.run(twice())
    assert close([one], [two])


def test_after_an_update_nothing_stale_is_used(make_engine: Callable[..., LocalEngine]) -> None:
    model = build_model()
    engine = LocalEngine(model, max_slots=4, max_length=LENGTH)
    prompt = tokens(40, seed=1)

    async def turn(ids: list[int]) -> Generation:
        return await engine.generate("a", prompt_ids=ids, sampling=sampling())

    ids = [*prompt, *asyncio.run(turn(prompt)).token_ids, *tokens(4, seed=2)]
    perturb(model)
    engine.reset_cache()
    # "a" is between turns: its slot must be computed again under the new weights.
    fresh = LocalEngine(model, max_slots=4, max_length=LENGTH)
    assert close([asyncio.run(turn(ids))], play(fresh, {"a": ids})["a"])


def test_without_the_reset_stale_keys_would_be_seen(make_engine: Callable[..., LocalEngine]) -> None:
    """The test above can fail: the same steps without ``reset_cache`` give other log-probabilities."""
    model = build_model()
    engine = LocalEngine(model, max_slots=4, max_length=LENGTH)
    prompt = tokens(40, seed=1)

    async def turn(ids: list[int]) -> Generation:
        return await engine.generate("a", prompt_ids=ids, sampling=sampling())

    ids = [*prompt, *asyncio.run(turn(prompt)).token_ids, *tokens(4, seed=2)]
    perturb(model)
    fresh = LocalEngine(model, max_slots=4, max_length=LENGTH)
    assert not close([asyncio.run(turn(ids))], play(fresh, {"a": ids})["a"])


def test_training_mode_is_left_as_it_was(make_engine: Callable[..., LocalEngine]) -> None:
    model = build_model()
    for mode in (True, False):
        model.train(mode)
        play(LocalEngine(model, max_slots=2, max_length=LENGTH), {"a": tokens(5, seed=0)})
        assert model.training is mode
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("prompt", "changes", "match"),
    [
        ([], {}, "request 'a': prompt_ids is empty"),
        ([3] * 155, {}, "155 prompt tokens and max_new_tokens=8 exceed max_length=160"),
    ],
)
def test_bad_requests(
    make_engine: Callable[..., LocalEngine], prompt: list[int], changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(RolloutError, match=match):
        play(make_engine(), {"a": prompt}, params=sampling(**changes))


def test_a_transcript_may_fill_the_slot_exactly(make_engine: Callable[..., LocalEngine]) -> None:
    params = sampling(stop_ids=frozenset())
    answer = play(make_engine(), {"a": [3] * (LENGTH - 8), "b": tokens(9, seed=1)}, params=params)["a"][0]
    assert len(answer.token_ids) == 8


def test_one_request_id_cannot_generate_twice_at_once(make_engine: Callable[..., LocalEngine]) -> None:
    engine = make_engine()

    async def twice() -> None:
        await asyncio.gather(*(engine.generate("a", prompt_ids=[3], sampling=sampling()) for _ in range(2)))

    with pytest.raises(RolloutError, match="request 'a' is already generating"):
        asyncio.run(twice())


def test_weights_must_not_change_under_a_running_request(make_engine: Callable[..., LocalEngine]) -> None:
    engine = make_engine()

    async def during() -> None:
        running = asyncio.ensure_future(engine.generate("a", prompt_ids=[3], sampling=sampling()))
        await asyncio.sleep(0)
        with pytest.raises(RolloutError, match=r"reset_cache while 1 requests generate \(one is 'a'\)"):
            engine.reset_cache()
        await running

    asyncio.run(during())


@pytest.mark.parametrize("name", ["max_slots", "max_length", "prefill_chunk"])
def test_sizes_are_positive(make_engine: Callable[..., LocalEngine], name: str) -> None:
    with pytest.raises(RolloutError, match=f"{name} must be at least 1, got 0"):
        make_engine(**{name: 0})


def test_another_attention_is_refused() -> None:
    model = build_model()
    model.config._attn_implementation = "eager"
    with pytest.raises(ModelError, match="attn_implementation is 'eager'; the local engine needs 'sinkflex'"):
        LocalEngine(model, max_slots=1, max_length=8)


def test_stats_count_since_the_last_reset(make_engine: Callable[..., LocalEngine]) -> None:
    engine = make_engine()
    answer = play(engine, {"a": tokens(12, seed=0)})["a"][0]
    stats = engine.reset_stats()
    assert (stats.sampled_tokens, stats.prefilled_tokens, stats.forced_tokens) == (len(answer.token_ids), 11, 0)
    assert (stats.decode_passes, stats.prefill_passes) == (len(answer.token_ids), 1)
    assert engine.stats.processed_tokens == 0


def test_a_short_prompt_rides_along_with_decoding(make_engine: Callable[..., LocalEngine]) -> None:
    engine = make_engine()
    answer = play(engine, {"a": tokens(RIDE_ALONG_TOKENS + 1, seed=0)})["a"][0]
    stats = engine.reset_stats()
    assert (stats.forced_tokens, stats.prefill_passes) == (RIDE_ALONG_TOKENS, 0)
    assert stats.decode_passes == RIDE_ALONG_TOKENS + len(answer.token_ids)


def test_the_collector_runs_on_it(make_bench: Callable[..., Any], vocabulary: int, renderer: Any) -> None:
    hf.register()
    model = build_tiny_model(
        SHAPE,
        vocab_size=vocabulary,
        pad_token_id=0,
        eos_token_id=STOP,
        attention="sinkflex",
        experts_implementation="eager",
        seed=1,
    )
    specs = [GroupSpec(task_id=task, split="train", group_seed=3, size=4) for task in ("a", "b")]
    results = []
    for slots in (8, 3):
        engine = LocalEngine(model, max_slots=slots, max_length=LENGTH)
        bench = make_bench(client=engine, max_length=LENGTH, max_new_tokens=10)
        results.append(bench.collector.run(specs, seed=5))
        assert bench.collector.run(specs, seed=5) == results[-1]
    for one, two in zip(*results, strict=True):
        for a, b in zip(one.trajectories, two.trajectories, strict=True):
            assert a.ledger.ids == b.ledger.ids
            assert a.messages == b.messages
    assert len({t.ledger.ids for group in results[0] for t in group.trajectories}) == 8
