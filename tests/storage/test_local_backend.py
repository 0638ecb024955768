"""File systems beyond the conformance suite: links, pipes, the order of syncs, refusals."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from holdfast.engine.errors import (
    DamagedCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    StorageConflictError,
    StorageError,
    StoragePermissionError,
)
from holdfast.engine.storage import Location, Segment, as_location

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Location:
    return as_location(tmp_path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> list[tuple[str, ...]]:
    """Records the calls that reach the disk, in order, with paths relative to the test's directory."""
    seen: list[tuple[str, ...]] = []
    temporary: dict[str, str] = {}

    def relative(path: Any) -> str:
        text = os.path.relpath(path, tmp_path)
        folder, name = os.path.split(text)
        if name.startswith(".holdfast-"):
            name = temporary.setdefault(name, "TEMPORARY")
        return os.path.join(folder, name)

    def record(name: str, describe: Callable[..., tuple[str, ...]]) -> None:
        real = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            described = describe(*args)
            result = real(*args, **options)
            if (name, *described) != (seen[-1] if seen else None):  # Several blocks of one file count once.
                seen.append((name, *described))
            return result

        monkeypatch.setattr(os, name, call)

    def of_descriptor(descriptor: int, *_: Any) -> tuple[str, ...]:
        return (relative(os.readlink(f"/proc/self/fd/{descriptor}")),)

    def of_path(*paths: Any) -> tuple[str, ...]:
        return tuple(relative(path) for path in paths[:2] if isinstance(path, str))

    for name in ("fsync", "pwrite", "ftruncate"):
        record(name, of_descriptor)
    for name in ("replace", "rename", "mkdir"):
        record(name, of_path)
    return seen


def test_an_atomic_write_syncs_the_file_then_the_directory(folder: Location, calls: list[tuple[str, ...]]) -> None:
    (folder / "record").write_bytes(b"content")
    assert calls == [("fsync", "TEMPORARY"), ("replace", "TEMPORARY", "record"), ("fsync", ".")]


def test_a_plain_write_syncs_the_file(folder: Location, calls: list[tuple[str, ...]]) -> None:
    (folder / "record").write_bytes(b"content", atomic=False)
    assert calls == [("fsync", "record")]


def test_data_is_synced_last(folder: Location, calls: list[tuple[str, ...]]) -> None:
    data = np.ones(5000, np.uint8)
    (folder / "data").write_data(5000, [Segment(0, 5000, lambda: iter([data]))])
    assert calls == [("ftruncate", "data"), ("pwrite", "data"), ("fsync", "data")]


def test_new_directories_are_synced_into_their_parents(folder: Location, calls: list[tuple[str, ...]]) -> None:
    (folder / "a" / "b").make_directory()
    assert calls == [("mkdir", "a"), ("fsync", "."), ("mkdir", "a/b"), ("fsync", "a")]
    calls.clear()
    (folder / "a" / "b").make_directory()
    (folder / "a" / "c").make_directory(sync=False)
    assert calls == [("mkdir", "a/c")]


def test_a_rename_syncs_the_parent(folder: Location, calls: list[tuple[str, ...]]) -> None:
    (folder / "old").make_directory(sync=False)
    calls.clear()
    (folder / "old").rename("new")
    assert calls == [("rename", "old", "new"), ("fsync", ".")]


@pytest.mark.parametrize("stage", ["fsync", "replace"])
def test_a_failed_atomic_write_keeps_the_old(folder: Location, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    (folder / "record").write_bytes(b"old")

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, stage, fail)
        with pytest.raises(StorageError, match="record: Input/output error"):
            (folder / "record").write_bytes(b"new")
    assert (folder / "record").read_bytes() == b"old"
    assert [entry.name for entry in folder.entries()] == ["record"]


