"""Checkpoints: whole or absent, verified, pruned, damage refused by name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from sinkflex.errors import CheckpointError, InfrastructureError
from sinkflex.train.checkpoint import CheckpointStore, atomic_folder, find_damage, read_checkpoint


def write_policy(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"\x00\x01" * 500)


def save(store: CheckpointStore, step: int, score: float | None = None) -> Path:
    info = store.save(
        step=step,
        score=score,
        write_policy=write_policy,
        tensors={"moment": torch.arange(4.0) + step},
        state={"position": step * 10},
    )
    return info.path


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep_last=2, keep_best=True)


def test_what_was_saved_comes_back(store: CheckpointStore) -> None:
    save(store, 3, 0.5)
    info = store.choose()
    tensors, state = read_checkpoint(info)
    assert (info.step, info.score, state) == (3, 0.5, {"position": 30})
    assert torch.equal(tensors["moment"], torch.tensor([3.0, 4.0, 5.0, 6.0]))


def test_the_last_two_and_the_best_are_kept(store: CheckpointStore) -> None:
    for step, score in ((1, 0.2), (2, 0.9), (3, 0.4), (4, None), (5, 0.5)):
        save(store, step, score)
    assert [info.step for info in store.complete()] == [2, 4, 5]


def test_a_changed_byte_is_refused_by_name_and_the_good_one_offered(store: CheckpointStore) -> None:
    save(store, 1)
    damaged = save(store, 2) / "policy" / "weights.bin"
    content = bytearray(damaged.read_bytes())
    content[17] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match=r"step_000002 is damaged \(policy/weights.bin does not match .*--resume-from step_000001",
    ):
        store.choose()
    assert store.choose("step_000001").step == 1


def test_a_missing_file_and_a_broken_manifest_are_damage(store: CheckpointStore) -> None:
    folder = save(store, 1)
    (folder / "trainer.pt").unlink()
    assert find_damage(folder) == "trainer.pt is missing"
    (folder / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read.*no earlier good checkpoint exists"):
        store.choose()


def test_nothing_to_resume_and_unknown_names_are_said(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match=r"holds no checkpoint; start the run without --resume"):
        store.choose()
    save(store, 1)
    with pytest.raises(CheckpointError, match=r"no checkpoint 'step_000009'.*there are step_000001"):
        store.choose("step_000009")


def test_a_write_that_fails_leaves_the_earlier_state(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 1)

    def full_disk(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights.bin").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(InfrastructureError, match=r"No space left on device; what was there before is unchanged"):
        store.save(step=2, score=None, write_policy=full_disk, tensors={}, state={})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]
    assert store.choose().step == 1


def test_a_disk_that_torch_reports_as_runtime_error_is_the_same_failure(store: CheckpointStore) -> None:
    def torch_style(folder: Path) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file: file write failed")

    with pytest.raises(InfrastructureError, match=r"file write failed; what was there before is unchanged"):
        store.save(step=2, score=None, write_policy=torch_style, tensors={}, state={})


def test_an_interrupted_block_leaves_no_trace(tmp_path: Path) -> None:
    def interrupted() -> None:
        with atomic_folder(tmp_path / "target") as staging:
            (staging / "file").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_saving_a_step_again_replaces_it(store: CheckpointStore) -> None:
    save(store, 1, 0.1)
    save(store, 1, 0.3)
    assert [(info.step, info.score) for info in store.complete()] == [(1, 0.3)]


def test_a_disk_that_safetensors_reports_in_its_own_way_is_the_same_failure(store: CheckpointStore) -> None:
    def full_disk(folder: Path) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with pytest.raises(InfrastructureError, match=r"No space left on device.*Free disk space"):
        store.save(step=1, score=None, write_policy=full_disk, tensors={}, state={})


def test_the_way_that_a_resumed_run_leaves_is_kept_apart(store: CheckpointStore) -> None:
    for step, score in ((5, 0.9), (15, 0.1), (20, 0.2)):
        save(store, step, score)
    moved = store.set_aside(after=5)
    assert [str(path.relative_to(store.folder)) for path in moved] == [
        "abandoned-1/step_000015",
        "abandoned-1/step_000020",
    ]
    assert [find_damage(path) for path in moved] == [None, None]
    save(store, 10, 0.3)
    assert [info.step for info in store.complete()] == [5, 10]
    assert store.choose().step == 10
    assert store.set_aside(after=10) == []


def test_what_was_just_saved_is_never_pruned(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1, keep_best=False)
    save(store, 20)
    save(store, 10)
    assert 10 in [info.step for info in store.complete()]


def test_a_killed_writer_leaves_nothing_behind(store: CheckpointStore) -> None:
    kept = save(store, 1)
    replaced = save(store, 2)
    replaced.rename(store.folder / ".old-step_000002-4711")  # killed between the two renames of a replacement
    kept_copy = store.folder / ".old-step_000001-4711"  # killed after them
    kept_copy.mkdir()
    (store.folder / ".tmp-step_000003-4711").mkdir()
    store.recover()
    assert sorted(path.name for path in store.folder.iterdir()) == ["step_000001", "step_000002"]
    assert find_damage(kept) is None
    assert store.choose().step == 2
