"""From recipes to parts: bounds that belong to a loss, names that do not exist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sinkflex.algo import ClipRange
from sinkflex.config import Recipe
from sinkflex.errors import ModelError
from sinkflex.train.build import build_parts, clip_range
from sinkflex.train.policy_setup import pick_device


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), ClipRange(low=0.2, high=0.2)),
        (("algo.loss=dapo",), ClipRange(low=0.2, high=0.28)),
        (("algo.loss=gspo",), ClipRange(low=3e-4, high=4e-4)),
        (("algo.loss=cispo", "algo.clip_high=3.0"), ClipRange(low=1.0, high=3.0)),
        (("algo.clip_low=0.1", "algo.clip_high=0.1", "algo.dual_clip=3.0"), ClipRange(low=0.1, high=0.1, dual=3.0)),
    ],
)
def test_clip_bounds_are_the_recipes_or_the_losss_own(
    tiny_recipe: Callable[..., Recipe], overrides: tuple[str, ...], expected: ClipRange
) -> None:
    assert clip_range(tiny_recipe(*overrides)) == expected


def test_cuda_is_refused_where_there_is_none(
    tiny_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert pick_device(tiny_recipe()) == "cpu"
    with pytest.raises(ModelError, match=r"run.device = 'cuda', but torch sees no CUDA device"):
        pick_device(tiny_recipe("run.device=cuda"))


def test_a_cached_warm_start_begins_the_run_exactly_as_a_trained_one(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = tiny_recipe(f"warmstart.cache_dir={tmp_path}")
    parts, generators = [], []
    for process_seed in (1, 2):
        torch.manual_seed(process_seed)
        parts.append(build_parts(recipe, on_warmstart_step=lambda *_: None))
        generators.append(parts[-1].trainer.tensors()["torch_rng"])  # the generator is one for all: read it now
    trained, cached = parts
    assert (trained.warmstart.source, cached.warmstart.source) == ("trained", "cache")
    assert torch.equal(*generators)
    torch.testing.assert_close(
        cached.policy.model.state_dict(), trained.policy.model.state_dict(), rtol=0.0, atol=0.0, check_device=False
    )
