"""Saves that fail: a full disk, missing permissions, at every system call in turn; who is told, and what is left."""

from __future__ import annotations

import contextlib
import errno
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoint.disk import Fault
from tests.manager.runs import commit

import holdfast as hf


def tree(step: int) -> dict[str, Any]:
    return {"weights": np.full(2000, step), "note": f"step {step}"}


def check_whole(manager: hf.CheckpointManager, steps: list[int]) -> None:
    assert manager.all_steps() == steps
    for step in steps:
        np.testing.assert_array_equal(manager.restore(step)["weights"], tree(step)["weights"])


# ---- who is told


@pytest.fixture
def failing(root: Path, fault: Fault) -> Iterator[hf.CheckpointManager]:
    """A manager that has lost step 2 in the background, and does not know yet."""
    manager = hf.CheckpointManager(root / "run")
    commit(manager, 1, tree(1))
    fault.start(errno.ENOSPC, ("posix_fallocate", "pwrite"))
    manager.save(2, tree(2))
    manager._background.join()
    fault.stop()
    yield manager
    with contextlib.suppress(hf.SaveFailedError):
        manager.close()


TELL: dict[str, Callable[[hf.CheckpointManager], object]] = {
    "wait_until_finished": lambda manager: manager.wait_until_finished(),
    "check_for_errors": lambda manager: manager.check_for_errors(),
    "close": lambda manager: manager.close(),
    "save": lambda manager: manager.save(3, tree(3)),
    "the lost step again": lambda manager: manager.save(2, tree(2), force=True),
    "end of with": lambda manager: manager.__exit__(None, None, None),
}


@pytest.mark.parametrize("how", TELL)
def test_told_once(failing: hf.CheckpointManager, how: str) -> None:
    """A save that tells of the error happens nevertheless; looking, and calls that fail, do not tell."""
    assert failing.all_steps() == [1]
    assert failing.latest_step() == 1
    assert failing.restore()["note"] == "step 1"
    assert not failing.save(1, tree(1))
    failing.reload()
    with pytest.raises(hf.CheckpointNotFoundError, match="no checkpoint of step 2; there are 1"):
        failing.restore(2)
    with pytest.raises(hf.CheckpointNotFoundError, match="step 2"):
        failing.record_metrics(2, {"loss": 1.0})
    with pytest.raises(hf.errors.UnsupportedLeafError):
        failing.save(3, {"weights": object()})
    with pytest.raises(hf.SaveFailedError, match=r"step 2 of .*run was not saved: .*No space left") as caught:
        TELL[how](failing)
    assert caught.value.step == 2
    assert isinstance(caught.value.__cause__, hf.errors.StorageFullError)
    failing.check_for_errors()
    failing.wait_until_finished()
    check_whole(failing, [1, *{"save": [3], "the lost step again": [2]}.get(how, [])])
    failing.close()


def test_a_save_in_the_foreground_fails_at_once(root: Path, fault: Fault) -> None:
    with hf.CheckpointManager(root / "run", hf.PyTreeCheckpointer()) as manager:
        manager.save(1, tree(1))
        fault.start(errno.EDQUOT, ("posix_fallocate", "pwrite"))
        with pytest.raises(hf.errors.StorageFullError, match="free some space"):
            manager.save(2, tree(2))
        fault.stop()
        manager.check_for_errors()
        assert not (root / "run" / "2").exists()
        manager.save(3, tree(3))
        check_whole(manager, [1, 3])


def test_a_deletion_that_fails_is_tried_again(root: Path, fault: Fault, caplog: pytest.LogCaptureFixture) -> None:
    with hf.CheckpointManager(root / "run", options=hf.CheckpointManagerOptions(max_to_keep=1)) as manager:
        commit(manager, 1, tree(1))
        fault.start(errno.EACCES, ("rename",))
        commit(manager, 2, tree(2))
        fault.stop()
        assert "step 1 could not be deleted" in caplog.text
        check_whole(manager, [1, 2])
        commit(manager, 3, tree(3))
        check_whole(manager, [3])
        commit(manager, 4, tree(4))
        fault.start(errno.EACCES, ("unlink", "rmdir"))
        manager.delete(4)
        fault.stop()
        assert "this step is deleted, and some of its files stay" in caplog.text
        assert (root / "run" / "4" / "state").exists()
        assert manager.all_steps() == []
    with hf.CheckpointManager(root / "run") as manager:
        manager.acquire()
        assert not (root / "run" / "4").exists()


@pytest.mark.parametrize("call", ["open", "pwrite", "mkdir", "replace", "fsync"])
def test_a_directory_that_cannot_be_taken_yet(root: Path, fault: Fault, call: str) -> None:
    with hf.CheckpointManager(root / "run") as manager:
        fault.start(errno.ENOSPC, (call,))
        with pytest.raises(hf.errors.StorageFullError):
            manager.acquire()
        fault.stop()
        commit(manager, 1, tree(1))
        check_whole(manager, [1])


def test_an_unfinished_step_that_cannot_be_removed_is_moved_aside(
    root: Path, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    run = root / "run"
    (run / "5").mkdir(parents=True)
    for name in ("checkpoint.partial", "half"):
        (run / "5" / name).write_text("{}")
    with hf.CheckpointManager(run) as manager:
        fault.start(errno.EACCES, ("unlink",))
        manager.save(1, tree(1))
        with pytest.raises(hf.errors.SaveFailedError):
            manager.wait_until_finished()
        fault.stop()
        commit(manager, 2, tree(2))
        assert not (run / "5").exists()
        assert (run / "5.unreadable" / "half").exists()
        assert "5: not swept, but moved to 5.unreadable: cannot remove" in caplog.text
        check_whole(manager, [2])


# ---- a real file system that is full, or refuses large files


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.fixture
def small_files(tmp_path: Path) -> Iterator[Path]:
    """A file that would be larger is refused by an error: Python ignores the signal of the system."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, limits[1]))
    yield tmp_path
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    ("limited", "said"), [("small_disk", "No space left"), ("small_files", "File too large")], ids=["disk", "files"]
)
def test_no_room_on_a_real_file_system(limited: str, said: str, request: pytest.FixtureRequest) -> None:
    place: Path = request.getfixturevalue(limited)
    with hf.CheckpointManager(place / "run") as manager:
        manager.save(1, tree(1))
        manager.save(2, {"weights": np.ones(1 << 20)})
        with pytest.raises(hf.SaveFailedError, match=said) as caught:
            manager.save(3, tree(3))
        assert caught.value.step == 2
        assert isinstance(caught.value.__cause__, hf.errors.StorageFullError)
        manager.wait_until_finished()
        check_whole(manager, [1, 3])
        assert not (place / "run" / "2").exists()
