"""Copy a committed checkpoint to another location: first the files that its record lists, then the record.

Files are copied unchanged, and every byte is verified against the saved checksums. The commit protocol ensures that a
partial copy is not a checkpoint. The marker of an interrupted copy contains the fingerprint of the original, so that
the next attempt can recognize the copy and skip complete files. A file on disk is complete if its bytes match their
checksums. An object is complete if it has the right size, because stores never expose partial objects. If a store can
copy objects itself, files of unchanged arrays are sent only once instead of at every step (`CopiedFiles`).
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays import ArrayDatabase, FileCheck, required
from ..errors import CheckpointExistsError, DamagedCheckpointError, HoldfastError, ObjectNotFoundError
from ..format import ARCHIVE, TREES, WITNESS_LIMIT, WITNESSES, CheckpointRecord, own_shares
from ..progress import NULL
from ..storage import PAGE, DataReader, Location, Segment, max_concurrency, parallel_map, sync_all
from .removal import CommitParts, parents_of
from .save import commit_protocol

PIECE_BYTES = 4 << 20  # bytes read, verified and written at a time
_LEAST_PIECE = 64 << 10
SPAN_BYTES = 16 << 20  # bytes of a data file that a thread copies at a time
SMALL_BYTES = 1 << 20  # maximum size, in bytes, of a file that is written in one request
_UPLOADS = 4  # maximum number of concurrent uploads; fewer if large files would exceed `_IN_MEMORY`
BESIDE = 16e6  # maximum rate of a copy during a save, in bytes per second; low enough not to slow down the disk
_IN_MEMORY = 256 << 20  # maximum total size, in bytes, of concurrent uploads, unless a single file is larger
_REMEMBERED = 4  # number of recent copies whose files are remembered
_SUFFIX = re.compile(r"\.[0-9a-f]{8}")  # suffix of folders whose plain name was already taken


class Transfer:
    """The rate limit and the progress of a copy; other threads use this object to slow down, end or monitor the copy.

    The threads of the copy together transfer at most ``rate`` bytes per second, and at most ``BESIDE`` while the copy
    gives way to a save.
    """

    def __init__(
        self,
        rate: float | None = None,
        *,
        advance: Callable[[int], None] = NULL.advance,
        changed: threading.Condition | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = rate
        self._advance = advance  # called with the number of bytes that have arrived
        self._changed = changed or threading.Condition()
        self._now = now
        self._free = 0.0  # the time after which more bytes may be transferred at the normal rate
        self._late = 0.0  # the time after which more bytes may be transferred at the rate ``BESIDE``
        self.gives_way = False
        self.ended: Exception | None = None  # the first error passed to end()
        self.done = 0  # bytes that are already at the destination
        self.sent = 0  # bytes that this machine has sent, excluding files copied by the store itself
        self._arrived = 0  # bytes added by this attempt, excluding earlier attempts
        self._measured = 0.0, 0  # seconds during which the copy did not give way, and bytes that arrived in that time
        self._since = now(), 0  # time at which the last measurement ended, and bytes that had arrived by then

    def give_way(self, yes: bool) -> None:
        """Slow down the copy while a save is in progress, or let it continue at the normal rate."""
        with self._changed:
            self._measure()
            self.gives_way = yes
            self._changed.notify_all()

    def end(self, error: Exception) -> None:
        """Make the copy fail with ``error`` before its next piece, and wake all waiting threads."""
        with self._changed:
            self.ended = self.ended or error
            self._changed.notify_all()

    @property
    def piece(self) -> int:
        """The number of bytes to transfer at a time, which is smaller at low rates to avoid long pauses."""
        return PIECE_BYTES if self._limit is None else max(_LEAST_PIECE, min(PIECE_BYTES, int(self._limit / 4)))

    def take(self, count: int) -> None:
        """Wait until ``count`` bytes may be transferred; raise the error passed to :meth:`end`, if any."""
        with self._changed:
            now = self._now()
            if self._limit is not None:
                self._free = max(self._free, now) + count / self._limit
            self._late = max(self._late, now) + count / BESIDE if self.gives_way else now
            free, late = self._free, self._late
            while self.ended is None:
                pause = (max(free, late) if self.gives_way else free) - self._now()
                if pause <= 0:
                    return
                self._changed.wait(pause)
            raise self.ended

    def passed(self, count: int, *, arrived: bool = True, sent: bool = True) -> None:
        """Record that ``count`` more bytes are at the destination."""
        with self._changed:
            self.done += count
            self._arrived += count if arrived else 0
            self.sent += count if sent else 0
        self._advance(count)

    @property
    def rate(self) -> float | None:
        """The measured rate in bytes per second, excluding the time in which the copy gave way; None if unknown."""
        with self._changed:
            self._measure()
        duration, count = self._measured
        return count / max(duration, 1e-3) if count else None

    def _measure(self) -> None:
        now = self._now(), self._arrived
        if not self.gives_way:
            self._measured = self._measured[0] + now[0] - self._since[0], self._measured[1] + now[1] - self._since[1]
        self._since = now


class _File(NamedTuple):
    key: tuple[str, str]  # the item name, and the path in its folder
    source: Location
    destination: Location
    check: FileCheck


class CopiedFiles:
    """The large data files of recent copies to a store, used as sources for server-side copies in later steps.

    A file is identified by its size, checksums and path; no two saves use the same path. The latest copy is never
    used as a source, so that an object with undetected damage does not affect two consecutive steps.
    """

    def __init__(self) -> None:
        self._copies: deque[dict[tuple[str, str], _File]] = deque(maxlen=_REMEMBERED)

    def note(self, files: Iterable[_File]) -> None:
        """Record the large files of a committed copy."""
        self._copies.append({file.key: file for file in files if file.check.record.size > SMALL_BYTES})

    def give(self, file: _File) -> bool:
        """Ask the store to copy a file from an object of an earlier copy; return True on success."""
        for files in list(self._copies)[-2::-1]:
            earlier = files.get(file.key)
            if earlier is not None and earlier.check.covers(file.check):
                with contextlib.suppress(OSError):  # the object was deleted, or the service refused to copy it
                    earlier.destination.share(file.destination, earlier.destination.identity())
                    return True
        return False


class _CopiedFolders(CommitParts):
    """The commit hooks of a copy, whose folders have the same names as in the original and may be nested."""

    def __init__(self, location: Location, record: CheckpointRecord) -> None:
        super().__init__(location)
        # Folder names without the zip suffix, which the commit appends.
        self._folders = {
            name: _SUFFIX.sub("", item.folder.removesuffix(ARCHIVE) if item.is_archive else item.folder)
            for name, item in record.items.items()
        }
        # An earlier copy to this location may have stored an item as a folder instead of a zip file, or vice versa.
        self._plain = {name for folder in self._folders.values() for name in (folder, f"{folder}{ARCHIVE}")}

    def folder(self, item: str) -> str:
        return self._folders[item]

    def owns(self, folder: str) -> bool:
        return _SUFFIX.sub("", folder) in self._plain

    def check_replaceable(self, record: CheckpointRecord | None) -> None:
        nested = [*self._folders.values(), *(item.folder for item in record.items.values())] if record else []
        if any("/" in folder for folder in nested):
            raise CheckpointExistsError(
                f"{self.location}: a tree of components is not replaced by a copy; remove it, or choose another path"
            )


@contextlib.contextmanager
def copied_step(
    source: Location,
    destination: Location,
    record: CheckpointRecord,
    *,
    overwrite: bool = False,
    transfer: Transfer | None = None,
    copied: CopiedFiles | None = None,
) -> Iterator[CheckpointRecord]:
    """Copy a checkpoint, yield the copy's record, and commit the copy when the block ends."""
    # If the original is damaged, remove the copied files; after other errors, keep them so that the next attempt can
    # reuse them. The store itself may copy files from the earlier copies that ``copied`` lists.
    parts, protocol = _CopiedFolders(destination, record), commit_protocol(destination)
    pending = protocol(destination, record.items, overwrite=overwrite, parts=parts, copies=record.fingerprint)
    transfer = transfer or Transfer()
    transfer.done = transfer.sent = 0
    if copied is None or not (destination.is_remote and destination.can_share()):
        copied = CopiedFiles()
    copy = _Copy(transfer, copied)
    try:
        pending.begin([name for name, item in record.items.items() if item.is_archive])
        items = {name: item._replace(folder=pending.paths[name]) for name, item in record.items.items()}
        result = replace(record, items=items, replaced=())
        checks = file_checks(source, record)
        files = [
            _File((name, path), source / theirs, destination / ours, checks[theirs])
            for name, item in record.items.items()
            for path, theirs, ours in zip(item.files, item.paths, items[name].paths, strict=True)
        ]
        copy.run(files, continues=pending.continues)
        folders = {folder for item in items.values() for path in item.paths for folder in parents_of(path)}
        sync_all([destination / folder for folder in folders])
        yield result
        pending.commit(result)
    except BaseException as error:
        failure = transfer.ended or error  # prefer the first error, as later ones may only report an aborted upload
        if isinstance(failure, DamagedCheckpointError):
            pending.abort(failure)
        else:
            pending.leave()
        if failure is error:
            raise
        raise failure from error
    copied.note(files)
    copy_witness(source, destination)


