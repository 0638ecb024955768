"""What every kind of checkpoint promises when a save of it is killed, fails, loses power, or runs beside another save.

A tree, a tree of components and a step of a manager are committed by one protocol, and pass the same tests.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.disk import CHANGES, NEEDS_SPACE, Crash, Disk, Fault
from tests.checkpoint.kinds import KINDS, Kind

import holdfast as hf
from holdfast.engine.checkpoint import PendingCheckpoint, commit, commit_protocol
from holdfast.engine.errors import StorageFullError
from holdfast.engine.storage import Location
from holdfast.engine.storage.folders import MemoryBackend
from holdfast.engine.storage.local import LocalBackend
from holdfast.integrations.components import layout

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = ("write_bytes", "write_data", "make_directory", "sync_directory", "rename", "remove", "remove_tree")
EVER = 1 << 30
WRITES_OF_DATA = {LocalBackend: "new_data", MemoryBackend: "write_data"}  # the operation that writes a data file


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def _instants(every: bool, stride: int, kind: Kind, old: int | None, case: int, first: int) -> Iterator[int]:
    """Numbers the moments to try: the first two, and all others or one of ``stride``, others in every case."""
    yield from range(first, first + 2)
    shift = (list(KINDS).index(kind.name) + 3 * bool(old) + 5 * case) % stride
    yield from itertools.count(first + 2 + (0 if every else shift), 1 if every else stride)


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A disk, and a store without locks."""
    url = str(tmp_path / "store") if request.param == "local" else f"memory://commit/{uuid.uuid4().hex}"
    yield url
    hf.storage.as_location(url).remove_tree()


@pytest.fixture(params=[True, False], ids=["replaced", "new"])
def old(request: pytest.FixtureRequest) -> int | None:
    """The edition that is there before the save; None if there is no checkpoint."""
    return 1 if request.param else None


class Killed(BaseException):
    """The program is gone."""


