"""The run folder: one process at a time, one recipe, and what may differ when a run is resumed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sinkflex.config import Recipe, dump_recipe, load_recipe
from sinkflex.errors import CheckpointError, ConfigError, InfrastructureError

CONFIG = "config.toml"
LOCK = ".lock"
FREE_TO_CHANGE = ("run.out", "logging.", "checkpoint.", "env.step_timeout_s", "warmstart.cache_dir")
"""Keys, or beginnings of keys, that change nothing in what is learnt."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; the operating system lets go when the process ends, however it ends.

    Raises:
        ConfigError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"{folder} is in use by another process; wait for it or stop it, or choose another --out"
            ) from error
        yield


def claim(folder: Path, recipe: Recipe, *, resuming: bool, allow_changes: bool = False) -> None:
    """Write the resolved recipe into a fresh folder, or check that a resumed one matches.

    Args:
        folder: of the run.
        recipe: what is about to run.
        resuming: the folder must hold a run already.
        allow_changes: resume under another recipe, which then replaces the stored one.

    Raises:
        ConfigError: the folder holds a run and is not resumed, or the recipes differ in what they would learn.
        CheckpointError: there is nothing to resume.
        InfrastructureError: the disk refused the write.
    """
    config = folder / CONFIG
    if resuming:
        if not config.is_file():
            raise CheckpointError(f"{folder} holds no run to resume; start it without --resume")
        stored = load_recipe(config)
        changed = sorted(_differences(stored.model_dump(), recipe.model_dump()))
        if changed and not allow_changes:
            raise ConfigError(
                f"cannot resume {folder}: the recipe differs from the one it was started with in {', '.join(changed)}; "
                f"resume with the stored one: sinkflex train {config} --resume --out {folder}, or go on under the new "
                "one with --allow-changes (the run is then no longer that of one recipe)"
            )
        if changed:
            _write(folder / f"config-before-{_count(folder) + 1}.toml", config.read_text(encoding="utf-8"))
    elif config.exists() and any((folder / "checkpoints").glob("step_*")):
        raise ConfigError(f"{folder} already holds a run; continue it with --resume or choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    _write(config, dump_recipe(recipe))


def _count(folder: Path) -> int:
    return len(list(folder.glob("config-before-*.toml")))


def _write(path: Path, text: str) -> None:
    """Write a file whole: aside, fsynced, renamed."""
    staging = path.with_suffix(".tmp")
    try:
        with staging.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
    except OSError as error:
        raise InfrastructureError(
            f"could not write {path}: {error}; free disk space or choose another --out"
        ) from error


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key in old.keys() | new.keys():
        path = f"{prefix}{key}"
        if isinstance(old.get(key), dict) and isinstance(new.get(key), dict):
            yield from _differences(old[key], new[key], f"{path}.")
        elif old.get(key) != new.get(key) and not path.startswith(FREE_TO_CHANGE):
            yield path
