"""What is in an item, and how it gets into its folder and out again.

A handler knows one kind of object. It is not concerned with atomicity or threads: a
:class:`~holdfast.Checkpointer` or a :class:`~holdfast.CheckpointManager` calls it and commits what it wrote.
"""

from __future__ import annotations

import abc
import functools
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from .coordination import Member
from .digests import check_files
from .errors import DamagedCheckpointError, ObjectNotFoundError, OptionError, UnsupportedLeafError
from .format import DOCUMENT_LIMIT, crc32c, decode_document, encode_document
from .item import HostTree, Layout, StagingBuffer, TreeReader, TreeWriter, load_tree, tree_metadata
from .record import FileRecord, ItemRecord
from .storage import Location
from .tree import collection_paused, describe, flatten

T = TypeVar("T")

Files = Mapping[str, FileRecord]
"""The files of an item by their path in its folder, as the commit record lists them."""


class SaveFuture(Protocol):
    """The part of a save that can happen later, on another thread."""

    def result(self, timeout: float | None = None) -> Files | None:
        """Completes that part; returns the files written, if the handler knows them."""
        ...


class PreparedItem(Protocol):
    """An item whose snapshot is taken: every process writes its share, and process 0 puts them together."""

    def write(self, folder: Location, member: Member) -> bytes:
        """Writes this process's share, durably; returns what process 0 needs to know of it."""
        ...

    def merge(self, folder: Location, fragments: Sequence[bytes]) -> Files:
        """Completes the item from what every process's ``write`` returned; returns all of its files."""
        ...


