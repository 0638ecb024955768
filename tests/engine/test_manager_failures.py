"""Saves that fail: a full disk, missing permissions, at every system call in turn; who is told, and what is left."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf

NEEDS_SPACE = ("open", "pwrite", "posix_fallocate", "mkdir", "replace", "fsync")
CHANGES = (*NEEDS_SPACE, "ftruncate", "rename", "unlink", "rmdir")


class Fault:
    """Makes system calls below one directory fail, from the n-th on."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = str(root)
        self.stop()
        for name in CHANGES:
            monkeypatch.setattr(os, name, self._failing(name, getattr(os, name)))

    def start(self, error: int, names: tuple[str, ...], *, after: int = 0, times: int = 1 << 30) -> None:
        """Lets some calls of these names pass; the next ones fail."""
        self.failed, self._error, self._names, self._pass, self._times = 0, error, names, after, times

    def stop(self) -> None:
        self.start(0, ())

    def _failing(self, name: str, real: Any) -> Callable[..., Any]:
        def call(target: Any, *arguments: Any, **keywords: Any) -> Any:
            if name in self._names and self._is_meant(name, target, arguments, keywords):
                self._pass -= 1
                if self._pass < 0 and self.failed < self._times:
                    self.failed += 1
                    raise OSError(self._error, os.strerror(self._error))
            return real(target, *arguments, **keywords)

        return call

    def _is_meant(self, name: str, target: Any, arguments: Any, keywords: Any) -> bool:
        if name == "open" and not arguments[0] & os.O_CREAT:
            return False
        if isinstance(target, int):
            target = os.readlink(f"/proc/self/fd/{target}")
        elif keywords.get("dir_fd") is not None:
            target = os.readlink(f"/proc/self/fd/{keywords['dir_fd']}")
        return str(target).startswith(self._root)


@pytest.fixture
def root() -> Iterator[Path]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a disk works as well, and takes longer
    with tempfile.TemporaryDirectory(dir=memory) as place:
        yield Path(place)


@pytest.fixture
def fault(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fault]:
    with monkeypatch.context() as patch:
        yield Fault(root, patch)


def tree(step: int) -> dict[str, Any]:
    return {"weights": np.full(2000, step), "note": f"step {step}"}


def check_whole(manager: hf.CheckpointManager, steps: list[int]) -> None:
    assert manager.all_steps() == steps
    for step in steps:
        np.testing.assert_array_equal(manager.restore(step)["weights"], tree(step)["weights"])


