"""The part of a save that comes after its snapshot: futures, shares, and how one process completes them alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, TypeVar

from ..coordination import Member
from ..format import crc32c
from ..record import FileRecord
from ..storage import Location

T = TypeVar("T")

Files = Mapping[str, FileRecord]
"""The files of an item by their path in its folder, as the commit record lists them."""


class SaveFuture(Protocol):
    """The part of a save that can happen later, on another thread."""

    def result(self, timeout: float | None = None) -> Any:
        """Completes that part; returns the files written (``Files``) if the handler knows them, or anything else."""
        ...


class PreparedItem(Protocol):
    """An item whose snapshot is taken: every process writes its share, and process 0 puts them together."""

    def write(self, folder: Location, member: Member) -> bytes:
        """Writes this process's share, durably; returns what process 0 needs to know of it."""
        ...

    def merge(self, folder: Location, fragments: Sequence[bytes]) -> Files:
        """Completes the item from what every process's ``write`` returned; returns all of its files."""
        ...


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, also where an event loop runs already (as in a notebook)."""
    import asyncio  # only for handlers of the user's own; it takes as long to import as all of the engine

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(coroutine))
        except BaseException as error:  # handed to the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="holdfast-snapshot")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def completed(result: Any) -> Any:
    """Returns what a method of the user's own returns, which may be a coroutine."""
    return run_coroutine(result) if isinstance(result, Coroutine) else result


def finish(futures: Sequence[SaveFuture] | None) -> Files | None:
    """Completes a save; returns its files if every future knows its own."""
    found: dict[str, FileRecord] = {}
    known = bool(futures)
    for future in futures or ():
        files = future.result()
        if _is_files(files):
            found.update(files)
        else:
            known = False  # a future of somebody else's making, such as those of concurrent.futures
    return found if known else None


def _is_files(result: Any) -> TypeGuard[Files]:
    return isinstance(result, Mapping) and all(isinstance(file, FileRecord) for file in result.values())


def write_alone(prepared: PreparedItem, folder: Location) -> Files:
    """Writes an item from one process."""
    return prepared.merge(folder, [prepared.write(folder, Member())])


class PreparedFile:
    """An item that is one small file; process 0 writes it."""

    def __init__(self, name: str, content: bytes) -> None:
        self._name = name
        self._content = content

    def write(self, folder: Location, member: Member) -> bytes:
        """Writes the file, on process 0."""
        if member.index == 0:
            (folder / self._name).write_bytes(self._content, atomic=False)
            folder.sync_directory()
        return b""

    def merge(self, folder: Location, fragments: Sequence[bytes]) -> Files:
        """Tells the file."""
        return {self._name: FileRecord(len(self._content), crc32c(self._content))}


class Later:
    """Work that is done when its result is asked for, once."""

    def __init__(self, work: Callable[[], Files]) -> None:
        self._work: Callable[[], Files] | None = work
        self._files: Files | None = None

    def result(self, timeout: float | None = None) -> Files | None:
        """Does the work, the first time."""
        if self._work is not None:
            self._files = self._work()
            self._work = None  # lets go of the snapshot
        return self._files
