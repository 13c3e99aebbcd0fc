"""One process and one recipe a folder; what may change on resume, and what a change leaves behind."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from sinkflex.config import load_recipe
from sinkflex.errors import ConfigError, InfrastructureError
from sinkflex.train.run_folder import claim, locked

HOLD = """
import sys
from pathlib import Path
from sinkflex.train.run_folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    program = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(ConfigError, match=r"is in use by another process; wait for it or stop it"),
            locked(tmp_path),
        ):
            pass
        holder.kill()
    with locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_not_said_to_be_in_use(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InfrastructureError, match=r"cannot write .*\.lock: .*fix the permissions"),
        locked(tmp_path / "file"),
    ):
        pass


def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with locked(tmp_path):
        pass
    assert "is on a file system without locks (No locks available)" in caplog.text


@pytest.mark.parametrize(
    "change",
    ["logging.wandb=true", "checkpoint.keep_last=9", "env.step_timeout_s=5.0", "warmstart.cache_dir=elsewhere"],
)
def test_what_is_not_learnt_from_may_change(tmp_path: Path, change: str) -> None:
    claim(tmp_path, load_recipe(None, []), resuming=False)
    claim(tmp_path, load_recipe(None, [change]), resuming=True)
    assert load_recipe(tmp_path / "config.toml") == load_recipe(None, [change])


def test_another_recipe_is_refused_unless_it_is_asked_for_and_the_old_one_is_kept(tmp_path: Path) -> None:
    old, new = load_recipe(None, []), load_recipe(None, ["optim.lr=1e-5", "rollout.max_length=600"])
    claim(tmp_path, old, resuming=False)
    with pytest.raises(ConfigError, match=r"differs .* in optim.lr, rollout.max_length.*--allow-changes"):
        claim(tmp_path, new, resuming=True)
    assert load_recipe(tmp_path / "config.toml") == old
    claim(tmp_path, new, resuming=True, allow_changes=True)
    assert load_recipe(tmp_path / "config.toml") == new
    assert load_recipe(tmp_path / "config-before-1.toml") == old