def names(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


@pytest.mark.parametrize(
    ("error", "calls", "times"),
    [
        pytest.param(errno.ENOSPC, NEEDS_SPACE, 1 << 30, id="the disk is full"),
        pytest.param(errno.ENOSPC, NEEDS_SPACE, 1, id="the disk is full for a moment"),
        pytest.param(errno.EIO, CHANGES, 1, id="one call fails"),
        pytest.param(errno.EACCES, CHANGES, 1 << 30, id="nothing is allowed any more"),
    ],
)
def test_failure_at_every_call(root: Path, fault: Fault, error: int, calls: tuple[str, ...], times: int) -> None:
    tidies_up = "unlink" not in calls
    for number in itertools.count():
        run = root / str(number)
        manager = hf.CheckpointManager(run)
        manager.save(1, tree(1))
        manager.wait_until_finished()
        before = names(run)
        fault.start(error, calls, after=number, times=times)
        manager.save(2, tree(2))
        manager._background.join()
        failed, committed = fault.failed, 2 in manager.all_steps()
        fault.stop()
        # Renamed, but neither synced nor taken back, as nothing worked any more: whole, and not reported as done.
        in_doubt = not committed and (run / "2" / "checkpoint.json").exists()
        assert not in_doubt or times > 1
        after = [1, 2, 3] if committed or in_doubt else [1, 3]
        if not committed:
            assert failed
            check_whole(manager, [1])
            if tidies_up and not in_doubt:
                assert names(run) == before
            with pytest.raises(hf.SaveFailedError, match="step 2 of") as caught:
                manager.save(3, tree(3))
            assert caught.value.step == 2
            assert ("could not be taken back" in str(caught.value)) is in_doubt
            assert isinstance(caught.value.__cause__, hf.StorageError)
            assert caught.value.__cause__.errno == error
        else:
            manager.save(3, tree(3))
        manager.wait_until_finished()
        manager.check_for_errors()
        check_whole(manager, [1, 2, 3] if committed else [1, 3])
        manager.close()
        with hf.CheckpointManager(run) as later:
            later.acquire()
            check_whole(later, after)
            assert not list(run.glob("*/checkpoint.partial"))
            assert 2 in after or not (run / "2").exists()
        if not failed:
            break
    assert number > 15


@pytest.mark.parametrize("calls", [NEEDS_SPACE, CHANGES], ids=["the disk is full", "one call fails"])
def test_failure_at_every_call_of_a_replacement(root: Path, fault: Fault, calls: tuple[str, ...]) -> None:
    for number in itertools.count():
        place = root / str(number)
        hf.save(place, tree(1))
        fault.start(errno.ENOSPC, calls, after=number, times=1 << 30 if calls is NEEDS_SPACE else 1)
        try:
            hf.save(place, tree(2), overwrite=True)
            expected = 2
        except hf.StorageFullError:
            expected = 1
            if calls is NEEDS_SPACE and (place / "checkpoint.partial").exists():
                expected = 2  # renamed, but neither synced nor taken back, as nothing worked any more
        failed = fault.failed
        fault.stop()
        found = hf.load(place)
        assert found["note"] == f"step {expected}"
        np.testing.assert_array_equal(found["weights"], tree(expected)["weights"])
        assert hf.verify(place).ok
        hf.save(place, tree(3), overwrite=True)
        assert hf.load(place)["note"] == "step 3"
        assert len([path for path in place.iterdir() if path.is_dir()]) == 1
        if not failed:
            break
    assert number > 15


# ---- who is told


@pytest.fixture
def failing(root: Path, fault: Fault) -> Iterator[hf.CheckpointManager]:
    """A manager that has lost step 2 in the background, and does not know yet."""
    manager = hf.CheckpointManager(root / "run")
    manager.save(1, tree(1))
    manager.wait_until_finished()
    fault.start(errno.ENOSPC, ("posix_fallocate", "pwrite"))
    manager.save(2, tree(2))
    manager._background.join()
    fault.stop()
    yield manager
    with contextlib.suppress(hf.SaveFailedError):
        manager.close()


@pytest.mark.parametrize(
    "tell",
    [
        pytest.param(lambda manager: manager.wait_until_finished(), id="wait_until_finished"),
        pytest.param(lambda manager: manager.check_for_errors(), id="check_for_errors"),
        pytest.param(lambda manager: manager.close(), id="close"),
        pytest.param(lambda manager: manager.save(3, tree(3)), id="save"),
        pytest.param(lambda manager: manager.__exit__(None, None, None), id="end of with"),
    ],
)
def test_told_once(failing: hf.CheckpointManager, tell: Callable[[hf.CheckpointManager], object]) -> None:
    with pytest.raises(hf.SaveFailedError, match=r"step 2 of .*run was not saved: .*No space left") as caught:
        tell(failing)
    assert caught.value.step == 2
    assert isinstance(caught.value.__cause__, hf.StorageFullError)
    failing.check_for_errors()
    failing.wait_until_finished()
    failing.close()
    assert hf.load(failing.directory / "1")["note"] == "step 1"


def test_looking_does_not_tell(failing: hf.CheckpointManager) -> None:
    assert failing.all_steps() == [1]
    assert failing.latest_step() == 1
    assert failing.restore()["note"] == "step 1"
    assert not failing.save(1, tree(1))
    failing.reload()
    with pytest.raises(hf.CheckpointNotFoundError, match="no checkpoint of step 2; there are 1"):
        failing.restore(2)
    with pytest.raises(hf.SaveFailedError):
        failing.wait_until_finished()


def test_a_save_that_is_refused_keeps_the_earlier_error(failing: hf.CheckpointManager) -> None:
    with pytest.raises(hf.UnsupportedLeafError):
        failing.save(3, {"weights": object()})
    with pytest.raises(hf.SaveFailedError, match="step 2 of"):
        failing.save(3, tree(3))
    failing.wait_until_finished()
    assert failing.all_steps() == [1, 3]


def test_a_lost_step_takes_no_metrics(failing: hf.CheckpointManager) -> None:
    with pytest.raises(hf.CheckpointNotFoundError, match="step 2"):
        failing.record_metrics(2, {"loss": 1.0})


def test_a_lost_step_can_be_saved_again(failing: hf.CheckpointManager) -> None:
    with pytest.raises(hf.SaveFailedError):
        failing.save(2, tree(2), force=True)
    failing.wait_until_finished()
    check_whole(failing, [1, 2])


def test_a_save_in_the_foreground_fails_at_once(root: Path, fault: Fault) -> None:
    with hf.CheckpointManager(root / "run", hf.PyTreeCheckpointer()) as manager:
        manager.save(1, tree(1))
        fault.start(errno.EDQUOT, ("posix_fallocate", "pwrite"))
        with pytest.raises(hf.StorageFullError, match="free some space"):
            manager.save(2, tree(2))
        fault.stop()
        manager.check_for_errors()
        assert not (root / "run" / "2").exists()
        manager.save(3, tree(3))
        check_whole(manager, [1, 3])


def test_a_deletion_that_fails_is_tried_again(root: Path, fault: Fault, caplog: pytest.LogCaptureFixture) -> None:
    with hf.CheckpointManager(root / "run", options=hf.CheckpointManagerOptions(max_to_keep=1)) as manager:
        manager.save(1, tree(1))
        manager.wait_until_finished()
        fault.start(errno.EACCES, ("rename",))
        with caplog.at_level(logging.WARNING, "holdfast"):
            manager.save(2, tree(2))
            manager.wait_until_finished()
        fault.stop()
        assert "step 1 could not be deleted" in caplog.text
        check_whole(manager, [1, 2])
        manager.save(3, tree(3))
        manager.wait_until_finished()
        check_whole(manager, [3])


def test_a_step_whose_deletion_stops_half_way_is_not_listed(root: Path, fault: Fault) -> None:
    run = root / "run"
    with hf.CheckpointManager(run) as manager:
        for step in (1, 2):
            manager.save(step, tree(step))
        manager.wait_until_finished()
        fault.start(errno.EACCES, ("unlink", "rmdir"))
        with pytest.raises(hf.StoragePermissionError):
            manager.delete(1)
        fault.stop()
        assert (run / "1" / "state").exists()
        check_whole(manager, [2])
    with hf.CheckpointManager(run) as manager:
        manager.acquire()
        assert not (run / "1").exists()


@pytest.mark.parametrize("call", ["open", "pwrite", "mkdir", "replace", "fsync"])
def test_a_directory_that_cannot_be_taken_yet(root: Path, fault: Fault, call: str) -> None:
    with hf.CheckpointManager(root / "run") as manager:
        fault.start(errno.ENOSPC, (call,))
        with pytest.raises(hf.StorageFullError):
            manager.acquire()
        fault.stop()
        manager.save(1, tree(1))
        manager.wait_until_finished()
        check_whole(manager, [1])


def test_a_failing_sweep_is_done_again(root: Path, fault: Fault) -> None:
    run = root / "run"
    (run / "5").mkdir(parents=True)
    (run / "5" / "checkpoint.partial").write_text("{}")
    (run / "5" / "half").write_text("written")
    with hf.CheckpointManager(run) as manager:
        fault.start(errno.EACCES, ("unlink",))
        with pytest.raises(hf.StoragePermissionError):
            manager.save(1, tree(1))
        fault.stop()
        manager.save(2, tree(2))
        manager.wait_until_finished()
        assert not (run / "5").exists()
        check_whole(manager, [2])


def test_a_listener_that_fails_is_told_and_the_step_stays(root: Path) -> None:
    def listener(report: hf.SaveReport) -> None:
        raise ZeroDivisionError("no such luck")

    with hf.CheckpointManager(root / "run") as manager:
        manager.add_listener(listener)
        manager.save(1, tree(1))
        with pytest.raises(hf.SaveFailedError, match="is saved, but a listener"):
            manager.wait_until_finished()
        check_whole(manager, [1])


# ---- a real file system that is full


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


def test_a_full_file_system(small_disk: Path) -> None:
    with hf.CheckpointManager(small_disk / "run") as manager:
        manager.save(1, tree(1))
        manager.save(2, {"weights": np.ones(1 << 20)})
        with pytest.raises(hf.SaveFailedError, match="No space left") as caught:
            manager.save(3, tree(3))
        assert caught.value.step == 2
        manager.wait_until_finished()
        check_whole(manager, [1, 3])
        assert not (small_disk / "run" / "2").exists()


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import resource, signal, sys
        import numpy as np
        import holdfast as hf
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with hf.CheckpointManager(sys.argv[1]) as manager:
            manager.save(1, {"weights": np.ones(100)})
            manager.save(2, {"weights": np.ones(1 << 20)})
            try:
                manager.save(3, {"weights": np.ones(100)})
            except hf.SaveFailedError as error:
                print(error.step, type(error.__cause__).__name__)
            manager.wait_until_finished()
            print(manager.all_steps())
        """
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.stdout.splitlines() == ["2 StorageFullError", "[1, 3]"], finished.stderr
    assert not (tmp_path / "2").exists()
