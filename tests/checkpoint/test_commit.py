"""How one checkpoint comes to exist, is replaced, and is deleted, step by step."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.engine.checkpoint import (
    PendingCheckpoint,
    commit_protocol,
    delete_checkpoint,
    sweep,
    write_record,
)
from holdfast.engine.format import encode_document
from holdfast.engine.format.record import VERSION, CheckpointRecord, FileRecord, ItemRecord
from holdfast.engine.steps import read_record
from holdfast.engine.storage import SaveLock
from holdfast.engine.storage.folders import MemoryBackend
from holdfast.engine.storage.local import LocalBackend


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[hf.storage.Location]:
    local = request.param == "local"
    location = hf.storage.as_location(tmp_path / "ckpt" if local else f"memory://commit/{uuid.uuid4().hex}/ckpt")
    yield location
    location.remove_tree()


@pytest.fixture
def on_disk(tmp_path: Path) -> hf.storage.Location:
    return hf.storage.as_location(tmp_path / "ckpt")


@pytest.fixture
def unlocked(place: hf.storage.Location, no_locks: None) -> hf.storage.Location:
    """A place without locks: an object store, or a file system that has none."""
    return place


def write(pending: PendingCheckpoint, text: str) -> CheckpointRecord:
    """Writes the one item of a checkpoint; returns the record that would commit it."""
    pending.begin()
    folder = pending.folders["item"]
    if not (pending.continues and (folder / "file").is_there()):
        (folder / "file").write_bytes(text.encode(), atomic=False)
    return CheckpointRecord(items={"item": ItemRecord(folder.name, "files", {"file": FileRecord(len(text))})}, time=1.0)


def begin(place: hf.storage.Location, *, overwrite: bool = False, **options: Any) -> PendingCheckpoint:
    return commit_protocol(place)(place, ["item"], overwrite=overwrite, **options)


def commit(place: hf.storage.Location, text: str, *, overwrite: bool = False) -> None:
    pending = begin(place, overwrite=overwrite)
    pending.commit(write(pending, text))


def content(place: hf.storage.Location) -> str:
    return (place / read_record(place).items["item"].folder / "file").read_bytes().decode()


def names(place: hf.storage.Location) -> list[str]:
    return [entry.name for entry in place.entries()]


@pytest.mark.parametrize("old", [False, True], ids=["new", "replaced"])
def test_a_save_that_is_given_up(place: hf.storage.Location, old: bool) -> None:
    if old:
        commit(place, "one")
    before = names(place)
    pending = begin(place, overwrite=old)
    assert names(place) == before, "nothing is written before something is known to be writable"
    pending.abort()
    write(pending, "two")
    assert "checkpoint.partial" in names(place)
    if old:
        assert content(place) == "one"
    else:
        with pytest.raises(hf.CheckpointNotFoundError):
            read_record(place)
    pending.abort()
    assert names(place) == before
    assert not old or content(place) == "one"


@pytest.mark.parametrize("fails", [True, False], ids=["full", "goes on"])
def test_a_disk_that_takes_a_part_of_the_marker(
    on_disk: hf.storage.Location, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    real = os.pwrite

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith("/checkpoint.partial"):
            return real(descriptor, data, offset)
        if fails and offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data[:9], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(hf.errors.StorageFullError) if fails else contextlib.nullcontext():
        hf.save(on_disk, {"step": 7})
    assert hf.verify(on_disk).ok if not fails else not on_disk.exists()


def test_a_place_is_written_replaced_and_deleted(place: hf.storage.Location) -> None:
    commit(place, "one")
    assert names(place) == ["checkpoint.json", "item"]
    with pytest.raises(hf.CheckpointExistsError, match="a checkpoint is there already"):
        begin(place)
    for edition in ("two", "three", "four"):
        for _ in range(3):
            write(begin(place, overwrite=True), "of a process that is killed")
        commit(place, edition, overwrite=True)
        assert content(place) == edition
        assert len(names(place)) == 2
    assert len(read_record(place).replaced) == 1
    write(begin(place, overwrite=True), "of a process that is killed")
    (place / "checkpoint.json").write_bytes(b"{")  # it is damaged, and can be replaced
    commit(place, "five", overwrite=True)
    assert content(place) == "five"
    for _ in range(2):
        delete_checkpoint(place)
        assert names(place) == []


@pytest.mark.parametrize(("call", "found"), [("write_bytes", "one"), ("remove_tree", "two"), ("remove", "two")])
def test_an_interrupted_replacement_loses_nothing(
    place: hf.storage.Location, monkeypatch: pytest.MonkeyPatch, call: str, found: str
) -> None:
    """As Ctrl-C does while the record is written, or while the old data is removed."""
    commit(place, "one")
    pending = begin(place, overwrite=True)
    record = write(pending, "two")

    real = getattr(hf.storage.Location, call)

    def interrupted(*arguments: object, **options: object) -> None:
        monkeypatch.setattr(hf.storage.Location, call, real)  # once
        real(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(hf.storage.Location, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        pending.commit(record)
    pending.abort()
    assert content(place) == found
    commit(place, "three", overwrite=True)
    assert content(place) == "three"
    assert len(names(place)) == 2


real_open = os.open


def refuse_markers(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
    if str(path).endswith(("ckpt/checkpoint.partial", "5/checkpoint.partial")) and not flags & os.O_CREAT:
        raise PermissionError(errno.EACCES, "not yours")
    return real_open(path, flags, *arguments, **options)


def test_a_marker_that_cannot_be_opened_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It belongs to another user: whether that save is alive is unknown. A manager leaves it alone."""
    place = hf.storage.as_location(tmp_path / "ckpt")
    first = begin(place)
    write(first, "one")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse_markers)
        first.leave()
        with pytest.raises(
            hf.errors.StoragePermissionError, match=r"it is unknown whether that save is alive .*another path"
        ):
            begin(place)
        (tmp_path / "run").mkdir()
        place.path.rename(tmp_path / "run" / "5")
        with caplog.at_level("WARNING", "holdfast"), hf.CheckpointManager(tmp_path / "run") as manager:
            manager.save(6, {"a": 1})
            manager.wait_until_finished()
    assert "it is unknown whether that save is alive" in caplog.text
    assert names(hf.storage.as_location(tmp_path / "run" / "5")) == ["checkpoint.partial", "item"]


