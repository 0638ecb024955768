"""Files between measurements: fsyncs, drops, counts and removes them."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def fsync_all(path: Path) -> None:
    """Fsync a file or everything below a directory, then the directory that holds it.

    For libraries that leave this to the file system: without it their times would not include the disk.
    """
    for each in [*_below(path), path, path.parent]:
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_cold(path: Path, *, system_wide: bool = True) -> str:
    """Drop the pages of a checkpoint from the page cache.

    Args:
        path: The checkpoint.
        system_wide: Whether to drop everything else as well, where that is allowed; it is the surer way.

    Returns:
        How: the name of the kernel's interface, for the table's footnote.
    """
    os.sync()
    if system_wide:
        with contextlib.suppress(OSError):
            DROP_CACHES.write_text("3\n")
            return str(DROP_CACHES)
    for each in [*_below(path), path]:
        if each.is_file():
            _forget(each)
    return "posix_fadvise(DONTNEED)"


def bytes_on_disk(path: Path) -> int:
    """Bytes of all blocks that a checkpoint occupies, directories included."""
    return sum(each.lstat().st_blocks * 512 for each in [*_below(path), path])


def remove(path: Path) -> None:
    """Remove a checkpoint and wait until the file system has settled."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    os.sync()


def _below(path: Path) -> Iterator[Path]:
    """Everything below a path, children before their directory."""
    for folder, folders, files in os.walk(path, topdown=False):
        yield from (Path(folder, name) for name in (*files, *folders))


def _forget(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
