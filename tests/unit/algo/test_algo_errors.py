"""Every refusal of the algorithm layer names the argument, its value and the remedy."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from sinkflex.algo.advantages import ADVANTAGE_ESTIMATORS, group_advantages, leave_one_out_advantages
from sinkflex.algo.aggregation import Aggregation, BatchTotals, aggregate
from sinkflex.algo.correction import mask_weights, mismatch_statistics, truncate_weights
from sinkflex.algo.evaluation import mean_at_k, pass_at_k, pass_hat_k
from sinkflex.algo.filtering import is_informative, overlong_penalty
from sinkflex.algo.losses import POLICY_LOSSES, ClipRange, LossInputs
from sinkflex.algo.stats import Statistic, merge_statistics
from sinkflex.errors import AlgorithmError

ONE = torch.ones(1)


def inputs(**changes: torch.Tensor) -> LossInputs:
    fields = {
        "logprobs": torch.zeros(2),
        "old_logprobs": torch.zeros(2),
        "advantages": torch.zeros(2),
        "loss_mask": torch.ones(2, dtype=torch.bool),
        "trajectory_ids": torch.zeros(2, dtype=torch.long),
    }
    made = object.__new__(LossInputs)
    # unwrapped: the run-time shape checks of the test session would answer before the class does
    inspect.unwrap(LossInputs.__init__)(made, **(fields | changes))
    return made


@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
def test_a_lone_member_is_refused_with_its_group(name: str) -> None:
    with pytest.raises(AlgorithmError, match=r"group 7 has 1 member, expected at least 2; drop it or sample"):
        ADVANTAGE_ESTIMATORS[name](torch.tensor([0.0, 1.0, 0.5]), torch.tensor([3, 3, 7]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
def test_a_reward_that_is_not_finite_is_refused_with_its_group(name: str, bad: float) -> None:
    with pytest.raises(AlgorithmError, match=rf"group 9 has reward {bad} at index 2, expected a finite number"):
        ADVANTAGE_ESTIMATORS[name](torch.tensor([0.0, 1.0, bad, 0.0]), torch.tensor([3, 3, 9, 9]))


def test_rewards_and_groups_of_two_lengths_are_refused() -> None:
    estimator = inspect.unwrap(leave_one_out_advantages)
    with pytest.MonkeyPatch.context() as patch:
        module = inspect.getmodule(leave_one_out_advantages)
        patch.setattr(module, "_checked_groups", inspect.unwrap(module._checked_groups))
        with pytest.raises(AlgorithmError, match=r"rewards has shape \(2,\) and group_ids \(3,\), expected one \[N\]"):
            estimator(torch.zeros(2), torch.zeros(3, dtype=torch.long))


def test_ddof_and_eps_are_checked() -> None:
    rewards, ids = torch.tensor([0.0, 1.0]), torch.tensor([0, 0])
    with pytest.raises(AlgorithmError, match=r"ddof is 2, expected 0 \(population\) or 1 \(sample\)"):
        group_advantages(rewards, ids, scale=True, ddof=2, eps=0.0)
    with pytest.raises(AlgorithmError, match=r"eps is -0.1, expected at least 0 reward units"):
        group_advantages(rewards, ids, scale=True, ddof=1, eps=-0.1)


@pytest.mark.parametrize("field", ["tokens", "trajectories", "token_budget"])
def test_empty_totals_are_refused(field: str) -> None:
    fields = {"tokens": 1, "trajectories": 1, "token_budget": 1} | {field: 0}
    with pytest.raises(AlgorithmError, match=rf"BatchTotals.{field} is 0, expected at least 1"):
        BatchTotals(**fields)


def test_counting_an_untrained_batch_is_refused() -> None:
    with pytest.raises(AlgorithmError, match=r"BatchTotals.tokens is 0, .* must be skipped before the loss"):
        BatchTotals.count(loss_mask=torch.zeros(2, dtype=torch.bool), trajectory_ids=torch.tensor([0, 1]))


def test_the_constant_denominator_needs_its_constant() -> None:
    totals = BatchTotals(tokens=1, trajectories=1)
    with pytest.raises(AlgorithmError, match=r"'constant' got BatchTotals.token_budget=None; give the run's largest"):
        aggregate(
            ONE,
            loss_mask=ONE.bool(),
            trajectory_ids=ONE.long(),
            totals=totals,
            how=Aggregation.CONSTANT,
        )
    with pytest.raises(AlgorithmError, match=r"'constant' got BatchTotals.token_budget=None"):
        POLICY_LOSSES["dr_grpo"](inputs(), totals=totals, clip=ClipRange(low=0.2, high=0.2))


@pytest.mark.parametrize("field", ["old_logprobs", "advantages", "loss_mask", "trajectory_ids", "correction"])
def test_loss_inputs_of_another_shape_are_refused(field: str) -> None:
    dtype = {"loss_mask": torch.bool, "trajectory_ids": torch.long}.get(field, torch.float32)
    with pytest.raises(AlgorithmError, match=rf"LossInputs.{field} has shape \(1, 2\), expected \(2,\) as logprobs"):
        inputs(**{field: torch.ones(1, 2, dtype=dtype)})


def test_a_float_mask_is_refused() -> None:
    with pytest.raises(AlgorithmError, match=r"LossInputs.loss_mask has dtype torch.float32, expected torch.bool"):
        inputs(loss_mask=torch.ones(2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"low": 0.0}, r"ClipRange.low is 0.0, expected in \(0, 1\]; 1 means no lower bound"),
        ({"low": 1.5}, r"ClipRange.low is 1.5, expected in \(0, 1\]"),
        ({"high": 0.0}, r"ClipRange.high is 0.0, expected above 0; inf means no upper bound"),
        ({"high": math.nan}, r"ClipRange.high is nan, expected above 0"),
        ({"dual": 1.0}, r"ClipRange.dual is 1.0, expected above 1, or None for no cap"),
    ],
)
def test_clip_ranges_are_checked(fields: dict[str, float], message: str) -> None:
    with pytest.raises(AlgorithmError, match=message):
        ClipRange(**({"low": 0.2, "high": 0.2} | fields))


def test_losses_refuse_what_they_cannot_honour() -> None:
    totals = BatchTotals(tokens=2, trajectories=1)
    with pytest.raises(AlgorithmError, match=r"grpo clips symmetrically but got low=0.2, high=0.28; choose 'dapo'"):
        POLICY_LOSSES["grpo"](inputs(), totals=totals, clip=ClipRange(low=0.2, high=0.28))
    for name in ("gspo", "cispo"):
        with pytest.raises(AlgorithmError, match=rf"{name} cannot honour ClipRange.dual=3.0; set it to None"):
            POLICY_LOSSES[name](inputs(), totals=totals, clip=ClipRange(low=0.2, high=0.2, dual=3.0))


def test_one_statistic_under_two_reductions_is_refused() -> None:
    mean, largest = Statistic.mean(ONE, ONE.bool()), Statistic.maximum(ONE, ONE.bool())
    with pytest.raises(AlgorithmError, match=r"statistic 'ratio' comes with reductions \['max', 'mean'\]"):
        merge_statistics([{"ratio": mean}, {"ratio": largest}])


def test_correction_bounds_are_checked() -> None:
    with pytest.raises(AlgorithmError, match=r"cap is 0.5, expected at least 1: a token without mismatch"):
        truncate_weights(ONE, cap=0.5)
    with pytest.raises(AlgorithmError, match=r"the band is \[1.1, 2.0\], expected 0 <= low <= 1 <= high"):
        mask_weights(ONE, ONE, low=1.1, high=2.0)
    with pytest.raises(AlgorithmError, match=r"loss_mask has no True, expected at least one trained token"):
        mismatch_statistics(ONE, ONE, loss_mask=~ONE.bool(), weights=ONE)


def test_filter_arguments_are_checked() -> None:
    with pytest.raises(AlgorithmError, match=r"scores is empty, expected one score a member"):
        is_informative([])
    with pytest.raises(AlgorithmError, match=r"buffer is 0, expected between 1 and max_length=5 tokens"):
        overlong_penalty(torch.tensor([1]), max_length=5, buffer=0)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([], r"scores is empty, expected one sequence of trials a task"),
        ([[1.0], [1.0, 0.0]], r"tasks have \[1, 2\] trials, expected one number above 0 for all"),
        ([[], []], r"tasks have \[0\] trials, expected one number above 0"),
        ([[1.0], [math.nan]], r"task 1 has scores \[nan\], expected finite numbers"),
        ([[0.5, 0.4]], r"scores has 1 task, expected at least 2 for an interval"),
    ],
)
def test_score_tables_are_checked(scores: list[list[float]], message: str) -> None:
    with pytest.raises(AlgorithmError, match=message):
        mean_at_k(scores)


@pytest.mark.parametrize("estimator", [pass_at_k, pass_hat_k])
def test_success_counts_are_checked(estimator) -> None:
    with pytest.raises(AlgorithmError, match=r"successes is empty, expected one count a task"):
        estimator([], trials=4, k=1)
    with pytest.raises(AlgorithmError, match=r"k is 5, expected between 1 and trials=4"):
        estimator([1], trials=4, k=5)
    with pytest.raises(AlgorithmError, match=r"task 1 has 9 successes, expected between 0 and trials=4"):
        estimator([1, 9], trials=4, k=1)
