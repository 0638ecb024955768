"""Damage to files, as disks do it."""

from __future__ import annotations

import os
from pathlib import Path


def flip(file: Path, at: int | None = None) -> None:
    """Changes a bit of a file, in its middle by default, as a disk does: the times of the file stay."""
    times, content = file.stat(), bytearray(file.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    file.chmod(0o600)
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
