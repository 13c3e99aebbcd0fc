"""bench train-step: one process a step, memory as a result, and bars that can be missed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from sinkflex.bench import train_child, train_step
from sinkflex.bench.render import train_step_table, train_step_verdicts, write
from sinkflex.bench.train_step import TrainStepPlan, TrainStepReport, TrainStepResult, run_train_steps
from sinkflex.cli import bench as cli
from sinkflex.errors import InfrastructureError

MIB = 2**20


def plan(**changes: Any) -> TrainStepPlan:
    return TrainStepPlan(**({"cap_bytes": 8 * 2**30, "lengths": (1024, 2048)} | changes))


def report(peaks: dict[str, list[int | None]], lengths: tuple[int, ...] = (1024, 4096, 8192)) -> TrainStepReport:
    results = [
        TrainStepResult(
            implementation=name,
            tokens=tokens,
            status="ok" if peak is not None else "out of memory",
            peak_bytes=peak,
            seconds=1.0 if peak is not None else None,
        )
        for name, column in peaks.items()
        for tokens, peak in zip(lengths, column, strict=True)
    ]
    return TrainStepReport(plan=plan(lengths=lengths, implementations=tuple(peaks)), results=tuple(results))


def test_growth_and_length_of_a_hand_case() -> None:
    # Eager grows by 400, sinkflex by 40: a tenth. Eager fails first at 8,192, where sinkflex still runs: ratio 1.
    made = report({"eager": [100, 500, None], "sinkflex": [100, 140, 180]})
    assert made.growth_share() == pytest.approx(0.1)
    assert made.length_ratio() == 1
    growth, length = train_step_verdicts(made)
    assert growth.endswith("10.0% of eager's; meets the bar of 15%")
    assert length.endswith("misses the bar of 8")


def test_bars_are_silent_without_their_figures() -> None:
    made = report({"eager": [100, None, None], "sinkflex": [100, 140, 180]})
    assert made.growth_share() is None
    assert report({"sinkflex": [1, 2, 3]}).length_ratio() is None
    assert len(train_step_verdicts(made)) == 1


def test_table_json_and_plot(tmp_path: Path) -> None:
    made = report({"eager": [100 * MIB, 500 * MIB, None], "sinkflex": [100 * MIB, 140 * MIB, 180 * MIB]})
    console = Console(record=True, width=120)
    console.print(train_step_table(made))
    text = console.export_text()
    assert "out of memory" in text
    assert "140" in text
    data, picture = write(made, tmp_path, "step")
    assert json.loads(data.read_text())["growth_share"] == pytest.approx(0.1)
    assert picture.exists()


def fake_child(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Run ``source`` in place of the training step; its settings are in sys.argv[1]."""
    real = train_step.subprocess.Popen

    def popen(command: list[str], **kwargs: Any) -> Any:
        return real([sys.executable, "-c", source, command[-1]], **kwargs)

    monkeypatch.setattr(train_step.subprocess, "Popen", popen)


def test_going_over_the_cap_ends_an_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_child(
        monkeypatch,
        "import json, sys, time\n"
        "s = json.loads(sys.argv[1])\n"
        "big = s['implementation'] == 'eager' and s['tokens'] > 1024\n"
        "block = bytearray(300 << 20) if big else b''\n"
        "time.sleep(30 if big else 0)\n"
        "print(json.dumps({'status': 'ok', 'seconds': 1.0, 'peak_bytes': 5, 'loss': 0.5}))",
    )
    seen: list[TrainStepResult] = []
    run_train_steps(
        plan(cap_bytes=200 * MIB, lengths=(1024, 2048, 4096), implementations=("eager", "sinkflex")),
        progress=seen.append,
    )
    assert [r.status for r in seen] == ["ok", "out of memory", "not run", "ok", "ok", "ok"]
    assert seen[1].peak_bytes is not None
    assert seen[1].peak_bytes > 200 * MIB