class CheckpointHandler(abc.ABC):
    """Saves and restores one kind of object, in a folder that is its own.

    Attributes:
        kind: How the commit record names what this handler writes.
        collective: Whether every process of a program takes part in a save; otherwise only process 0 calls it.
        verifies: Whether restoring checks what it reads. Otherwise all files are compared with their digests before.
    """

    kind = "files"
    collective = False
    verifies = False

    @abc.abstractmethod
    def save(self, directory: Location, item: Any, **kwargs: Any) -> Files | None:
        """Writes an item into a folder.

        Args:
            directory: An empty folder. It can be used as a path when it is on a file system.
            item: What to save.
            **kwargs: ``save_kwargs`` of the caller.

        Returns:
            The files, if they are durable already; None leaves it to the caller to find them and make them so.
        """

    @abc.abstractmethod
    def restore(self, directory: Location, item: Any = None, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Reads an item back.

        Args:
            directory: The folder.
            item: What to restore into or after, if the handler uses that.
            files: What the commit record says about the folder, to check against.
            **kwargs: ``restore_kwargs`` of the caller.

        Returns:
            The item.
        """

    def structure(self, directory: Location, *, files: Files | None = None) -> Any:
        """Returns what the item looks like without reading its data, or None if the handler cannot tell."""
        return None


class AsyncCheckpointHandler(CheckpointHandler):
    """A handler that can take a snapshot quickly and write it later."""

    @abc.abstractmethod
    async def async_save(self, directory: Location, item: Any, **kwargs: Any) -> list[SaveFuture] | None:
        """Takes a snapshot of an item.

        Args:
            directory: An empty folder for it.
            item: What to save; it may change as soon as this returns.
            **kwargs: ``save_kwargs`` of the caller.

        Returns:
            Futures whose ``result()`` completes the save, called one after the other on another thread.
        """

    def save(self, directory: Location, item: Any, **kwargs: Any) -> Files | None:
        """Takes the snapshot and writes it at once."""
        return finish(run_coroutine(self.async_save(directory, item, **kwargs)))


class PreparedCheckpointHandler(AsyncCheckpointHandler):
    """A handler whose snapshot needs no folder: whatever is wrong with an item shows before anything is written."""

    @abc.abstractmethod
    def prepare(self, item: Any, *, snapshot: bool, **kwargs: Any) -> PreparedItem:
        """Makes an item ready to be written.

        Args:
            item: What to save.
            snapshot: Whether it may change between this call and the writing. A handler may reuse the memory of its
                last snapshot, so that one has to be written, or given up, before the next is taken.
            **kwargs: ``save_kwargs`` of the caller.

        Returns:
            What writes it into a folder.
        """

    def save(self, directory: Location, item: Any, **kwargs: Any) -> Files:
        """Writes an item at once."""
        return write_alone(self.prepare(item, snapshot=False, **kwargs), directory)

    async def async_save(self, directory: Location, item: Any, **kwargs: Any) -> list[SaveFuture] | None:
        """Takes a snapshot of an item; the one future that is returned writes it."""
        return [_Later(functools.partial(write_alone, self.prepare(item, snapshot=True, **kwargs), directory))]


class PyTreeCheckpointHandler(PreparedCheckpointHandler):
    """Saves trees: containers of arrays of any library, scalars, text and bytes.

    Args:
        layout: Sizes of chunks, segments and data files.
    """

    kind = "pytree"
    collective = True
    verifies = True

    def __init__(self, *, layout: Layout | None = None) -> None:
        self._layout = layout or Layout()
        self._staging = StagingBuffer()

    def prepare(self, item: Any, *, snapshot: bool, layout: Layout | None = None, **kwargs: Any) -> PreparedItem:
        """Makes a tree ready to be written.

        Args:
            item: The tree.
            snapshot: Whether to copy arrays that can change. Those that cannot, such as jax's, are held, not copied.
            layout: Sizes of chunks, segments and data files, instead of the handler's own.
            **kwargs: None are known.

        Returns:
            What writes the tree into a folder.

        Raises:
            UnsupportedLeafError: A leaf cannot be saved; names every such leaf.
        """
        _no_arguments(self, kwargs)
        flat = flatten(item)
        leaves = describe(flat.names, flat.values)
        if snapshot:
            leaves = self._staging.snapshot(leaves)
        return TreeWriter(HostTree(flat.names, leaves, flat.structure), layout or self._layout)

    def restore(self, directory: Location, item: Any = None, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Reads a tree.

        Args:
            directory: The folder.
            item: The template: its containers, array libraries, dtypes and shardings decide what is returned. None
                returns the saved containers with numpy arrays.
            files: What the commit record says about the folder.
            **kwargs: ``select``: patterns of paths; only matching leaves are read.

        Returns:
            The tree.

        Raises:
            TreeMismatchError: Template and checkpoint differ; lists every leaf that does.
            DamagedCheckpointError: What is stored does not verify.
        """
        with collection_paused():
            return load_tree(TreeReader(directory, files), like=item, **kwargs)

    def structure(self, directory: Location, *, files: Files | None = None) -> Any:
        """Returns the tree with a description of every leaf in its place; no data is read."""
        return tree_metadata(TreeReader(directory, files))


class JsonCheckpointHandler(PreparedCheckpointHandler):
    """Saves what JSON can hold: nested dictionaries and lists of text, numbers, booleans and None.

    Args:
        filename: The file's name in the item's folder.
    """

    kind = "json"
    verifies = True

    def __init__(self, filename: str = "data.json") -> None:
        self._filename = filename

    def prepare(self, item: Any, *, snapshot: bool, **kwargs: Any) -> PreparedItem:
        """Makes an item ready to be written. Raises UnsupportedLeafError if JSON cannot hold it."""
        _no_arguments(self, kwargs)
        try:
            content = encode_document("json", {"data": item})
        except (TypeError, ValueError) as error:
            raise UnsupportedLeafError(
                f"this item cannot be saved as JSON: {error}. Use PyTreeCheckpointHandler for arrays and other values"
            ) from error
        return _PreparedFile(self._filename, content)

    def restore(self, directory: Location, item: Any = None, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Reads the item back; ``item`` is not needed."""
        _no_arguments(self, kwargs)
        place = directory / self._filename
        try:
            content = place.read_bytes(limit=DOCUMENT_LIMIT)
        except ObjectNotFoundError as error:
            raise DamagedCheckpointError(f"{place} is missing: the checkpoint is not whole") from error
        return decode_document(content, "json", source=str(place)).get("data")

    def structure(self, directory: Location, *, files: Files | None = None) -> Any:
        """Returns the item itself: reading it costs no more than describing it."""
        return self.restore(directory, files=files)


def restore_item(
    handler: CheckpointHandler, folder: Location, saved: ItemRecord, item: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Reads an item back, after making sure that it is whole and of the handler's kind.

    Args:
        handler: What reads it.
        folder: The item's folder.
        saved: What the commit record says about it.
        item: What to restore into or after.
        kwargs: Further arguments for the handler.

    Raises:
        DamagedCheckpointError: What is there does not verify.
        OptionError: A handler of another kind wrote it.
    """
    if handler.kind != saved.kind:
        raise OptionError(
            f"{folder} was written by a handler of kind {saved.kind!r:.80}; {type(handler).__name__} is of kind "
            f"{handler.kind!r}. Restore it with the handler that it was saved with"
        )
    if not handler.verifies:
        check_files(folder, saved.files)
    return handler.restore(folder, item, files=saved.files, **kwargs)


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


def finish(futures: Sequence[SaveFuture] | None) -> Files | None:
    """Completes a save; returns its files if every future knows its own."""
    found: dict[str, FileRecord] = {}
    known = bool(futures)
    for future in futures or ():
        files = future.result()
        known = known and files is not None
        found.update(files or {})
    return found if known else None


def write_alone(prepared: PreparedItem, folder: Location) -> Files:
    """Writes an item from one process."""
    return prepared.merge(folder, [prepared.write(folder, Member())])


class _PreparedFile:
    """An item that is one small file; process 0 writes it."""

    def __init__(self, name: str, content: bytes) -> None:
        self._name = name
        self._content = content

    def write(self, folder: Location, member: Member) -> bytes:
        if member.index == 0:
            (folder / self._name).write_bytes(self._content, atomic=False)
            folder.sync_directory()
        return b""

    def merge(self, folder: Location, fragments: Sequence[bytes]) -> Files:
        return {self._name: FileRecord(len(self._content), crc32c(self._content))}


class _Later:
    """Work that is done when its result is asked for, once."""

    def __init__(self, work: Callable[[], Files]) -> None:
        self._work: Callable[[], Files] | None = work
        self._files: Files | None = None

    def result(self, timeout: float | None = None) -> Files | None:
        if self._work is not None:
            self._files = self._work()
            self._work = None  # lets go of the snapshot
        return self._files


def _no_arguments(handler: CheckpointHandler, kwargs: Mapping[str, Any]) -> None:
    if kwargs:
        raise TypeError(f"{type(handler).__name__} does not know these arguments: {', '.join(sorted(kwargs))}")