@pytest.mark.parametrize("place", ["local"], indirect=True)
def test_without_locks_a_marker_that_cannot_be_read_does_not_pass_for_that_of_another_save(
    unlocked: hf.storage.Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begin(unlocked)
    record = write(first, "one")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse_markers)
        with pytest.raises(hf.errors.StoragePermissionError, match=r"cannot read .*checkpoint\.partial"):
            first.commit(record)
    first.commit(record)
    assert content(unlocked) == "one"


@pytest.mark.parametrize("overwrite", [False, True])
def test_saves_that_begin_at_the_same_moment(on_disk: hf.storage.Location, overwrite: bool) -> None:
    """As processes that are not connected do."""
    if overwrite:
        commit(on_disk, "none")
    first, second, third = (begin(on_disk, overwrite=overwrite) for _ in range(3))
    record = write(first, "one")
    with pytest.raises(hf.errors.StorageConflictError, match="connect them"):
        second.begin()
    second.abort()
    first.commit(record)
    with pytest.raises(hf.errors.StorageConflictError):
        third.begin()
    third.abort()
    assert content(on_disk) == "one"
    assert len(names(on_disk)) == 2


WHOLE = ["checkpoint.json", "item"]


@pytest.mark.parametrize(
    ("there", "left", "stays"),
    [
        pytest.param([], {"checkpoint.partial": "{}", "item/file": "x"}, [], id="a save that did not end"),
        pytest.param([], {"checkpoint.partial": ""}, [], id="a marker that was cut short"),
        pytest.param([], {"checkpoint.deleted": "{}", "item/file": "x"}, [], id="a deletion that did not end"),
        pytest.param([], {"item/file": "x"}, ["item"], id="a folder that is not ours"),
        pytest.param([], {"file": "x"}, ["file"], id="a file that is not ours"),
        pytest.param([], {".holdfast-0123": "x"}, [".holdfast-0123"], id="not ours without a record"),
        pytest.param(WHOLE, {}, [], id="a record"),
        pytest.param(
            WHOLE, {"checkpoint.partial": '{"folders": ["item.1"]}', "item.1/file": "x"}, [], id="a replacement"
        ),
        pytest.param(
            WHOLE, {"checkpoint.partial": '{"folders": ["item", "item/file"]}'}, [], id="what is committed stays"
        ),
        pytest.param(
            WHOLE, {"checkpoint.partial": '{"folders": ["../other", 3]}'}, [], id="a marker that leads elsewhere"
        ),
        pytest.param(WHOLE, {"checkpoint.partial": "[1"}, [], id="a marker beside a record that was cut short"),
        pytest.param(WHOLE, {".holdfast-0123": "x"}, [], id="a record that was not renamed"),
        pytest.param(WHOLE, {"notes.txt": "x", "checkpoint.partial": "{}"}, ["notes.txt"], id="a file of the user"),
    ],
)
def test_what_a_sweep_leaves(
    place: hf.storage.Location, there: list[str], left: dict[str, str], stays: list[str]
) -> None:
    if there:
        commit(place, "one")
    for name, text in left.items():
        (place / name).parent.make_directory()
        (place / name).write_bytes(text.encode())
    assert sweep(place) is (not there and not stays)
    assert sorted(names(place)) == sorted([*there, *stays])
    assert not there or content(place) == "one"


