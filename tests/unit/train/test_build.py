"""From recipes to parts: bounds that belong to a loss, names that do not exist."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sinkflex.algo import ClipRange
from sinkflex.config import Recipe
from sinkflex.errors import ModelError
from sinkflex.train.build import clip_range
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
