"""Damage to files, as disks do it."""

from __future__ import annotations

import os
from pathlib import Path


def flipped(content: bytes, at: int, bit: int = 0) -> bytes:
    """Returns the content with another bit in one byte."""
    changed = bytearray(content)
    changed[at] ^= 1 << bit
    return bytes(changed)


def flip(file: Path, at: int | None = None) -> None:
    """Changes a bit of a file, in its middle by default, as a disk does: the times of the file stay."""
    times, content = file.stat(), file.read_bytes()
    file.chmod(0o600)
    file.write_bytes(flipped(content, len(content) // 2 if at is None else at))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
