"""verify-attention: passes an exact implementation and names the layer of one that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM
from typer.testing import CliRunner

from sinkflex.attention import hf
from sinkflex.bench.verify import verify_model
from sinkflex.cli.verify_attention import verify_attention
from sinkflex.errors import ConfigError, ModelError


@pytest.fixture(scope="module")
def model() -> GptOssForCausalLM:
    config = GptOssConfig(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    torch.manual_seed(0)
    made = GptOssForCausalLM(config)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1 and "norm" not in name:
                parameter.normal_(0.0, 0.3)
    return made


def test_an_exact_implementation_passes(model: GptOssForCausalLM) -> None:
    verdict = verify_model(model, name="tiny", length=24)
    assert verdict.passed
    assert [(c.case, c.place) for c in verdict.checks] == [
        (case, place) for case in ("plain", "left-padded") for place in ("logits", "layer 0", "layer 1")
    ]
    assert [c.has_sink for c in verdict.checks[:3]] == [False, True, True]
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert json.loads(json.dumps(verdict.to_dict()))["passed"] is True


@pytest.mark.parametrize("fault", ["sink left out", "sink without gradient", "window off by one", "nan"])
def test_a_fault_fails_in_the_layer_that_has_it(
    fault: str, model: GptOssForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = hf.sink_attention

    def faulty(q: Tensor, k: Tensor, v: Tensor, s: Tensor, *, window: int | None, **kwargs: Any) -> Any:
        match fault:
            case "sink left out":
                s = s - torch.inf
            case "sink without gradient":
                s = s.detach()
            case "window off by one":
                window = window + 1 if window else None
            case "nan":
                v = v * torch.nan
        return real(q, k, v, s, window=window, **kwargs)

    monkeypatch.setattr(hf, "sink_attention", faulty)
    verdict = verify_model(model, name="tiny", length=24)
    assert not verdict.passed
    failed = {c.place for c in verdict.checks if not c.passed}
    assert "layer 0" in failed
    if fault == "sink without gradient":
        layer = next(c for c in verdict.checks if c.place == "layer 0")
        assert layer.worst == "model.layers.0.self_attn.sinks"
        assert layer.output_error <= layer.budget


def test_bf16_is_judged_by_eagers_own_error(model: GptOssForCausalLM) -> None:
    verdict = verify_model(model.bfloat16(), name="tiny", length=24)
    model.float()
    assert verdict.dtype == "torch.bfloat16"
    # The yardstick is eager's own distance from fp32: bf16's 8 bits, and nowhere near fp32's tolerance.
    assert all(1e-3 < check.budget < 0.5 for check in verdict.checks)


def test_a_model_without_attention_layers_is_refused() -> None:
    with pytest.raises(ModelError, match=r"one layer \(Linear\) has no attention modules"):
        verify_model(nn.Linear(2, 2), name="one layer")


@pytest.fixture
def command() -> typer.Typer:
    app = typer.Typer()
    app.command()(verify_attention)
    return app


def test_the_command_passes_and_writes(command: typer.Typer, model: GptOssForCausalLM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    out = tmp_path / "verdict.json"
    arguments = [str(tmp_path / "model"), "--length", "12", "--out", str(out)]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "PASS" in result.output
    assert json.loads(out.read_text())["passed"] is True


def test_the_command_fails_with_status_1(
    command: typer.Typer, model: GptOssForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.save_pretrained(tmp_path / "model")
    real = hf.sink_attention
    monkeypatch.setattr(hf, "sink_attention", lambda q, k, v, s, **kwargs: real(q, k, v, None, **kwargs))
    result = CliRunner().invoke(command, [str(tmp_path / "model"), "--length", "12"], catch_exceptions=False)
    assert result.exit_code == 1
    assert "FAIL" in result.output


def test_wrong_arguments_are_refused(command: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [str(tmp_path), "--dtype", "int8"])
    assert isinstance(result.exception, ConfigError)
    assert "--dtype is 'int8'" in str(result.exception)
    result = CliRunner().invoke(command, [str(tmp_path)])
    assert isinstance(result.exception, ModelError)
    assert "cannot load" in str(result.exception)


def test_a_missing_transformers_names_the_extra(
    command: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    result = CliRunner().invoke(command, [str(tmp_path)])
    assert "pip install 'sinkflex[hf]'" in str(result.exception)
