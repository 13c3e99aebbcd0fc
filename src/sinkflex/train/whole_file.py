"""Files that are whole or absent: written aside, fsynced, renamed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from sinkflex.errors import InfrastructureError


def write_whole(path: Path, lines: Iterable[str]) -> None:
    """Write a text file so that a reader, or a killed process, finds the old content or the new and nothing between.

    Args:
        path: the file; its folder is made if missing.
        lines: its text in pieces, written as they are.

    Raises:
        InfrastructureError: the disk refused; what was there before is unchanged.
    """
    staging = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staging.open("w", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
        fsync(path.parent)
    except OSError as error:
        with suppress(OSError):
            staging.unlink()
        raise refused(path, error) from error


def refused(path: Path, error: OSError) -> InfrastructureError:
    """Return the error for a file that the disk would not take."""
    return InfrastructureError(
        f"cannot write {path}: {error.strerror or error}; what was written before is intact. "
        "Free disk space or fix the permissions, then run again with --resume, or choose another --out"
    )


def fsync(path: Path) -> None:
    """Force a file or folder to the disk; a folder's entries are part of it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
