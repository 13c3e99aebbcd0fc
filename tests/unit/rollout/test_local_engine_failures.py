"""The local engine when the model, the machine or the caller fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_lab import (
    LENGTH,
    build_model,
    close,
    play,
    sampling,
    tokens,
)

from sinkflex.errors import ModelError
from sinkflex.rollout import Generation
from sinkflex.rollout.engines.local import LocalEngine


def test_nan_logits_name_the_request_and_the_position() -> None:
    model = build_model()
    engine = LocalEngine(model, max_slots=4, max_length=LENGTH)
    healthy = play(engine, {"a": tokens(10, seed=0)})
    saved = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.raises(ModelError, match=r"request 'a': the model returned NaN or infinite logits for position 10"):
        play(engine, {"a": tokens(10, seed=0)})
    with torch.no_grad():
        model.lm_head.weight.copy_(saved)
    engine.reset_cache()
    assert play(engine, {"a": tokens(10, seed=0)}) == healthy


def test_nan_keys_do_not_outlive_a_reset() -> None:
    model = build_model()
    engine = LocalEngine(model, max_slots=4, max_length=LENGTH)
    healthy = play(engine, {"a": tokens(60, seed=0)})
    saved = model.model.embed_tokens.weight.detach().clone()
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="NaN or infinite logits"):
        play(engine, {"b": tokens(100, seed=1)})
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(saved)
    engine.reset_cache()
    assert close(play(engine, {"a": tokens(60, seed=0)})["a"], healthy["a"])


def test_an_error_of_the_machine_reaches_everyone_who_waits(
    make_engine: Callable[..., LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_slots=1)

    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError("no more memory")

    monkeypatch.setattr(engine, "_forward", broken)

    async def both() -> list[Any]:
        calls = [engine.generate(name, prompt_ids=[3, 4], sampling=sampling()) for name in "ab"]
        return await asyncio.gather(*calls, return_exceptions=True)

    assert [type(error) for error in asyncio.run(both())] == [MemoryError, MemoryError]
    monkeypatch.undo()
    assert len(play(engine, {"a": [3, 4]})["a"]) == 1


def test_a_cancelled_request_frees_its_slot(make_engine: Callable[..., LocalEngine]) -> None:
    engine = make_engine(max_slots=1)

    async def main() -> Generation:
        waits = [
            asyncio.ensure_future(engine.generate(name, prompt_ids=tokens(40, seed=0), sampling=sampling()))
            for name in ("running", "queued", "last")
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for task, name in zip(waits[:2], ("running", "queued"), strict=True):
            task.cancel()
            engine.release(name)
        return await waits[2]

    assert close([asyncio.run(main())], play(make_engine(), {"last": tokens(40, seed=0)})["last"])


def test_an_interrupted_loop_leaves_a_usable_engine(make_engine: Callable[..., LocalEngine]) -> None:
    engine = make_engine()
    unfinished: list[asyncio.Future[Generation]] = []

    async def interrupted() -> None:
        unfinished.append(
            asyncio.ensure_future(engine.generate("a", prompt_ids=tokens(40, seed=0), sampling=sampling()))
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(interrupted())
    assert unfinished[0].cancelled()
    engine.release("a")
    assert play(engine, {"a": tokens(40, seed=0)}) == play(make_engine(), {"a": tokens(40, seed=0)})