def test_a_peak_that_only_the_process_saw_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = 300 * MIB
    fake_child(monkeypatch, f'print(\'{{"status": "ok", "seconds": 1.0, "peak_bytes": {peak}, "loss": 0.5}}\')')
    (result,) = run_train_steps(plan(cap_bytes=200 * MIB, lengths=(8,), implementations=("eager",))).results
    assert (result.status, result.seconds, result.peak_bytes) == ("out of memory", None, peak)


def test_a_process_that_the_kernel_killed_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_child(monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    made = run_train_steps(plan(lengths=(8,), implementations=("eager",)))
    assert made.results[0].status == "out of memory"


def test_flops_of_a_hand_case(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_experts_per_tok": 1, "num_local_experts": 2, "head_dim": 8, "num_attention_heads": 3}
    monkeypatch.setattr(train_child, "MODEL", sizes | {"sliding_window": 2})
    model = torch.nn.Module()
    model.embed_tokens = torch.nn.Linear(9, 9)
    model.mlp = torch.nn.ModuleDict({"experts": torch.nn.ModuleDict({"all": torch.nn.Linear(4, 10)})})
    model.head = torch.nn.Linear(5, 7)
    model.config = SimpleNamespace(layer_types=["full_attention", "sliding_attention"])
    # 35 + 40 / 2 weights, 6 FLOPs each and token. Pairs of 4 tokens: 10 in full, 1 + 2 + 2 + 2 through a window of 2.
    assert train_child.step_flops(model, 4) == 6 * 55 * 4 + 14 * 8 * 3 * 17


def test_a_step_that_takes_too_long_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_child(monkeypatch, "import time; time.sleep(30)")
    made = run_train_steps(plan(implementations=("sinkflex",), lengths=(8,), timeout_s=0.2))
    assert made.results[0].status == "timeout"


def test_any_other_failure_raises_with_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_child(monkeypatch, "raise SystemExit('the roof is on fire')")
    with pytest.raises(InfrastructureError, match=r"the eager step at 8 tokens ended with status 1:\nthe roof"):
        run_train_steps(plan(lengths=(8,)))


def test_the_child_runs_the_same_step_under_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "sliding_window": 16}
    monkeypatch.setattr(train_child, "MODEL", train_child.MODEL | small)
    records = []
    for implementation in ("eager", "sinkflex", train_child.SDPA_FLOOR):
        settings = {
            "implementation": implementation,
            "tokens": 80,
            "device": "cpu",
            "threads": torch.get_num_threads(),
            "cap_bytes": 2**33,
            "checkpointing": implementation == "sinkflex",
        }
        monkeypatch.setattr(sys, "argv", ["train_child", json.dumps(settings)])
        train_child.main()
        records.append(json.loads(capsys.readouterr().out))
    assert [record["status"] for record in records] == ["ok", "ok", "ok"]
    assert records[0]["loss"] == pytest.approx(records[1]["loss"], rel=1e-4)
    # Without the sink it is another model, though a near one.
    assert records[0]["loss"] != pytest.approx(records[2]["loss"], rel=1e-6)
    for record in records:
        assert record["tokens_per_s"] == pytest.approx(80 / record["seconds"])
        assert 0 < record["peak_share"] < 1.5


@pytest.mark.parametrize("message", ["DefaultCPUAllocator: can't allocate memory: you tried", "something else"])
def test_only_a_failed_allocation_is_out_of_memory(
    message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(train_child, "measured_step", fail)
    settings = {"implementation": "eager", "tokens": 1, "device": "cpu", "threads": 1, "checkpointing": False}
    monkeypatch.setattr(sys, "argv", ["train_child", json.dumps(settings)])
    if "allocate" in message:
        train_child.main()
        assert json.loads(capsys.readouterr().out) == {"status": "out of memory"}
    else:
        with pytest.raises(RuntimeError, match="something else"):
            train_child.main()


def test_the_command_prints_and_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_child(monkeypatch, 'print(\'{"status": "ok", "seconds": 1.0, "peak_bytes": 9, "loss": 0.5}\')')
    arguments = ["train-step", "--lengths", "8,16", "--cap-gib", "1", "--device", "cpu", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"train-step-cpu.json", "train-step-cpu.png"}
