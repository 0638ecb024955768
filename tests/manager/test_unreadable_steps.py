"""A step that the disk fails to read: the run goes back, loudly, and what cannot be read today is not thrown away."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.manager.runs import saved

import holdfast as hf
from holdfast.engine.checkpoint import PendingCheckpoint


def tree(step: int) -> dict[str, Any]:
    return {"weights": np.full(5000, step), "step": step}


class BrokenDisk:
    """Fails to open files and list folders, wherever they are moved to, until it is repaired."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code = 0
        self._broken: set[int] = set()
        for name in ("open", "scandir", "rename"):
            monkeypatch.setattr(os, name, self._failing(getattr(os, name), name == "rename"))
        self.moves = True  # whether what is broken can be renamed

    def breaks(self, path: Path, code: int) -> None:
        self.code = code
        self._broken |= {one.stat().st_ino for one in (path, *path.rglob("*"))}

    def is_repaired(self) -> None:
        self._broken.clear()

    def _failing(self, real: Callable[..., Any], renames: bool) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if self._broken and not isinstance(path, int) and not (renames and self.moves):
                try:
                    broken = os.stat(path).st_ino in self._broken
                except OSError:
                    broken = False
                if broken:
                    raise OSError(self.code, os.strerror(self.code), path)
            return real(path, *arguments, **options)

        return call


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokenDisk]:
    with monkeypatch.context() as patch:
        yield BrokenDisk(patch)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the steps 1 to 3."""
    saved(tmp_path / "run", 1, 2, 3, items=tree)
    return tmp_path / "run"


def loop(path: Path) -> None:
    """Puts a link to itself in the place of a file or folder."""
    path.rename(path.with_name(f"kept-{path.name}"))
    path.symlink_to(path.name)


def data_file(step: Path) -> Path:
    return next(path for path in (step / "state/d").iterdir() if path.name != "index")


BROKEN: dict[str, Callable[[Path], Path]] = {
    "folder": lambda step: step,
    "record": lambda step: step / "checkpoint.json",
    "structure": lambda step: step / "state/tree.json",
    "data": data_file,
}


def check_resumes(run: Path, caplog: pytest.LogCaptureFixture, said: str = "cannot") -> hf.CheckpointManager:
    """Opens the run and takes its newest whole step, which is the one before the last."""
    manager = hf.CheckpointManager(run)
    with caplog.at_level(logging.WARNING):
        restored = manager.restore_latest()
    assert restored is not None
    assert (restored.step, [step for step, _ in restored.skipped]) == (2, [3])
    assert "step 3 is damaged and passed over" in caplog.text
    assert said in caplog.text
    assert "going back to step 2" in caplog.text
    assert manager.all_steps() == [1, 2]
    np.testing.assert_array_equal(restored.items["weights"], tree(2)["weights"])
    return manager


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("code", [errno.EIO, errno.EUCLEAN], ids=errno.errorcode.__getitem__)
def test_the_newest_step_cannot_be_read(
    broken: str, code: int, run: Path, disk: BrokenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.breaks(BROKEN[broken](run / "3"), code)
    with pytest.raises(hf.DamagedCheckpointError, match=r"cannot (be read|open|read)"):
        hf.load(run)  # the newest was asked for
    assert hf.load(run / "2")["step"] == 2
    report = hf.verify(run)
    assert [one.step for one in report.checkpoints if one.problems] == [3]
    assert [one.step for one in hf.list_checkpoints(run)] == [1, 2, 3]
    with check_resumes(run, caplog) as manager:
        manager.save(3, {"step": "again"})
        manager.wait_until_finished()
        assert "what was there is now 3.unreadable" in caplog.text
        assert manager.all_steps() == [1, 2, 3]
        manager.save(4, tree(4))
    assert hf.load(run / "3") == {"step": "again"}
    disk.is_repaired()
    assert hf.verify(run / "3.unreadable").ok
    assert hf.load(run / "3.unreadable")["step"] == 3
    assert hf.CheckpointManager(run).all_steps() == [1, 2, 3, 4]


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    (path / "x").mkdir(parents=True)


def lost_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("strange", "broken", "said"),
    [
        (loop, "folder", "Too many levels of symbolic links"),
        (loop, "record", "Too many levels of symbolic links"),
        (pipe, "record", "not a regular file"),
        (folder, "record", "not a regular file"),
    ],
)
def test_what_lies_in_the_place_of_a_step_or_its_record(
    strange: Callable[[Path], None], broken: str, said: str, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strange(BROKEN[broken](run / "3"))
    with pytest.raises(hf.DamagedCheckpointError, match=said):
        hf.load(run)
    assert not hf.verify(run).ok
    with check_resumes(run, caplog, said) as manager:
        manager.save(3, tree(3))
    assert "what was there is now 3.unreadable" in caplog.text
    assert os.path.lexists(run / "3.unreadable")
    assert hf.load(run)["step"] == 3


@pytest.mark.parametrize("strange", [loop, folder, pipe, lost_link])
def test_what_lies_in_the_place_of_the_marker_of_a_deletion(strange: Callable[[Path], None], run: Path) -> None:
    (run / "2" / "checkpoint.deleted").touch()
    strange(run / "2" / "checkpoint.deleted")
    with hf.CheckpointManager(run) as manager:
        manager.delete(2)
    assert not (run / "2").exists()


def test_what_cannot_be_moved_aside_either(run: Path, disk: BrokenDisk, caplog: pytest.LogCaptureFixture) -> None:
    disk.breaks(run / "3", errno.EUCLEAN)
    disk.moves = False
    with check_resumes(run, caplog) as manager:
        with pytest.raises(
            hf.errors.StorageError, match=r"run/3: this step cannot be read .*Repair the file system or remove"
        ):
            manager.save(3, tree(3))
        manager.save(4, tree(4))  # the run continues
        manager.wait_until_finished()
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
            manager.save(3, {"step": again}, force=True)
            manager.wait_until_finished()
    assert hf.load(run) == {"step": 1}
    assert not (run / "3/checkpoint.partial").exists()
