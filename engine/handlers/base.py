"""The protocol that handlers implement to write one kind of object into a folder and read it back.

A handler need not deal with atomicity or threads, because a :class:`~holdfast.Checkpointer` or a
:class:`~holdfast.CheckpointManager` calls the handler and commits the written files.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from ..arrays import Layout, make_durable, open_folder, read_checked, write_file
from ..distributed import ProcessInfo
from ..errors import UnsupportedLeafError
from ..foreign_arguments import refuse_unknown
from ..format import DOCUMENT_LIMIT, FileRecord, decode_document, encode_archive, encode_document
from ..storage import Helper, Location, folder_in_memory

T = TypeVar("T")

Files = Mapping[str, FileRecord]  # an item's files, keyed by path relative to its folder, as in the commit record

# Maximum size, in bytes, of an item packed into one file. Reading such a file takes no longer than one more request.
SMALL_ITEM = 256 << 10

# Handler arguments that are reserved for the engine; the caller of a checkpointer must not pass them.
_INTERNAL = frozenset({"snapshot", "member", "reuse", "files", "source", "shared"})


class SaveFuture(Protocol):
    """A deferred part of a save, which can be completed on another thread."""

    def result(self, timeout: float | None = None) -> Any:
        """Complete this part; return the written files (``Files``) if they are known. Any other result is ignored."""
        ...


class PreparedItem(Protocol):
    """An item whose snapshot has been taken. Every process writes its share, and process 0 merges the shares."""

    def write(self, folder: Location, member: ProcessInfo) -> bytes:
        """Write this process's share, durably if several processes save. Return a fragment for :meth:`merge`."""
        ...

    def merge(self, folder: Location, fragments: Sequence[bytes]) -> Files:
        """Complete the item from the fragments that ``write`` returned on each process; return all files to commit."""
        ...


@runtime_checkable
class SizedItem(PreparedItem, Protocol):
    """An item of known size that can be written to any location, even in memory."""

    def estimate_bytes(self) -> int | None:
        """Estimate the number of bytes that all processes write; return None if the item cannot be kept in memory."""


class CheckpointHandler(abc.ABC):
    """Saves and restores one kind of object in a folder of the checkpoint.

    Attributes:
        kind: The name that identifies items of this handler in the commit record.
        collective: Whether all processes take part in a save. Otherwise, only process 0 calls the handler.
        optional: Whether the item may be omitted from a save, and from a restore even if it was saved.
        verifies: Whether :meth:`restore` verifies the data. If not, the caller first checks the checksums of all files.
        shares_reads: Whether :meth:`restore` accepts ``shared=``, so that data needed by several processes is read only
            once. A subclass that overrides ``restore`` must set this attribute again.
    """

    kind = "files"
    collective = False
    optional = False
    verifies = False
    shares_reads = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "restore" in vars(cls) and "shares_reads" not in vars(cls):
            cls.shares_reads = False

    @abc.abstractmethod
    def save(self, directory: Location, item: Any, **kwargs: Any) -> Files | None:
        """Write an item into a folder.

        Args:
            directory: An empty folder, which can be used as a path if it is on a file system.
            item: The object to save.
            **kwargs: The caller's ``save_kwargs``.

        Returns:
            The files if they are already durable, or None to let the caller list them and make them durable.
        """

    @abc.abstractmethod
    def restore(self, directory: Location, item: Any = None, **kwargs: Any) -> Any:
        """Restore an item.

        Args:
            directory: The item's folder.
            item: A template for the result, or the object to restore into, if the handler uses one.
            **kwargs: The caller's ``restore_kwargs``. If the handler sets ``verifies``, it also receives ``files``, the
                folder's files as listed in the commit record, to verify them.

        Returns:
            The restored item.
        """

    def structure(self, directory: Location, **kwargs: Any) -> Any:
        """Describe the item without reading its data. Handlers that cannot do this should not override this method.

        Args:
            directory: The item's folder.
            **kwargs: ``files``, as for :meth:`restore`, if the handler sets ``verifies``.
        """
        return None


