"""A disk that fails: cut off at a system call, with what was not synced lost, or refusing calls with an error."""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHANGING = ("open", "write", "pwrite", "ftruncate", "mkdir", "rename", "replace", "link", "unlink", "rmdir", "fsync")


class Crash(BaseException):
    """The process is gone."""


@dataclass
class Disk:
    """The system calls below one directory; can be cut off, and can lose what was not synced.

    Nothing is really synced: that only takes time.

    Attributes:
        root: The directory.
        graveyard: Where what was deleted or replaced is kept, to bring it back.
        calls: What was called, with the path relative to the root.
        crash_at: How many calls to let pass, or None for all.
        crashed: Whether a call was cut off.
    """

    root: Path
    graveyard: Path
    calls: list[tuple[str, str]] = field(default_factory=list)
    crash_at: int | None = None
    crashed: bool = False
    _unsynced_files: set[str] = field(default_factory=set)
    _unsynced_names: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    _real: dict[str, Any] = field(default_factory=dict)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in CHANGING:
            self._real[name] = getattr(os, name)
            monkeypatch.setattr(os, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(
            os, "posix_fallocate", lambda descriptor, offset, size: self._ftruncate(descriptor, offset + size)
        )

    def recover(self) -> None:
        """Lets calls pass again."""
        self.crash_at = None

    def sync(self) -> None:
        """Forgets what may be lost, and what was called."""
        self.crashed = False
        for kept in (self.calls, self._unsynced_files, self._unsynced_names):
            kept.clear()

    def cut_power(self, generator: random.Random | None, *, whole: str | None = None) -> None:
        """Loses what was not synced: all of it, or in every directory what came after a random point.

        Nothing is lost of the names in the directory ``whole``.
        """
        self.recover()
        counts = Counter(folder for folder, _ in self._unsynced_names)
        keep = {folder: generator.randint(0, count) if generator else 0 for folder, count in counts.items()}
        if whole in keep:
            keep[whole] = len(self._unsynced_names)
        for path in self._unsynced_files:
            with contextlib.suppress(FileNotFoundError):
                os.truncate(path, generator.randint(0, os.path.getsize(path)) if generator else 0)
        for folder, undo in reversed(self._unsynced_names):
            if counts[folder] > keep[folder]:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    undo()
            counts[folder] -= 1
        self._unsynced_files.clear()
        self._unsynced_names.clear()

    def _path(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path in question, or None if it is none of ours."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        path = os.fspath(path)
        return path if isinstance(path, str) and f"{path}/".startswith(f"{self.root}/") else None

    def _note(self, name: str, path: str) -> None:
        if self.crash_at is not None and len(self.calls) >= self.crash_at:
            self.crashed = True
            raise Crash
        self.calls.append((name, path[len(str(self.root)) + 1 :] or "."))

    def _named(self, path: str, undo: Callable[[], None]) -> None:
        self._unsynced_names.append((os.path.dirname(path), undo))

    def _grave(self) -> str:
        return str(self.graveyard / str(len(os.listdir(self.graveyard))))

    def _bury(self, path: str) -> Callable[[], None]:
        """Keeps a second name of a file; returns what brings it back."""
        grave = self._grave()
        self._real["link"](path, grave, follow_symlinks=False)

        def restore() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._real["unlink"](path)
            self._real["link"](grave, path)

        return restore

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        ours = self._path(path, dir_fd)
        creates = ours is not None and flags & os.O_CREAT and not os.path.lexists(ours)
        if ours is not None and (creates or flags & os.O_TRUNC):
            self._note("create" if creates else "truncate", ours)
            self._unsynced_files.add(ours)
        descriptor: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        if ours is not None and creates:
            self._named(ours, lambda: self._real["unlink"](ours))
        return descriptor

    def _changes_file(self, name: str, descriptor: int, *arguments: Any) -> Any:
        ours = self._path(descriptor)
        if ours is not None:
            self._note(name, ours)
            self._unsynced_files.add(ours)
        return self._real[name](descriptor, *arguments)

    def _write(self, descriptor: int, data: Any) -> Any:
        return self._changes_file("write", descriptor, data)

    def _pwrite(self, descriptor: int, data: Any, offset: int) -> Any:
        return self._changes_file("pwrite", descriptor, data, offset)

    def _ftruncate(self, descriptor: int, size: int) -> Any:
        return self._changes_file("ftruncate", descriptor, size)

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        ours = self._path(path, dir_fd)
        if ours is not None and not os.path.lexists(ours):
            self._note("mkdir", ours)
            self._named(ours, lambda: self._real["rename"](ours, self._grave()))
        self._real["mkdir"](path, mode, dir_fd=dir_fd)

    def _replace(self, source: Any, target: Any) -> None:
        ours = self._path(source)
        if ours is not None:
            self._note("rename", target)
            restore = self._bury(target) if os.path.isfile(target) else lambda: None

            def undo() -> None:
                self._real["rename"](target, source)
                restore()

            self._named(ours, undo)
            if ours in self._unsynced_files:
                self._unsynced_files.add(target)
        self._real["replace"](source, target)

    _rename = _replace

    def _link(self, source: Any, target: Any, *, follow_symlinks: bool = True) -> None:
        ours = self._path(target)
        if ours is not None:
            self._note("link", ours)
        self._real["link"](source, target, follow_symlinks=follow_symlinks)
        if ours is not None:
            self._named(ours, lambda: self._real["unlink"](ours))

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        ours = self._path(path, dir_fd)
        if ours is not None and os.path.lexists(ours):
            self._note("unlink", ours)
            self._named(ours, self._bury(ours))
        self._real["unlink"](path, dir_fd=dir_fd)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        ours = self._path(path, dir_fd)
        if ours is not None:
            self._note("rmdir", ours)
        self._real["rmdir"](path, dir_fd=dir_fd)  # fails where the directory is not empty
        if ours is not None:
            self._named(ours, lambda: self._real["mkdir"](ours))

    def _fsync(self, descriptor: int) -> None:
        ours = self._path(descriptor)
        if ours is None:
            return
        self._note("fsync", ours)
        self._unsynced_files.discard(ours)
        self._unsynced_names = [entry for entry in self._unsynced_names if entry[0] != ours]


NEEDS_SPACE = ("open", "pwrite", "posix_fallocate", "mkdir", "replace", "fsync")
CHANGES = (*NEEDS_SPACE, "ftruncate", "rename", "unlink", "rmdir")


class Fault:
    """Makes system calls below one directory fail, from the n-th on."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = str(root)
        self.stop()
        for name in CHANGES:
            monkeypatch.setattr(os, name, self._failing(name, getattr(os, name)))

    def start(self, error: int, names: tuple[str, ...], *, after: int = 0, times: int = 1 << 30) -> None:
        """Lets some calls of these names pass; the next ones fail."""
        self.failed, self._error, self._names, self._pass, self._times = 0, error, names, after, times

    def stop(self) -> None:
        self.start(0, ())

    def _failing(self, name: str, real: Any) -> Callable[..., Any]:
        def call(target: Any, *arguments: Any, **keywords: Any) -> Any:
            if name in self._names and self._is_meant(name, target, arguments, keywords):
                self._pass -= 1
                if self._pass < 0 and self.failed < self._times:
                    self.failed += 1
                    raise OSError(self._error, os.strerror(self._error))
            return real(target, *arguments, **keywords)

        return call

    def _is_meant(self, name: str, target: Any, arguments: Any, keywords: Any) -> bool:
        if name == "open" and not arguments[0] & os.O_CREAT:
            return False
        if isinstance(target, int):
            target = os.readlink(f"/proc/self/fd/{target}")
        elif keywords.get("dir_fd") is not None:
            target = os.readlink(f"/proc/self/fd/{keywords['dir_fd']}")
        return str(target).startswith(self._root)
