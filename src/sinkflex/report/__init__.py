"""The run report: ``curves.png``, ``summary.json``, the terminal summary and the trajectory viewer."""

from sinkflex.report.curves import draw_curves
from sinkflex.report.history import RunHistory, Validation, read_run
from sinkflex.report.summary import render_summary, summarise, write_summary
from sinkflex.report.trajectories import read_trajectory, render_trajectory, trajectory_files

__all__ = [
    "RunHistory",
    "Validation",
    "draw_curves",
    "read_run",
    "read_trajectory",
    "render_summary",
    "render_trajectory",
    "summarise",
    "trajectory_files",
    "write_summary",
]
