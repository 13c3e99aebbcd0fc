"""The warm start: bare beginnings, batches that hold a long prompt once, and what they must not change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sinkflex.config import Recipe
from sinkflex.models import Policy
from sinkflex.train import warmstart
from sinkflex.train.build import make_env
from sinkflex.train.demonstrations import TokenRow
from sinkflex.train.policy_setup import prepare_policy
from sinkflex.train.scoring import score_rows
from sinkflex.train.warmstart import WarmstartPlan, shared_beginning, train_warmstart


def row(ids: list[int], *, prompt: int) -> TokenRow:
    return TokenRow(ids=tuple(ids), loss_mask=(False,) * prompt + (True,) * (len(ids) - prompt))


PROMPT = list(range(10, 90))
ROWS = [row([*PROMPT, 100 + i, 7, 8 + i, 9], prompt=82) for i in range(6)]


@pytest.fixture
def policy(tiny_recipe: Callable[..., Recipe]) -> Policy:
    recipe = tiny_recipe("warmstart.enabled=false")
    made, _ = prepare_policy(recipe, make_env(recipe), _tasks(recipe), on_step=lambda *_: None)
    return made


def _tasks(recipe: Recipe) -> list[str]:
    return list(make_env(recipe).unwrapped.task_ids("train", "easy"))


def plan(**changes: object) -> WarmstartPlan:
    settings = {"steps": 4, "batch_tokens": 8, "lr": 1e-3, "copy_steps": 0, "bare_steps": 0, "prefix_tree": "off"}
    return WarmstartPlan(**{**settings, "seed": 0, **changes})  # type: ignore[arg-type]


def test_the_shared_beginning_ends_where_rows_differ_or_a_token_before_training() -> None:
    assert shared_beginning(ROWS) == 80
    assert shared_beginning([row([1, 2, 3, 4], prompt=3), row([1, 2, 9, 4], prompt=3)]) == 2
    assert shared_beginning([row([1, 2, 3, 4], prompt=3)] * 2) == 2
    assert shared_beginning([row([1, 2], prompt=1), row([3, 4], prompt=1)]) == 0


def test_bare_steps_leave_the_prompt_out_and_later_steps_bring_it_back(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def watch(*args: object, **kwargs: object) -> torch.Tensor:
        seen.append([len(item.ids) for item in args[1]])  # type: ignore[attr-defined]
        return score_rows(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(warmstart, "score_rows", watch)
    settings = plan(bare_steps=2, prefix_tree="on")
    train_warmstart(policy, ROWS, settings, copy_token_ids=[1, 2], on_step=lambda *_: None)
    assert seen == [[4, 4], [4, 4], [84, 84], [84, 84]]


def test_without_a_tree_the_budget_counts_whole_rows(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def watch(*args: object, **kwargs: object) -> torch.Tensor:
        seen.append(len(args[1]))  # type: ignore[arg-type]
        return score_rows(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(warmstart, "score_rows", watch)
    train_warmstart(policy, ROWS, plan(batch_tokens=100), copy_token_ids=[1, 2], on_step=lambda *_: None)
    assert seen == [2, 2, 2, 2]


def test_holding_the_prompt_once_changes_no_logprob(policy: Policy) -> None:
    with torch.no_grad():
        separate = score_rows(policy, ROWS, temperature=1.0)
        shared = score_rows(policy, ROWS, temperature=1.0, prefix_tree="on")
    torch.testing.assert_close(shared, separate, rtol=1e-5, atol=1e-5)