def test_a_directory_that_cannot_be_synced_is_fine(folder: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    folder.sync_directory()


def test_syncing_a_missing_directory(folder: Location) -> None:
    with pytest.raises(ObjectNotFoundError, match="missing"):
        (folder / "missing").sync_directory()


@pytest.fixture
def outside(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    place = tmp_path_factory.mktemp("outside")
    (place / "precious").write_text("content")
    (place / "below").mkdir()
    (place / "below" / "precious").write_text("content")
    return place


def test_remove_tree_does_not_follow_links(folder: Location, outside: pathlib.Path) -> None:
    (folder / "step" / "deep").make_directory()
    for number, target in enumerate([outside, outside / "precious", outside / "below", outside / "nowhere"]):
        os.symlink(target, folder / "step" / f"link{number}")
        os.symlink(target, folder / "step" / "deep" / f"link{number}")
    os.symlink(outside, folder / "link")
    (folder / "step").remove_tree()
    (folder / "link").remove_tree()
    assert folder.entries() == []
    assert (outside / "precious").read_text() == "content"
    assert (outside / "below" / "precious").read_text() == "content"


def test_remove_deletes_a_link_only(folder: Location, outside: pathlib.Path) -> None:
    os.symlink(outside / "precious", folder / "link")
    (folder / "link").remove()
    assert (outside / "precious").exists()


def test_write_data_replaces_a_link(folder: Location, outside: pathlib.Path) -> None:
    os.symlink(outside / "precious", folder / "data")
    (folder / "data").write_data(3, [Segment(0, 3, lambda: iter([np.ones(3, np.uint8)]))])
    assert (outside / "precious").read_text() == "content"
    assert (folder / "data").read_bytes() == b"\1\1\1"


def test_entries_look_through_links(folder: Location, outside: pathlib.Path) -> None:
    os.symlink(outside, folder / "directory")
    os.symlink(outside / "precious", folder / "file")
    os.symlink(outside / "nowhere", folder / "broken")
    listed = {entry.name: (entry.is_directory, entry.size) for entry in folder.entries()}
    assert listed == {"broken": (False, None), "directory": (True, None), "file": (False, 7)}
    assert (folder / "directory").is_directory()
    assert not (folder / "broken").exists()


def test_the_named_file_is_deleted_last(folder: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "marker", "z", "sub/marker"):
        (folder / "step" / name).parent.make_directory()
        (folder / "step" / name).write_bytes(b"1")
    order: list[str] = []
    real = os.unlink

    def unlink(path: Any, **options: Any) -> None:
        order.append(os.fspath(path))
        real(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    (folder / "step").remove_tree(last="marker")
    assert order[-1] == str(folder / "step" / "marker")
    assert len(order) == 4
    assert not (folder / "step").exists()


def test_two_may_delete_the_same_tree(folder: Location) -> None:
    for number in range(300):
        (folder / "step" / str(number % 10)).make_directory(sync=False)
        (folder / "step" / str(number % 10) / str(number)).path.touch()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            (folder / "step").remove_tree()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert folder.entries() == []


@pytest.mark.parametrize("kind", ["directory", "pipe", "device"])
def test_only_regular_files_are_read(folder: Location, kind: str) -> None:
    place = folder / "odd"
    if kind == "directory":
        place.make_directory()
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        os.symlink("/dev/zero", place)
    for read in (place.read_bytes, lambda: place.read_bytes(100), place.open_data):
        with pytest.raises(DamagedCheckpointError, match=r"odd .*regular file"):
            read()


@pytest.mark.parametrize(
    "attempt",
    [
        lambda place: place.read_bytes(),
        lambda place: place.open_data(),
        lambda place: place.write_bytes(b""),
        lambda place: place.write_data(0, []),
        lambda place: place.make_directory(),
        lambda place: place.entries(),
        lambda place: place.rename("x"),
        lambda place: place.remove(),
        lambda place: place.remove_tree(),
        lambda place: place.exists(),
    ],
    ids=["read", "open", "write", "write-data", "mkdir", "entries", "rename", "remove", "remove-tree", "exists"],
)
def test_refusals_name_the_path(
    folder: Location, monkeypatch: pytest.MonkeyPatch, attempt: Callable[[Location], object]
) -> None:
    place = folder / "forbidden"

    def refuse(path: Any, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    for name in ("open", "mkdir", "scandir", "rename", "unlink", "lstat", "stat"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(os.path, "isdir", lambda path: str(path) != str(place))
    with pytest.raises(StoragePermissionError, match=r"forbidden.*: Permission denied; check the permissions"):
        attempt(place)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may do everything")
def test_a_read_only_directory(folder: Location) -> None:
    os.chmod(folder, 0o500)
    with pytest.raises(StoragePermissionError):
        (folder / "file").write_bytes(b"")
    os.chmod(folder, 0o700)


def test_conflicts(folder: Location) -> None:
    (folder / "file").write_bytes(b"1")
    (folder / "full" / "inside").make_directory()
    (folder / "step").make_directory()
    with pytest.raises(StorageConflictError, match="step"):
        (folder / "step").rename("full")
    with pytest.raises(StorageConflictError, match="file"):
        (folder / "file").make_directory()
    with pytest.raises(StorageConflictError, match=r"/file: File exists"):
        (folder / "file" / "below").make_directory()
    with pytest.raises(StorageError, match="full"):
        (folder / "full").write_bytes(b"1")
    with pytest.raises(InvalidLocationError, match="too long"):
        (folder / ("x" * 300)).write_bytes(b"1", atomic=False)
    assert [entry.name for entry in folder.entries()] == ["file", "full", "step"]


def test_entries_of_a_file(folder: Location) -> None:
    (folder / "file").write_bytes(b"1")
    with pytest.raises(ObjectNotFoundError, match="Not a directory"):
        (folder / "file").entries()


def test_a_file_that_is_listed_and_cannot_be_removed(
    tmp_path: pathlib.Path, folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system in trouble says that a file is missing, and lists it."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"1")

    def unlink(path: Any) -> None:
        raise FileNotFoundError(errno.ENOENT, "no such file", path)

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(StorageError, match=r"folder: .* has answered 100 times that it does not exist"):
        (folder / "folder").remove_tree(first="file")
