"""The progress display: readable when piped, live in a terminal, honest about the time left."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from sinkflex.config import load_recipe
from sinkflex.train.progress import Progress, clock_text, sparkline, validation_name

RECIPE = load_recipe(None, ["train.steps=10"])
VALIDATION = {
    "val-core/Telecom-v0/reward/mean@1": 0.5,
    "val-core/Telecom-v0/reward/mean@1/low": 0.4,
    "val-core/Telecom-v0/reward/mean@1/high": 0.6,
}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def display(clock, *, terminal=False):
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100, color_system=None)
    return Progress(RECIPE, console=console, clock=clock), output


def test_a_pipe_gets_plain_lines_for_validations_and_otherwise_a_few(clock):
    progress, output = display(clock)
    with progress:
        progress.step(0, VALIDATION)
        for step in range(1, 11):
            clock.now += 4
            progress.step(step, {"critic/rewards/mean": 0.25, "critic/score/mean": 0.3, "perf/throughput": 4321.0})
    assert output.getvalue().splitlines() == [
        "step 0/10  validation 0.500 [0.400, 0.600]",
        "step 4/10  reward 0.250  validation 0.500 [0.400, 0.600]  tokens/s 4,321  left 0:24",
        "step 8/10  reward 0.250  validation 0.500 [0.400, 0.600]  tokens/s 4,321  left 0:08",
        "step 10/10  reward 0.250  validation 0.500 [0.400, 0.600]  tokens/s 4,321  left 0:00",
    ]


def test_phases_and_notes_are_lines_too(clock):
    progress, output = display(clock)
    progress.warmstart(5, 10, 1.23456)
    progress.warmstart(6, 10, 1.1)
    clock.now += 20
    progress.warmstart(9, 10, 0.5)
    progress.warmstart(10, 10, 0.4)
    progress.phase("validation")
    progress.note("prefix trees [on]")
    assert output.getvalue().splitlines() == [
        "warm start 5/10 loss 1.235",
        "warm start 9/10 loss 0.500",
        "warm start 10/10 loss 0.400",
        "validation",
        "prefix trees [on]",
    ]


def test_time_left_counts_validations_and_not_the_warm_start(clock):
    progress, _ = display(clock)
    clock.now += 500
    assert progress.seconds_left() is None
    progress.step(0, {})
    assert progress.seconds_left() is None
    clock.now += 10
    progress.step(1, {})
    clock.now += 30
    progress.step(2, VALIDATION)
    assert progress.seconds_left() == pytest.approx((10 + 30) / 2 * 8)


def test_a_resumed_run_takes_its_pace_from_its_own_steps(clock):
    progress, _ = display(clock)
    progress.step(6, {"timing_s/step": 7.0})
    assert progress.seconds_left() == pytest.approx(7.0 * 4)
    clock.now += 9
    progress.step(7, {"timing_s/step": 9.0})
    assert progress.seconds_left() == pytest.approx((7 + 9) / 2 * 3)


def test_a_figure_that_is_not_finite_is_not_shown(clock):
    progress, output = display(clock)
    progress.step(10, {"critic/rewards/mean": float("nan"), "critic/score/mean": float("nan"), "perf/throughput": 5.0})
    assert "tokens/s 5" in output.getvalue()
    assert "nan" not in output.getvalue()


def test_a_terminal_shows_bars_figures_and_curves(clock):
    progress, output = display(clock, terminal=True)
    with progress:
        progress.warmstart(5, 10, 0.75)
        progress.phase("validation")
        progress.step(0, {**VALIDATION, "critic/score/mean": 0.0})
        clock.now += 5
        progress.note("saved")
        progress.step(1, {**VALIDATION, "critic/score/mean": 1.0, "critic/rewards/mean": 0.9})
    text = output.getvalue()
    for part in ("warm start", "loss 0.750", "validation  ...", "1/10", "reward 0.900", "left 0:45", "▁█", "saved"):
        assert part in text


def test_small_parts():
    assert sparkline([0.0, 0.5, 0.999, 1.0, 2.0, -1.0], width=5) == "▅███▁"
    assert (clock_text(59.6), clock_text(3599), clock_text(3661)) == ("1:00", "59:59", "1:01:01")
    assert validation_name({"critic/score/mean": 1.0}) is None
    assert validation_name(VALIDATION) == "val-core/Telecom-v0/reward/mean@1"
