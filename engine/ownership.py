"""One writer for a directory: a second run is refused, and within one process the newer manager takes over.

On a file system the owner holds an advisory lock on a file, which the operating system releases when the process
dies, however it dies. Where there are no locks (object stores, some network file systems) the newest owner leaves its
token, and an older one finds out before it commits.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import uuid
import weakref
from collections.abc import Callable

from .clock import Clock
from .errors import DamagedCheckpointError, HoldfastError, ObjectNotFoundError, OwnershipError
from .storage import Location
from .storage.statuses import os_errors

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_logger = logging.getLogger("holdfast")

OWNER = "owner.json"
"""Name of the file that says who writes to a directory."""


class Ownership:
    """The right to write to one directory.

    Args:
        directory: The directory; it is made when the right is taken.
        clock: Where the time noted in the file comes from.
        drain: Called before a newer manager of this process takes over: ends the save that is under way.
    """

    def __init__(self, directory: Location, clock: Clock, drain: Callable[[], None]) -> None:
        self._directory = directory
        self._clock = clock
        self._drain = weakref.WeakMethod(drain)
        self._token = uuid.uuid4().hex
        self._descriptor: int | None = None
        self._close: weakref.finalize[..., Ownership] | None = None
        self._held = False
        self._lost = False
        self._size: int | None = None  # of the file, once it is written
        self._key = os.path.realpath(directory.path) if directory.is_local else directory.url

    @property
    def held(self) -> bool:
        """Tells whether the right is held."""
        return self._held and not self._lost

    def take(self) -> bool:
        """Takes the right to write, once.

        Returns:
            Whether it was taken now; False when it was held before.

        Raises:
            OwnershipError: A live run holds it, or it was lost to a newer manager.
        """
        self.check_not_lost()
        if self._held:
            return False
        with _lock:
            earlier = _owners.get(self._key)
            if earlier is not None:
                earlier._give_up()
            self._directory.make_directory()
            if self._directory.is_local and fcntl is not None:
                self._lock_file()
            try:
                self._write_file()
            except BaseException:
                self._release()  # or the next attempt would meet this one's lock
                raise
            _owners[self._key] = self
            self._held = True
        return True

    def check(self) -> None:
        """Makes sure that the right is still held, right before something is committed.

        Raises:
            OwnershipError: Another run or manager has taken over.
            StorageError: It cannot be told, as the storage does not answer.
        """
        self.check_not_lost()
        if self._descriptor is None and self._read(self._size).get("token") != self._token:
            self._lost = True
            self.check_not_lost()

    def check_not_lost(self) -> None:
        """Raises OwnershipError if a newer manager has taken over."""
        if self._lost:
            raise OwnershipError(
                f"{self._directory}: another manager has taken over this directory; this one may not write to it. "
                f"Now held by {self._describe()}"
            )

    def release(self) -> None:
        """Gives the right back."""
        with _lock:
            if _owners.get(self._key) is self:
                del _owners[self._key]
            self._release()

    def _give_up(self) -> None:
        drain = self._drain()
        if drain is not None:
            drain()
        self._lost = True
        self._release()

    def _release(self) -> None:
        self._held = False
        self._descriptor = None
        if self._close is not None:
            self._close()
            self._close = None

    def _lock_file(self) -> None:
        path = os.fspath(self._directory / OWNER)
        with os_errors(path, "open"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise OwnershipError(
                f"{self._directory}: another run is writing to this directory ({self._describe()}). "
                "Stop it, wait for it to end, or use another directory"
            ) from error
        except OSError as error:  # a file system without locks: the token has to do
            os.close(descriptor)
            _logger.warning("%s: no file locks here (%s); a second run is noticed only when it commits", path, error)
            return
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)  # also when the manager is never closed

    def _write_file(self) -> None:
        content = json.dumps(
            {"token": self._token, "host": socket.gethostname(), "pid": os.getpid(), "since": self._clock.now()}
        ).encode()
        self._size = len(content)
        if self._descriptor is None:
            (self._directory / OWNER).write_bytes(content)
            return
        # In place: replacing the file would leave the lock on one that nobody sees.
        with os_errors((self._directory / OWNER).url, "write"):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, content, 0)

    def _read(self, size: int | None = None) -> dict[str, object]:
        """Returns what the file says, or nothing where there is none that can be read.

        Args:
            size: Its length if it is this owner's; of another's, no more is read.
        """
        try:
            found = json.loads((self._directory / OWNER).read_bytes(limit=4096, size=size))
        except (ObjectNotFoundError, DamagedCheckpointError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _describe(self) -> str:
        try:
            found = self._read()
        except HoldfastError:
            found = {}
        return f"process {found.get('pid', '?')} on {found.get('host', '?')}"


_lock = threading.Lock()
_owners: weakref.WeakValueDictionary[str, Ownership] = weakref.WeakValueDictionary()


def _disown() -> None:
    """Runs in a forked process, such as a data loader's worker: it must not keep the lock of a run that has died."""
    global _lock
    _lock = threading.Lock()
    for owner in list(_owners.values()):
        owner._lost = True
        owner._release()
    _owners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)
