"""The run folder: one process at a time, one recipe, and what may differ when a run is resumed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from sinkflex.config import Recipe, dump_recipe, load_recipe
from sinkflex.errors import CheckpointError, ConfigError
from sinkflex.train.whole_file import refused, write_whole

log = logging.getLogger(__name__)

CONFIG = "config.toml"
LOCK = ".lock"
FREE_TO_CHANGE = ("run.out", "logging.", "checkpoint.", "env.step_timeout_s", "warmstart.cache_dir")
"""Keys, or beginnings of keys, that change nothing in what is learnt."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; the operating system lets go when the process ends, however it ends.

    Raises:
        ConfigError: another process holds it.
        InfrastructureError: the folder cannot be written.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with _open_lock(folder) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{folder} is in use by another process; wait for it or stop it, or choose another --out"
            ) from error
        except OSError as error:
            log.warning(
                "%s is on a file system without locks (%s); see to it that no second process runs there",
                folder,
                error.strerror,
            )
        yield


def holds_run(folder: Path) -> bool:
    """Whether a folder holds a run that has come as far as a checkpoint."""
    return (folder / CONFIG).exists() and any((folder / "checkpoints").glob("step_*"))


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
            write_whole(folder / f"config-before-{_count(folder) + 1}.toml", [config.read_text(encoding="utf-8")])
    elif holds_run(folder):
        raise ConfigError(f"{folder} already holds a run; continue it with --resume or choose another --out")
    write_whole(config, [dump_recipe(recipe)])


def _count(folder: Path) -> int:
    return len(list(folder.glob("config-before-*.toml")))


def _open_lock(folder: Path) -> TextIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / LOCK).open("w")
    except OSError as error:
        raise refused(folder / LOCK, error) from error


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key in old.keys() | new.keys():
        path = f"{prefix}{key}"
        if isinstance(old.get(key), dict) and isinstance(new.get(key), dict):
            yield from _differences(old[key], new[key], f"{path}.")
        elif old.get(key) != new.get(key) and not path.startswith(FREE_TO_CHANGE):
            yield path
