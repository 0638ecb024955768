"""Opening files for direct I/O, and falling back where a file system has none."""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from ..errors import DamagedCheckpointError

_DIRECT: int = getattr(os, "O_DIRECT", 0)


def open_direct(path: str, flags: int) -> int:
    """Opens a file past the page cache where the file system allows it, otherwise the ordinary way.

    Args:
        path: The file.
        flags: ``os.O_RDONLY`` or such; close-on-exec is added.

    Returns:
        A file descriptor.

    Raises:
        OSError: The file cannot be opened either way.
    """
    flags |= os.O_CLOEXEC
    if _DIRECT:
        try:
            return os.open(path, flags | _DIRECT, 0o666)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            # Some file systems refuse only after the file has been created; that one is ours then.
            flags &= ~os.O_EXCL
    return os.open(path, flags, 0o666)


def regular_size(descriptor: int, path: str) -> int:
    """Returns the length of an open file in bytes; closes it and raises DamagedCheckpointError if it is no such."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise DamagedCheckpointError(f"{path} should be a file, but is not a regular file")
    return status.st_size


def is_direct(descriptor: int) -> bool:
    """Returns whether a file descriptor does direct I/O."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & _DIRECT)


def make_buffered(descriptor: int) -> None:
    """Switches a file descriptor to ordinary I/O, for every thread that uses it."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_DIRECT)
