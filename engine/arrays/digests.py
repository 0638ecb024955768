"""Digests of whole files: of small files, and of items without checksums of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from ..errors import DamagedCheckpointError, ObjectNotFoundError, itemized
from ..format import FileRecord, crc32c, extend
from ..storage import Buffer, DataReader, Location, unreadable_as_damage

_STEP = 16 << 20  # bytes read at a time


def digest(file: DataReader) -> int:
    found, buffer = 0, Buffer()
    for start in range(0, file.size, _STEP):
        found = extend(found, file.read(start, min(_STEP, file.size - start), buffer))
    return found


def fsync_and_digest(folder: Location, prefix: str = "") -> dict[str, FileRecord]:
    """Sync all files below a folder that a handler wrote; return them with their digests."""
    found: dict[str, FileRecord] = {}
    for entry in folder.entries():
        place = folder / entry.name
        if entry.is_directory:
            found.update(fsync_and_digest(place, f"{prefix}{entry.name}/"))
            continue
        with place.open_data() as file:
            found[f"{prefix}{entry.name}"] = FileRecord(file.size, digest(file))
        if place.is_local:
            with open(place, "rb") as written:
                os.fsync(written.fileno())
    folder.sync_directory()
    return found


def is_missing(place: Location) -> str:
    return f"{place} is missing: the checkpoint is incomplete"


@contextlib.contextmanager
def required(place: Location) -> Iterator[None]:
    """Report a missing file as damage; a disk reports it on opening, an object store on reading."""
    try:
        with unreadable_as_damage(place):
            yield
    except ObjectNotFoundError as error:
        raise DamagedCheckpointError(is_missing(place)) from error


def read_checked(place: Location, known: FileRecord | None, *, limit: int) -> bytes:
    """Read a small file and compare it with the commit record."""
    with required(place):
        if known is None:
            return place.read_bytes(limit=limit)
        content = place.read_bytes(limit=min(limit, known.size), size=known.size)
    found = crc32c(content)
    if len(content) != known.size or (known.crc32c is not None and found != known.crc32c):
        raise DamagedCheckpointError(
            f"{place} is not what was saved: expected {known.size} bytes with crc32c {known.crc32c or 0:08x}, "
            f"found {len(content)} bytes with {found:08x}"
        )
    return content


def check_file(place: Location, known: FileRecord) -> None:
    """Read a file and compare it with the commit record."""
    with required(place), place.open_data() as file:
        if file.size != known.size:
            raise DamagedCheckpointError(f"{place}: expected {known.size} bytes, found {file.size}")
        if known.crc32c is not None and (found := digest(file)) != known.crc32c:
            raise DamagedCheckpointError(f"{place}: expected crc32c {known.crc32c:08x}, found {found:08x}")


def check_files(folder: Location, files: Mapping[str, FileRecord]) -> None:
    """Read all files of an item and compare them with the commit record."""
    problems = []
    for path, known in files.items():
        try:
            check_file(folder / path, known)
        except DamagedCheckpointError as error:
            problems.append(str(error))
    if problems:
        raise DamagedCheckpointError(itemized(f"{folder} is damaged:", problems))
