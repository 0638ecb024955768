"""File systems beyond the conformance suite: links, pipes, refusals; ``tests/checkpoint`` has the order of syncs."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

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


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Location:
    return as_location(tmp_path)


def test_a_directory_that_cannot_be_synced_is_fine(folder: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ObjectNotFoundError, match="missing"):
        (folder / "missing").sync_directory()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EINVAL, "Invalid argument")))
    folder.sync_directory()


@pytest.fixture
def outside(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    place = tmp_path_factory.mktemp("outside")
    (place / "precious").write_text("content")
    (place / "below").mkdir()
    (place / "below" / "precious").write_text("content")
    return place


def test_links_are_followed_by_reads_alone(folder: Location, outside: pathlib.Path) -> None:
    targets = {"directory": outside, "file": outside / "precious", "broken": outside / "nowhere"}
    for place in (folder, folder / "step", folder / "step" / "deep"):
        place.make_directory()
        for name, target in targets.items():
            os.symlink(target, place / name)
    listed = {entry.name: (entry.is_directory, entry.size) for entry in (folder / "step" / "deep").entries()}
    assert listed == {"broken": (False, None), "directory": (True, None), "file": (False, 7)}
    assert (folder / "directory").is_directory()
    assert not (folder / "broken").exists()
    (folder / "file").write_data(3, [Segment(0, 3, lambda: iter([np.ones(3, np.uint8)]))])
    assert (folder / "file").read_bytes() == b"\1\1\1"
    (folder / "broken").remove()
    for name in ("step", "directory", "file"):
        (folder / name).remove_tree()
    assert folder.entries() == []
    assert (outside / "precious").read_text() == "content"
    assert (outside / "below" / "precious").read_text() == "content"


def test_two_may_delete_the_same_tree(folder: Location) -> None:
    for number in range(300):
        (folder / "step" / str(number % 10)).make_directory(sync=False)
        (folder / "step" / str(number % 10) / str(number)).path.touch()
    with ThreadPoolExecutor(4) as threads:
        deletions = [threads.submit((folder / "step").remove_tree) for _ in range(4)]
    assert [one.exception() for one in deletions] == [None] * 4
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


ATTEMPTS: dict[str, Callable[[Location], object]] = {
    "read": lambda place: place.read_bytes(),
    "open": lambda place: place.open_data(),
    "write": lambda place: place.write_bytes(b""),
    "write data": lambda place: place.write_data(0, []),
    "make a directory": lambda place: place.make_directory(),
    "list": lambda place: place.entries(),
    "rename": lambda place: place.rename("x"),
    "remove": lambda place: place.remove(),
    "remove a tree": lambda place: place.remove_tree(),
    "look": lambda place: place.exists(),
}


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS)
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


def test_conflicts(folder: Location) -> None:
    (folder / "file").write_bytes(b"1")
    (folder / "full" / "inside").make_directory()
    (folder / "step").make_directory()
    attempts: list[tuple[type[StorageError], str, Callable[[], object]]] = [
        (StorageConflictError, "step", lambda: (folder / "step").rename("full")),
        (StorageConflictError, "file", lambda: (folder / "file").make_directory()),
        (StorageConflictError, "/file: File exists", lambda: (folder / "file" / "below").make_directory()),
        (StorageError, "full", lambda: (folder / "full").write_bytes(b"1")),
        (InvalidLocationError, "too long", lambda: (folder / ("x" * 300)).write_bytes(b"1", atomic=False)),
        (ObjectNotFoundError, "Not a directory", lambda: (folder / "file").entries()),
    ]
    for kind, message, attempt in attempts:
        with pytest.raises(kind, match=message):
            attempt()
    assert [entry.name for entry in folder.entries()] == ["file", "full", "step"]


def test_a_file_that_is_listed_and_cannot_be_removed(
    tmp_path: pathlib.Path, folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system in trouble says that a file is missing, and lists it."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"1")

    def unlink(path: Any) -> None:
        raise FileNotFoundError(errno.ENOENT, "no such file", path)

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(StorageError, match=r"folder: .* reported 100 times that it does not exist"):
        (folder / "folder").remove_tree(first="file")
