"""``curves.png``: what the policy learned, at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sinkflex.errors import InfrastructureError, MissingExtraError
from sinkflex.report.history import RunHistory

FILE_NAME = "curves.png"

_INK, _QUIET, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_BLUE, _ORANGE, _GREEN, _RED = "#2166ac", "#e08214", "#1b7837", "#b2182b"
_STYLE: Any = {
    "axes.edgecolor": _QUIET,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlecolor": _INK,
    "font.size": 9.5,
    "grid.color": _GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "xtick.color": _QUIET,
    "ytick.color": _QUIET,
}


def draw_curves(history: RunHistory) -> Path:
    """Draw the six panels into the run folder.

    Args:
        history: a run with at least one recorded step.

    Returns:
        The picture's path.

    Raises:
        MissingExtraError: matplotlib is not installed.
        InfrastructureError: the picture cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "curves.png needs matplotlib; install it with: pip install 'sinkflex[train]'"
        ) from error
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(13, 7.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(2, 3).ravel()
        _draw_validation(axes[0], history)
        _draw_trend(axes[1], history, "critic/score/mean", title="Training score", label="mean score", color=_GREEN)
        _draw_trend(
            axes[2], history, "critic/rewards/mean", title="Trajectory reward", label="mean reward", color=_ORANGE
        )
        _draw_kl(axes[3], history)
        _draw_trend(axes[4], history, "actor/entropy", title="Entropy", label="nats a token", color=_BLUE)
        _draw_lengths(axes[5], history)
        for axis in axes:
            axis.set_xlabel("train step")
            axis.set_xlim(left=0, right=max(1, history.records[-1]["step"]) * 1.02)
        figure.suptitle(_headline(history), x=0.01, ha="left", fontsize=12, color=_QUIET)
        path = history.folder / FILE_NAME
        try:
            figure.savefig(path, dpi=130)
        except OSError as error:
            raise InfrastructureError(
                f"cannot write {path}: {error}; free disk space, then: sinkflex report"
            ) from error
    return path


def _headline(history: RunHistory) -> str:
    run, env = history.settings["run"], history.settings["env"]
    tiers = ", ".join(env["tier"]) or "all tiers"
    return f"{run['name']}, seed {run['seed']}: {env['id']} ({tiers})"


def _draw_validation(axis: Any, history: RunHistory) -> None:
    points = history.validations
    axis.set_title("Validation, mean@1 on held-out tasks")
    axis.set_ylim(0, 1)
    if not points:
        _say_empty(axis)
        return
    steps = [point.step for point in points]
    axis.fill_between(
        steps,
        [point.low for point in points],
        [point.high for point in points],
        color=_BLUE,
        alpha=0.18,
        linewidth=0,
        label="95 % interval",
    )
    axis.plot(
        steps,
        [point.mean for point in points],
        color=_BLUE,
        marker="o",
        markersize=4,
        label=f"mean@1 (n = {points[-1].tasks})",
    )
    for style, (name, value) in zip(("--", ":", "-."), sorted(history.floors.items()), strict=False):
        axis.axhline(value, color=_RED, linestyle=style, linewidth=1.2, label=f"floor: {name.replace('_', ' ')}")
    for point, offset, side in ((points[0], (7, -3), "left"), (points[-1], (0, 7), "right")):
        axis.annotate(
            f"{point.mean:.2f}",
            (point.step, point.mean),
            xytext=offset,
            textcoords="offset points",
            ha=side,
            color=_BLUE,
            fontweight="bold",
        )
    axis.legend(loc="best")


def _draw_trend(axis: Any, history: RunHistory, name: str, *, title: str, label: str, color: str) -> None:
    """A figure of single steps, with its running mean where there are enough steps to need one."""
    axis.set_title(title)
    steps, values = history.series(name)
    if not steps:
        _say_empty(axis)
        return
    smooth = running_mean(values, width=max(1, len(values) // 10))
    noisy = len(values) >= 20
    axis.plot(steps, values, color=color, alpha=0.35 if noisy else 1, linewidth=1.2, label=None if noisy else label)
    if noisy:
        axis.plot(steps, smooth, color=color, linewidth=2, label=f"{label}, running mean")
    axis.margins(y=0.15)
    if name.startswith("critic/score/"):
        axis.set_ylim(0, 1)
    elif min(values) >= 0:
        axis.set_ylim(bottom=0)
    axis.legend(loc="best")


def _draw_kl(axis: Any, history: RunHistory) -> None:
    axis.set_title("KL divergence")
    lines = (
        ("actor/kl_loss", "to the reference policy", _BLUE, "-"),
        ("actor/ppo_kl", "over one batch's updates", _ORANGE, "-"),
        ("training/rollout_kl", "sampler to trainer", _QUIET, ":"),
    )
    drawn = False
    for name, label, color, style in lines:
        steps, values = history.series(name)
        if any(values):
            axis.plot(steps, values, color=color, linestyle=style, label=label)
            drawn = True
    if not drawn:
        _say_empty(axis)
        return
    axis.set_ylabel("nats a token")
    axis.legend(loc="best")


def _draw_lengths(axis: Any, history: RunHistory) -> None:
    axis.set_title("Lengths")
    steps, tokens = history.series("response_length/mean")
    if not steps:
        _say_empty(axis)
        return
    axis.plot(steps, tokens, color=_BLUE, label="sampled tokens an episode")
    axis.set_ylim(0, max(tokens) * 1.25 or 1)
    axis.set_ylabel("tokens", color=_BLUE)
    turn_steps, turns = history.series("num_turns/mean")
    handles, labels = axis.get_legend_handles_labels()
    if turn_steps:
        other = axis.twinx()
        other.grid(visible=False)
        other.spines["right"].set_visible(True)
        other.plot(turn_steps, turns, color=_ORANGE, label="agent turns an episode")
        other.set_ylim(0, max(turns) * 1.6 or 1)
        other.set_ylabel("turns", color=_ORANGE)
        more_handles, more_labels = other.get_legend_handles_labels()
        handles, labels = handles + more_handles, labels + more_labels
    axis.legend(handles, labels, loc="lower right")


def _say_empty(axis: Any) -> None:
    axis.text(0.5, 0.5, "not recorded in this run", transform=axis.transAxes, ha="center", color=_QUIET)
    axis.grid(visible=False)
    axis.set_yticks([])


def running_mean(values: Sequence[float], *, width: int) -> list[float]:
    """Average each value with up to ``width - 1`` before it; the first values have fewer."""
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        means.append(sum(window) / len(window))
    return means
