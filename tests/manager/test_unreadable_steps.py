"""A step that the disk fails to read: the run goes back, loudly, and what cannot be read today is not thrown away."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.manager.damages import DAMAGES
from tests.manager.runs import commit, newest_whole, saved

import holdfast as hf
from holdfast.engine.checkpoint import PendingCheckpoint


def tree(step: int) -> dict[str, Any]:
    return {"weights": np.full(5000, step), "step": step}


class BrokenDisk:
    """Fails to open files and list folders, wherever they are moved to, until it is repaired."""

    moves = True  # whether what is broken can be renamed

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code = 0
        self._broken: set[int] = set()
        for name in ("open", "scandir", "rename"):
            monkeypatch.setattr(os, name, self._failing(name, getattr(os, name)))

    def breaks(self, path: Path, code: int) -> None:
        self.code = code
        self._broken |= {one.stat().st_ino for one in (path, *path.rglob("*"))}

    def is_repaired(self) -> None:
        self._broken.clear()

    def _failing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            is_tried = self._broken and not isinstance(path, int) and not (name == "rename" and self.moves)
            if is_tried and os.path.exists(path) and os.stat(path).st_ino in self._broken:
                raise OSError(self.code, os.strerror(self.code), path)
            return real(path, *arguments, **options)

        return call


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> BrokenDisk:
    return BrokenDisk(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the steps 1 to 3."""
    saved(tmp_path / "run", 1, 2, 3, items=tree)
    return tmp_path / "run"


PARTS = {
    "folder": ".",
    "record": "checkpoint.json",
    "structure": "state/tree.json",
    "manifest": "state/manifest.ocdbt",
    "index": "state/d/index",
    "data": "state/d/*.0.0",
}


def check_resumes(run: Path, caplog: pytest.LogCaptureFixture, said: str = "cannot") -> hf.CheckpointManager:
    """Opens the run and takes its newest whole step, which is the one before the last."""
    manager = hf.CheckpointManager(run)
    with caplog.at_level(logging.WARNING):
        restored = newest_whole(manager)
    [(skipped, why)] = restored.skipped
    assert (restored.step, skipped) == (2, 3)
    assert re.search(said, why)
    for text in ("step 3 is damaged and passed over", why, "going back to step 2"):
        assert text in caplog.text
    assert manager.all_steps() == [1, 2]
    np.testing.assert_array_equal(restored.items["weights"], tree(2)["weights"])
    return manager


@pytest.mark.parametrize(
    ("part", "broken", "said"),
    [
        *((part, errno.EIO, "cannot (be read|open|read)") for part in PARTS),
        *((part, errno.EUCLEAN, "cannot (be read|open|read)") for part in PARTS),
        *((part, "flipped", PARTS[part].partition("*")[2] or PARTS[part]) for part in PARTS if part != "folder"),
        *((part, "loop", "Too many levels of symbolic links") for part in ("folder", "record")),
        *(("record", strange, "not a regular file") for strange in ("pipe", "folder")),
    ],
)
def test_the_newest_step_cannot_be_read(
    part: str, broken: int | str, said: str, run: Path, disk: BrokenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = (run / "3").glob(PARTS[part]) if part == "data" else [run / "3" / PARTS[part]]
    if isinstance(broken, int):
        disk.breaks(path, broken)
    else:
        DAMAGES[broken](path)
    with pytest.raises(hf.DamagedCheckpointError, match=said):
        hf.load(run)  # the newest was asked for
    assert hf.load(run / "2")["step"] == 2
    assert [one.step for one in hf.verify(run).checkpoints if one.problems] == [3]
    assert [one.step for one in hf.list_checkpoints(run)] == [1, 2, 3]
    with check_resumes(run, caplog, said) as manager:
        with pytest.raises(hf.DamagedCheckpointError):
            manager.restore(3)
        assert commit(manager, 3, {"step": "again"}), "the run comes by again, and replaces it"
        assert manager.all_steps() == [1, 2, 3]
        manager.save(4, tree(4))
    assert hf.load(run / "3") == {"step": "again"}
    is_kept = broken != "flipped"
    assert ("what was there is now 3.unreadable" in caplog.text) is is_kept
    assert os.path.lexists(run / "3.unreadable") is is_kept
    if isinstance(broken, int):
        disk.is_repaired()
        assert hf.verify(run / "3.unreadable").ok
        assert hf.load(run / "3.unreadable")["step"] == 3
    assert hf.CheckpointManager(run).all_steps() == [1, 2, 3, 4]


@pytest.mark.parametrize("strange", ["loop", "folder", "pipe", "dangling link"])
def test_what_lies_in_the_place_of_the_marker_of_a_deletion(strange: str, run: Path) -> None:
    DAMAGES[strange](run / "2" / "checkpoint.deleted")
    with hf.CheckpointManager(run) as manager:
        manager.delete(2)
    assert not (run / "2").exists()


def test_what_cannot_be_moved_aside_either(run: Path, disk: BrokenDisk, caplog: pytest.LogCaptureFixture) -> None:
    disk.breaks(run / "3", errno.EUCLEAN)
    disk.moves = False
    with check_resumes(run, caplog) as manager:
        with pytest.raises(hf.errors.StorageError, match=r"run/3: this step cannot be read .*Repair the file system"):
            manager.save(3, tree(3))
        commit(manager, 4, tree(4))  # the run continues
        assert manager.all_steps() == [1, 2, 4]
    disk.is_repaired()
    assert hf.load(run / "3")["step"] == 3


def test_an_older_step_that_cannot_be_read_does_not_matter(run: Path, disk: BrokenDisk) -> None:
    disk.breaks(run / "1", errno.EIO)
    (run / "notes").symlink_to("notes")
    with hf.CheckpointManager(run) as manager:
        assert manager.restore()["step"] == 3
        manager.save(4, tree(4))
    assert hf.load(run)["step"] == 4


def test_a_replacement_was_killed_and_then_the_record_is_damaged(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hf.storage.Location, "write_data_files", dies)
        # A program that is gone tidies nothing up; the system releases its locks.
        patch.setattr(PendingCheckpoint, "abort", lambda self, error=None: self.leave())
        killed = hf.CheckpointManager(run, hf.PyTreeCheckpointer())
        killed.restore(3)
        with pytest.raises(KeyboardInterrupt):
            killed.save(3, {"step": 4}, force=True)
    assert (run / "3/checkpoint.partial").exists()
    (run / "3/checkpoint.json").write_bytes(b"{")
    with hf.CheckpointManager(run) as manager:
        assert manager.restore()["step"] == 2
        for again in range(2):
            commit(manager, 3, {"step": again}, force=True)
    assert hf.load(run) == {"step": 1}
    assert not (run / "3/checkpoint.partial").exists()
