"""``summary.json`` and its words: what was learned, in figures, and where everything lies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sinkflex.errors import InfrastructureError
from sinkflex.report.history import RunHistory, Validation

FILE_NAME = "summary.json"


def summarise(history: RunHistory) -> dict[str, Any]:
    """Return a run's summary as plain data.

    Training figures compare the first with the last tenth of the train steps; ``intervals_apart`` is True when the
    95 % intervals of the first and the last validation do not overlap.

    Args:
        history: a run with at least one recorded step.
    """
    settings, last = history.settings, history.records[-1]
    return {
        "name": settings["run"]["name"],
        "seed": settings["run"]["seed"],
        "env": settings["env"]["id"],
        "tiers": list(settings["env"]["tier"]),
        "steps": {"done": last["step"], "planned": settings["train"]["steps"]},
        "wall_s": last["wall_s"],
        "validation": _validation_figures(history),
        "floors": dict(history.floors),
        "training": {
            "score": _change(history, "critic/score/mean"),
            "reward": _change(history, "critic/rewards/mean"),
            "entropy": _change(history, "actor/entropy"),
        },
        "tokens_per_s": _mean(history.series("perf/throughput")[1]),
        "largest_logprob_mismatch": max(history.series("training/rollout_logprobs_diff_max")[1], default=None),
        "constant_group_share": _constant_share(history),
        "failed_episodes": sum(history.series("training/failed_episodes")[1]),
        "skipped_updates": sum(history.series("actor/skipped_updates")[1]),
        "versions": {name: _version(name) for name in ("sinkflex", "torch", "transformers", "gymnasium")},
    }


def write_summary(history: RunHistory) -> dict[str, Any]:
    """Write ``summary.json`` into the run folder and return it.

    Raises:
        InfrastructureError: the file cannot be written.
    """
    summary = summarise(history)
    path = history.folder / FILE_NAME
    staging = path.with_suffix(".tmp")
    try:
        staging.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        staging.replace(path)
    except OSError as error:
        raise InfrastructureError(
            f"cannot write {path}: {error}; free disk space, then: sinkflex report {history.folder}"
        ) from error
    return summary


def render_summary(history: RunHistory, summary: Mapping[str, Any]) -> RenderableType:
    """Lay a summary out for a console with ``soft_wrap`` on, which keeps long paths in one piece.

    Args:
        history: the run.
        summary: from ``summarise``.
    """
    return Group(
        Text(_what_ran(summary), style="bold"),
        Text(_verdict(summary), style="bold"),
        Text(""),
        _figures_table(summary),
        Text("training score, reward and entropy: means over the first and the last tenth of the steps", style="dim"),
        Text(""),
        *_place_lines(history),
    )


def _what_ran(summary: Mapping[str, Any]) -> str:
    steps = summary["steps"]
    return f"{summary['name']} (seed {summary['seed']}), {summary['env']}: {steps['done']} of {steps['planned']} steps"


def _verdict(summary: Mapping[str, Any]) -> str:
    validation = summary["validation"]
    if validation is None:
        return "Nothing was validated, so nothing can be said about learning."
    first, last = validation["first"], validation["last"]
    if first["step"] == last["step"]:
        return f"Held-out score {last['mean']:.3f} at step {last['step']}, with nothing to compare it with yet."
    change = f"Held-out score {first['mean']:.3f} -> {last['mean']:.3f} ({validation['gain']:+.3f})"
    if not validation["intervals_apart"]:
        return f"{change}: the 95 % intervals overlap, so no change is shown."
    return f"{change}, 95 % intervals apart: the policy got {'better' if validation['gain'] > 0 else 'worse'}."


def _figures_table(summary: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    table.add_column("first", justify="right")
    table.add_column("last", justify="right")
    validation = summary["validation"]
    if validation is not None:
        table.add_row(
            f"validation mean@1, n = {validation['tasks']}",
            _interval(validation["first"]),
            _interval(validation["last"]),
        )
        table.add_row(f"  best, at step {validation['best']['step']}", "", _interval(validation["best"]))
        for name, value in sorted(summary["floors"].items()):
            table.add_row(f"  floor, {name.replace('_', ' ')}", f"{value:.3f}", "")
    for label, key in (
        ("training score", "score"),
        ("trajectory reward", "reward"),
        ("entropy, nats a token", "entropy"),
    ):
        change = summary["training"][key]
        if change is not None:
            table.add_row(label, f"{change['first']:.3f}", f"{change['last']:.3f}")
    for label, value in _single_figures(summary):
        table.add_row(label, "", value)
    return table


def _single_figures(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    figures = [("training time", f"{summary['wall_s'] / 60:.1f} min")]
    if summary["tokens_per_s"] is not None:
        figures.append(("tokens a second", f"{summary['tokens_per_s']:,.0f}"))
    if summary["largest_logprob_mismatch"] is not None:
        figures.append(("largest sampler-trainer gap, nats", f"{summary['largest_logprob_mismatch']:.1e}"))
    if summary["constant_group_share"] is not None:
        figures.append(("groups that taught nothing", f"{summary['constant_group_share']:.0%}"))
    for label, key in (("failed episodes", "failed_episodes"), ("skipped updates", "skipped_updates")):
        if summary[key]:
            figures.append((label, f"{summary[key]:.0f}"))
    return figures


def _place_lines(history: RunHistory) -> list[Text]:
    """One line a file; plain lines, since a path broken over two cannot be copied."""
    folder = history.folder
    places = [
        ("curves", folder / "curves.png"),
        ("figures", folder / "metrics.jsonl"),
        ("summary", folder / FILE_NAME),
        ("recipe", folder / "config.toml"),
        ("trajectories", folder / "trajectories"),
        ("checkpoints", folder / "checkpoints"),
    ]
    found = [(label, str(path)) for label, path in places if path.exists()]
    found.append(("read a dialogue", f"sinkflex report {folder} --trajectory 1"))
    return [Text.assemble((f"{label:<17}", "dim"), place) for label, place in found]


def _validation_figures(history: RunHistory) -> dict[str, Any] | None:
    points = history.validations
    if not points:
        return None
    first, last = points[0], points[-1]
    best = max(points, key=lambda point: (point.mean, point.step))
    prefix = f"val-core/{history.source}/reward/"
    others = {
        name.removeprefix(prefix): value
        for record in history.records
        if record["step"] == last.step
        for name, value in record.items()
        if name.startswith(prefix) and not name.startswith(f"{prefix}mean@1")
    }
    return {
        "tasks": last.tasks,
        "first": _point(first),
        "last": _point(last),
        "best": _point(best),
        "gain": last.mean - first.mean,
        "intervals_apart": first.high < last.low or last.high < first.low,
        "last_by_name": others,
    }


def _point(point: Validation) -> dict[str, float]:
    return {"step": point.step, "mean": point.mean, "low": point.low, "high": point.high}


def _interval(point: Mapping[str, float]) -> str:
    return f"{point['mean']:.3f} [{point['low']:.3f}, {point['high']:.3f}]"


def _change(history: RunHistory, name: str) -> dict[str, float] | None:
    values = history.series(name)[1]
    if not values:
        return None
    tenth = max(1, len(values) // 10)
    return {"first": sum(values[:tenth]) / tenth, "last": sum(values[-tenth:]) / tenth}


def _constant_share(history: RunHistory) -> float | None:
    constant = sum(history.series("training/constant_groups")[1])
    group_size = history.settings["rollout"]["group_size"]
    trajectories = sum(history.series("training/trajectories")[1])
    return constant * group_size / trajectories if trajectories else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
