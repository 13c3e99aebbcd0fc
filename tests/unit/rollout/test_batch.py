"""Flat rows and VERL batches hold exactly the ledgers' tokens, in the layout their docstrings draw."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sinkflex.errors import MissingExtraError, RolloutError
from sinkflex.rollout import Group, GroupSpec, TokenLedger, Trajectory
from sinkflex.rollout.batch import TrainRows, ledgers_from_verl_batch, to_verl_batch
from sinkflex.types import StopReason


def ledger(prompt: list[int], *segments: Any) -> TokenLedger:
    built = TokenLedger()
    built.append_prompt(prompt)
    for segment in segments:
        if isinstance(segment, dict):
            built.append_sampled(list(segment), list(segment.values()))
        else:
            built.append_observation(segment)
    return built


def trajectory(tokens: TokenLedger, *, reward: float = 0.0, member: int = 0, top_p: float = 1.0) -> Trajectory:
    return Trajectory(
        task_id="t",
        split="train",
        tier="easy",
        group_id="train/t/0",
        episode_id=f"train/t/0/{member}",
        group_seed=0,
        sampling_seed=0,
        temperature=1.0,
        top_p=top_p,
        ledger=tokens,
        messages=(),
        reward=reward,
        score=reward,
        components={},
        stop_reason=StopReason.USER_STOP,
        turns=tokens.turns,
        invalid_actions=0,
        metrics={},
    )


@pytest.fixture
def example() -> list[Group]:
    """The two ledgers of the docstrings."""
    first = ledger([7, 8], {3: -1.2, 1: -0.1})
    second = ledger([7], {4: -0.7}, [9], {1: -0.2})
    members = (trajectory(first, reward=1.0), trajectory(second, reward=0.25, member=1))
    return [Group(group_id="train/t/0", trajectories=members)]


def test_rows_of_the_docstring(example: list[Group]) -> None:
    rows = TrainRows.from_ledgers([item.ledger for item in example[0].trajectories])
    assert rows.ids.tolist() == [7, 8, 3, 1, 7, 4, 9, 1]
    assert rows.loss_mask.tolist() == [False, False, True, True, False, True, False, True]
    assert rows.logprobs.tolist() == pytest.approx([0, 0, -1.2, -0.1, 0, -0.7, 0, -0.2])
    assert rows.turn_ids.tolist() == [0, 0, 1, 1, 0, 1, 1, 2]
    assert rows.row_ids.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert rows.cu_seqlens.tolist() == [0, 4, 8]


def test_verl_batch_of_the_docstring(example: list[Group]) -> None:
    batch = to_verl_batch(example, pad_token_id=0)
    assert batch.batch_size == torch.Size([2])
    assert batch["prompts"].tolist() == [[7, 8], [0, 7]]
    assert batch["responses"].tolist() == [[3, 1, 0], [4, 9, 1]]
    assert batch["input_ids"].tolist() == [[7, 8, 3, 1, 0], [0, 7, 4, 9, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 3], [0, 0, 1, 2, 3]]
    assert batch["response_mask"].tolist() == [[1, 1, 0], [1, 0, 1]]
    expected = torch.tensor([[-1.2, -0.1, 0.0], [-0.7, 0.0, -0.2]])
    torch.testing.assert_close(batch["rollout_log_probs"], expected)
    assert batch["token_level_scores"].tolist() == [[0, 1, 0], [0, 0, 0.25]]
    assert batch["token_level_rewards"].tolist() == batch["token_level_scores"].tolist()
    assert list(batch["uid"]) == ["train/t/0", "train/t/0"]
    assert list(batch["episode_id"]) == ["train/t/0/0", "train/t/0/1"]
    assert list(batch["stop_reason"]) == ["user_stop", "user_stop"]


def test_trainer_values_land_on_their_tokens(example: list[Group]) -> None:
    values = torch.arange(8, dtype=torch.float32)
    batch = to_verl_batch(example, pad_token_id=0, token_values={"advantages": values, "old_log_probs": -values})
    assert batch["advantages"].tolist() == [[2, 3, 0], [5, 6, 7]]
    assert batch["old_log_probs"].tolist() == [[-2, -3, 0], [-5, -6, -7]]
    assert "returns" not in batch.keys()  # noqa: SIM118  (a TensorDict is not a mapping of strings to test with `in`)


def test_collected_groups_come_back_exactly(make_bench: Callable[..., Any]) -> None:
    specs = [GroupSpec(task_id=task, split="train", group_seed=1, size=2) for task in ("a", "b")]
    groups = make_bench(max_new_tokens=3).collector.run(specs, seed=0)
    ledgers = [item.ledger for group in groups for item in group.trajectories]
    restored = ledgers_from_verl_batch(to_verl_batch(groups, pad_token_id=0))
    for one, two in zip(ledgers, restored, strict=True):
        assert (one.ids, one.loss_mask, one.turn_ids) == (two.ids, two.loss_mask, two.turn_ids)
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-6)


def test_a_pad_id_inside_the_text_is_kept(example: list[Group]) -> None:
    batch = to_verl_batch(example, pad_token_id=7)
    restored = ledgers_from_verl_batch(batch)
    assert [item.ids for item in restored] == [item.ledger.ids for item in example[0].trajectories]


def test_a_response_that_does_not_start_with_a_sampled_token_is_no_ledger(example: list[Group]) -> None:
    batch = to_verl_batch(example, pad_token_id=0)
    batch["response_mask"][1, 0] = 0
    with pytest.raises(RolloutError, match="append_observation after a prompt segment"):
        ledgers_from_verl_batch(batch)


def test_refusals(example: list[Group]) -> None:
    with pytest.raises(RolloutError, match="groups hold no finished trajectory"):
        to_verl_batch([Group(group_id="g", trajectories=())], pad_token_id=0)
    with pytest.raises(RolloutError, match="ledger 0 has no sampled token"):
        to_verl_batch([Group(group_id="g", trajectories=(trajectory(ledger([1])),))], pad_token_id=0)
    narrow = Group(group_id="g", trajectories=(trajectory(ledger([1], {2: -1.0}), top_p=0.9),))
    with pytest.raises(RolloutError, match=r"sampled with top_p=0.9; .* for evaluation only"):
        to_verl_batch([narrow], pad_token_id=0)
    with pytest.raises(RolloutError, match=r"token_values\['entropy'\].* expected a key of old_log_probs"):
        to_verl_batch(example, pad_token_id=0, token_values={"entropy": torch.zeros(8)})
    with pytest.raises(RolloutError, match=r"token_values\['returns'\] has shape \(7,\); .* shape \(8,\)"):
        to_verl_batch(example, pad_token_id=0, token_values={"returns": torch.zeros(7)})


def test_without_tensordict_the_extra_is_named(example: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "tensordict":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"pip install 'sinkflex\[train\]'"):
        to_verl_batch(example, pad_token_id=0)