class AsyncCheckpointHandler(CheckpointHandler):
    """A handler that can take a snapshot of an item and write it later."""

    @abc.abstractmethod
    async def async_save(self, directory: Location, item: Any, **kwargs: Any) -> list[SaveFuture] | None:
        """Take a snapshot of an item.

        Args:
            directory: An empty folder for the item.
            item: The object to save, which may change as soon as this method returns.
            **kwargs: The caller's ``save_kwargs``.

        Returns:
            Futures that complete the save when their ``result()`` is called, in order, on another thread.
        """

    def save(self, directory: Location, item: Any, **kwargs: Any) -> Files | None:
        """Take a snapshot of an item and write it immediately."""
        return finish(run_coroutine(self.async_save(directory, item, **kwargs)))


class PreparedCheckpointHandler(AsyncCheckpointHandler):
    """A handler that takes a snapshot without a folder, so that unsupported items fail before files are written.

    Attributes:
        divides: Whether :meth:`prepare` accepts ``member=``, the process whose share will be written if several
            processes save together. The snapshot may then omit all other data.
        reuses: Whether :meth:`prepare` accepts ``reuse=``. Managers use it to pass the data files of earlier steps, so
            that unchanged arrays need not be written again.
        layout: The handler's chunk and file sizes, if :meth:`prepare` accepts a ``layout=`` that overrides them. A
            manager whose mirror is in an object store passes a layout that is suitable for uploads.
    """

    divides = False
    reuses = False
    layout: Layout | None = None

    @abc.abstractmethod
    def prepare(self, item: Any, *, snapshot: bool, **kwargs: Any) -> PreparedItem:
        """Prepare an item to be written.

        Args:
            item: The object to save.
            snapshot: Whether the item may change before it is written. A handler may reuse the memory of its last
                snapshot, so each snapshot must be written or discarded before the next one is taken.
            **kwargs: The caller's ``save_kwargs``.

        Returns:
            The prepared item, which can be written into a folder.
        """

    def save(self, directory: Location, item: Any, **kwargs: Any) -> Files:
        """Write an item immediately."""
        return write_alone(self.prepare(item, snapshot=False, **kwargs), directory)

    async def async_save(self, directory: Location, item: Any, **kwargs: Any) -> list[SaveFuture] | None:
        """Take a snapshot of an item; return a single future that writes it."""
        return [_DeferredWrite(self.prepare(item, snapshot=True, **kwargs), directory)]


class _DeferredWrite:
    """A future that writes an item when its result is first requested."""

    def __init__(self, prepared: PreparedItem, folder: Location) -> None:
        self._prepared: PreparedItem | None = prepared
        self._folder = folder
        self._files: Files | None = None

    def result(self, timeout: float | None = None) -> Files | None:
        if self._prepared is not None:
            self._files = write_alone(self._prepared, self._folder)
            self._prepared = None  # frees the snapshot
        return self._files


def write_alone(prepared: PreparedItem, folder: Location, awaited: threading.Event | None = None) -> Files:
    """Write an item of a single process, and make its files durable."""
    return make_durable(folder, prepared.merge(folder, [prepared.write(folder, ProcessInfo(awaited=awaited))]))


def size_of(prepared: PreparedItem) -> int | None:
    return prepared.estimate_bytes() if isinstance(prepared, SizedItem) else None


def write_archive(prepared: PreparedItem, location: Location, member: ProcessInfo) -> bytes | None:
    """Pack a single process's item into a zip file for ``location``; return None if it is large or of unknown size."""
    size = size_of(prepared)
    if size is None or size > SMALL_ITEM:
        return None
    files: dict[str, bytes] = {}
    folder = folder_in_memory(location, files)
    prepared.merge(folder, [prepared.write(folder, member)])
    return encode_archive(files)


