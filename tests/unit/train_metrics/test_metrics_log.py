"""``metrics.jsonl``: nothing written is lost, nothing is counted twice, and a broken tracker never ends a run."""

from __future__ import annotations

import builtins
import contextlib
import errno
import json
import logging
import os
import sys
import types

import pytest

from sinkflex.config import load_recipe
from sinkflex.errors import ConfigError, InfrastructureError, MissingExtraError
from sinkflex.train import trackers
from sinkflex.train.metrics import MetricsLog, check_sinks, read_metrics
from sinkflex.train.trackers import RunIdentity, open_sinks

RECIPE = load_recipe(None, ["logging.tensorboard=false"])


class Recorder:
    name = "recorder"

    def __init__(self, *, breaks: bool = False) -> None:
        self.calls: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self.breaks = breaks

    def log(self, step, metrics):
        if self.breaks:
            raise ConnectionError("no route")
        self.calls.append((step, dict(metrics)))

    def close(self, ending):
        self.closed += 1
        self.ending = ending
        if self.breaks:
            raise ConnectionError("still no route")


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_is_on_disk_when_write_returns(tmp_path):
    log = MetricsLog(tmp_path, RECIPE, sinks=[])
    log.write(1, {"critic/score/mean": 0.25, "perf/throughput": 10})
    assert [{key: value for key, value in line.items() if key != "wall_s"} for line in lines(tmp_path)] == [
        {"step": 1, "critic/score/mean": 0.25, "perf/throughput": 10.0}
    ]
    log.close()


def test_a_figure_that_is_not_finite_is_null_and_kept_from_trackers(tmp_path):
    sink = Recorder()
    with MetricsLog(tmp_path, RECIPE, sinks=[sink]) as log:
        log.write(1, {"a": float("nan"), "b": float("-inf"), "c": 1.0})
    assert {key: lines(tmp_path)[0][key] for key in "abc"} == {"a": None, "b": None, "c": 1.0}
    assert sink.calls == [(1, {"c": 1.0})]
    assert sink.closed == 1


def test_a_resumed_run_drops_what_it_will_do_again_and_a_torn_line(tmp_path):
    with MetricsLog(tmp_path, RECIPE, sinks=[]) as log:
        for step in range(4):
            log.write(step, {"x": step})
    kept_until = lines(tmp_path)[2]["wall_s"]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "x"')
    with MetricsLog(tmp_path, RECIPE, resume_step=2, sinks=[]) as log:
        log.write(3, {"x": 33})
    assert [(line["step"], line["x"]) for line in lines(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 33)]
    assert lines(tmp_path)[-1]["wall_s"] >= kept_until


def test_a_fresh_run_starts_the_file_anew(tmp_path):
    with MetricsLog(tmp_path, RECIPE, sinks=[]) as log:
        log.write(0, {"x": 1})
    with MetricsLog(tmp_path, RECIPE, sinks=[]) as log:
        log.write(0, {"x": 2})
    assert [line["x"] for line in lines(tmp_path)] == [2]


def test_reading_merges_lines_of_one_step_and_leaves_a_torn_one_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "wall_s": 1, "a": 1}\n{"step": 0, "wall_s": 0}\n{"step": 1, "wall_s": 2, "b": 3}\n{"step": 2'
    )
    assert read_metrics(tmp_path) == [{"step": 0, "wall_s": 0}, {"step": 1, "wall_s": 2, "a": 1, "b": 3}]


def test_reading_a_folder_without_figures_is_explained(tmp_path):
    with pytest.raises(ConfigError, match=r"has no metrics.jsonl; give the folder of a run"):
        read_metrics(tmp_path)


