"""Checkpoints that are whole or absent: written aside, fsynced, renamed, and verified by hash before use."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from sinkflex.errors import CheckpointError, InfrastructureError
from sinkflex.train.whole_file import fsync

MANIFEST = "manifest.json"
FORMAT = 1
_WRITER = re.compile(r"-\d+$")
"""The process id at the end of a temporary folder's name."""


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """One complete checkpoint folder.

    Attributes:
        path: the folder.
        step: train steps done when it was written.
        score: validation mean@1 measured at that step, or None.
    """

    path: Path
    step: int
    score: float | None


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``target`` when the block ends well, and vanishes when it does not.

    Every file is fsynced before the rename and the parent after it, so a power cut leaves the old state or the new.

    Raises:
        InfrastructureError: the disk is full or refuses the write; nothing under ``target`` has changed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f".tmp-{target.name}-{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
        yield staging
        for path in sorted(staging.rglob("*")):
            fsync(path)
        fsync(staging)
        replaced = target.parent / f".old-{target.name}-{os.getpid()}"
        if target.exists():
            target.rename(replaced)
        staging.rename(target)
        fsync(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise InfrastructureError(
            f"could not write {target}: {error}; what was there before is unchanged. "
            "Free disk space or choose another --out, then --resume"
        ) from error
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


class CheckpointStore:
    """The ``checkpoints/`` folder of one run: keeps the best and the last few.

    Args:
        folder: where the ``step_*`` folders live.
        keep_last: how many of the newest to keep, at least one.
        keep_best: also keep the one with the highest validation score.
    """

    def __init__(self, folder: Path, *, keep_last: int, keep_best: bool) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.keep_best = keep_best

    def save(
        self,
        *,
        step: int,
        score: float | None,
        write_policy: Callable[[Path], None],
        tensors: dict[str, Any],
        state: dict[str, Any],
    ) -> CheckpointInfo:
        """Write one checkpoint and prune old ones.

        Args:
            step: train steps done.
            score: validation mean@1 at this step, or None.
            write_policy: writes the weights into the folder that it is given.
            tensors: optimiser, schedule and generator state; anything ``torch.load(weights_only=True)`` reads back.
            state: JSON-ready counters, data position and buffers.

        Raises:
            InfrastructureError: the disk refused; earlier checkpoints are untouched.
        """
        target = self.folder / f"step_{step:06d}"
        with atomic_folder(target) as staging:
            try:
                write_policy(staging / "policy")
                torch.save(tensors, staging / "trainer.pt")
                (staging / "state.json").write_text(json.dumps(state, indent=1, sort_keys=True))
                write_manifest(staging, {"step": step, "score": score})
            except (RuntimeError, SafetensorError) as error:
                # How torch and safetensors report a full disk.
                raise OSError(str(error)) from error
        saved = CheckpointInfo(path=target, step=step, score=score)
        self._prune(saved)
        return saved

    def recover(self) -> None:
        """Clear up after processes that were killed while writing: finish a half-done replacement, drop half a write.

        Call it when no other process writes here.
        """
        for old in sorted(self.folder.glob(".old-step_*")):
            target = self.folder / _WRITER.sub("", old.name.removeprefix(".old-"))
            if target.exists():
                shutil.rmtree(old)
            else:
                old.rename(target)
        for half in self.folder.glob(".tmp-step_*"):
            shutil.rmtree(half)

    def set_aside(self, *, after: int) -> list[Path]:
        """Move checkpoints of steps beyond ``after`` to ``abandoned-1``, ``abandoned-2``, ...; return where they went.

        A run that goes on from an earlier step takes another way from there; its checkpoints must not be mixed with
        those of the way it leaves.
        """
        later = [path for path in sorted(self.folder.glob("step_*")) if path.name > f"step_{after:06d}"]
        if not later:
            return []
        number = 1 + len(list(self.folder.glob("abandoned-*")))
        target = self.folder / f"abandoned-{number}"
        target.mkdir()
        return [path.rename(target / path.name) for path in later]

    def complete(self) -> list[CheckpointInfo]:
        """All complete checkpoints, oldest first; damaged manifests are skipped here and refused by ``load``."""
        found = []
        for path in sorted(self.folder.glob("step_*")):
            try:
                record = json.loads((path / MANIFEST).read_text())
                found.append(CheckpointInfo(path=path, step=int(record["step"]), score=record["score"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return found

    def choose(self, name: str | None = None) -> CheckpointInfo:
        """Return the newest checkpoint, or the one called ``name``, after verifying every hash.

        Raises:
            CheckpointError: there is none, or it is damaged; the message names the newest good earlier one.
        """
        folders = sorted(self.folder.glob("step_*"))
        if not folders:
            raise CheckpointError(f"{self.folder} holds no checkpoint; start the run without --resume")
        chosen = folders[-1] if name is None else self.folder / name
        if not chosen.is_dir():
            names = ", ".join(path.name for path in folders)
            raise CheckpointError(f"no checkpoint {name!r} in {self.folder}; there are {names}")
        damage = find_damage(chosen)
        if damage is None:
            record = json.loads((chosen / MANIFEST).read_text())
            return CheckpointInfo(path=chosen, step=int(record["step"]), score=record["score"])
        good = next((path for path in reversed(folders) if path < chosen and find_damage(path) is None), None)
        offer = (
            f"the good one before it is {good.name}: resume from it with --resume-from {good.name}, or score it with "
            f"sinkflex eval --checkpoint {good.name}"
            if good
            else ("no earlier good checkpoint exists; start again with another --out")
        )
        raise CheckpointError(f"checkpoint {chosen.name} is damaged ({damage}); {offer}")

    def _prune(self, saved: CheckpointInfo) -> None:
        complete = self.complete()
        keep = {saved.path, *(info.path for info in complete[-self.keep_last :])}
        scored = [info for info in complete if info.score is not None]
        if self.keep_best and scored:
            keep.add(max(scored, key=lambda info: (info.score, info.step)).path)
        for info in complete:
            if info.path not in keep:
                shutil.rmtree(info.path)


def read_checkpoint(info: CheckpointInfo) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a verified checkpoint's tensors and state, as they were given to ``save``."""
    tensors = torch.load(info.path / "trainer.pt", weights_only=True)
    return tensors, json.loads((info.path / "state.json").read_text())


def find_damage(folder: Path) -> str | None:
    """Say what is wrong with a checkpoint folder, or None when every file has its recorded size and hash."""
    try:
        record = json.loads((folder / MANIFEST).read_text())
        files = dict(record["files"])
        version = record["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {MANIFEST} cannot be read: {error}"
    if version != FORMAT:
        return f"its format is {version}, this version reads {FORMAT}"
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if _sha256(path) != digest:
            return f"{name} does not match its recorded hash"
    return None


def write_manifest(folder: Path, record: dict[str, Any]) -> None:
    """Record every file's hash beside ``record``; the last thing written into a folder."""
    files = {str(path.relative_to(folder)): _sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / MANIFEST).write_text(json.dumps({**record, "format": FORMAT, "files": files}, indent=1, sort_keys=True))


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