READS_AND_CHANGES = ("entries", "read_bytes", "write_bytes", "rename", "remove", "remove_tree")


@contextlib.contextmanager
def before_operation(*acts: tuple[int, Callable[[], object]]) -> Iterator[None]:
    """Acts once each, before the storage operations with these numbers; those of the acts are not counted."""
    begun = itertools.count(1)
    acts_now = False

    def acting(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal acts_now
            if not acts_now:
                number = next(begun)
                acts_now = True
                try:
                    for when, act in acts:
                        if when == number:
                            act()
                finally:
                    acts_now = False
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for backend in (LocalBackend, MemoryBackend):
            for name in READS_AND_CHANGES:
                patch.setattr(backend, name, acting(getattr(backend, name)))
        yield


class Rival:
    """A save that begins and ends while something else goes on with its place; it may be refused."""

    def __init__(self, place: hf.storage.Location, **options: Any) -> None:
        self.place, self.options = place, options
        self.begun: tuple[PendingCheckpoint, CheckpointRecord] | None = None
        self.is_refused = self.has_ended = False

    def begin(self) -> None:
        try:
            pending = begin(self.place, **self.options)
            self.begun = pending, write(pending, "new")
        except hf.errors.StorageConflictError:
            self.is_refused = True

    def end(self) -> None:
        if self.begun is not None and not self.has_ended:
            self.begun[0].commit(self.begun[1])
            self.has_ended = True


def during(number: int, act: Callable[[], object], work: Callable[[hf.storage.Location], object], place: Any) -> bool:
    """Acts before a storage operation of the work; returns whether there are that many."""
    acted: list[object] = []
    with before_operation((number, lambda: acted.append(act()))):
        work(place)
    return bool(acted)


def moments(attempt: Callable[[int], bool]) -> int:
    """Make an attempt with each number from one on, as long as it returns True; return how many there were."""
    return next(number for number in itertools.count(1) if not attempt(number))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("copies", [None, "original"], ids=["save", "copy that continues"])
@pytest.mark.parametrize("old", [True, False], ids=["replaced", "new"])
def test_a_save_that_is_alive_commits_while_a_run_sweeps(
    unlocked: hf.storage.Location, old: bool, copies: str | None
) -> None:
    """At any moment of the sweep, wherever a copy began again: the save fails, or all of it stays."""

    def attempt(number: int, beginning: int) -> bool:
        if old:
            commit(unlocked, "old")
        if copies:
            write(begin(unlocked, overwrite=old, copies=copies), "new")  # It is interrupted.
        pending = begin(unlocked, overwrite=old, copies=copies)
        assert pending.continues is bool(copies)
        records: list[CheckpointRecord] = [] if beginning else [write(pending, "new")]
        committed: list[bool] = []

        def end() -> None:
            try:
                pending.commit(records[0])
                committed.append(True)
            except hf.errors.StorageConflictError as error:
                pending.abort(error)
                committed.append(False)

        with before_operation((beginning, lambda: records.append(write(pending, "new"))), (number, end)):
            sweep(unlocked)
        if committed:
            expected = ["new"] if committed[0] else ["old"] if old else []
            assert [content(unlocked) for _ in expected] == expected
            sweep(unlocked)
            assert len(names(unlocked)) == 2 * len(expected)
        unlocked.remove_tree()
        return bool(committed)

    def attempts(number: int) -> bool:
        return True in [attempt(number, beginning) for beginning in range(number + 1 if copies else 1)]

    assert moments(attempts) > 4


@pytest.mark.parametrize("old", [True, False], ids=["replaced", "new"])
def test_a_save_that_begins_when_a_sweep_has_taken_the_marker_commits(old: bool) -> None:
    place = hf.storage.as_location(f"memory://commit/{uuid.uuid4().hex}/ckpt")
    rivals: list[Rival] = []

    def attempt(number: int) -> bool:
        if old:
            commit(place, "old")
        write(begin(place, overwrite=old), "dead")
        rivals.append(rival := Rival(place, overwrite=old))

        def begin_without_the_marker() -> None:
            if "checkpoint.partial" not in names(place):
                rival.begin()

        has_acted = during(number, begin_without_the_marker, sweep, place)
        rival.end()
        assert not rival.has_ended or content(place) == "new"
        place.remove_tree()
        return has_acted

    moments(attempt)
    assert [rival.has_ended for rival in rivals].count(True) > 1


def test_a_sweep_passes_over_a_checkpoint_that_is_deleted_meanwhile(place: hf.storage.Location) -> None:
    def attempt(number: int) -> bool:
        commit(place, "one")
        (place / "checkpoint.partial").write_bytes(b"{}")
        has_acted = during(number, lambda: delete_checkpoint(place), sweep, place)
        place.remove_tree()
        return has_acted

    assert moments(attempt) > 4


def test_a_save_that_begins_when_a_run_has_looked_for_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hf.CheckpointManager(tmp_path) as run:
        run.save(1, {})
    step = hf.storage.as_location(tmp_path / "1")
    (step / "checkpoint.deleted").write_bytes(b"{}")  # there is something to sweep
    pending = begin(step, overwrite=True)
    (step / "checkpoint.deleted").write_bytes(b"{}")
    take_over = SaveLock.take_over
    records: list[CheckpointRecord] = []

    def begin_afterwards(lock: SaveLock) -> bool:
        found = take_over(lock)
        if not records:
            records.append(write(pending, "new"))
        return found

    with monkeypatch.context() as patch, hf.CheckpointManager(tmp_path) as later:
        patch.setattr(SaveLock, "take_over", begin_afterwards)
        later.acquire()
    pending.commit(records[0])
    assert content(step) == "new"


@pytest.mark.parametrize(
    ("remove", "left"),
    [
        (sweep, ["checkpoint.deleted"]),
        (sweep, ["checkpoint.partial"]),
        (sweep, ["checkpoint.deleted", "checkpoint.partial"]),
        (delete_checkpoint, []),
    ],
)
def test_a_save_that_begins_beside_a_removal(
    on_disk: hf.storage.Location, remove: Callable[[hf.storage.Location], object], left: list[str]
) -> None:
    """At any moment of it, and ends at any later one: the save is refused, or all of it stays."""
    refusals = 0

    def attempt(first: int, last: int) -> tuple[bool, bool]:
        """Return whether the save has begun, or was refused, and whether it has ended during the removal."""
        nonlocal refusals
        commit(on_disk, "old")
        for mark in left:
            (on_disk / "checkpoint.json").remove()
            (on_disk / mark).write_bytes(b"{}")
        rival = Rival(on_disk)
        with before_operation((first, rival.begin), (last, rival.end)):
            remove(on_disk)
        has_ended_early = rival.has_ended
        rival.end()
        if rival.has_ended:
            assert content(on_disk) == "new"
            assert names(on_disk) == ["checkpoint.json", read_record(on_disk).items["item"].folder]
        else:
            assert names(on_disk) == []
        refusals += rival.is_refused
        on_disk.remove_tree()
        return rival.begun is not None or rival.is_refused, has_ended_early

    for first in itertools.count(1 if left else 2):  # what is there before its first change is deleted
        tried = [attempt(first, first)]
        while tried[-1][1]:
            tried.append(attempt(first, first + len(tried)))
        if not tried[-1][0]:
            break
    assert refusals > 0


@pytest.mark.parametrize("late", [False, True], ids=["between its record and its lock", "a second one"])
def test_a_deletion_spares_a_save_that_has_swept_its_marker(
    on_disk: hf.storage.Location, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(on_disk, "old")
    if late:
        delete_checkpoint(on_disk)
    take_over, rival = SaveLock.take_over, Rival(on_disk)

    def begin_before(lock: SaveLock) -> bool:
        monkeypatch.setattr(SaveLock, "take_over", take_over)
        rival.begin()
        return lock.take_over()

    monkeypatch.setattr(SaveLock, "take_over", begin_before)
    delete_checkpoint(on_disk)
    rival.end()
    assert content(on_disk) == "new"


def test_a_sweep_waits_for_a_deletion_beside_what_a_dead_save_left(on_disk: hf.storage.Location) -> None:
    commit(on_disk, "old")
    for mark in ("checkpoint.partial", "checkpoint.deleted"):
        (on_disk / mark).write_bytes(b"{}")
    (on_disk / "checkpoint.json").remove()
    deletion = SaveLock(on_disk / "checkpoint.deleted")
    assert deletion.take_over()
    with pytest.raises(hf.errors.StorageConflictError):
        sweep(on_disk)
    with pytest.raises(hf.errors.StorageConflictError):
        begin(on_disk)
    deletion.release()
    assert sweep(on_disk)
    assert names(on_disk) == []


def test_a_failed_deletion_releases_its_lock_where_the_folder_cannot_be_listed(
    on_disk: hf.storage.Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(on_disk, "old")

    def refuse_to_list(backend: LocalBackend, key: str) -> None:
        raise hf.errors.StorageError(f"cannot list {key}: ESTALE")

    def refuse(backend: LocalBackend, key: str, *given: object) -> None:
        monkeypatch.setattr(LocalBackend, "entries", refuse_to_list)
        raise hf.errors.StorageError(f"cannot remove {key}: EIO")

    monkeypatch.setattr(LocalBackend, "remove_tree", refuse)
    with pytest.raises(hf.errors.StorageError, match="EIO"):
        delete_checkpoint(on_disk)
    monkeypatch.undo()
    assert SaveLock(on_disk / "checkpoint.deleted").take_over()


@pytest.mark.parametrize("remove", [sweep, delete_checkpoint])
def test_a_removal_on_nfs_leaves_no_folder(
    tmp_path: Path, remove: Callable[[hf.storage.Location], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps the marker under another name, and with it the folder, until the lock closes it."""
    place = hf.storage.as_location(tmp_path / "ckpt")
    place.make_directory()
    (place / "checkpoint.deleted").write_bytes(b"{}")
    kept = tmp_path / "ckpt" / ".nfs0123"
    remove_tree, release = LocalBackend.remove_tree, SaveLock.release

    def removed(backend: LocalBackend, key: str, first: str | None, last: str | None) -> None:
        remove_tree(backend, key, first, last)
        kept.parent.mkdir()
        kept.touch()

    def released(lock: SaveLock) -> None:
        if lock.descriptor is not None:
            kept.unlink(missing_ok=True)
        release(lock)

    monkeypatch.setattr(LocalBackend, "remove_tree", removed)
    monkeypatch.setattr(SaveLock, "release", released)
    remove(place)
    assert not kept.parent.exists()


def test_sweep_takes_only_the_marker_beside_a_damaged_record(on_disk: hf.storage.Location) -> None:
    commit(on_disk, "one")
    (on_disk / "checkpoint.json").write_bytes(b"{")
    (on_disk / "checkpoint.partial").write_bytes(b'{"folders": ["item"]}')
    assert not sweep(on_disk)
    assert names(on_disk) == WHOLE


def test_a_save_that_is_alive_replaces_a_damaged_record_while_a_run_sweeps(unlocked: hf.storage.Location) -> None:
    """At any moment of the sweep, which leaves a marker that may be that of a living save."""

    def attempt(number: int) -> bool:
        commit(unlocked, "old")
        (unlocked / "checkpoint.json").write_bytes(b"{")
        pending = begin(unlocked, overwrite=True)
        record = write(pending, "new")
        has_ended = during(number, lambda: pending.commit(record), sweep, unlocked)
        if not has_ended:
            pending.commit(record)
        assert content(unlocked) == "new"
        assert "checkpoint.partial" not in names(unlocked)
        unlocked.remove_tree()
        return has_ended

    assert moments(attempt) > 1


def test_a_newer_version_is_not_replaced(place: hf.storage.Location) -> None:
    """It is told apart from damage."""
    commit(place, "one")
    record = CheckpointRecord.decode((place / "checkpoint.json").read_bytes(), source="")
    (place / "checkpoint.json").write_bytes(encode_document("checkpoint", record.to_document(), version=VERSION + 1))
    (place / "checkpoint.partial").write_bytes(b'{"folders": ["item"]}')
    for use in (lambda: begin(place, overwrite=True), lambda: hf.load(place)):
        with pytest.raises(hf.errors.FormatVersionError, match=rf"version {VERSION + 1}.*upgrade holdfast"):
            use()
    assert not sweep(place)
    assert names(place) == ["checkpoint.json", "checkpoint.partial", "item"]


def test_a_record_keeps_everything(place: hf.storage.Location) -> None:
    place.make_directory()
    record = CheckpointRecord(
        items={"a": ItemRecord("a.1", "pytree", {"d/0": FileRecord(3), "tree.json": FileRecord(4, 0xDEADBEEF)})},
        time=1234.5,
        step=7,
        reason="because",
        metrics={"loss": 0.1, "inf": float("-inf"), "nested": {"n": 3}},
        pinned=True,
        replaced=("a", "b"),
    )
    write_record(place, record)
    assert read_record(place) == record
    assert record.nbytes == 7
