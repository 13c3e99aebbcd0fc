from __future__ import annotations

import itertools
import math
import random
from statistics import fmean

import pytest

from sinkflex.algo.evaluation import mean_at_k, pass_at_k, pass_hat_k, wilson_interval


def test_wilson_against_its_defining_equation() -> None:
    # The ends are where |p - q| = z sqrt(q (1 - q) / n).
    z = 1.959963984540054
    for proportion, draws in [(0.3, 10.0), (0.0, 128.0), (1.0, 5.0), (0.5, 1.0), (0.44, 40.5)]:
        for end in wilson_interval(proportion, draws):
            if 0 < end < 1:
                distance = z * math.sqrt(end * (1 - end) / draws)
                assert abs(proportion - end) == pytest.approx(distance, rel=1e-9)


def test_wilson_of_a_published_example() -> None:
    # 15 of 148 with 95 %: 0.0624 to 0.1605 (Newcombe 1998, table I, method 3)
    assert wilson_interval(15 / 148, 148.0) == pytest.approx((0.0624, 0.1605), abs=5e-5)


def test_wilson_at_the_edges_has_width() -> None:
    assert wilson_interval(0.0, 20.0)[0] == 0.0
    assert 0.1 < wilson_interval(0.0, 20.0)[1] < 0.2
    assert wilson_interval(1.0, 20.0)[1] == pytest.approx(1.0)


def test_one_trial_a_task_is_wilson_on_the_tasks() -> None:
    estimate = mean_at_k([[1.0], [0.0], [0.0], [1.0], [1.0]])
    assert (estimate.value, estimate.tasks, estimate.trials) == (0.6, 5, 1)
    assert (estimate.low, estimate.high) == wilson_interval(0.6, 5.0)


def test_repeating_tasks_that_always_agree_adds_no_information() -> None:
    single = mean_at_k([[float(i < 6)] for i in range(10)])
    repeated = mean_at_k([[float(i < 6)] * 8 for i in range(10)])
    assert repeated.low == pytest.approx(single.low, abs=0.02)
    assert repeated.high == pytest.approx(single.high, abs=0.02)


def test_trials_that_ignore_the_task_count_in_full() -> None:
    # every task has exactly half its trials right: no spread between tasks at all
    estimate = mean_at_k([[1.0, 0.0]] * 9 + [[0.0, 1.0]])
    assert (estimate.low, estimate.high) == wilson_interval(0.5, 20.0)
    mixed = mean_at_k([[1.0, 1.0, 0.0, 0.0]] * 5 + [[1.0, 0.0, 0.0, 0.0]] * 3 + [[1.0, 1.0, 1.0, 0.0]] * 3)
    assert (mixed.low, mixed.high) == wilson_interval(0.5, 44.0)


def test_interval_covers_about_ninety_five_percent() -> None:
    """Tasks of very different difficulty, 4 trials each: the interval must cover the mean over *new* tasks."""
    draw = random.Random(0)
    covered, rounds = 0, 1500
    for _ in range(rounds):
        chances = [draw.betavariate(0.6, 0.9) for _ in range(40)]
        estimate = mean_at_k([[float(draw.random() < p) for _ in range(4)] for p in chances])
        covered += estimate.low <= 0.4 <= estimate.high
    # a standard error of 0.6 % on 1,500 rounds
    assert 0.93 <= covered / rounds <= 0.97


def test_scores_that_are_not_binary_get_the_normal_interval() -> None:
    # task means 0.25, 0.5, 0.75: variance 0.0625, standard error sqrt(0.0625 / 3)
    estimate = mean_at_k([[0.2, 0.3], [0.5, 0.5], [0.7, 0.8]])
    half = 1.959963984540054 * math.sqrt(0.0625 / 3)
    assert estimate.value == pytest.approx(0.5)
    assert (estimate.low, estimate.high) == pytest.approx((0.5 - half, 0.5 + half))


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_estimators_equal_the_count_over_all_subsets(k: int) -> None:
    trials = 5
    for successes in range(trials + 1):
        outcomes = [True] * successes + [False] * (trials - successes)
        subsets = list(itertools.combinations(outcomes, k))
        assert pass_at_k([successes], trials=trials, k=k) == pytest.approx(fmean(map(any, subsets)))
        assert pass_hat_k([successes], trials=trials, k=k) == pytest.approx(fmean(map(all, subsets)))


def test_both_are_the_success_rate_at_one_and_average_over_tasks() -> None:
    counts = [0, 1, 4]
    for estimator in (pass_at_k, pass_hat_k):
        assert estimator(counts, trials=4, k=1) == pytest.approx(5 / 12)
    assert pass_at_k(counts, trials=4, k=4) == pytest.approx(2 / 3)
    assert pass_hat_k(counts, trials=4, k=4) == pytest.approx(1 / 3)


def test_pass_estimators_are_unbiased() -> None:
    p, trials = 0.3, 6
    weight = [math.comb(trials, c) * p**c * (1 - p) ** (trials - c) for c in range(trials + 1)]
    at = sum(w * pass_at_k([c], trials=trials, k=3) for c, w in enumerate(weight))
    hat = sum(w * pass_hat_k([c], trials=trials, k=3) for c, w in enumerate(weight))
    assert (at, hat) == (pytest.approx(1 - 0.7**3), pytest.approx(0.3**3))