def test_a_full_disk_stops_with_a_message_and_leaves_whole_lines(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path, RECIPE, sinks=[])
    log.write(1, {"x": 1})

    def refuse(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(InfrastructureError, match=r"cannot write .*metrics.jsonl: No space left on device; .*--resume"):
        log.write(2, {"x": 2})
    monkeypatch.undo()
    assert [line["step"] for line in lines(tmp_path)] == [1]
    log.close()


def test_a_torn_line_that_cannot_be_cut_is_said(tmp_path, monkeypatch, caplog):
    log = MetricsLog(tmp_path, RECIPE, sinks=[])

    def refuse(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(os, "truncate", refuse)
    with pytest.raises(InfrastructureError, match="Input/output error"):
        log.write(1, {"x": 1})
    assert "may end in a torn line" in caplog.text
    monkeypatch.undo()
    log.close()


def test_a_folder_that_cannot_be_written_is_explained(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(InfrastructureError, match=r"cannot write .*metrics.jsonl: File exists"):
        MetricsLog(tmp_path / "taken", RECIPE, sinks=[])


def test_a_tracker_that_fails_is_named_once_and_left_out(tmp_path, caplog):
    good, bad = Recorder(), Recorder(breaks=True)
    with caplog.at_level(logging.WARNING), MetricsLog(tmp_path, RECIPE, sinks=[bad, good]) as log:
        log.write(1, {"x": 1})
        log.write(2, {"x": 2})
    assert [record.getMessage().split(" and ")[0] for record in caplog.records] == ["recorder failed"]
    assert [step for step, _ in good.calls] == [1, 2]
    assert (bad.closed, good.closed) == (0, 1)


def test_a_tracker_that_fails_to_close_is_named(tmp_path, caplog):
    bad = Recorder()
    log = MetricsLog(tmp_path, RECIPE, sinks=[bad])
    bad.breaks = True
    log.close()
    assert "recorder failed and is left out from here on (ConnectionError: still no route)" in caplog.text


def test_the_recipe_names_the_trackers(tmp_path):
    recipe = load_recipe(None, ["logging.tensorboard=true"])
    with MetricsLog(tmp_path, recipe) as log:
        log.write(1, {"critic/score/mean": 0.5})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("critic/score/mean")] == [(1, 0.5)]


def identity(folder, resume_step=None):
    return RunIdentity(
        folder=folder, project="p", name="n", settings={"run": {"seed": 3}, "flat": 1}, resume_step=resume_step
    )


def test_an_unknown_tracker_names_the_nearest(tmp_path):
    with pytest.raises(
        ValueError, match=r"unknown tracker 'wandbb'; choose one of mlflow, tensorboard, wandb. Did you"
    ):
        open_sinks(["wandbb"], identity(tmp_path))


@pytest.mark.parametrize(("name", "key"), [("wandb", "wandb"), ("mlflow", "mlflow"), ("tensorboard", "tensorboard")])
def test_a_missing_extra_comes_with_its_command(tmp_path, monkeypatch, name, key):
    real_import = builtins.__import__

    def hide(module, *arguments, **options):
        if module.split(".")[0] == key:
            raise ImportError(module)
        return real_import(module, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", hide)
    for loaded in [m for m in sys.modules if m.split(".")[0] == key or m.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, key, None)
    with pytest.raises(
        MissingExtraError, match=rf"logging.{key} needs {key}; install it with: pip install 'sinkflex\["
    ):
        open_sinks([name], identity(tmp_path))


def test_wandb_gets_the_figures_and_keeps_its_run_over_a_resume(tmp_path, monkeypatch):
    runs = []

    class Run:
        def __init__(self, **options):
            self.options, self.logged, self.exit_code = options, [], None

        def log(self, figures):
            self.logged.append(figures)

        def finish(self, exit_code):
            self.exit_code = exit_code

    def init(**options):
        runs.append(Run(**options))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    for resume_step in (None, 1):
        (sink,) = open_sinks(["wandb"], identity(tmp_path, resume_step))
        sink.log(2, {"x": 1.0})
        sink.close("failed" if resume_step is None else "finished")
    first, second = runs
    assert first.options["id"] == second.options["id"]
    assert (first.options["project"], first.options["name"], first.options["resume"]) == ("p", "n", "allow")
    assert first.logged == [{"x": 1.0, "train_step": 2}]
    assert (first.exit_code, second.exit_code) == (1, 0)


def test_mlflow_gets_allowed_names_and_keeps_its_run_over_a_resume(tmp_path, monkeypatch):
    calls = []

    class Client:
        def create_run(self, experiment, run_name):
            calls.append(("create", experiment, run_name))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))

        def log_param(self, *arguments):
            calls.append(("param", *arguments))

        def log_metric(self, run, name, value, step):
            calls.append(("metric", run, name, value, step))

        def set_terminated(self, run, status):
            calls.append(("end", run, status))

        def update_run(self, run, status):
            calls.append(("again", run, status))

    fake = types.SimpleNamespace(
        MlflowClient=Client, set_experiment=lambda name: types.SimpleNamespace(experiment_id=f"e-{name}")
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    (sink,) = open_sinks(["mlflow"], identity(tmp_path))
    sink.log(3, {"val-core/T/reward/mean@1": 0.5, "val-core/T/reward/pass^2": 0.25})
    sink.close("killed")
    (sink,) = open_sinks(["mlflow"], identity(tmp_path, resume_step=3))
    sink.close("finished")
    assert calls == [
        ("create", "e-p", "n"),
        ("param", "r1", "run.seed", "3"),
        ("param", "r1", "flat", "1"),
        ("metric", "r1", "val-core/T/reward/mean_at_1", 0.5, 3),
        ("metric", "r1", "val-core/T/reward/pass_hat_2", 0.25, 3),
        ("end", "r1", "KILLED"),
        ("again", "r1", "RUNNING"),
        ("end", "r1", "FINISHED"),
    ]


def test_a_tracker_that_cannot_be_opened_is_named_and_left_out(tmp_path, monkeypatch, caplog):
    def out_of_reach(identity):
        raise ConnectionError("no route to host")

    monkeypatch.setitem(trackers.SINKS, "wandb", out_of_reach)
    assert [sink.name for sink in open_sinks(["wandb", "tensorboard"], identity(tmp_path))] == ["TensorBoard"]
    assert "wandb cannot be opened and is left out (ConnectionError: no route to host)" in caplog.text


def test_missing_extras_are_found_before_anything_is_trained(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"logging.wandb needs wandb"):
        check_sinks(load_recipe(None, ["logging.wandb=true", "logging.tensorboard=false"]))
    check_sinks(load_recipe(None, ["logging.tensorboard=false"]))


def test_a_line_that_is_no_json_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step" 2}\n{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 2 is no JSON"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(
    ("error", "ending"), [(None, "finished"), (RuntimeError, "failed"), (KeyboardInterrupt, "killed")]
)
def test_trackers_learn_how_the_run_ended(tmp_path, error, ending):
    sink = Recorder()
    with contextlib.suppress(RuntimeError, KeyboardInterrupt), MetricsLog(tmp_path, RECIPE, sinks=[sink]) as log:
        log.write(1, {"a": 1.0})
        if error is not None:
            raise error
    assert (sink.closed, sink.ending) == (1, ending)


def test_half_a_line_that_a_full_disk_took_is_taken_back_and_never_turns_up_later(tmp_path):
    class Filling:
        """A file whose disk takes five more bytes of the next line, and all again after that."""

        def __init__(self, real):
            self.real, self.left = real, 5

        def fileno(self):
            return self.real.fileno()

        def write(self, data):
            if self.left == 0:
                self.left = None
                raise OSError(errno.ENOSPC, "No space left on device")
            taken = self.real.write(data if self.left is None else data[: self.left])
            self.left = None if self.left is None else 0
            return taken

        def close(self):
            self.real.close()

    log = MetricsLog(tmp_path, RECIPE, sinks=[])
    log.write(1, {"a": 1.0})
    log._file = Filling(log._file)
    with pytest.raises(InfrastructureError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
        log.write(2, {"a": 2.0})
    assert [line["step"] for line in lines(tmp_path)] == [1]
    log.write(3, {"a": 3.0})
    log.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 3]
