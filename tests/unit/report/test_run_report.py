"""The report says what the figures say, and no more."""

from __future__ import annotations

import builtins
import io
import json
import sys

import pytest
from matplotlib.image import imread
from rich.console import Console

from sinkflex.errors import ConfigError, InfrastructureError, MissingExtraError
from sinkflex.report import (
    draw_curves,
    read_run,
    read_trajectory,
    render_summary,
    render_trajectory,
    summarise,
    trajectory_files,
    write_summary,
)
from sinkflex.report.curves import running_mean


def shown(renderable) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None, soft_wrap=True)
    console.print(renderable, highlight=False)
    return console.file.getvalue()


def test_a_run_is_read_back(learned):
    history = read_run(learned)
    assert history.source == "Telecom-v0"
    assert [(point.step, point.mean, point.low, point.high, point.tasks) for point in history.validations] == [
        (0, 0.25, 0.2, 0.3, 128),
        (10, 0.625, 0.55, 0.7, 128),
        (20, 0.5, 0.45, 0.55, 128),
    ]
    assert history.floors == {"do_nothing": 0.0}
    steps, values = history.series("actor/grad_norm")
    assert (3 in steps, len(values)) == (False, 19)
    assert history.series("never/recorded") == ([], [])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda folder: (folder / "config.toml").unlink(), r"is no run folder: config.toml cannot be read"),
        (lambda folder: (folder / "config.toml").write_text("[run"), r"is no run folder: config.toml cannot be read"),
        (lambda folder: (folder / "metrics.jsonl").unlink(), r"has no metrics.jsonl"),
        (lambda folder: (folder / "metrics.jsonl").write_text(""), r"has no figures yet; wait for its first step"),
    ],
)
def test_a_folder_that_is_no_run_is_explained(learned, broken, message):
    broken(learned)
    with pytest.raises(ConfigError, match=message):
        read_run(learned)


def test_the_summary_holds_the_figures(learned):
    summary = summarise(read_run(learned))
    assert (summary["name"], summary["seed"], summary["env"]) == ("demo", 2, "sinkflex/Telecom-v0")
    assert summary["steps"] == {"done": 20, "planned": 20}
    assert summary["wall_s"] == 205.0
    assert summary["validation"] == {
        "tasks": 128,
        "first": {"step": 0, "mean": 0.25, "low": 0.2, "high": 0.3},
        "last": {"step": 20, "mean": 0.5, "low": 0.45, "high": 0.55},
        "best": {"step": 10, "mean": 0.625, "low": 0.55, "high": 0.7},
        "gain": 0.25,
        "intervals_apart": True,
        "last_by_name": {"pass^1": 0.5},
    }
    # The first tenth is steps 1 and 2 (0.12, 0.14), the last 19 and 20 (0.48, 0.50).
    assert summary["training"]["score"] == pytest.approx({"first": 0.13, "last": 0.49})
    assert summary["training"]["reward"] == pytest.approx({"first": 0.08, "last": 0.44})
    assert summary["tokens_per_s"] == pytest.approx(4010.5)
    assert summary["largest_logprob_mismatch"] == pytest.approx(2e-4)
    # 20 steps with 2 constant groups of 4 among 32 trajectories each.
    assert summary["constant_group_share"] == pytest.approx(0.25)
    assert summary["failed_episodes"] == 1
    assert summary["versions"]["sinkflex"]


def test_the_summary_is_written_whole(learned):
    history = read_run(learned)
    assert write_summary(history) == json.loads((learned / "summary.json").read_text())
    assert not list(learned.glob("*.tmp"))


def test_the_terminal_summary_names_figures_and_places(learned):
    history = read_run(learned)
    draw_curves(history)
    text = shown(render_summary(history, write_summary(history)))
    for part in (
        "demo (seed 2), sinkflex/Telecom-v0: 20 of 20 steps",
        "Held-out score 0.250 -> 0.500 (+0.250), 95 % intervals apart: the policy got better.",
        "0.250 [0.200, 0.300]  0.500 [0.450, 0.550]",
        "best, at step 10",
        "floor, do nothing",
        "groups that taught nothing",
        "failed episodes",
        str(learned / "curves.png"),
        f"sinkflex report {learned} --trajectory 1",
    ):
        assert part in text
    assert "skipped updates" not in text


