"""Files on a file system of this machine."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from typing import TYPE_CHECKING

from ..errors import DamagedCheckpointError
from .backend import Entry
from .direct import regular_size
from .direct_reader import LocalDataReader
from .direct_writer import write_data_file
from .statuses import os_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .bulk import DataReader, Segment

HIDDEN_SUFFIX = ".__lock"
"""TensorStore's lock files, which it hides from its own listings, too."""

TEMPORARY_PREFIX = ".holdfast-"
"""How the names begin under which atomic writes gather their bytes; a crash may leave one behind."""


class LocalBackend:
    """The operating system's file system; keys are absolute paths."""

    is_local = True
    is_remote = False

    def url(self, key: str) -> str:
        """Returns the path itself."""
        return key

    def exists(self, key: str) -> bool:
        """Returns whether a file or directory has this path; a link counts if what it points to does."""
        return self._stat(key) is not None

    def is_there(self, key: str) -> bool:
        """Returns whether a file or directory has this path."""
        return self.exists(key)

    def is_directory(self, key: str) -> bool:
        """Returns whether the path is a directory, or a link to one."""
        status = self._stat(key)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def entries(self, key: str) -> list[Entry]:
        """Returns what lies directly inside, sorted by name; nothing when the directory is missing."""
        found = []
        with os_errors(key, "list"):
            try:
                scan = os.scandir(key)
            except FileNotFoundError:
                return []
            with scan:
                for item in scan:
                    if item.name.endswith(HIDDEN_SUFFIX):
                        continue
                    try:
                        is_directory = item.is_dir()
                        size = None if is_directory else item.stat().st_size
                    except FileNotFoundError:  # A link to nowhere, or deleted meanwhile.
                        if not os.path.lexists(item.path):
                            continue
                        is_directory, size = False, None
                    found.append(Entry(item.name, is_directory, size))
        return sorted(found)

    def read_bytes(self, key: str, limit: int | None, size: int | None) -> bytes:
        """Returns the whole content of a regular file."""
        with os_errors(key, "read"):
            # Opening a pipe would wait for its other end for ever.
            descriptor = os.open(key, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            size = regular_size(descriptor, key)
            with open(descriptor, "rb", buffering=0) as file:
                if limit is not None and size > limit:
                    raise DamagedCheckpointError(f"{key} has {size} bytes, more than the {limit} it may have")
                return file.readall()

    def has_size(self, key: str, size: int) -> bool:
        """Returns whether a file has just this length."""
        with os_errors(key, "look at"):
            return os.stat(key).st_size == size

    def write_bytes(self, key: str, data: bytes, *, atomic: bool) -> None:
        """Writes a file and syncs it; with ``atomic``, under another name first, and syncs the directory, too."""
        parent = os.path.dirname(key)
        target = os.path.join(parent, f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}") if atomic else key
        with os_errors(key, "write"):
            exclusive = os.O_EXCL if atomic else os.O_TRUNC
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | exclusive, 0o666)
            try:
                with open(descriptor, "wb", buffering=0) as file:
                    rest = memoryview(data)
                    while rest:
                        rest = rest[file.write(rest) :]
                    os.fsync(descriptor)
                if atomic:
                    os.replace(target, key)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(target)
                raise
        if atomic:
            self.sync_directory(parent)

    def make_directory(self, key: str, *, sync: bool) -> None:
        """Creates a directory and its parents; with ``sync``, the names of the new ones are durable."""
        missing = []
        path = key
        while not os.path.isdir(path) and os.path.dirname(path) != path:
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            with os_errors(path, "create the directory"):
                try:
                    os.mkdir(path)
                except FileExistsError:  # Somebody else was faster, or it is a file.
                    if not os.path.isdir(path):
                        raise
        if sync:
            for path in reversed(missing):
                self.sync_directory(os.path.dirname(path))

    def sync_directory(self, key: str) -> None:
        """Makes the names inside a directory durable."""
        with os_errors(key, "sync the directory"):
            descriptor = os.open(key, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            except OSError as error:
                # Some network file systems have no fsync for directories: their servers do it on their own.
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
            finally:
                os.close(descriptor)

    def rename(self, key: str, target: str) -> None:
        """Moves a file or directory in one step and syncs the parent; replaces a file, or an empty directory."""
        with os_errors(key, f"rename to {os.path.basename(target)!r}"):
            os.rename(key, target)
        self.sync_directory(os.path.dirname(target))

    def remove(self, key: str) -> None:
        """Deletes a file or a link; missing is fine."""
        with os_errors(key, "remove"), contextlib.suppress(FileNotFoundError):
            os.unlink(key)

    def remove_tree(self, key: str, last: str | None) -> None:
        """Deletes everything below and the directory itself; a link is deleted, what it points to is not."""
        with os_errors(key, "remove"):
            try:
                if not stat.S_ISDIR(os.lstat(key).st_mode):
                    os.unlink(key)
                    return
                names = sorted(os.listdir(key), key=lambda name: name == last)
            except FileNotFoundError:
                return
            for name in names:
                _remove(os.path.join(key, name))
            _remove(key)

    def write_data(self, key: str, size: int, segments: Sequence[Segment]) -> None:
        """Writes one bulk data file past the page cache where possible, and syncs it."""
        write_data_file(key, size, segments)

    def open_data(self, key: str, size: int | None) -> DataReader:
        """Opens a bulk data file for reading by many threads."""
        return LocalDataReader(key)

    def _stat(self, key: str) -> os.stat_result | None:
        with os_errors(key, "look at"):
            try:
                return os.stat(key)
            except (FileNotFoundError, NotADirectoryError):
                return None


def _remove(path: str) -> None:
    """Deletes a file, a link or a directory tree, even while somebody else deletes from it, too."""
    while True:
        try:
            if stat.S_ISDIR(os.lstat(path).st_mode):
                shutil.rmtree(path)
            else:
                os.unlink(path)
            return
        except FileNotFoundError:
            if not os.path.lexists(path):
                return
