from __future__ import annotations

import pytest
import torch

from sinkflex.algo.filtering import is_informative, overlong_filter, overlong_penalty


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0.0, 0.0, 1.0], True),
        ([1.0, 1.0, 1.0], False),
        ([0.0, 0.0], False),
        # different partial scores, but nobody succeeded
        ([0.2, 0.9, 0.4], False),
    ],
)
def test_only_a_mixed_outcome_is_informative(scores: list[float], expected: bool) -> None:
    assert is_informative(scores) is expected


def test_the_threshold_of_success_can_be_lowered() -> None:
    assert is_informative([0.2, 0.9, 0.4], success_at=0.5)
    assert not is_informative([0.2, 0.9, 0.4], success_at=0.1)


def test_the_overlong_penalty_by_hand() -> None:
    # no punishment up to 8 - 4 = 4 tokens, then a quarter a token
    lengths = torch.tensor([0, 4, 5, 6, 8, 20])
    penalty = overlong_penalty(lengths, max_length=8, buffer=4)
    assert penalty.tolist() == pytest.approx([0.0, 0.0, -0.25, -0.5, -1.0, -1.0])


def test_truncated_trajectories_leave_the_loss_mask_and_no_other_does() -> None:
    mask = torch.tensor([True, False, True, True, True])
    ids = torch.tensor([0, 0, 3, 3, 5])
    assert overlong_filter(mask, ids, torch.tensor([3, 8])).tolist() == [True, False, False, False, True]
    assert torch.equal(overlong_filter(mask, ids, torch.tensor([], dtype=torch.long)), mask)
