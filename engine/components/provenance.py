"""Where a checkpoint comes from: versions of libraries and the commit of the program's repository."""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path as FilePath
from typing import Any

_LIBRARIES = ("numpy", "torch", "jax", "flax", "optax")
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_LIMIT = 4 << 20  # bytes of a file of git's that is read


def versions() -> dict[str, str]:
    """Returns the versions of Python, of holdfast, and of the libraries that are in use."""
    found = {"python": platform.python_version()}
    for name in ("holdfast", *_LIBRARIES):
        version = _version(name) if name == "holdfast" or name in sys.modules else None
        if version is not None:
            found[name] = version
    return found


@functools.cache
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def commit_of(module: str) -> str | None:
    """Returns the commit of the git repository that a module lies in, or None; runs nothing.

    Asked once for a module: what is in the repository later is not what this process has loaded.

    Args:
        module: The module's name.
    """
    file = getattr(sys.modules.get(module), "__file__", None)
    return commit_in(FilePath(file).resolve().parent if isinstance(file, str) else FilePath.cwd())


def commit_in(start: FilePath) -> str | None:
    """Returns the commit of the git repository around a folder, or None; runs nothing."""
    try:
        for folder in (start, *start.parents):
            git = folder / ".git"
            if git.is_dir():
                return _head(git)
            if git.is_file():
                return _head(folder / _read(git).removeprefix("gitdir:").strip())
    except (OSError, ValueError):
        return None
    return None


def _head(git: FilePath) -> str | None:
    head = _read(git / "HEAD")
    if not head.startswith("ref:"):
        return head if _COMMIT.fullmatch(head) else None
    reference = head.removeprefix("ref:").strip()
    if ".." in reference.split("/") or os.path.isabs(reference):
        return None
    common = git / "commondir"
    places = [git, (git / _read(common)).resolve()] if common.is_file() else [git]
    for place in places:
        if (place / reference).is_file():
            found = _read(place / reference)
            return found if _COMMIT.fullmatch(found) else None
        if (place / "packed-refs").is_file():
            for line in _read(place / "packed-refs").splitlines():
                commit, _, name = line.partition(" ")
                if name.strip() == reference and _COMMIT.fullmatch(commit):
                    return commit
    return None


def _read(file: FilePath) -> str:
    with file.open("rb") as opened:
        return opened.read(_LIMIT).decode("utf-8").strip()


def summary(module: str) -> dict[str, Any]:
    """Returns what metadata says of where a checkpoint comes from.

    Args:
        module: The module of the component's class.
    """
    return {"versions": versions(), "commit": commit_of(module)}
