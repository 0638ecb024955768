"""Marks of saves that are under way: on a file system, a lock tells those that are alive from what a crash has left.

Object stores, and some network file systems, have no locks; there, whoever begins last wins, and the others find out.
"""

from __future__ import annotations

import json
import os
import weakref
from typing import Any

from .errors import DamagedCheckpointError, StorageConflictError, StorageError, StorageUnavailableError
from .storage import Location
from .storage.statuses import os_errors

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


class Mark:
    """The file that says that a save into its directory is under way.

    Args:
        place: The file.
    """

    def __init__(self, place: Location) -> None:
        self._place = place
        self._close: weakref.finalize[..., Mark] | None = None

    def make(self) -> None:
        """Makes the file, empty, and locks it.

        Raises:
            StorageConflictError: Another save was faster.
        """
        if not self._lock(os.O_CREAT | os.O_EXCL):  # it was taken for dead before it was locked
            raise self.conflict()

    def take_over(self) -> bool:
        """Locks a file that is there, so that what a dead save has left can be removed.

        Returns:
            Whether the file is there still; where there are no locks it is thought to be.

        Raises:
            StorageConflictError: The save is alive.
        """
        return self._lock(0)

    def release(self) -> None:
        """Lets go of the lock; the file stays, if it is still there."""
        _held.discard(self)
        if self._close is not None:
            self._close()
            self._close = None

    def content(self, size: int | None = None) -> dict[str, Any]:
        """Returns what the file says; nothing where there is none that can be read.

        Args:
            size: Its length, if it is as it was written.

        Raises:
            StorageUnavailableError: The storage does not answer, so that nobody knows whose it is.
        """
        try:
            found = json.loads(self._place.read_bytes(limit=1 << 24, size=size))
        except StorageUnavailableError:
            raise
        except (StorageError, DamagedCheckpointError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def folders(self) -> list[str]:
        """Returns the folders that the save writes into, as far as the file says."""
        found = self.content().get("folders")
        return [folder for folder in found if isinstance(folder, str)] if isinstance(found, list) else []

    def conflict(self) -> StorageConflictError:
        """Returns the error that says that another save is under way."""
        return StorageConflictError(
            f"{self._place.parent}: another save to the same path has begun; only one at a time can be committed. "
            "Wait for it to end; if this is a program of several processes, connect them before they save"
        )

    def _lock(self, flags: int) -> bool:
        if not self._place.is_local:
            return True
        with os_errors(self._place.url, "open"):
            try:
                descriptor = os.open(self._place, (os.O_RDWR if flags else os.O_RDONLY) | os.O_CLOEXEC | flags, 0o666)
            except FileExistsError:
                raise self.conflict() from None
            except (FileNotFoundError, PermissionError) as error:
                if flags:
                    raise
                return isinstance(error, PermissionError)  # of another user: nobody can tell
        self._close = weakref.finalize(self, os.close, descriptor)  # a save that is forgotten is dead
        _held.add(self)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise self.conflict() from None
        except OSError:  # a file system without locks
            return True
        try:
            if os.path.samestat(os.fstat(descriptor), os.stat(self._place)):
                return True
        except FileNotFoundError:
            pass
        self.release()  # the file that was locked is not there any more
        return False


_held: weakref.WeakSet[Mark] = weakref.WeakSet()


def _let_go() -> None:
    """Runs in a forked process, such as a data loader's worker: it must not keep the mark of a save that has died."""
    for mark in list(_held):
        mark.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
