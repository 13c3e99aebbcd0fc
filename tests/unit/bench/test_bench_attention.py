"""bench attention: the contenders answer the same question, and its figures are what they say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from sinkflex.attention import sink_attention
from sinkflex.bench import attention as bench
from sinkflex.bench import meter
from sinkflex.bench.attention import AttentionPlan, run_attention
from sinkflex.bench.contenders import CONTENDERS, Shape, select
from sinkflex.bench.render import attention_table, parse_lengths, write
from sinkflex.cli import bench as cli
from sinkflex.errors import ConfigError, InfrastructureError

CPU = torch.device("cpu")


def shape(**changes: Any) -> Shape:
    return Shape(**({"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "tokens": 33, "window": None} | changes))


@pytest.mark.parametrize("window", [None, 1, 7, 33, 50])
def test_visible_pairs_are_counted(window: int | None) -> None:
    rows, columns = torch.arange(33)[:, None], torch.arange(33)
    seen = (columns <= rows) & (rows - columns < (window or 33))
    assert shape(window=window).visible_pairs == int(seen.sum())


def test_flops_of_a_hand_case() -> None:
    # 3 pairs of T=2, two products of 2*8 each forward: 3*32 = 96 per head; backward adds five products: 240.
    one = shape(batch=1, heads=1, kv_heads=1, tokens=2)
    assert one.flops(backward=False) == 96
    assert one.flops(backward=True) == 336


@pytest.mark.parametrize("window", [None, 5])
def test_contenders_with_a_sink_agree_and_the_floor_is_plain_softmax(window: int | None) -> None:
    case = shape(window=window)
    made = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 33, 8, generator=made)
    k, v = (torch.randn(2, 2, 33, 8, generator=made) for _ in range(2))
    s = torch.randn(4, generator=made)
    for name, contender in CONTENDERS.items():
        if contender.missing(CPU, torch.float32) is None:
            got = contender.build(case, CPU)(q, k, v, s)
            want = sink_attention(q, k, v, s if contender.has_sink else None, window=window, impl="reference")
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=name)


def plan(**changes: Any) -> AttentionPlan:
    settings = {
        "shape": shape(),
        "lengths": [16, 40],
        "contenders": list(CONTENDERS),
        "dtype": torch.float32,
        "device": CPU,
        "repeats": 1,
    }
    return AttentionPlan(**(settings | changes))


def test_a_run_reports_every_contender_at_every_length(tmp_path: Path) -> None:
    seen: list[Any] = []
    report = run_attention(plan(), progress=seen.append)
    assert seen == list(report.results)
    assert [(r.tokens, r.contender) for r in seen] == [(t, c) for t in (16, 40) for c in CONTENDERS]
    for result in seen:
        if CONTENDERS[result.contender].missing(CPU, torch.float32):
            assert (result.status, result.note) == ("unavailable", "needs a CUDA device")
        else:
            assert result.status == "ok"
            assert result.seconds > 0
            assert result.tokens_per_s == pytest.approx(2 * result.tokens / result.seconds)
    data, picture = write(report, tmp_path, "run")
    record = json.loads(data.read_text())
    assert record["plan"]["dtype"] == "torch.float32"
    assert record["machine"]["torch"] == torch.__version__
    assert picture.read_bytes().startswith(b"\x89PNG")
    console = Console(record=True, width=160)
    console.print(attention_table(report))
    text = console.export_text()
    assert "leaves the sink out" in text
    assert "needs a CUDA device" in text


def test_what_cannot_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_free_bytes", lambda device: 1000)
    (result,) = run_attention(plan(lengths=[64], contenders=["hf-eager"])).results
    assert result.status == "too large"
    assert "GiB of scores" in result.note


def test_running_out_of_memory_ends_one_result_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(shape: Any, device: torch.device) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB. GPU 0 has less")

    monkeypatch.setitem(CONTENDERS, "sdpa", dataclasses.replace(CONTENDERS["sdpa"], build=run_out))
    lost, kept = run_attention(plan(lengths=[16], contenders=["sdpa", "sinkflex"])).results
    assert (lost.status, lost.note, lost.seconds) == ("out of memory", "CUDA out of memory", None)
    assert kept.status == "ok"


@pytest.mark.parametrize("name", ["flash-attn", "flash-attn-3"])
def test_flash_attn_is_left_out_in_fp32(name: str) -> None:
    reason = CONTENDERS[name].missing(torch.device("cuda"), torch.float32)
    assert reason == "wants float16 or bfloat16, not float32"


def test_peak_memory_is_what_a_call_holds_at_once() -> None:
    def hold() -> None:
        torch.ones(12_000_000)

    reading = meter.measure(hold, device=CPU, repeats=1)
    assert reading.peak_bytes == pytest.approx(48e6, rel=0.05)


def test_a_machine_without_a_peak_to_reset_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, text: str) -> int:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(InfrastructureError, match="peak memory on CPU is read from Linux's /proc/self"):
        meter.reset_peak(CPU)


def test_a_machine_without_proc_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(InfrastructureError, match="memory on CPU is read from Linux's /proc/self/status"):
        meter.current_bytes(CPU)


def test_unknown_contenders_are_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown contender 'sdpaa'.*Did you mean 'sdpa'"):
        select(["sdpaa"])


def test_lengths_are_parsed() -> None:
    assert parse_lengths("4096,1024") == [1024, 4096]
    with pytest.raises(ValueError, match="expected positive numbers"):
        parse_lengths("0,5")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int8"], "--dtype is 'int8'; expected one of float32"),
        (["--lengths", "many"], "--lengths is 'many'; expected positive numbers"),
        (["--shape", "1,8"], "--shape is '1,8'; expected batch,heads,kv_heads,head_dim"),
        (["--shape", "1,8,3,64"], "with heads a multiple of kv_heads"),
        (["--device", "abacus"], "--device is 'abacus'; expected cpu"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.app, ["attention", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    options = ["--lengths", "16", "--shape", "1,2,1,8", "--window", "4", "--contenders", "sdpa,sinkflex"]
    arguments = ["attention", *options, "--device", "cpu", "--repeats", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "attention-cpu-float32-window4.json",
        "attention-cpu-float32-window4.png",
    }
