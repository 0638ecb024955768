"""What a handler is: it knows one kind of object, and how that gets into a folder and out again.

A handler is not concerned with atomicity or threads: a :class:`~holdfast.Checkpointer` or a
:class:`~holdfast.CheckpointManager` calls it and commits what it wrote.
"""

from __future__ import annotations

import abc
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..digests import check_files
from ..errors import OptionError, UnknownArgumentError
from ..record import ItemRecord
from ..storage import Location
from .saves import Files, Later, PreparedItem, SaveFuture, finish, run_coroutine, write_alone

_OURS = frozenset({"snapshot", "member", "files"})  # arguments that callers of a checkpointer do not give


class CheckpointHandler(abc.ABC):
    """Saves and restores one kind of object, in a folder that is its own.

    Attributes:
        kind: How the commit record names what this handler writes.
        collective: Whether every process of a program takes part in a save; otherwise only process 0 calls it.
        optional: Whether a checkpoint may be saved without the item, and restored without it where it was.
        verifies: Whether restoring checks what it reads. Otherwise all files are compared with their digests before.
    """

    kind = "files"
    collective = False
    optional = False
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
    def restore(self, directory: Location, item: Any = None, **kwargs: Any) -> Any:
        """Reads an item back.

        Args:
            directory: The folder.
            item: What to restore into or after, if the handler uses that.
            **kwargs: ``restore_kwargs`` of the caller. Handlers that verify are given ``files``, too: what the commit
                record says about the folder, to check against.

        Returns:
            The item.
        """

    def structure(self, directory: Location, **kwargs: Any) -> Any:
        """Returns what the item looks like without reading its data; a handler that cannot tell leaves this as it is.

        Args:
            directory: The folder.
            **kwargs: ``files`` for handlers that verify, as for :meth:`restore`.
        """
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
    """A handler whose snapshot needs no folder: whatever is wrong with an item shows before anything is written.

    Attributes:
        divides: Whether :meth:`prepare` takes ``member=``, the process whose share will be written, and may leave out
            of the snapshot what others write; it is given where several processes save together.
    """

    divides = False

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
        return [Later(functools.partial(write_alone, self.prepare(item, snapshot=True, **kwargs), directory))]


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
    try:
        if handler.verifies:
            return handler.restore(folder, item, files=saved.files, **kwargs)
        check_files(folder, saved.files)
        return handler.restore(folder, item, **kwargs)
    except UnknownArgumentError as error:
        raise UnknownArgumentError(f"{folder} was not restored: {error}") from None


def has_structure(handler: CheckpointHandler) -> bool:
    """Tells whether a handler can say what an item looks like without reading it."""
    return type(handler).structure is not CheckpointHandler.structure


def item_structure(handler: CheckpointHandler, folder: Location, saved: ItemRecord) -> Any:
    """Returns what an item looks like without reading its data, None if its handler cannot tell.

    Args:
        handler: What knows the item.
        folder: The item's folder.
        saved: What the commit record says about it.
    """
    return handler.structure(folder, files=saved.files) if handler.verifies else handler.structure(folder)


def no_arguments(handler: CheckpointHandler, kwargs: Mapping[str, Any], method: Callable[..., Any]) -> None:
    """Raises an error if there are arguments that a handler does not know.

    Args:
        handler: The handler.
        kwargs: The arguments that were left over.
        method: What was called; the arguments that it has by name are those that are known.

    Raises:
        UnknownArgumentError: There are such arguments.
    """
    if not kwargs:
        return
    parameters = inspect.signature(method).parameters.values()
    known = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name not in _OURS]
    close = [match for name in sorted(kwargs) for match in difflib.get_close_matches(name, known, 1)]
    raise UnknownArgumentError(
        f"{type(handler).__name__} does not know these arguments: {', '.join(sorted(kwargs))}; "
        + (f"did you mean {', '.join(close)}? " if close else "")
        + (f"It knows {', '.join(known)}" if known else "It takes none")
    )
