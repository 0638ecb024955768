"""The names of a tree's files, the layout of chunks in them, digests, and the verification of files that are copied."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from ..errors import DamagedCheckpointError, ObjectNotFoundError, itemized
from ..format import ARCHIVE_LIMIT, FileRecord, crc32c, decode_archive, extend, unsynced
from ..storage import Buffer, DataReader, Location, folder_in_memory, sync_all, unreadable_as_damage

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bytes: TypeAlias = "NDArray[np.uint8]"

Integers: TypeAlias = "NDArray[np.int64]"

MANIFEST = "manifest.ocdbt"
INDEX = "d/index"
TREE = "tree.json"
TREE_KIND = "tree"

# Every chunk starts at a multiple of this many bytes: a cache line, and what XLA needs to adopt host memory.
CHUNK_ALIGNMENT = 64
CHECKSUM_BYTES = 4  # length of the crc32c that follows the data of every chunk

_STEP = 16 << 20  # bytes read at a time


def checksum_after(data: bytes) -> int:
    """Return the checksum that ends the bytes of a chunk."""
    return int.from_bytes(data[-CHECKSUM_BYTES:], "little")


def fsync_and_digest(folder: Location, prefix: str = "") -> dict[str, FileRecord]:
    """Sync all files below a folder that a handler wrote; return them with their digests."""
    found: dict[str, FileRecord] = {}
    for entry in folder.entries():
        place = folder / entry.name
        if entry.is_directory:
            found.update(fsync_and_digest(place, f"{prefix}{entry.name}/"))
            continue
        with place.open_data() as file:
            digest, buffer = 0, Buffer()
            for start in range(0, file.size, _STEP):
                digest = extend(digest, file.read(start, min(_STEP, file.size - start), buffer))
            found[f"{prefix}{entry.name}"] = FileRecord(file.size, digest)
        if place.is_local:
            with open(place, "rb") as written:
                os.fsync(written.fileno())
    folder.sync_directory()
    return found


def make_durable(folder: Location, files: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    """Make durable what is not yet of the files in a folder; return them as durable."""
    sync_all([folder / path if path else folder for path in unsynced(files)])
    return {path: replace(file, durable=True) for path, file in files.items()}


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
    """Read a small file, which may lie in another one, and compare it with the commit record."""
    with required(place):
        if known is None:
            return place.read_bytes(limit=limit)
        if known.within is None:
            content = place.read_bytes(limit=min(limit, known.size), size=known.size)
        else:
            begin, size = known.within
            with place.parent.open_data(size=size, cached=True) as file:
                content = file.read(begin, min(limit, known.size)).tobytes()
    found = crc32c(content)
    if len(content) != known.size or (known.crc32c is not None and found != known.crc32c):
        raise DamagedCheckpointError(
            f"{place} is not what was saved: expected {known.size} bytes with crc32c {known.crc32c or 0:08x}, "
            f"found {len(content)} bytes with {found:08x}"
        )
    return content


def open_folder(
    place: Location, files: Mapping[str, FileRecord] | None
) -> tuple[Location, Mapping[str, FileRecord] | None]:
    """Return a folder with the files that the commit record has for it; one that is a zip file is read whole, now."""
    known = None if files is None else files.get("")
    if known is None:
        return place, files
    found = decode_archive(read_checked(place, known, limit=ARCHIVE_LIMIT), source=str(place))
    return folder_in_memory(place, found), {path: FileRecord(len(content)) for path, content in found.items()}


def check_files(folder: Location, files: Mapping[str, FileRecord]) -> None:
    """Read all files of an item and compare them with the commit record."""
    problems = []
    for path, known in files.items():
        try:
            FileCheck(known).check(folder / path)
        except DamagedCheckpointError as error:
            problems.append(str(error))
    if problems:
        raise DamagedCheckpointError(itemized(f"{folder} is damaged:", problems))


# ---- files that are copied


_NO_CHUNKS = np.zeros(0, np.int64)


class FileCheck(NamedTuple):
    """The known checksums of a file: the digest of the whole, or its chunks, which end in their CRC-32C."""

    known: FileRecord
    offsets: NDArray[np.int64] = _NO_CHUNKS  # offsets of the chunks in bytes, ascending
    lengths: NDArray[np.int64] = _NO_CHUNKS  # sizes of the chunks in bytes
    checksums: NDArray[np.int64] = _NO_CHUNKS  # checksums in the index; -1 where it has none

    def covers(self, other: FileCheck) -> bool:
        """Whether a file has all chunks of another of the same name: no two saves give a data file the same name."""
        if self.known != other.known or not len(self.offsets) or not len(other.offsets):
            return False
        places = np.searchsorted(self.offsets, other.offsets)
        if places.max() == len(self.offsets) or other.checksums.min() < 0:
            return False
        here, there = (self.offsets, self.lengths, self.checksums), (other.offsets, other.lengths, other.checksums)
        return all(np.array_equal(one[places], two) for one, two in zip(here, there, strict=True))

    def spans(self, alignment: int, least: int) -> list[tuple[int, int]]:
        """Divide the file at chunks that begin at a multiple of ``alignment``, into spans of at least so many bytes."""
        if self.known.crc32c is not None:
            return [(0, self.known.size)]  # the digest needs all bytes in order
        cuts = [0]
        for offset in self.offsets[self.offsets % alignment == 0].tolist():
            if offset - cuts[-1] >= least:
                cuts.append(offset)
        return list(pairwise([*cuts, self.known.size]))

    def read_span(
        self, place: Location, file: DataReader, start: int, stop: int, step: int
    ) -> Iterator[NDArray[np.uint8]]:
        """Read a span in pieces of ``step`` bytes, whose memory is reused, until it ends or turns out to be damaged."""
        first = int(np.searchsorted(self.offsets, start))
        last = int(np.searchsorted(self.offsets, stop))
        chunks = zip(
            self.offsets[first:last].tolist(),
            self.lengths[first:last].tolist(),
            self.checksums[first:last].tolist(),
            strict=True,
        )
        reached, chunk = start, next(chunks, None)
        whole = crc = ending = 0
        buffer = Buffer()
        for position in range(start, stop, step):
            end = min(position + step, stop)
            with required(place):
                part = file.read(position, end - position, buffer)
            part.flags.writeable = False  # spares the checksums a view of each chunk
            if self.known.crc32c is not None:
                whole = extend(whole, part)
            while chunk is not None and chunk[0] < end:
                offset, length, checksum = chunk
                data_end, chunk_end = offset + length - CHECKSUM_BYTES, offset + length
                if offset < reached or length < CHECKSUM_BYTES or chunk_end > stop:
                    raise DamagedCheckpointError(f"{place}: the index is wrong about the chunk at byte {offset}")
                if position < data_end:
                    crc = extend(crc, part[max(offset, position) - position : min(data_end, end) - position])
                for at in range(max(data_end, position), min(chunk_end, end)):  # four bytes, perhaps of two pieces
                    ending |= int(part[at - position]) << 8 * (at - data_end)
                if chunk_end > end:
                    break
                if crc != ending or checksum not in (-1, crc):
                    raise DamagedCheckpointError(
                        f"{place} is damaged: the chunk at byte {offset} should have the crc32c "
                        f"{ending if checksum == -1 else checksum:08x}, and has {crc:08x}"
                    )
                reached, crc, ending, chunk = chunk_end, 0, 0, next(chunks, None)
            yield part
        if self.known.crc32c is not None and whole != self.known.crc32c:
            raise DamagedCheckpointError(f"{place}: expected crc32c {self.known.crc32c:08x}, found {whole:08x}")

    def check(self, place: Location) -> None:
        """Read a file and compare it with what is known; raise DamagedCheckpointError if it differs."""
        with required(place), place.open_data() as file:
            if file.size != self.known.size:
                raise DamagedCheckpointError(f"{place}: expected {self.known.size} bytes, found {file.size}")
            for _ in self.read_span(place, file, 0, self.known.size, _STEP):
                pass

    def is_met(self, place: Location) -> bool:
        """Whether a file has exactly these bytes, as far as they are known; all of it is read."""
        try:
            self.check(place)
        except DamagedCheckpointError:
            return False
        return True