def copy_witness(source: Location, destination: Location, *, again: bool = False) -> None:
    """Copy witness files, which only grow, and ignore errors. With ``again``, skip files whose size is unchanged."""

    def copy(name: str) -> None:
        with contextlib.suppress(OSError, HoldfastError):
            content = (source / name).read_own(WITNESS_LIMIT)
            with contextlib.suppress(ObjectNotFoundError):
                if again and (destination / name).has_size(len(content)):
                    return
            (destination / name).write_bytes(content, atomic=False, sync=False)

    with contextlib.suppress(OSError, HoldfastError):
        destination.check_not_link()
        names = [entry.name for entry in source.entries() if WITNESSES.fullmatch(entry.name)]
        parallel_map(copy, names, max(map(max_concurrency, (source, destination))), name="holdfast-copy")


def file_checks(location: Location, record: CheckpointRecord) -> dict[str, FileCheck]:
    """Return the sizes and checksums of all files of a checkpoint, keyed by path relative to its directory."""
    checks = {path: FileCheck(file) for item in record.items.values() for path, file in item.paths.items()}
    trees = [part for part in record.parts().values() if part.kind == TREES]
    shares = [
        share._replace(folder=f"{tree.folder}/{share.folder}") for tree in trees for share in own_shares(tree.files)
    ]
    for tree in (*trees, *shares):
        if not tree.is_archive:  # an archive's digest covers the whole file
            chunks = ArrayDatabase(location / tree.folder, tree.files).file_checks()
            checks |= {f"{tree.folder}/{path}": check for path, check in chunks.items() if len(check.offsets)}
    return checks


