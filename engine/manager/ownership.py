"""One writer for a directory: a second run is refused, and within one process the newer manager takes over.

On a file system the owner holds a :class:`~holdfast.engine.storage.FileLock`. Without locks (object stores, some
network file systems), the newest owner leaves its token, and an older one sees it before it commits.
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Callable

from ..clock import Clock
from ..errors import HoldfastError, OwnershipError, StorageConflictError
from ..format import OWNER
from ..storage import FileLock, Location, os_errors

_logger = logging.getLogger("holdfast")


class Ownership:
    """The ownership of one directory: the right to write to it."""

    def __init__(self, directory: Location, clock: Clock, drain: Callable[[], None] | None = None) -> None:
        self._directory = directory
        self._clock = clock
        # Waits until the owner has stopped writing, before a newer one in this process takes over; None does not wait.
        self._drain = None if drain is None else weakref.WeakMethod(drain)
        self._token = os.urandom(16).hex()
        self._lock = FileLock(directory / OWNER)
        self._process: int | None = None  # PID of the owner; a forked child does not own the directory
        self._lost = False
        self._size: int | None = None  # bytes of the file, once it is written
        self._key = os.path.realpath(directory.path) if directory.is_local else directory.url

    @property
    def held(self) -> bool:
        """Whether this process is the owner."""
        return self._process == os.getpid() and not self._lost

    def take(self) -> None:
        """Take ownership, unless this run has it already."""
        self.check_not_lost()
        with FileLock.handover:
            if self._process is not None:  # another thread may have called this meanwhile
                return
            earlier = _owners.get(self._key)
            if earlier is not None and earlier.held:
                earlier._give_up()
            self._directory.make_directory()
            try:
                if self._directory.is_local:
                    self._lock_file()
                self._write_file()
                _owners[self._key] = self
                self._process = os.getpid()
            except BaseException:
                self._release()  # otherwise the next attempt finds this lock
                raise

    def check(self, *, at_once: bool = False) -> None:
        """Raise OwnershipError unless this run still owns the directory; ``at_once`` sends no request to a store."""
        self.check_not_lost()
        if at_once and (self._process is None or not self._directory.is_local):
            return
        if self._lock.descriptor is not None:
            if self._lock.is_current():
                return
        elif self._lock.content(self._size).get("token") == self._token:
            return
        if not (self._directory / OWNER).is_there():
            gone = f"its {OWNER}" if self._directory.exists() else "the directory"
            raise OwnershipError(
                f"{self._directory}: {gone} was moved or deleted while this run was writing here, so another run could "
                "take the directory unnoticed; nothing was written. Move it back, and this run continues; or start the "
                "run again in the directory where it is to continue"
            )
        self._lost = True
        self.check_not_lost()

    def check_not_lost(self) -> None:
        """Raise OwnershipError if a newer manager has taken over, or if this process is a fork of the owner's."""
        if self._lost or self._process not in (None, os.getpid()):
            raise OwnershipError(
                f"{self._directory}: another manager has taken over this directory; this one may not write to it. "
                f"Now held by {self._describe()}"
            )

    def release(self) -> None:
        """Release ownership."""
        with FileLock.handover:
            if _owners.get(self._key) is self:
                del _owners[self._key]
            self._release()

    def _give_up(self) -> None:
        drain = None if self._drain is None else self._drain()
        if drain is not None:
            drain()
        self._lost = True
        self._release()

    def _release(self) -> None:
        self._process = None
        self._lock.release()

    def _lock_file(self) -> None:
        try:
            self._lock.acquire(os.O_RDWR | os.O_CREAT)
        except StorageConflictError as error:
            raise OwnershipError(
                f"{self._directory}: another run is writing to this directory ({self._describe()}). "
                "Stop it, wait for it to end, or use another directory"
            ) from error
        if self._lock.obstacle is not None:  # only the token protects the directory
            path, obstacle = self._directory / OWNER, self._lock.obstacle
            self._lock.release()
            _logger.warning(
                "%s: no file locks here (%s); a second run is noticed only at the next save", path, obstacle
            )

    def _write_file(self) -> None:
        content = json.dumps(
            {"token": self._token, "host": os.uname().nodename, "pid": os.getpid(), "since": self._clock.now()}
        ).encode()
        self._size = len(content)
        if self._lock.descriptor is None:
            (self._directory / OWNER).write_bytes(content)
            return
        # The file is written in place: replacing it would leave the lock on a file without a name.
        with os_errors((self._directory / OWNER).url, "write"):
            os.ftruncate(self._lock.descriptor, 0)
            os.pwrite(self._lock.descriptor, content, 0)

    def _describe(self) -> str:
        try:
            found = self._lock.content()
        except HoldfastError:
            found = {}
        return f"process {found.get('pid', '?')} on {found.get('host', '?')}"


_owners: weakref.WeakValueDictionary[str, Ownership] = weakref.WeakValueDictionary()
