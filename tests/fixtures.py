"""Fixtures for all tests: a place in memory, exact comparison, files of a checkpoint to tamper with, little memory."""

from __future__ import annotations

import logging
import re
import resource
import signal
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import equality
from tests.documents.examples import Examples

import holdfast as hf
from holdfast.engine.format import decode_document, encode_document
from holdfast.engine.format.record import RECORD
from holdfast.engine.storage import as_location


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Keeps what a command does to logging from reaching other tests, also from a fixture of its module."""
    logger = logging.getLogger("holdfast")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    try:
        return (yield)
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def examples(request: pytest.FixtureRequest) -> Iterator[Examples]:
    """The examples of a page that the test declares by ``@pytest.mark.examples``; it has to use each of them."""
    found = Examples(*request.node.get_closest_marker("examples").args)
    yield found
    assert not found.unused, f"{found.page}: the test declares {sorted(found.unused)}, and does not use them"


@pytest.fixture
def default_sigterm() -> Iterator[None]:
    """SIGTERM has its usual effect, and must have it again at the end of the test."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    left = signal.signal(signal.SIGTERM, before)
    assert left is signal.SIG_DFL, "the test left a handler of SIGTERM behind"


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests run as a background job of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def fits_are_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every ``fit`` stand for a process that starts, though one process does all: it knows of none before it."""
    monkeypatch.setattr("holdfast.integrations.lightning.store.RunStore.note_finished", lambda *_: None)


@pytest.fixture
def place() -> Iterator[str]:
    """A URL below which nothing is yet; in memory, so that syncing costs nothing."""
    url = f"memory://tests/{uuid.uuid4().hex}"
    yield url
    as_location(url).remove_tree()


@pytest.fixture(params=[pytest.param(False, id="some"), pytest.param(True, id="every", marks=pytest.mark.sweep)])
def every(request: pytest.FixtureRequest) -> bool:
    """Whether a test tries every moment, step or byte; the default run tries some, which differ from case to case."""
    return bool(request.param)


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Any, Any], None]:
    """Compares two trees: the types of all containers and leaves, the order of keys, every bit of every value."""
    return equality.assert_same


_DATA_FILE = re.compile(r"\bd/[0-9a-f]{8}\.0\.([0-9]+)\b")
_SHORT = re.compile(r"\bd/[0-9]+$")


@pytest.fixture(scope="session")
def short() -> Callable[[str], str]:
    """Shortens the paths of data files in a text to the same ones for every save: ``d/0``, ``d/1`` and so on."""
    return _short


def _short(text: str) -> str:
    return _DATA_FILE.sub(r"d/\1", text)


class Contents(dict[str, bytes]):
    """The content of files by path; data files are found by their short paths, too."""

    def __missing__(self, path: str) -> bytes:
        return {_short(real): content for real, content in self.items()}[path]


class StoredFiles:
    """The files of a checkpoint or of a directory of them, to be looked at and tampered with.

    Data files can be called ``d/0``, ``d/1`` and so on here.

    Args:
        url: Where they are.
    """

    def __init__(self, url: str) -> None:
        self._location = as_location(url)

    def read(self) -> Contents:
        """Returns the content of every file by its path."""
        return Contents({path: (self._location / path).read_bytes() for path in self._paths("")})

    def name(self, path: str) -> str:
        """Returns the real path of a file; of a data file that there is not, the one that was given."""
        if not _SHORT.search(path):
            return path
        return {_short(real): real for real in self._paths("")}.get(path, path)

    def write(self, path: str, content: bytes) -> None:
        """Replaces a file; on a disk without waiting for it."""
        self._put(self.name(path), content)

    def remove(self, path: str) -> None:
        """Deletes a file."""
        (self._location / self.name(path)).remove()

    def reseal(self, path: str, content: bytes) -> None:
        """Writes a file of the item ``state`` and puts its digest into the record, as a forger would."""
        self._put(f"state/{path}", content)
        self.edit(lambda body: body["items"]["state"]["files"].update({path: {"size": len(content)}}))

    def edit(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Changes the commit record, which verifies afterwards."""
        body = decode_document((self._location / RECORD).read_bytes(), "checkpoint", source="test")
        change(body)
        self.write(RECORD, encode_document("checkpoint", body))

    def _put(self, path: str, content: bytes) -> None:
        place = self._location / path
        if place.is_local:
            place.path.write_bytes(content)
        else:
            place.write_bytes(content)

    def _paths(self, folder: str) -> list[str]:
        entries = (self._location / folder if folder else self._location).entries()
        below = [(f"{folder}/{entry.name}".lstrip("/"), entry.is_directory) for entry in entries]
        return [path for name, is_folder in below for path in (self._paths(name) if is_folder else [name])]


@pytest.fixture
def stored() -> Callable[[str], StoredFiles]:
    """Opens the files of a checkpoint."""
    return StoredFiles


MARGIN = 1 << 30


@pytest.fixture
def little_memory() -> Iterator[int]:
    """Lets the process take one more GiB of addresses, and not what a forged number asks for; gives the bytes."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MARGIN, before[1]))
    yield MARGIN
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="session")
def look() -> Callable[..., list[str]]:
    """Does all that one can do with a checkpoint; gives the errors, all of which are holdfast's own."""
    return _look


def _look(place: str, *, loads: bool = False) -> list[str]:
    errors = []
    actions: list[Callable[[str], Any]] = [hf.load, hf.describe, hf.PyTreeCheckpointer().structure]
    for action in actions:
        try:
            action(place)
        except hf.HoldfastError as error:
            errors.append(str(error))
        else:
            assert loads or action is not hf.load, "it loads, although it should not"
    hf.verify(place)
    assert all(place in error for error in errors)
    return errors
