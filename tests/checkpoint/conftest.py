"""Disks that fail, for the tests of what is committed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checkpoint.disk import Disk, Fault


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a disk works as well, and takes longer
    with tempfile.TemporaryDirectory(dir=memory) as place, monkeypatch.context() as patch:
        made = Disk(Path(place, "root"), Path(place, "graveyard"))
        made.root.mkdir()
        made.graveyard.mkdir()
        made.install(patch)
        yield made
        made.recover()


@pytest.fixture
def root() -> Iterator[Path]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a disk works as well, and takes longer
    with tempfile.TemporaryDirectory(dir=memory) as place:
        yield Path(place)


@pytest.fixture
def fault(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fault]:
    with monkeypatch.context() as patch:
        yield Fault(root, patch)
