"""The index of the commit records in a directory: with it, opening and listing thousands of steps takes a moment.

``steps.log`` lies beside the steps of a local directory and repeats their records, one a line. It is a cache and proves
nothing: which steps there are, the directory says, and a line counts only while the file of the record has the stamp
(size, times and inode) that it had before the record was read for this line. Everything else is read from the record
itself. So a torn, foreign, old or missing index makes a listing slower, and never wrong.

Two writes within one tick of the file system's clock can leave equal stamps. A record is therefore noted only when its
last change lies some seconds before the moment at which it is read, by the clock of the file system.

The owner of the directory appends a line after a commit and writes the file anew when too many lines are void. Readers
only read it. Nothing is synced for its sake: each line has a checksum.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import DamagedCheckpointError, HoldfastError
from ..format import RECORD, CheckpointRecord, crc32c
from ..storage import Location, open_own
from .records import read_record

_logger = logging.getLogger("holdfast")

INDEX = "steps.log"  # name of the file
FEWEST = 64  # steps that a directory has before it gets an index; fewer are read as quickly without
_HEADER = b'["holdfast", "steps", 1]\n'
_SETTLED = 3_000_000_000  # nanoseconds; longer than a tick of any file system's clock
_LARGEST = 64 << 10  # bytes of a line; longer records, of very many files, are always read themselves
_AT_ONCE = 64  # records that one save notes at most, where many wait
_VOID = 1024  # lines that may be void beside as many as there are steps, before the file is written anew

# Of a file: its size, the times of its last modification and change in nanoseconds, and its inode.
Stamp = tuple[int, int, int, int]


@dataclass(slots=True)
class _Line:
    """A record in the index, and what its file and folder looked like before it was read."""

    stamp: Stamp
    tidy: Stamp | None  # the stamp of the folder if nothing but the checkpoint was in it, else None
    document: bytes  # the record as JSON; not parsed before it is needed
    record: CheckpointRecord | None = None  # the same once it was looked at; then ``document`` is empty


class RecordIndex:
    """The index of one local directory, as one process sees it."""

    def __init__(self, directory: Location) -> None:
        self._directory = directory
        self._root = os.fspath(directory)
        self._lines: dict[str, _Line] = {}  # by the name of the step's folder
        self._new: list[str] = []  # names of lines that the file lacks
        self._waiting: deque[str] = deque()  # names of records that were changed too lately to be noted
        self._moment: int | None = None  # of the file system's clock, before which all records are read; None: reader
        self._inode = 0
        self._end = 0  # bytes of the file that were read, or written by this process
        self._count = 0  # lines in them
        self._sound = False  # whether a line may be appended
        self._warned = False

    # -- reading

    def load(self, folders: int) -> None:
        """Read what the file has more than at the last call; ``folders`` limits the size that is accepted."""
        try:
            with open(open_own(f"{self._root}/{INDEX}", os.O_RDONLY), "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                if status.st_size > (2 * folders + _VOID) * _LARGEST:
                    raise OSError("not an index")
                if status.st_ino != self._inode or status.st_size < self._end:
                    self._inode, self._end, self._count, self._sound = status.st_ino, 0, 0, True
                file.seek(self._end)
                content = file.read(status.st_size - self._end)
        except OSError:
            self._sound = False
            return
        for line in content.splitlines(keepends=True):
            if not self._take(line):
                self._sound = False
                return
            self._end += len(line)
            self._count += 1
        self._sound = self._sound and self._end > 0

    def _take(self, line: bytes) -> bool:
        """Add a line of the file; return False if it is none."""
        if self._end == 0:
            return line == _HEADER
        text = line[9:-1]
        if not line.endswith(b"\n") or line[:9] != b"%08x " % crc32c(text):
            return False
        head, _, document = text.partition(b"\t")
        try:
            name, stamp, tidy = json.loads(head)
            self._lines[name] = _Line(tuple(stamp), None if tidy is None else tuple(tidy), document)
        except (ValueError, TypeError, RecursionError):
            return False
        return True

    def read(self, location: Location) -> tuple[CheckpointRecord, bool]:
        """Return the record of a step, and whether it comes from the index."""
        name = location.name
        stamp = self._stamp(f"{name}/{RECORD}")
        line = self._lines.get(name)
        if line is not None and line.stamp == stamp:
            if line.record is None:
                try:
                    document = json.loads(line.document)
                    line.record = CheckpointRecord.from_document(document, source=f"{self._root}/{INDEX}")
                    line.document = b""
                except (DamagedCheckpointError, ValueError, RecursionError):
                    line.stamp = (0, 0, 0, 0)
            if line.record is not None:
                return line.record, True
        return self._read(location, stamp), False

    def _read(self, location: Location, stamp: Stamp | None) -> CheckpointRecord:
        """Read a record itself, and note it if its stamp, which was taken before, cannot be that of a later one."""
        tidy = self._tidy_stamp(location.name) if self._is_settled(stamp) else None
        record = read_record(location)
        if self._is_settled(stamp):
            assert stamp is not None
            if tidy is not None and not _is_tidy(f"{self._root}/{location.name}", record):
                tidy = None
            self._lines[location.name] = _Line(stamp, tidy, b"", record)
            self._new.append(location.name)
        elif self._moment is not None:
            self._waiting.append(location.name)
        return record

    def is_tidy(self, name: str) -> bool:
        """Whether a step's folder is as it was when nothing but the checkpoint was in it."""
        line = self._lines.get(name)
        return line is not None and line.tidy is not None and line.tidy == self._stamp(name)

    def _tidy_stamp(self, name: str) -> Stamp | None:
        found = self._stamp(name)
        return found if self._is_settled(found) else None

    def _is_settled(self, stamp: Stamp | None) -> bool:
        return stamp is not None and self._moment is not None and max(stamp[1:3]) < self._moment - _SETTLED

    def _stamp(self, name: str) -> Stamp | None:
        try:
            found = os.stat(f"{self._root}/{name}")
        except OSError:
            return None
        return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino

    # -- writing, by the owner of the directory

    def begin(self, written: str) -> None:
        """Note the records that are read from now on; ``written`` is the name of a file that was written just now."""
        stamp = self._stamp(written)
        if stamp is not None:
            self._moment = stamp[2]

    def changed(self, names: Iterable[str]) -> None:
        """Note records that were just written, each when its time has come, and those whose time has come now."""
        self._waiting.extend(names)
        if self._waiting:
            self.begin(f"{self._waiting[-1]}/{RECORD}")
        for name in list(itertools.islice(self._waiting, _AT_ONCE)):
            stamp = self._stamp(f"{name}/{RECORD}")
            if stamp is not None and not self._is_settled(stamp):
                break
            self._waiting.popleft()
            line = self._lines.get(name)
            if stamp is None or (line is not None and line.stamp == stamp):
                continue
            try:
                self._read(self._directory / name, stamp)
            except HoldfastError:  # damaged or deleted meanwhile: the next listing says so
                continue
        self.write()

    def forget(self, names: Iterable[str]) -> None:
        """Drop the lines of steps that are gone."""
        for name in names:
            self._lines.pop(name, None)

    def keep(self, names: Collection[str]) -> None:
        """Drop the lines of all other steps."""
        self.forget([name for name in self._lines if name not in names])

    def write(self) -> None:
        """Bring the file up to date; a failure is logged once, as the file is never needed."""
        names = [name for name in dict.fromkeys(self._new) if name in self._lines]
        self._new = []
        try:
            if not self._sound or self._count + len(names) > 2 * len(self._lines) + _VOID:
                self._write_anew()
            elif names:
                self._append(names)
        except (OSError, HoldfastError, RecursionError) as error:
            self._sound = False
            if not self._warned:
                _logger.warning("%s: the index of steps is not written: %s", self._directory / INDEX, error)
            self._warned = True

    def _append(self, names: list[str]) -> None:
        lines = [line for name in names if (line := self._encode(name))]
        content = b"".join(lines)
        descriptor = open_own(f"{self._root}/{INDEX}", os.O_WRONLY | os.O_APPEND)
        try:
            status = os.fstat(descriptor)
            whole = (status.st_ino, status.st_size) == (self._inode, self._end)
            if whole:
                whole = os.write(descriptor, content) == len(content)
        finally:
            os.close(descriptor)
        if not whole:  # another program has changed the file, or the disk is full
            self._write_anew()
            return
        self._end += len(content)
        self._count += len(lines)

    def _write_anew(self) -> None:
        self._sound = False
        lines = [_HEADER, *(line for name in self._lines if (line := self._encode(name)))]
        content = b"".join(lines)
        (self._directory / INDEX).write_bytes(content)
        self._inode = os.stat(f"{self._root}/{INDEX}").st_ino
        self._end, self._count, self._sound = len(content), len(lines), True

    def _encode(self, name: str) -> bytes:
        """Return the line of a step, or nothing if it is too long."""
        line = self._lines[name]
        head = _encode([name, line.stamp, line.tidy])
        text = b"%s\t%s" % (head, line.document if line.record is None else _encode(line.record.to_document()))
        return b"%08x %s\n" % (crc32c(text), text) if len(text) < _LARGEST else b""


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def _is_tidy(folder: str, record: CheckpointRecord) -> bool:
    known = {RECORD, *(item.folder.partition("/")[0] for item in record.items.values())}
    try:
        return known.issuperset(os.listdir(folder))
    except OSError:
        return False