def _stops(patch: pytest.MonkeyPatch, fails: type[BaseException], first: int, times: int) -> list[int]:
    """Makes the operations of the store with these numbers fail; returns the number of those that began."""
    begun = [0]

    def stopping(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun[0] += 1
            if first <= begun[0] < first + times:
                raise fails("no space")
            return real(*args, **kwargs)

        return call

    for name in OPERATIONS:
        patch.setattr(MemoryBackend, name, stopping(getattr(MemoryBackend, name)))
    return begun


def _after_all(kind: Kind, place: str, clean: list[str]) -> None:
    """The next save goes well, and leaves no trace of the one before."""
    kind.save(place, 3)
    assert kind.find(place) == 3
    assert kind.files(place) == clean


@pytest.fixture
def clean(kind: Kind, place: str) -> list[str]:
    """The files of edition 3, saved where nothing was."""
    kind.save(place, 3)
    return kind.files(place)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("fails", "times"),
    [
        pytest.param(Killed, EVER, id="the program is killed"),
        pytest.param(StorageFullError, 1, id="one fails"),
        pytest.param(StorageFullError, EVER, id="all fail from there"),
    ],
)
def test_killed_or_failed_at_any_operation_of_a_store(
    kind: Kind, old: int | None, fails: type[BaseException], times: int, every: bool, place: str, clean: list[str]
) -> None:
    """There is the old checkpoint or the new one, and an error means the old one."""
    for number in _instants(every, 16, kind, old, (fails is Killed) + (times == 1), 1):
        there = f"{place}/{number}"
        if old:
            kind.save(there, old)
        with pytest.MonkeyPatch.context() as patch:
            begun = _stops(patch, fails, number, times)
            if fails is Killed:  # a program that is gone tidies nothing up
                patch.setattr(PendingCheckpoint, "abort", lambda self, error=None: self.leave())
            raised = _error_of(kind, there, 2)
        found, finished = kind.find(there), begun[0] < number
        if fails is Killed:
            assert found == 2 if finished else found in (old, 2), number
        else:
            assert found == (2 if raised is None or _is_in_doubt(raised) else old), number
        _after_all(kind, there, clean)
        if finished:
            break
    assert number > 10


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_killed_between_the_record_and_those_of_parts(
    kind: Kind, tmp_path: Path, old: int | None, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill after the record of the root leaves the new checkpoint, whole."""
    place = str(tmp_path / "place")
    root = hf.storage.as_location(kind.path(place))
    if old:
        kind.save(place, old)
    written: list[Location] = []
    real = commit.write_record

    def dies(location: Location, record: Any, **options: Any) -> None:
        written.extend([location] if written or location == root else [])
        if len(written) == limit:
            raise Killed
        real(location, record, **options)

    with monkeypatch.context() as patch:
        patch.setattr(PendingCheckpoint, "abort", lambda self, error=None: self.leave())
        patch.setattr(commit, "write_record", dies)
        patch.setattr(layout, "write_record", dies)
        with contextlib.suppress(Killed, hf.SaveFailedError):
            kind.save(place, 2)
    assert written
    assert kind.find(place) == (old if limit == 1 else 2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("power", "first"),
    [
        pytest.param("stays", 0, id="the process dies"),
        pytest.param("all", 1, id="all that is not synced is lost"),
        pytest.param("some", 2, id="some that is not synced is lost"),
    ],
)
def test_cut_off_at_any_call(
    disk: Disk, kind: Kind, old: int | None, every: bool, power: str, first: int, clean: list[str]
) -> None:
    generator = random.Random(0)
    for number in _instants(every, 20, kind, old, first, first):
        place = str(disk.root / str(number))
        if old:
            kind.save(place, old)
        disk.sync()
        disk.crash_at = number
        with contextlib.suppress(Crash, hf.HoldfastError):
            kind.save(place, 2)
        crashed = disk.crashed
        disk.recover()
        if power != "stays":
            disk.cut_power(None if power == "all" else generator)
        found = kind.find(place)
        assert found in (old, 2) if crashed else found == 2, (number, disk.calls[number - 1 : number])
        _after_all(kind, place, clean)
        if not crashed:
            break
    assert number > 20


def test_folders_that_come_back_without_a_marker_are_removed_by_the_next_save(
    disk: Disk, kind: Kind, clean: list[str]
) -> None:
    """A power failure after a save: the marker is gone, and what was removed before it in other directories is not."""
    place = str(disk.root / "place")
    kind.save(place, 1)
    disk.sync()
    kind.save(place, 2)
    saved = kind.files(place)
    disk.cut_power(None, whole=kind.path(place))
    back = {*kind.files(place)} - {*saved}
    if kind.name == "components":  # whose folders do not lie in the marker's directory
        assert "b/c/state/component.json" in back
        assert "b/c/checkpoint.json" not in back
    assert kind.find(place) == 2
    _after_all(kind, place, clean)


@pytest.mark.parametrize(
    ("error", "calls", "times", "case"),
    [
        pytest.param(errno.ENOSPC, NEEDS_SPACE, EVER, 0, id="the disk is full"),
        pytest.param(errno.ENOSPC, NEEDS_SPACE, 1, 1, id="the disk is full for a moment"),
        pytest.param(errno.EIO, CHANGES, 1, 2, id="one call fails"),
        pytest.param(errno.EACCES, CHANGES, EVER, 3, id="nothing is allowed any more"),
    ],
)
def test_failure_at_any_call(
    root: Path,
    fault: Fault,
    kind: Kind,
    old: int | None,
    every: bool,
    error: int,
    calls: tuple[str, ...],
    times: int,
    case: int,
    clean: list[str],
) -> None:
    """A save that fails leaves what was there; one that reports success has left the new checkpoint."""
    for number in _instants(every, 16, kind, old, case, 0):
        place = str(root / str(number))
        if old:
            kind.save(place, old)
        before = kind.files(place)
        fault.start(error, calls, after=number, times=times)
        raised = _error_of(kind, place, 2)
        failed = fault.failed
        fault.stop()
        in_doubt = raised is not None and _is_in_doubt(raised)
        assert not in_doubt or times > 1
        assert kind.find(place) == (2 if raised is None or in_doubt else old), number
        if raised is not None:
            assert failed
            assert raised.errno == error
            if "unlink" not in calls and not in_doubt and old:
                # Records of parts take space to write again: where there is none, the marker tells the next save to.
                unwritten = {"checkpoint.partial"} if kind.name == "components" else set[str]()
                assert {*kind.files(place)} - {*before} <= unwritten
        _after_all(kind, place, clean)
        if not failed:
            break
    assert number > 15


def _error_of(kind: Kind, place: str, edition: int) -> Any:
    """Saves; returns the error of the storage, which is the cause of that of a save in the background."""
    error: BaseException | None = None
    try:
        kind.save(place, edition)
    except hf.SaveFailedError as failure:
        error = failure.__cause__
    except (hf.errors.StorageError, Killed) as failure:
        error = failure
    assert isinstance(error, hf.errors.StorageError | Killed | None)
    return error


def _is_in_doubt(error: BaseException) -> bool:
    """Whether the checkpoint was renamed, but neither synced nor taken back: it is whole, and not reported as done."""
    return any("could not be taken back" in one for one in getattr(error, "__notes__", []))


# ---- several saves to one path


def test_a_save_that_begins_meanwhile(
    kind: Kind, store: str, old: int | None, clean: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the two is committed, and neither harms what the other writes."""
    place = f"{store}/place"
    if old:
        kind.save(place, old)
    intruder = KINDS["tree"] if kind.name == "step" else kind
    outcome: list[Any] = []
    for backend, of_data in WRITES_OF_DATA.items():
        real = getattr(backend, of_data)

        def interrupted(self: Any, *args: Any, real: Any = real, **options: Any) -> Any:
            if not outcome:
                outcome.append("begun")
                outcome.append(_conflict_of(intruder, kind.path(place), 4))
            return real(self, *args, **options)

        monkeypatch.setattr(backend, of_data, interrupted)
    conflict = _conflict_of(kind, place, 2)
    if hf.storage.as_location(store).is_local:
        assert conflict is None
        assert "another save to the same path has begun" in outcome[1]
    else:  # the later one cannot know that the first is alive
        assert conflict is not None
        assert "another save to the same path has begun" in conflict
        assert outcome[1] is None
    assert kind.find(place) == (2 if conflict is None else 4)
    _after_all(kind, place, clean)


def _conflict_of(kind: Kind, place: str, edition: int) -> str | None:
    """Saves; returns the text of the error where another save prevented that."""
    error = _error_of(kind, place, edition)
    assert error is None or isinstance(error, hf.errors.StorageConflictError)
    return None if error is None else str(error)


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("moment", ["before", "after"])
def test_overtaken_around_the_record(
    kind: Kind, store: str, moment: str, old: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without locks, another save may begin around the record: it sweeps the data before, and the old data after."""
    place = f"{store}/place"
    root = hf.storage.as_location(kind.path(place))
    if old:
        kind.save(place, old)
    later: list[PendingCheckpoint] = []
    for module in (commit, layout):
        real = module.write_record

        def overtaken(location: Location, record: Any, real: Any = real, **options: Any) -> None:
            if moment == "after":
                real(location, record, **options)
            if location == root and not later:
                later.append(commit_protocol(root)(root, ["item"], overwrite=True))
                later[0].begin()
            if moment == "before":
                real(location, record, **options)

        monkeypatch.setattr(module, "write_record", overtaken)
    conflict = _conflict_of(kind, place, 2)
    assert later
    if moment == "before" or not old:
        assert conflict is not None
        assert "another save to the same path has begun" in conflict
        assert kind.find(place) == old
    else:
        assert conflict is None
        assert kind.find(place) == 2


def test_alive_until_its_process_dies(tmp_path: Path) -> None:
    """One program saves all kinds at once; no save ends."""
    program = """
import os, sys, threading
from holdfast.engine.checkpoint.commit import PendingCheckpoint
from tests.checkpoint.kinds import KINDS
PendingCheckpoint.commit = lambda self, record: (os.write(1, b"written\\n"), sys.stdin.read())
for name, kind in KINDS.items():
    threading.Thread(target=kind.save, args=(f"{sys.argv[1]}/{name}", 1)).start()
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT) as other:
        assert other.stdout is not None
        assert [other.stdout.readline() for _ in KINDS] == [b"written\n"] * len(KINDS)
        for name, kind in KINDS.items():
            place = kind.path(str(tmp_path / name))
            if name == "step":  # of a run that is alive, too
                with pytest.raises(hf.errors.OwnershipError, match="a run is writing to"):
                    KINDS["tree"].save(place, 2)
            else:
                conflict = _conflict_of(kind, place, 2)
                assert conflict is not None
                assert "another save to the same path has begun" in conflict
        other.kill()
    for name, kind in KINDS.items():
        kind.save(str(tmp_path / name), 3)
        assert kind.find(str(tmp_path / name)) == 3
