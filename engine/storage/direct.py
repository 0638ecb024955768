"""Opening files for direct I/O, and falling back where a file system has none."""

from __future__ import annotations

import errno
import fcntl
import os

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


def is_direct(descriptor: int) -> bool:
    """Returns whether a file descriptor does direct I/O."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & _DIRECT)


def make_buffered(descriptor: int) -> None:
    """Switches a file descriptor to ordinary I/O, for every thread that uses it."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_DIRECT)