class PreparedFiles:
    """Files that process 0 writes into an item's folder, optionally along with a tree."""

    def __init__(self, contents: Mapping[str, bytes], tree: PreparedItem | None = None) -> None:
        self._contents = contents
        self._tree = tree
        self._files: dict[str, FileRecord] = {}

    def estimate_bytes(self) -> int | None:
        size = 0 if self._tree is None else size_of(self._tree)
        return None if size is None else size + sum(map(len, self._contents.values()))

    def write(self, folder: Location, member: ProcessInfo) -> bytes:
        if member.index == 0:
            self._files |= {path: write_file(folder / path, content) for path, content in self._contents.items()}
        return b"" if self._tree is None else self._tree.write(folder, member)

    def merge(self, folder: Location, fragments: Sequence[bytes]) -> Files:
        return self._files if self._tree is None else {**self._tree.merge(folder, fragments), **self._files}


def finish(futures: Sequence[SaveFuture] | None) -> Files | None:
    """Complete a save. Return its files if every future reports the files that it wrote, and None otherwise."""
    records: dict[str, FileRecord] = {}
    are_known = bool(futures)
    for future in futures or ():
        files = future.result()
        # Other futures, such as `concurrent.futures.Future`, may return anything.
        are_known &= isinstance(files, Mapping) and all(isinstance(file, FileRecord) for file in files.values())
        records |= files if are_known else {}
    return records if are_known else None


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion, even if an event loop is already running, as in a notebook."""
    import asyncio  # imported lazily because only user-defined handlers need it, and importing it is slow

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    results: list[T] = []
    errors: list[BaseException] = []

    loop = asyncio.new_event_loop()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                results.append(runner.run(coroutine))
        except BaseException as error:  # raised again on the caller's thread
            errors.append(error)

    def interrupted(error: BaseException) -> None:
        errors.insert(0, error)
        with contextlib.suppress(RuntimeError):  # raised if the coroutine has ended and its loop is closed
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])

    thread = Helper(run, "holdfast-snapshot")
    try:
        thread.start()
    except BaseException as error:
        interrupted(error)
    thread.finish(interrupted)
    loop.close()
    if errors:
        raise errors[0]
    return results[0]


def has_structure(handler: CheckpointHandler) -> bool:
    return type(handler).structure is not CheckpointHandler.structure


def refuse_arguments(handler: CheckpointHandler, kwargs: Mapping[str, Any], method: Callable[..., Any]) -> None:
    """Raise UnknownArgumentError for arguments that a handler's method does not accept."""
    refuse_unknown(type(handler).__name__, kwargs, method, _INTERNAL)


# ---- JSON documents as items


class JsonCheckpointHandler(PreparedCheckpointHandler):
    """Saves a JSON document, which consists of nested dictionaries and lists of strings, numbers, booleans and None.

    If several processes save together, only the document of process 0 is saved.

    Args:
        filename: The name of the file in the item's folder.
    """

    kind = "json"
    verifies = True

    def __init__(self, filename: str = "data.json") -> None:
        self._filename = filename

    def prepare(self, item: Any, *, snapshot: bool, **kwargs: Any) -> PreparedItem:
        """Prepare an item to be written; raise UnsupportedLeafError if it cannot be represented as JSON."""
        refuse_arguments(self, kwargs, self.prepare)
        try:
            content = encode_document("json", {"data": item})
        except (TypeError, ValueError) as error:
            raise UnsupportedLeafError(
                f"this item cannot be saved as JSON: {error}. Use PyTreeCheckpointHandler for arrays and other values"
            ) from error
        return PreparedFiles({self._filename: content})

    def restore(self, directory: Location, item: Any = None, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Restore the item; the argument ``item`` is ignored."""
        refuse_arguments(self, kwargs, self.restore)
        directory, files = open_folder(directory, files)
        file = directory / self._filename
        content = read_checked(file, None if files is None else files.get(self._filename), limit=DOCUMENT_LIMIT)
        return decode_document(content, "json", source=str(file)).get("data")

    def structure(self, directory: Location, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Return the item itself, because reading it is as fast as describing it."""
        return self.restore(directory, files=files)
