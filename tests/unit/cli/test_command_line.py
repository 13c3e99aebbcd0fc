"""The command line: quick to start, one clean message for every expected failure, commands mounted when asked for."""

from __future__ import annotations

import errno
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer

import sinkflex.cli as cli
from sinkflex import __version__
from sinkflex.config import load_recipe
from sinkflex.errors import ConfigError, InfrastructureError


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command line in this process; returns (exit status, stdout, stderr)."""
    monkeypatch.delenv(cli.TRACEBACK, raising=False)

    def _run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        out, err = capsys.readouterr()
        code = caught.value.code
        return (0 if code is None else int(code)), out, err

    return _run


def test_starting_up_imports_no_tensor_library():
    code = (
        "import sys; import sinkflex.cli as c; c.build_app(['--help']); "
        "print([m for m in ('torch', 'transformers', 'gymnasium', 'matplotlib', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_help_lists_every_command_without_importing_them(run, monkeypatch):
    monkeypatch.setattr(cli, "LATE_COMMANDS", dict(cli.LATE_COMMANDS))
    status, out, _ = run("--help")
    assert status == 0
    for name in ("train", "eval", "report", "doctor", "config", *cli.LATE_COMMANDS):
        assert name in out


def test_the_version_is_printed(run):
    assert run("--version")[:2] == (0, f"sinkflex {__version__}\n")


def test_a_late_command_is_mounted_when_it_is_asked_for(run, monkeypatch):
    group = typer.Typer()

    @group.command()
    def one():
        print("one ran")

    @group.command()
    def two():
        print("two ran")

    def single(name: str):
        print(f"single got {name}")

    module = types.SimpleNamespace(group=group, single=single)
    monkeypatch.setitem(sys.modules, "late_module", module)
    monkeypatch.setattr(
        cli,
        "LATE_COMMANDS",
        {
            "group": cli.LateCommand(module="late_module", attribute="group", summary="A group."),
            "single": cli.LateCommand(module="late_module", attribute="single", summary="One."),
        },
    )
    assert run("group", "two")[:2] == (0, "two ran\n")
    assert run("single", "x")[:2] == (0, "single got x\n")
    with pytest.raises(AssertionError, match="without being mounted"):
        cli._not_mounted()


def failing(monkeypatch, error):
    def fail():
        raise error

    module = types.SimpleNamespace(fail=fail)
    monkeypatch.setitem(sys.modules, "late_module", module)
    monkeypatch.setattr(
        cli, "LATE_COMMANDS", {"fail": cli.LateCommand(module="late_module", attribute="fail", summary="Fails.")}
    )


def test_an_expected_failure_is_one_message_and_status_2(run, monkeypatch):
    failing(monkeypatch, InfrastructureError("the clock stopped [really]"))
    assert run("fail") == (2, "", "error: the clock stopped [really]\n")


def test_the_traceback_can_be_asked_for(monkeypatch):
    failing(monkeypatch, ConfigError("wrong"))
    monkeypatch.setenv(cli.TRACEBACK, "")
    with pytest.raises(ConfigError, match="wrong"):
        cli.main(["--traceback", "fail"])


def test_a_full_disk_is_said_and_other_errors_show_themselves(run, monkeypatch):
    failing(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    status, _, err = run("fail")
    assert status == 2
    assert "the disk is full" in err
    failing(monkeypatch, OSError(errno.EACCES, "Permission denied"))
    with pytest.raises(OSError, match="Permission denied"):
        cli.main(["fail"])


def test_config_show_prints_a_recipe_that_loads_equal(run, tmp_path):
    status, out, _ = run("config", "show", "retail", "--set", "run.seed=7", "--set", "env.tier=long")
    assert status == 0
    path = tmp_path / "shown.toml"
    path.write_text(out)
    recipe = load_recipe(path)
    assert (recipe.run.name, recipe.run.seed, recipe.env.tier) == ("retail", 7, ("long",))


def test_config_lists_recipes_and_explains_keys(run):
    assert "gpt-oss-20b-lora" in run("config", "list")[1]
    _, out, _ = run("config", "keys", "checkpoint")
    assert "checkpoint.keep_last" in out
    assert "rollout.slots" not in out
    status, _, err = run("config", "keys", "chekpoint")
    assert (status, "no section 'chekpoint'; there are algo, chat, checkpoint" in err) == (2, True)


def test_doctor_names_versions_devices_attention_and_missing_extras(run, monkeypatch):
    from sinkflex.cli import doctor

    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda package: None if package in ("wandb", "torch") else real(package))
    status, out, _ = run("doctor")
    assert status == 0
    for part in (
        f"sinkflex      {__version__}",
        "torch         not installed",
        "cores usable",
        "flash: torch's CPU flash kernel" if "no device" in out else "CUDA 0",
        "gpt_oss",
        "Weights & Biases: missing wandb: pip install 'sinkflex[wandb]'",
    ):
        assert part in out


def test_doctor_says_when_there_is_no_transformers(monkeypatch):
    from sinkflex.cli import doctor

    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor._sink_models() == []


@pytest.mark.parametrize("path", sorted((Path(__file__).resolve().parents[3] / "recipes").glob("*.toml")))
def test_every_shipped_recipe_passes_a_dry_run(run, path):
    status, out, err = run("train", path.stem, "--dry-run")
    assert status == 0, err
    assert f'name = "{path.stem}"' in out
    assert "nothing was run" in err
