"""Disks that fail, for the tests of what is committed, and what a handler knows of a tree."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.disk import Disk, Fault

from holdfast.engine.arrays.snapshot import KnownTree


@pytest.fixture
def root() -> Iterator[Path]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a disk works as well, and takes longer
    with tempfile.TemporaryDirectory(dir=memory) as place:
        yield Path(place)


@pytest.fixture
def disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(root / "root", root / "graveyard")
    made.root.mkdir()
    made.graveyard.mkdir()
    with monkeypatch.context() as patch:
        made.install(patch)
        yield made
        made.recover()


@pytest.fixture
def fault(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fault]:
    with monkeypatch.context() as patch:
        yield Fault(root, patch)


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the locks from a disk, as some file systems have none."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each tree was recognized, of those that came after a first one."""
    found: list[bool] = []
    snapshot = KnownTree.snapshot

    def noted(self: KnownTree, tree: Any) -> Any:
        copies = snapshot(self, tree)
        found.append(copies is not None)
        return copies

    monkeypatch.setattr(KnownTree, "snapshot", noted)
    return found
