"""Defines file names, chunk alignment, checksums and digests of stored trees, and verifies copied files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError, ObjectNotFoundError, itemized
from ..format import ARCHIVE_LIMIT, FileRecord, crc32c, decode_archive, extend, unsynced
from ..storage import Buffer, DataReader, Location, folder_in_memory, sync_all, unreadable_as_damage

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]

MANIFEST = "manifest.ocdbt"
INDEX = "d/index"
TREE = "tree.json"
TREE_KIND = "tree"

# Alignment of chunks in data files, in bytes: the size of a cache line, which XLA requires for zero-copy host memory.
CHUNK_ALIGNMENT = 64
CHECKSUM_BYTES = 4  # size of the crc32c at the end of every chunk

_STEP = 16 << 20  # bytes read at a time


def checksum_after(data: bytes) -> int:
    """Return the checksum at the end of a stored chunk."""
    return int.from_bytes(data[-CHECKSUM_BYTES:], "little")


def fsync_and_digest(folder: Location, prefix: str = "") -> dict[str, FileRecord]:
    """Fsync all files that a handler wrote into a folder; return their records with digests."""
    records: dict[str, FileRecord] = {}
    for entry in folder.entries():
        location = folder / entry.name
        if entry.is_directory:
            records.update(fsync_and_digest(location, f"{prefix}{entry.name}/"))
            continue
        with location.open_data() as file:
            digest, buffer = 0, Buffer()
            for start in range(0, file.size, _STEP):
                digest = extend(digest, file.read(start, min(_STEP, file.size - start), buffer))
            records[f"{prefix}{entry.name}"] = FileRecord(file.size, digest)
        if location.is_local:
            with open(location, "rb") as written:
                os.fsync(written.fileno())
    folder.sync_directory()
    return records


def make_durable(folder: Location, files: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    """Make the files in a folder durable; return their updated records."""
    sync_all([folder / path if path else folder for path in unsynced(files)])
    return {path: replace(file, durable=True) for path, file in files.items()}


def is_missing(file: Location) -> str:
    return f"{file} is missing: the checkpoint is incomplete"


@contextlib.contextmanager
def required(file: Location) -> Iterator[None]:
    """Report a missing file as damage. In an object store, opening such a file succeeds and only reading it fails."""
    try:
        with unreadable_as_damage(file):
            yield
    except ObjectNotFoundError as error:
        raise DamagedCheckpointError(is_missing(file)) from error


def read_checked(location: Location, record: FileRecord | None, *, limit: int) -> bytes:
    """Read a small file, which may be packed in another file, and verify it against its record."""
    with required(location):
        if record is None:
            return location.read_bytes(limit=limit)
        if record.within is None:
            content = location.read_bytes(limit=min(limit, record.size), size=record.size)
        else:
            begin, size = record.within
            with location.parent.open_data(size=size, cached=True) as file:
                content = file.read(begin, min(limit, record.size)).tobytes()
    computed = crc32c(content)
    if len(content) != record.size or (record.crc32c is not None and computed != record.crc32c):
        raise DamagedCheckpointError(
            f"{location} is not what was saved: expected {record.size} bytes with crc32c {record.crc32c or 0:08x}, "
            f"found {len(content)} bytes with {computed:08x}"
        )
    return content


def open_folder(
    location: Location, files: Mapping[str, FileRecord] | None
) -> tuple[Location, Mapping[str, FileRecord] | None]:
    """Return a folder and its file records. If the folder is packed in a zip file, read it into memory."""
    record = None if files is None else files.get("")
    if record is None:
        return location, files
    contents = decode_archive(read_checked(location, record, limit=ARCHIVE_LIMIT), source=str(location))
    return folder_in_memory(location, contents), {path: FileRecord(len(data)) for path, data in contents.items()}


def check_files(folder: Location, files: Mapping[str, FileRecord]) -> None:
    """Read all files of an item and verify them against the commit record."""
    problems = []
    for path, record in files.items():
        try:
            FileCheck(record).check(folder / path)
        except DamagedCheckpointError as error:
            problems.append(str(error))
    if problems:
        raise DamagedCheckpointError(itemized(f"{folder} is damaged:", problems))


# ---- files that are copied


_NO_CHUNKS: Integers = np.zeros(0, np.int64)


class FileCheck(NamedTuple):
    """The known checksums of a file: its digest, or the CRC-32C at the end of each of its chunks."""

    record: FileRecord
    offsets: Integers = _NO_CHUNKS  # offsets of the chunks in bytes, ascending
    lengths: Integers = _NO_CHUNKS  # sizes of the chunks in bytes
    checksums: Integers = _NO_CHUNKS  # checksums of the chunks, as listed in the index; -1 if missing

    def covers(self, other: FileCheck) -> bool:
        """Return True if this file contains all chunks of `other`, a file of the same save with the same name."""
        if self.record != other.record or not len(self.offsets) or not len(other.offsets):
            return False
        rows = np.searchsorted(self.offsets, other.offsets)
        if rows.max() == len(self.offsets) or other.checksums.min() < 0:
            return False
        return all(np.array_equal(ours[rows], theirs) for ours, theirs in zip(self[1:], other[1:], strict=True))

    def spans(self, alignment: int, least: int) -> list[tuple[int, int]]:
        """Split the file into spans of at least ``least`` bytes, at chunk offsets divisible by ``alignment``."""
        if self.record.crc32c is not None:
            return [(0, self.record.size)]  # a digest can only be computed over all bytes in order
        cuts = [0]
        for offset in self.offsets[self.offsets % alignment == 0].tolist():
            if offset - cuts[-1] >= least:
                cuts.append(offset)
        return list(pairwise([*cuts, self.record.size]))

    def read_span(self, location: Location, file: DataReader, start: int, stop: int, step: int) -> Iterator[Bytes]:
        """Read and verify a span, yielding pieces of ``step`` bytes in a reused buffer; raise an error on damage."""
        first, last = np.searchsorted(self.offsets, [start, stop]).tolist()
        chunks = zip(*(column[first:last].tolist() for column in self[1:]), strict=True)
        reached, chunk = start, next(chunks, None)
        whole = crc = ending = 0
        buffer = Buffer()
        for position in range(start, stop, step):
            end = min(position + step, stop)
            with required(location):
                part = file.read(position, end - position, buffer)
            part.flags.writeable = False  # otherwise, the checksum functions would create a read-only view per chunk
            if self.record.crc32c is not None:
                whole = extend(whole, part)
            while chunk is not None and chunk[0] < end:
                offset, length, checksum = chunk
                data_end, chunk_end = offset + length - CHECKSUM_BYTES, offset + length
                if offset < reached or length < CHECKSUM_BYTES or chunk_end > stop:
                    raise DamagedCheckpointError(f"{location}: the index is wrong about the chunk at byte {offset}")
                if position < data_end:
                    crc = extend(crc, part[max(offset, position) - position : min(data_end, end) - position])
                for at in range(max(data_end, position), min(chunk_end, end)):  # the checksum may span two pieces
                    ending |= int(part[at - position]) << 8 * (at - data_end)
                if chunk_end > end:
                    break
                if crc != ending or checksum not in (-1, crc):
                    raise DamagedCheckpointError(
                        f"{location} is damaged: the chunk at byte {offset} should have the crc32c "
                        f"{ending if checksum == -1 else checksum:08x}, but has {crc:08x}"
                    )
                reached, crc, ending, chunk = chunk_end, 0, 0, next(chunks, None)
            yield part
        if self.record.crc32c is not None and whole != self.record.crc32c:
            raise DamagedCheckpointError(f"{location}: expected crc32c {self.record.crc32c:08x}, found {whole:08x}")

    def check(self, location: Location) -> None:
        """Read a file; raise DamagedCheckpointError if its size or a checksum does not match."""
        with required(location), location.open_data() as file:
            if file.size != self.record.size:
                raise DamagedCheckpointError(f"{location}: expected {self.record.size} bytes, found {file.size}")
            for _ in self.read_span(location, file, 0, self.record.size, _STEP):
                pass

    def is_met(self, location: Location) -> bool:
        """Read a file; return True if its size and checksums match."""
        try:
            self.check(location)
        except DamagedCheckpointError:
            return False
        return True