class _Copy(NamedTuple):
    transfer: Transfer
    copied: CopiedFiles

    def run(self, files: list[_File], *, continues: bool) -> None:
        largest = max((file.check.record.size for file in files), default=0)
        is_local = all(file.destination.is_local for file in files)
        at_once = 1 if is_local else max(1, min(_UPLOADS, _IN_MEMORY // max(1, largest)))
        for folder in dict.fromkeys(file.destination.parent for file in files):
            folder.make_directory(sync=False)
        # Copy small files first, because they fail soonest if the destination is not writable.
        ordered = sorted(files, key=lambda file: file.check.record.size)
        parallel_map(lambda file: self._copy(file, continues), ordered, at_once, name="holdfast-copy")

    def _copy(self, file: _File, continues: bool) -> None:
        size = file.check.record.size
        if continues and self._is_there(file):
            self.transfer.passed(size, arrived=False, sent=False)
            return
        self.transfer.take(0)  # raises the error passed to end(), if any
        if self.copied.give(file):
            self.transfer.passed(size, sent=False)
            return
        with required(file.source):
            opened = file.source.open_data(size=size)
        with opened as reader:
            if file.source.is_local and reader.size != size:
                raise DamagedCheckpointError(f"{file.source}: expected {size} bytes, found {reader.size}")
            if size <= SMALL_BYTES:
                content = b"".join(part.tobytes() for part in self._parts(file, reader, 0, size))
                file.destination.write_bytes(content, atomic=False)
                return
            segments = [
                Segment(start, stop - start, partial(self._parts, file, reader, start, stop))
                for start, stop in file.check.spans(PAGE, SPAN_BYTES)
            ]
            file.destination.write_data(size, segments)

    def _parts(self, file: _File, reader: DataReader, start: int, stop: int) -> Iterator[NDArray[np.uint8]]:
        try:
            for part in file.check.read_span(file.source, reader, start, stop, self.transfer.piece):
                self.transfer.take(len(part))
                yield part
                self.transfer.passed(len(part))
        except Exception as error:
            self.transfer.end(error)  # stops all threads
            raise

    def _is_there(self, file: _File) -> bool:
        if file.destination.is_local:
            return file.check.is_met(file.destination)
        return file.destination.is_there() and file.destination.has_size(file.check.record.size)