@pytest.mark.parametrize(
    ("points", "verdict"),
    [
        ({0: (0.5, 0.45, 0.55), 20: (0.25, 0.2, 0.3)}, "the policy got worse."),
        ({0: (0.5, 0.4, 0.6), 20: (0.55, 0.45, 0.65)}, "the 95 % intervals overlap, so no change is shown."),
        ({0: (0.5, 0.4, 0.6)}, "with nothing to compare it with yet."),
        ({}, "Nothing was validated, so nothing can be said about learning."),
    ],
)
def test_the_verdict_claims_only_what_is_shown(write_run, points, verdict):
    name = "val-core/Telecom-v0/reward/mean@1"
    figures = {
        step: {name: mean, f"{name}/low": low, f"{name}/high": high} for step, (mean, low, high) in points.items()
    }
    history = read_run(write_run(figures or {1: {"critic/score/mean": 0.5}}))
    assert verdict in " ".join(shown(render_summary(history, summarise(history))).split())


def test_curves_draw_what_there_is(learned, write_run):
    full = draw_curves(read_run(learned))
    picture = imread(full)
    assert picture.shape[1] > 1500
    # The validation line (blue) and the training score (green) leave their colours in their own panels.
    height, width = picture.shape[:2]
    top = picture[: height // 2]
    assert has_colour(top[:, : width // 3], (0x21, 0x66, 0xAC))
    assert has_colour(top[:, width // 3 : 2 * width // 3], (0x1B, 0x78, 0x37))
    empty = draw_curves(read_run(write_run({0: {"warmstart/loss": 0.3}})))
    assert not has_colour(imread(empty), (0x1B, 0x78, 0x37))


def has_colour(picture, rgb) -> bool:
    return bool((abs(picture[..., :3] - [part / 255 for part in rgb]).max(axis=-1) < 0.02).any())


def test_curves_without_matplotlib_name_the_extra(learned, monkeypatch):
    real_import = builtins.__import__

    def hide(module, *arguments, **options):
        if module.split(".")[0] == "matplotlib":
            raise ImportError(module)
        return real_import(module, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", hide)
    for loaded in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(MissingExtraError, match=r"curves.png needs matplotlib; install it with: pip install"):
        draw_curves(read_run(learned))


def test_a_report_that_cannot_be_written_is_explained(learned):
    history = read_run(learned)
    (learned / "curves.png").mkdir()
    (learned / "summary.tmp").mkdir()
    with pytest.raises(InfrastructureError, match=r"cannot write .*curves.png"):
        draw_curves(history)
    with pytest.raises(InfrastructureError, match=r"cannot write .*summary.json.*sinkflex report"):
        write_summary(history)


def test_running_mean_of_a_hand_case():
    # (4)/1, (4+8)/2, (8+0)/2, (0+2)/2
    assert running_mean([4.0, 8.0, 0.0, 2.0], width=2) == [4.0, 6.0, 4.0, 1.0]


def test_a_dialogue_reads_like_one(with_trajectories):
    record, title = read_trajectory(with_trajectories, 1)
    text = shown(render_trajectory(record, title))
    for part in (
        "step_000020.jsonl, trajectory 1 of 2",
        "task t-1 (train, easy)",
        "user  My phone is [dead].",
        "(thinks)  Look it up.",
        'assistant calls  get_line(line_id="4783", full=true)',
        "... (700 characters)",
        "Done.\n                    Bye.",
        "score 1   reward 0.75   ended by success   2 agent turns, 1 invalid",
        "components: world 1, told does not apply",
    ):
        assert part in text


def test_exact_tokens_can_be_read_instead(with_trajectories):
    text = shown(render_trajectory(*read_trajectory(with_trajectories, 2), tokens=True))
    assert "prompt 0  <|start|>user" in text
    assert "sampled 1  <|channel|>final" in text
    assert "My phone" not in text
    assert "components" not in text


def test_trajectory_files_are_listed_and_chosen(with_trajectories):
    assert [path.stem for path in trajectory_files(with_trajectories)] == ["step_000020", "validation_000020"]
    record, title = read_trajectory(with_trajectories, 1, name="validation_000020")
    assert (record["task_id"], title) == ("t-2", "validation_000020.jsonl, trajectory 1 of 1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"number": 3}, r"step_000020.jsonl has trajectories 1 to 2, but number 3 was asked for"),
        ({"number": 0}, r"number 0 was asked for"),
        ({"number": 1, "name": "step_7"}, r"no trajectory file 'step_7'; there are step_000020, validation_000020"),
    ],
)
def test_a_trajectory_that_is_not_there_is_explained(with_trajectories, arguments, message):
    number = arguments.pop("number")
    with pytest.raises(ConfigError, match=message):
        read_trajectory(with_trajectories, number, **arguments)


def test_a_run_without_trajectories_says_how_to_get_them(learned):
    with pytest.raises(ConfigError, match=r"has no trajectories; train with logging.trajectories_every above 0"):
        trajectory_files(learned)
