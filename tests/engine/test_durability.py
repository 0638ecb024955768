"""What survives a process that dies, or a power cut, before any system call of a save.

The system calls that change the file system are recorded. Their order is checked as it is, and they are cut off at each
one in turn: everything that had not been synced until then may be lost, and what is left must make sense.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf

CHANGING = ("open", "write", "pwrite", "ftruncate", "mkdir", "rename", "replace", "unlink", "rmdir", "fsync")


class Crash(BaseException):
    """The process is gone."""


@dataclass
class Disk:
    """The system calls below one directory; can be cut off, and can lose what was not synced.

    Nothing is really synced: that only takes time.

    Attributes:
        root: The directory.
        graveyard: Where what was deleted or replaced is kept, to bring it back.
        calls: What was called, with the path relative to the root.
        crash_at: How many calls to let pass, or None for all.
        crashed: Whether a call was cut off.
    """

    root: Path
    graveyard: Path
    calls: list[tuple[str, str]] = field(default_factory=list)
    crash_at: int | None = None
    crashed: bool = False
    _unsynced_files: set[str] = field(default_factory=set)
    _unsynced_names: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    _real: dict[str, Any] = field(default_factory=dict)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in CHANGING:
            self._real[name] = getattr(os, name)
            monkeypatch.setattr(os, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(
            os, "posix_fallocate", lambda descriptor, offset, size: self._ftruncate(descriptor, offset + size)
        )

    def recover(self) -> None:
        """Lets calls pass again."""
        self.crash_at = None

    def sync(self) -> None:
        """Forgets what may be lost, and what was called."""
        self.calls.clear()
        self.crashed = False
        self._unsynced_files.clear()
        self._unsynced_names.clear()

    def cut_power(self, generator: random.Random | None) -> None:
        """Loses what was not synced: all of it, or in every directory what came after a random point."""
        self.recover()
        keep: dict[str, int] = {}
        for folder, _ in self._unsynced_names:
            keep[folder] = keep.get(folder, 0) + 1
        keep = {folder: generator.randint(0, count) if generator else 0 for folder, count in keep.items()}
        seen: dict[str, int] = {}
        undone = []
        for folder, undo in self._unsynced_names:
            seen[folder] = seen.get(folder, 0) + 1
            if seen[folder] > keep[folder]:
                undone.append(undo)
        for path in self._unsynced_files:
            with contextlib.suppress(FileNotFoundError):
                os.truncate(path, generator.randint(0, os.path.getsize(path)) if generator else 0)
        for undo in reversed(undone):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                undo()
        self._unsynced_files.clear()
        self._unsynced_names.clear()

    def _path(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path in question, or None if it is none of ours."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        path = os.fspath(path)
        return path if isinstance(path, str) and f"{path}/".startswith(f"{self.root}/") else None

    def _note(self, name: str, path: str) -> None:
        if self.crash_at is not None and len(self.calls) >= self.crash_at:
            self.crashed = True
            raise Crash
        self.calls.append((name, path[len(str(self.root)) + 1 :] or "."))

    def _named(self, path: str, undo: Callable[[], None]) -> None:
        self._unsynced_names.append((os.path.dirname(path), undo))

    def _bury(self, path: str) -> str:
        """Keeps a second name of a file."""
        grave = str(self.graveyard / str(len(os.listdir(self.graveyard))))
        os.link(path, grave, follow_symlinks=False)
        return grave

    def _restore(self, grave: str, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._real["unlink"](path)
        os.link(grave, path)

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        ours = self._path(path, dir_fd)
        creates = ours is not None and flags & os.O_CREAT and not os.path.lexists(ours)
        if ours is not None and (creates or flags & os.O_TRUNC):
            self._note("create" if creates else "truncate", ours)
            self._unsynced_files.add(ours)
        descriptor: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        if ours is not None and creates:
            self._named(ours, lambda: self._real["unlink"](ours))
        return descriptor

    def _changes_file(self, name: str, descriptor: int, *arguments: Any) -> Any:
        ours = self._path(descriptor)
        if ours is not None:
            self._note(name, ours)
            self._unsynced_files.add(ours)
        return self._real[name](descriptor, *arguments)

    def _write(self, descriptor: int, data: Any) -> Any:
        return self._changes_file("write", descriptor, data)

    def _pwrite(self, descriptor: int, data: Any, offset: int) -> Any:
        return self._changes_file("pwrite", descriptor, data, offset)

    def _ftruncate(self, descriptor: int, size: int) -> Any:
        return self._changes_file("ftruncate", descriptor, size)

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        ours = self._path(path, dir_fd)
        if ours is not None and not os.path.lexists(ours):
            self._note("mkdir", ours)
            self._named(ours, lambda: self._real["rename"](ours, self.graveyard / str(len(os.listdir(self.graveyard)))))
        self._real["mkdir"](path, mode, dir_fd=dir_fd)

    def _replace(self, source: Any, target: Any) -> None:
        ours = self._path(source)
        if ours is None:
            self._real["replace"](source, target)
            return
        self._note("rename", target)
        grave = self._bury(target) if os.path.isfile(target) else None

        def undo() -> None:
            self._real["rename"](target, source)
            if grave is not None:
                self._restore(grave, target)

        self._named(ours, undo)
        if ours in self._unsynced_files:
            self._unsynced_files.add(target)
        self._real["replace"](source, target)

    _rename = _replace

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        ours = self._path(path, dir_fd)
        if ours is not None and os.path.lexists(ours):
            self._note("unlink", ours)
            grave = self._bury(ours)
            self._named(ours, lambda: self._restore(grave, ours))
        self._real["unlink"](path, dir_fd=dir_fd)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        ours = self._path(path, dir_fd)
        if ours is not None:
            self._note("rmdir", ours)
            self._named(ours, lambda: self._real["mkdir"](ours))
        self._real["rmdir"](path, dir_fd=dir_fd)

    def _fsync(self, descriptor: int) -> None:
        ours = self._path(descriptor)
        if ours is None:
            return
        self._note("fsync", ours)
        self._unsynced_files.discard(ours)
        self._unsynced_names = [entry for entry in self._unsynced_names if entry[0] != ours]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a disk works as well, and takes longer
    with tempfile.TemporaryDirectory(dir=memory) as place, monkeypatch.context() as patch:
        made = Disk(Path(place, "root"), Path(place, "graveyard"))
        made.root.mkdir()
        made.graveyard.mkdir()
        made.install(patch)
        yield made
        made.recover()


def tree(step: int, edition: int = 0) -> dict[str, Any]:
    return {
        "step": step,
        "edition": edition,
        "weights": np.full(1500, step + edition / 10),
        "note": f"{step} {edition}",
    }


# ---- the order


def test_order_of_one_save(disk: Disk) -> None:
    run = disk.root / "new" / "run"
    with hf.CheckpointManager(run) as manager:
        manager.save(7, tree(7))
        manager.wait_until_finished()
        calls = list(disk.calls)
    committed = calls.index(("rename", "new/run/7/checkpoint.json"))
    before, after = calls[:committed], calls[committed + 1 :]
    written = [path for name, path in before if name in ("create", "truncate") and path.startswith("new/run/7/")]
    names = {re.sub("^[0-9a-f]{8}", "*", Path(path).name) for path in written}
    assert names > {"*.0.0", "index", "tree.json", "manifest.ocdbt"}
    for path in written:
        last_change = max(i for i, call in enumerate(before) if call[1] == path and call[0] != "fsync")
        assert ("fsync", path) in before[last_change:], f"{path} is not synced before the record"
    named = {path for name, path in before if name in ("create", "mkdir")} - set(written[-1:])
    for path in named - {"new/run/owner.json"}:
        first = min(i for i, call in enumerate(before) if call[1] == path)
        assert ("fsync", str(Path(path).parent)) in before[first:], f"the name of {path} is not synced"
    record = written[-1]
    assert ".holdfast-" in record
    assert before[-1] == ("fsync", record)
    synced_before_record = before[: next(i for i, call in enumerate(before) if call[1] == record)]
    assert ("fsync", "new/run/7") in synced_before_record
    assert ("fsync", "new/run") in synced_before_record
    assert after[0] == ("fsync", "new/run/7"), "the record's own name is synced before anything else happens"
    assert ("unlink", "new/run/7/checkpoint.partial") in after


def test_done_means_synced(disk: Disk) -> None:
    reported: list[bool] = []

    def listen(report: hf.SaveReport) -> None:
        last = len(disk.calls) - 1 - disk.calls[::-1].index(("rename", f"{report.step}/checkpoint.json"))
        reported.append(("fsync", str(report.step)) in disk.calls[last:])

    with hf.CheckpointManager(disk.root) as manager:
        manager.add_listener(listen)
        for step in range(3):
            manager.save(step, tree(step))
    assert reported == [True, True, True]


def test_deleting_makes_the_loss_of_the_record_durable_first(disk: Disk) -> None:
    with hf.CheckpointManager(disk.root) as manager:
        manager.save(1, tree(1))
        manager.wait_until_finished()
        disk.calls.clear()
        manager.delete(1)
    assert disk.calls[:2] == [("rename", "1/checkpoint.deleted"), ("fsync", "1")]
    assert disk.calls[-2:] == [("unlink", "1/checkpoint.deleted"), ("rmdir", "1")]


@pytest.mark.parametrize("save", [pytest.param(hf.save, id="save"), pytest.param(None, id="AsyncCheckpointer")])
def test_one_checkpoint_survives_a_power_cut(disk: Disk, save: Callable[..., object] | None) -> None:
    place = disk.root / "a" / "b" / "checkpoint"
    if save is not None:
        save(place, tree(1))
    else:
        with hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(place, tree(1))
    disk.cut_power(None)
    assert hf.load(place)["note"] == "1 0"


class Files(hf.CheckpointHandler):
    """A handler of a user: ordinary files in ordinary folders, synced by nobody."""

    def save(self, directory: hf.Location, item: Any, **kwargs: Any) -> None:
        inner = os.path.join(os.fspath(directory), "inner", "most")
        os.makedirs(inner)
        for name, text in item.items():
            descriptor = os.open(os.path.join(inner, name), os.O_WRONLY | os.O_CREAT, 0o666)
            os.write(descriptor, text.encode())
            os.close(descriptor)

    def restore(self, directory: hf.Location, item: Any = None, *, files: Any = None, **kwargs: Any) -> Any:
        inner = Path(os.fspath(directory), "inner", "most")
        return {path.name: path.read_text() for path in sorted(inner.iterdir())}


def test_files_of_a_users_handler_survive_a_power_cut(disk: Disk) -> None:
    place = disk.root / "checkpoint"
    hf.Checkpointer(Files()).save(place, {"one": "first", "two": "second"})
    disk.cut_power(None)
    assert hf.Checkpointer(Files()).restore(place) == {"one": "first", "two": "second"}


# ---- cut off at every call

OPTIONS = hf.CheckpointManagerOptions(max_to_keep=2)
State = dict[int, int]  # the edition of every step that is there


def history() -> Iterator[tuple[list[State], Callable[[hf.CheckpointManager], object]]]:
    """Generates what a run does, each with the states that may be found after it was cut off in it, the last if not."""

    def save(step: int, edition: int = 0) -> Callable[[hf.CheckpointManager], object]:
        def run(manager: hf.CheckpointManager) -> None:
            manager.save(step, tree(step, edition), metrics={"loss": step}, force=edition > 0)
            manager.wait_until_finished()

        return run

    yield [{}, {1: 0}], save(1)
    yield [{1: 0}, {1: 0, 2: 0}], save(2)
    yield [{1: 0, 2: 0}, {1: 0, 2: 0, 3: 0}, {2: 0, 3: 0}], save(3)
    yield [{2: 0, 3: 0}, {2: 0, 3: 1}], save(3, 1)
    yield [{2: 0, 3: 1}], lambda manager: manager.pin(2)
    yield [{2: 0, 3: 1}], lambda manager: manager.record_metrics(3, {"accuracy": 0.5})
    yield [{2: 0, 3: 1}, {2: 0, 3: 2}], save(3, 2)
    yield [{2: 0, 3: 2}, {2: 0}], lambda manager: manager.delete(3)
    yield [{2: 0}, {2: 0, 3: 3}], save(3, 3)


def begin(root: Path) -> hf.CheckpointManager:
    return hf.CheckpointManager(root, options=OPTIONS, metadata={"name": "run"})


def live(root: Path, allowed: list[State]) -> bool:
    """Runs the history until it is cut off; leaves in ``allowed`` what may be found then. Returns whether it ended."""
    manager = begin(root)
    try:
        manager.acquire()
        for states, act in history():
            allowed[:] = states
            act(manager)
            allowed[:] = states[-1:]
        manager.close()
        return True
    except (Crash, hf.HoldfastError):
        with contextlib.suppress(hf.HoldfastError):  # what a process that is gone would not tell either
            manager.check_for_errors()
        with contextlib.suppress(hf.HoldfastError, Crash):
            manager.close()
        return False


def check(root: Path, allowed: list[State]) -> None:
    """What must be so after an interruption: to a reader, to the next run, and after that."""
    found = {summary.step: summary for summary in hf.list_checkpoints(root)}
    trees = {step: hf.load(root / str(step)) for step in found}
    state = {step: int(found["edition"]) for step, found in trees.items()}
    assert state in allowed
    assert [summary.damage for summary in found.values()] == [None] * len(found)
    with begin(root) as manager:
        assert manager.all_steps() == sorted(state)
        manager.acquire()
        assert manager.all_steps() == sorted(state)
        assert manager.metadata() == {"name": "run"}
        for step, edition in state.items():
            np.testing.assert_array_equal(trees[step]["weights"], tree(step, edition)["weights"])
        check_clean(root, state)
        manager.save(9, tree(9))
        assert manager.restore(9)["note"] == "9 0"


def check_clean(root: Path, state: State) -> None:
    """Nothing is there that belongs to no checkpoint, but for empty folders, which may be anybody's."""
    left = {path.name for path in root.iterdir() if not (path.is_dir() and not any(path.iterdir()))}
    assert left <= {str(step) for step in state} | {"owner.json", "options.json", "metadata"}
    for step in state:
        record = json.loads((root / str(step) / "checkpoint.json").read_bytes())
        files = {f"{item['folder']}/{path}" for item in record["items"].values() for path in item["files"]}
        present = {str(path.relative_to(root / str(step))) for path in (root / str(step)).rglob("*") if path.is_file()}
        assert present == files | {"checkpoint.json"}


@pytest.mark.parametrize(
    ("power", "first", "stride"),
    [
        pytest.param("stays", 0, 1, id="the process dies"),
        pytest.param("all", 0, 2, id="all that is not synced is lost"),
        pytest.param("some", 1, 2, id="some that is not synced is lost"),
    ],
)
def test_cut_off_at_every_call(disk: Disk, power: str, first: int, stride: int) -> None:
    generator = random.Random(0)
    for number in itertools.count(first, stride):
        root = disk.root / str(number)
        root.mkdir()
        disk.sync()
        disk.crash_at = number
        allowed: list[State] = [{}]
        ended = live(root, allowed)
        assert ended is not disk.crashed
        disk.recover()
        if power != "stays":
            disk.cut_power(None if power == "all" else generator)
        try:
            check(root, allowed)
        except BaseException as error:
            error.add_note(f"after call {number}, {disk.calls[number - 1 : number]}; allowed: {allowed}")
            raise
        if ended:
            break
    assert number > 200
