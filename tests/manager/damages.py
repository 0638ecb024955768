"""What happens to a file of a run: it is damaged, or something else lies in its place."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from tests.damage import flip


def removed(path: Path) -> Path:
    """Removes what is there, and returns its path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return path


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as found, contextlib.chdir(removed(path).parent):
        found.bind(path.name)


def folder(path: Path) -> None:
    removed(path).mkdir()
    (path / "x").write_bytes(b"x")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: removed(path).write_bytes(b""),
    "away": removed,
    "folder": folder,
    "pipe": lambda path: os.mkfifo(removed(path)),
    "socket": bound_socket,
    "device": lambda path: os.mknod(removed(path), stat.S_IFCHR | 0o600, os.makedev(1, 3)),  # that of /dev/null
    "dangling link": lambda path: removed(path).symlink_to("/nowhere/at/all"),
    "loop": lambda path: removed(path).symlink_to(path.name),
}
CONTENT = ("flipped", "cut", "empty", "away")
STRANGE = ("folder", "pipe", "socket", "device", "dangling link")
