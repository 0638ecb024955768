"""Files on a local file system: small files, and bulk data files at the full speed of the disk.

Bulk data files bypass the page cache if the file system allows it. Several threads write each file: a thread takes a
segment, collects its parts in a large aligned block and writes the block. While one thread holds the GIL to produce
parts, the others wait for the disk without holding the GIL. Files no larger than one block go through the page cache,
which lets the disk write them while the caller produces the next file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from ..errors import DamagedCheckpointError
from ..forks import Lock
from .backend import DataReader, Entry, FileIdentity, Segment
from .buffers import PAGE, Buffer, aligned_empty, round_up
from .parallel import CORES, parallel_map
from .status import check_extent, os_errors, truncated

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HIDDEN_SUFFIX = ".__lock"  # suffix of TensorStore's lock files, which neither TensorStore nor holdfast lists

TEMPORARY_PREFIX = ".holdfast-"  # prefix of temporary files for atomic writes; a crash may leave one behind

THREADS = 8  # number of threads that write one file, including the calling thread

# Number of writer threads while a training loop runs. A few threads write almost as fast but do not slow the loop.
THREADS_BESIDE = max(2, CORES // 2)

BLOCK = 4 << 20  # number of bytes that a thread collects for each write

# Bytes per write to the page cache. Larger writes use huge pages, which are slow if a hypervisor reclaims memory.
_CACHED_BLOCK = 256 << 10

_LOCK = "hhqqi4x"  # struct flock of fcntl(2) with 64-bit offsets
_SET_LOCK: int = getattr(fcntl, "F_OFD_SETLK", -1)  # Linux only; on other systems, readers cannot detect each other
_GET_LOCK: int = getattr(fcntl, "F_OFD_GETLK", -1)

_SYNCS = 6  # maximum number of files and directories synced concurrently
_SYNCS_OF_THREAD = 32  # number of files and directories per sync thread
_REMOVALS = 100  # maximum number of attempts to remove a tree while other processes modify it

_AWAY = "move it away"  # advice if something other than a regular file is at one of holdfast's paths
_FICLONE = 0x40049409  # request code for ioctl_ficlone(2)
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_AHEAD: int = getattr(os, "POSIX_FADV_SEQUENTIAL", 0)  # makes large buffered reads about as fast as direct ones
_WRITE_BACK: int = getattr(os, "POSIX_FADV_DONTNEED", 0)  # starts writeback, so the final sync has less to write
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS only; its fsync(2) does not flush the drive cache
_idle_blocks: list[NDArray[np.uint8]] = []  # reused, because allocation can be slow on virtual machines


class LocalBackend:
    """The operating system's file system; keys are absolute paths."""

    is_local = True
    is_remote = False

    def url(self, key: str) -> str:
        return key

    def is_there(self, key: str) -> bool:
        return self._stat(key) is not None

    def is_directory(self, key: str) -> bool:
        status = self._stat(key)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def entries(self, key: str) -> list[Entry]:
        entries = []
        with os_errors(key, "list"):
            try:
                scan = os.scandir(key)
            except FileNotFoundError:
                return []
            with scan:
                for item in scan:
                    if item.name.endswith(HIDDEN_SUFFIX):
                        continue
                    is_directory, status = True, None
                    try:
                        is_directory = item.is_dir()
                        status = None if is_directory else item.stat()
                    except FileNotFoundError:  # a broken symlink, or an entry that has just been deleted
                        if not os.path.lexists(item.path):
                            continue
                    except OSError:  # a symlink loop or a broken disk; opening the entry will raise the error
                        pass
                    facts = (status.st_size, status.st_nlink) if status else ()
                    entries.append(Entry(item.name, is_directory, *facts))
        return sorted(entries, key=attrgetter("name"))

    def read_bytes(self, key: str, limit: int | None, size: int | None) -> bytes:
        with os_errors(key, "read"):
            descriptor, size = _open_regular(key, _open)
            with open(descriptor, "rb", buffering=0) as file:
                if limit is not None and size > limit:
                    raise DamagedCheckpointError(f"{key} has {size} bytes; the limit is {limit}")
                return file.readall()

    def has_size(self, key: str, size: int) -> bool:
        with os_errors(key, "access"):
            return os.stat(key).st_size == size

    def write_bytes(
        self, key: str, data: bytes, *, atomic: bool, sync: bool = True, before: Sequence[str] = ()
    ) -> None:
        parent = os.path.dirname(key)
        target = os.path.join(parent, f"{TEMPORARY_PREFIX}{os.urandom(8).hex()}") if atomic else key
        with os_errors(key, "write"):
            descriptor = open_own(target, os.O_WRONLY | os.O_CREAT | (os.O_EXCL if atomic else os.O_TRUNC))
            try:
                with open(descriptor, "wb", buffering=0) as file:
                    rest = memoryview(data)
                    while rest:
                        rest = rest[file.write(rest) :]
                    if before or not sync:
                        _advise(descriptor, _WRITE_BACK)
                    if before:
                        sync_all([*before, target])
                    if sync and (not before or _FULL_SYNC is not None):
                        _sync(descriptor, drive=atomic)
                if atomic:
                    os.replace(target, key)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(target)
                raise
        if atomic:
            _sync_path(parent, drive=True)

    def make_directory(self, key: str, *, sync: bool) -> bool:
        if os.path.isdir(key):
            return False
        parent, is_new = os.path.dirname(key), True
        self.make_directory(parent, sync=sync)
        with os_errors(key, "create the directory"):
            try:
                os.mkdir(key)
            except FileExistsError:  # another process has just created the directory, or a file has this name
                if not os.path.isdir(key):
                    raise
                is_new = False
        if sync:
            self.sync_directory(parent)
        return is_new

    def sync_directory(self, key: str) -> None:
        _sync_path(key)

    def rename(self, key: str, target: str) -> None:
        with os_errors(key, f"rename to {os.path.basename(target)!r}"):
            os.rename(key, target)
        _sync_path(os.path.dirname(target), drive=True)

    def remove(self, key: str) -> None:
        with os_errors(key, "remove"), contextlib.suppress(FileNotFoundError):
            os.unlink(key)

    def remove_tree(self, key: str, first: str | None, last: str | None) -> None:
        with os_errors(key, "remove"):
            try:
                if not stat.S_ISDIR(os.lstat(key).st_mode):
                    os.unlink(key)
                    return
                names = sorted(os.listdir(key), key=lambda name: (name == last, name != first))
            except FileNotFoundError:
                return
            for name in names:
                _remove(os.path.join(key, name))
            if last is None:
                _remove(key)
                return
            try:  # once the marker is deleted, another save may write to the directory, which makes rmdir fail
                os.rmdir(key)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                    raise

    @contextlib.contextmanager
    def new_data(self, key: str, size: int, *, sync: bool) -> Iterator[LocalDataWriter]:
        """Create a data file for the ``with`` block to write; delete the file if the block raises an error."""
        cached = size <= BLOCK
        with os_errors(key, "write"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(key)  # processes that have the old file open can still read it
            descriptor = (_open if cached else _open_direct)(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                with open(descriptor, "wb", buffering=0):
                    _allocate(descriptor, size if cached else round_up(size))
                    yield LocalDataWriter(descriptor, cached)
                    if size % PAGE and not cached:
                        os.ftruncate(descriptor, size)
                    if sync:
                        os.fsync(descriptor)
                    else:
                        _advise(descriptor, _WRITE_BACK)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(key)
                raise

    def open_data(self, key: str, size: int | None, *, cached: bool | None) -> DataReader:
        return LocalDataReader(key, cached=cached)

    def can_share(self) -> bool:
        return True

    def identity(self, key: str) -> FileIdentity:
        return _identity(os.lstat(key))

    def share(self, key: str, target: str, expected: FileIdentity) -> FileIdentity:
        """Hard-link or clone a file. A linked file becomes read-only, because all its names share the same contents."""
        if self.identity(key) != expected:
            raise OSError(errno.ESTALE, "it was changed after it was written", key)
        try:
            os.link(key, target, follow_symlinks=False)
        except NotImplementedError:  # raised on systems that can only link the target of a symlink
            raise OSError(errno.EOPNOTSUPP, "this system cannot link it", key) from None
        except OSError as refusal:
            if refusal.errno in (errno.ENOENT, errno.EEXIST):
                raise
            return self._cloned(key, target, expected, refusal)
        # The file may have been replaced in the meantime, or the file system may have copied rather than linked it.
        if self.identity(target)[:3] != expected[:3]:
            os.unlink(target)
            raise OSError(errno.ESTALE, "the link leads to another file", target)
        with contextlib.suppress(OSError):
            os.chmod(target, 0o444 & stat.S_IMODE(os.stat(target).st_mode))
        return self.identity(target)

    def _cloned(self, source: str, target: str, expected: FileIdentity, refusal: OSError) -> FileIdentity:
        """Clone a file durably. If the file system cannot clone it, raise ``refusal``, the error from the hard link."""
        with open(open_own(source, os.O_RDONLY), "rb", buffering=0) as read:
            written = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                fcntl.ioctl(written, _FICLONE, read.fileno())
                os.fsync(written)
                status = os.fstat(read.fileno())
            except OSError:
                os.unlink(target)
                raise refusal from None
            finally:
                os.close(written)
        clone = self.identity(target)
        if _identity(status) != expected or clone.size != expected.size:
            os.unlink(target)
            raise OSError(errno.ESTALE, "the clone differs from the file", target)
        return clone

    def _stat(self, key: str) -> os.stat_result | None:
        with os_errors(key, "access"):
            try:
                return os.stat(key)
            except (FileNotFoundError, NotADirectoryError):
                return None


@dataclass(frozen=True, slots=True)
class LocalDataWriter:
    """A new data file on a local file system. Several threads may write its segments at the same time."""

    descriptor: int
    cached: bool  # whether to write through the page cache
    stop: threading.Event = field(default_factory=threading.Event)  # set to stop writing all segments early

    def write(self, segment: Segment) -> None:
        position = segment.offset
        size, page = (_CACHED_BLOCK, 1) if self.cached else (BLOCK, PAGE)
        with _block() as block:
            for data in _filled_blocks(segment, block.data[:size], self.stop, page):
                written = 0
                while written < len(data):
                    rest, offset = data[written:], position + written
                    try:
                        count = os.pwrite(self.descriptor, rest, offset)
                    except OSError as error:
                        _leave_direct(self.descriptor, error)
                        count = os.pwrite(self.descriptor, rest, offset)
                    if count <= 0:
                        raise OSError(errno.EIO, f"the system wrote {count} of {len(rest)} bytes")
                    written += count  # if a partial write ends within a page, the next write uses buffered I/O
                position += written


class LocalDataReader(DataReader):
    """A reader for one data file on a local file system. See ``Location.open_data`` for ``cached``."""

    def __init__(self, path: str, *, cached: bool | None) -> None:
        self._path = path
        self._is_cached = bool(cached)
        self._detects_readers = False  # whether each read checks for other readers of this file
        self._descriptor = -1
        self._lock = Lock()
        with os_errors(path, "open"):
            self._descriptor, self._size = _open_regular(path, _open if cached else _open_direct)
        if cached:
            _advise(self._descriptor, _AHEAD)
        if cached is None and is_direct(self._descriptor):
            with contextlib.suppress(OSError):  # the file system may not support locks
                # Readers detect each other through shared locks on the file, and then switch to the page cache.
                _lock_request(self._descriptor, _SET_LOCK, fcntl.F_RDLCK)
                self._detects_readers = True

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int, buffer: Buffer | None = None) -> NDArray[np.uint8]:
        check_extent(self._path, self._size, offset, length)
        # Direct I/O transfers whole pages, so the requested bytes start ``lead`` bytes into the aligned memory.
        first = offset - offset % PAGE
        lead = offset - first
        needed = lead + length
        span = round_up(needed)
        memory = aligned_empty(span) if buffer is None else buffer.view(span)
        filled, end = (lead, needed) if self._is_cached else (0, span)
        with os_errors(self._path, "read"):
            if self._detects_readers and _lock_request(self._descriptor, _GET_LOCK, fcntl.F_WRLCK) != fcntl.F_UNLCK:
                self._detects_readers = False
                _make_buffered(self._descriptor)
                _advise(self._descriptor, _AHEAD)
            while filled < needed:
                read = os.preadv if hasattr(os, "preadv") else _preadv
                target, start = [memory[filled:end].data], first + filled
                try:
                    count = read(self._descriptor, target, start)
                except OSError as error:
                    _leave_direct(self._descriptor, error)
                    count = read(self._descriptor, target, start)
                if not count:
                    raise truncated(self._path, start, offset, length)
                filled += count
        return memory[lead:needed]

    def close(self) -> None:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def _lock_request(descriptor: int, request: int, lock_type: int) -> int:
    """Set or test a lock on an open file description, and return the lock type that the kernel reports."""
    lock = struct.pack(_LOCK, lock_type, os.SEEK_SET, 0, 0, 0)
    return int(struct.unpack(_LOCK, fcntl.fcntl(descriptor, request, lock))[0])


def _preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Stand in for ``os.preadv``, which older macOS versions lack; takes one buffer and makes an extra copy."""
    [memory] = buffers
    data = os.pread(descriptor, len(memory), offset)
    memory[: len(data)] = data
    return len(data)


def _sync(descriptor: int, *, drive: bool = False) -> None:
    """Sync a file. If ``drive`` is True (for commit records), also flush the drive's cache on macOS."""
    if drive and _FULL_SYNC is not None:
        with contextlib.suppress(OSError):  # not supported by some file systems, such as network file systems
            fcntl.fcntl(descriptor, _FULL_SYNC)
            return
    os.fsync(descriptor)


def sync_all(paths: Sequence[str]) -> None:
    """Sync files and directories to make file contents and directory entries durable."""
    # The first sync also commits the metadata of the other files, so threads pay off only for many paths.
    parallel_map(_sync_path, paths, min(_SYNCS, 1 + len(paths) // _SYNCS_OF_THREAD), name="holdfast-sync")


def _sync_path(path: str, *, drive: bool = False) -> None:
    with os_errors(path, "sync"):
        descriptor = _open(path, os.O_RDONLY)
        try:
            _sync(descriptor, drive=drive)
        except OSError as error:
            # Some network file systems do not support fsync on directories; their servers sync directories anyway.
            refused = error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
            if not (refused and stat.S_ISDIR(os.fstat(descriptor).st_mode)):
                raise
        finally:
            os.close(descriptor)


def _advise(descriptor: int, advice: int) -> None:
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, advice)


def append_line(path: str | os.PathLike[str], text: str, *, create: bool = True) -> None:
    """Append a line to a file without syncing. A single write call prevents interleaved lines of several processes."""
    descriptor = open_own(path, os.O_WRONLY | os.O_APPEND | (os.O_CREAT if create else 0))
    try:
        os.write(descriptor, f"{text}\n".encode())
    finally:
        os.close(descriptor)


def open_own(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file of this run or checkpoint; raise OSError for a symlink (ELOOP) or other non-regular file (EINVAL)."""
    # A symlink could lead to a file of another run, and opening a pipe would block until its other end is opened.
    try:
        descriptor = _open(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.ELOOP, f"it is a symbolic link, which is not followed; {_AWAY}", path) from None
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a pipe without a reader, a device or a directory
            raise OSError(errno.EINVAL, f"it is not a regular file; {_AWAY}", path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is not a regular file; {_AWAY}", path)
    return descriptor


@contextlib.contextmanager
def _block() -> Iterator[NDArray[np.uint8]]:
    """Yield an aligned block with undefined contents."""
    try:
        block = _idle_blocks.pop()  # list.pop is atomic, so no lock is needed
    except IndexError:
        block = aligned_empty(BLOCK)
    try:
        yield block
    finally:
        if len(_idle_blocks) < THREADS:
            _idle_blocks.append(block)


def _filled_blocks(segment: Segment, block: memoryview, stop: threading.Event, page: int) -> Iterator[memoryview]:
    """Copy the parts of a segment to a block, and yield each full block; pad the last block to whole pages."""
    filled = 0
    for part in segment.checked_parts():
        if stop.is_set():
            return
        # Copy the parts as memoryviews: NumPy's assignment would release the GIL for each part, and a computing thread
        # could then hold the GIL for milliseconds.
        data, room = part.data, len(block) - filled
        while len(data) >= room:
            block[filled:] = data[:room]
            yield block
            data, filled, room = data[room:], 0, len(block)
        end = filled + len(data)
        block[filled:end] = data
        filled = end
    if filled:
        end = round_up(filled, page)
        block[filled:end] = bytes(end - filled)
        yield block[:end]


def _identity(status: os.stat_result) -> FileIdentity:
    return FileIdentity(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _open_direct(path: str, flags: int) -> int:
    """Open a file for direct I/O if the file system supports it, otherwise for buffered I/O."""
    if _DIRECT:
        try:
            return _open(path, flags | _DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            # Some file systems create the file before refusing direct I/O, so a second attempt with O_EXCL would fail.
            flags &= ~os.O_EXCL
    return _open(path, flags)


def _open(path: str | os.PathLike[str], flags: int) -> int:
    # O_NONBLOCK prevents the call from waiting for the other end of a pipe.
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & _DIRECT)


def _make_buffered(descriptor: int) -> None:
    """Switch a file descriptor to buffered I/O for all threads that use the descriptor."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_DIRECT)


def _leave_direct(descriptor: int, refusal: OSError) -> None:
    """Switch to buffered I/O if the file system may have refused direct I/O; otherwise, raise the error."""
    if refusal.errno != errno.EINVAL:
        raise refusal
    _make_buffered(descriptor)


def _allocate(descriptor: int, size: int) -> None:
    """Reserve space to detect a full disk early, and set the length because writes that extend a file are slow."""
    # If the file system cannot reserve space, the C library writes to every page, which fails at once with direct I/O.
    if size and is_direct(descriptor):
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        else:
            return
    os.ftruncate(descriptor, size)


def _open_regular(path: str, opener: Callable[[str, int], int]) -> tuple[int, int]:
    """Open a regular file and return its descriptor and length; raise DamagedCheckpointError for any other file."""
    try:
        descriptor = opener(path, os.O_RDONLY)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            return descriptor, status.st_size
        os.close(descriptor)
    except OSError as error:
        if error.errno != errno.ENXIO:  # ENXIO: a socket, or a device that does not exist
            raise
    raise DamagedCheckpointError(f"{path} should be a file, but is not a regular file")


def _remove(path: str) -> None:
    """Delete a file, symlink or directory tree, even if another process is deleting it at the same time."""
    for _ in range(_REMOVALS):
        try:
            if stat.S_ISDIR(os.lstat(path).st_mode):
                import shutil  # imported lazily because shutil imports modules for all archive formats

                shutil.rmtree(path)
            else:
                os.unlink(path)
            return
        except FileNotFoundError:
            if not os.path.lexists(path):
                return
    raise OSError(errno.EIO, f"the file system lists it, but reported {_REMOVALS} times that it does not exist", path)
