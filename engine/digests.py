"""Digests of whole files: for small files, and for items that carry no checksums of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .errors import DamagedCheckpointError, ObjectNotFoundError
from .format import crc32c, extend
from .record import FileRecord
from .storage import Buffer, DataReader, Location

_STEP = 16 << 20  # bytes read at a time


def digest(file: DataReader) -> int:
    """Returns the crc32c of a whole file.

    Args:
        file: The file, open for reading.
    """
    found, buffer = 0, Buffer()
    for start in range(0, file.size, _STEP):
        found = extend(found, file.read(start, min(_STEP, file.size - start), buffer))
    return found


def seal(folder: Location, prefix: str = "") -> dict[str, FileRecord]:
    """Makes files durable that somebody else has written, and lists them with their digests.

    Args:
        folder: The folder that they and their own folders are in.
        prefix: What the paths of the result begin with.

    Returns:
        The files by their path.
    """
    found: dict[str, FileRecord] = {}
    for entry in folder.entries():
        place = folder / entry.name
        if entry.is_directory:
            found.update(seal(place, f"{prefix}{entry.name}/"))
            continue
        with place.open_data() as file:
            found[f"{prefix}{entry.name}"] = FileRecord(file.size, digest(file))
        if place.is_local:
            with open(place, "rb") as written:
                os.fsync(written.fileno())
    folder.sync_directory()
    return found


def read_checked(place: Location, known: FileRecord | None, *, limit: int) -> bytes:
    """Reads a small file and compares it with the commit record.

    Args:
        place: The file.
        known: What the record says about it; None where there is none to compare with.
        limit: The most bytes that are sensible.

    Returns:
        Its content.

    Raises:
        DamagedCheckpointError: It is missing, or not what was saved.
    """
    try:
        content = place.read_bytes(
            limit=limit if known is None else min(limit, known.size), size=None if known is None else known.size
        )
    except ObjectNotFoundError as error:
        raise DamagedCheckpointError(f"{place} is missing: the checkpoint is not whole") from error
    if known is not None:
        found = crc32c(content)
        if len(content) != known.size or (known.crc32c is not None and found != known.crc32c):
            raise DamagedCheckpointError(
                f"{place} is not what was saved: expected {known.size} bytes with crc32c {known.crc32c or 0:08x}, "
                f"found {len(content)} bytes with {found:08x}"
            )
    return content


def check_file(place: Location, known: FileRecord) -> None:
    """Reads a file and compares it with the commit record.

    Args:
        place: The file.
        known: What the record says about it.

    Raises:
        DamagedCheckpointError: It is missing, or not what was saved.
    """
    try:
        with place.open_data() as file:
            if file.size != known.size:
                raise DamagedCheckpointError(f"{place}: expected {known.size} bytes, found {file.size}")
            if known.crc32c is not None and (found := digest(file)) != known.crc32c:
                raise DamagedCheckpointError(f"{place}: expected crc32c {known.crc32c:08x}, found {found:08x}")
    except ObjectNotFoundError as error:
        raise DamagedCheckpointError(f"{place} is missing: the checkpoint is not whole") from error


def check_files(folder: Location, files: Mapping[str, FileRecord]) -> None:
    """Reads all files of an item and compares them with the commit record.

    Args:
        folder: The item's folder.
        files: The files by their path inside it.

    Raises:
        DamagedCheckpointError: Some are missing, or not what was saved; names every one.
    """
    problems = []
    for path, known in files.items():
        try:
            check_file(folder / path, known)
        except DamagedCheckpointError as error:
            problems.append(str(error))
    if problems:
        raise DamagedCheckpointError("\n".join([f"{folder} is damaged:", *(f"  {what}" for what in problems)]))
