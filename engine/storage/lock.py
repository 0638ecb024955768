"""File locks that show whether the process holding them is still alive.

The operating system releases a lock when the process that holds it dies. Object stores and some network file systems
do not support locks. Without locks, each writer stores its own token in the file. The last writer wins, and an earlier
writer notices at commit that the token has changed.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
import weakref
from typing import Any, ClassVar

from ..errors import DamagedCheckpointError, ObjectNotFoundError, StorageConflictError, StoragePermissionError
from ..forks import Lock
from .local import open_own
from .location import Location
from .status import os_errors

_GLANCE = 0.02  # seconds until the second attempt; a process that only tests a lock holds it for less than this


class FileLock:
    """An advisory lock on a local file. Forked processes, such as data loader workers, do not inherit it."""

    handover: ClassVar[Lock] = Lock()  # held while one thread hands a lock over to another

    def __init__(self, file: Location) -> None:
        self._file = file
        self._close: weakref.finalize[..., FileLock] | None = None
        self.descriptor: int | None = None  # descriptor of the open file
        self.obstacle: OSError | None = None  # the system's error if the file cannot be locked

    def acquire(self, flags: int) -> None:
        """Open and lock the file, or only open it without lock support; raise StorageConflictError if it is locked."""
        self.release()  # in case an interrupted attempt still holds the lock
        with _descriptors, os_errors(self._file.url, "open"):
            descriptor = self.descriptor = open_own(self._file, flags)
            self._close = weakref.finalize(self, os.close, descriptor)  # also runs when the lock is garbage-collected
            _held.add(self)
        try:
            self.obstacle = None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_GLANCE)  # another process may hold the lock only to test it
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise StorageConflictError(f"{self._file}: another process has locked this file") from error
        except OSError as error:
            self.obstacle = error

    def is_current(self) -> bool:
        """Return whether the locked file is still at its path. Other processes may have replaced or removed it."""
        try:
            with _descriptors, os_errors(self._file.url, "access"):
                if self.descriptor is None:
                    return False
                locked, named = os.fstat(self.descriptor), os.stat(self._file)
                # On NFS, locks may be local to a host and inode numbers may be reused, so also compare the mtimes.
                return os.path.samestat(locked, named) and locked.st_mtime_ns == named.st_mtime_ns
        except ObjectNotFoundError:
            return False

    def is_own(self, token: str) -> bool:
        """Return whether the lock is still held; without lock support, whether the file still contains ``token``."""
        is_locked = self.descriptor is not None and self.obstacle is None
        return self.is_current() if is_locked else self.content().get("token") == token

    def release(self) -> None:
        """Close the file, which releases the lock. The file is not removed."""
        with _descriptors:
            _held.discard(self)
            self.descriptor = None
            if self._close is not None:
                self._close()
                self._close = None

    def write(self, content: bytes, *, sync: bool) -> None:
        """Write the file, in place if it is open, because a new file would not be locked; sync it if ``sync``."""
        if self.descriptor is None:
            self._file.write_bytes(content)
            return
        with os_errors(self._file.url, "write"):
            os.ftruncate(self.descriptor, 0)
            written = 0
            while written < len(content):  # a write may be partial if the disk becomes full
                written += os.pwrite(self.descriptor, content[written:], written)
            if sync:
                os.fsync(self.descriptor)

    def content(self) -> dict[str, Any]:
        """Return the JSON object in the file, or an empty dictionary if the file is missing or damaged."""
        try:
            document = json.loads(self._file.read_own(limit=1 << 24))
        except (ObjectNotFoundError, DamagedCheckpointError, ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}


def locked_elsewhere(location: Location) -> bool:
    """Return whether another process is known to hold the lock on a local file."""
    try:
        descriptor = open_own(location, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with _descriptors:
            held = [os.fstat(lock.descriptor) for lock in _held if lock.descriptor is not None]
        return not any(os.path.samestat(os.fstat(descriptor), status) for status in held)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


class SaveLock(FileLock):
    """The marker file of a save in progress. The file is locked as long as the save is alive."""

    @property
    def shows_life(self) -> bool:
        """Whether the lock distinguishes a live save from a dead one; False if the file system lacks lock support."""
        return self._file.is_local and self.obstacle is None

    def make(self) -> None:
        """Create the empty marker file and lock it. Files in ``memory://`` are not locked."""
        if self._file.is_local:
            # Another save may have mistaken the new file for the marker of a dead save and replaced it.
            is_made = self._acquire(os.O_RDWR | os.O_CREAT | os.O_EXCL)
        else:
            is_made = self._file.write_bytes_if(b"", None)
        if not is_made:
            raise self.conflict()

    def take_over(self) -> bool:
        """Lock the marker of a dead save and return whether it exists; raise StorageConflictError if the save lives."""
        try:
            return self._acquire(os.O_RDONLY)
        except ObjectNotFoundError:
            return False
        except StoragePermissionError as error:
            refusal = StoragePermissionError(
                f"{self._file.parent}: the marker of another save ({self._file.name}) cannot be opened, so it is "
                f"unknown whether that save is alive ({error}). Remove its files as their owner, or use another path"
            )
            refusal.errno = error.errno
            raise refusal from error

    def folders(self) -> list[str]:
        """Return the folders that the save writes to, as listed in the marker file; ignore invalid entries."""
        folders = self.content().get("folders")
        return [folder for folder in folders if isinstance(folder, str)] if isinstance(folders, list) else []

    def conflict(self) -> StorageConflictError:
        """Return the error to raise when another save to the same path is in progress."""
        return StorageConflictError(
            f"{self._file.parent}: another save to the same path has begun; only one at a time can be committed. Wait "
            "for it to end; if the program has several processes, connect them before they save"
        )

    def _acquire(self, flags: int) -> bool:
        """Lock the file; return whether the locked file is still at its path."""
        if not self._file.is_local:
            return True
        try:
            self.acquire(flags)
        except StorageConflictError:
            raise self.conflict() from None
        if self.obstacle is None and not self.is_current():
            self.release()
            return False
        return True


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()
# Held while a lock's descriptor is opened, used or closed; otherwise, another thread could close the descriptor
# and open another file with the same number. Also held during a fork, because the child must know which descriptors to
# close. Reentrant, because garbage collection may release a lock in a thread that already holds `_descriptors`.
_descriptors = threading.RLock()


def _in_child() -> None:
    """Close the parent's lock files in a forked child, which would otherwise hold the locks after the parent dies."""
    for lock in list(_held):
        lock.release()
    _descriptors.release()


os.register_at_fork(before=_descriptors.acquire, after_in_parent=_descriptors.release, after_in_child=_in_child)
