"""Checkpointers, which atomically save an object to a path, synchronously or in the background, and restore it.

:class:`OwnItems` and :class:`OtherItems` read the items of checkpoints from holdfast and from other libraries.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Never, Self

from ..arrays import check_files
from ..clock import Clock, Duration, SystemClock, seconds
from ..distributed import Coordinator, ProcessGroup
from ..errors import CheckpointNotFoundError, OptionError, StateError, UnknownArgumentError
from ..foreign_arguments import refuse_unknown
from ..forks import cached_property
from ..format import ITEM, CheckpointRecord, ItemRecord
from ..handlers import (
    AsyncCheckpointHandler,
    CheckpointHandler,
    JsonCheckpointHandler,
    PyTreeCheckpointHandler,
)
from ..sources import JSON, TREE, CheckpointSource, is_ours, recognise
from ..steps import read_steadily
from ..storage import Location, Place, as_location
from .background import BackgroundSave
from .save import ItemToSave, Save, SaveReport

if TYPE_CHECKING:
    from concurrent.futures import Future


class Checkpointer:
    """Saves one object at a time. When ``save`` returns, the checkpoint is durable.

    In a program with several processes, all of them must call ``save`` with the same path to write one checkpoint.

    Args:
        handler: The handler that writes and reads the object.
        clock: The clock that provides the time of the commit.
        coordinator: Connects the processes. None uses jax.distributed or torch.distributed if one of them is
            initialized; ``hf.processes.Alone()`` ignores other processes.
        barrier_timeout_secs: The maximum time to wait for other processes, in seconds or as text such as ``"10m"``.

    >>> import tempfile, numpy as np
    >>> checkpointer = Checkpointer(PyTreeCheckpointHandler())
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = checkpointer.save(f"{directory}/one", {"weights": np.ones(3)})
    ...     checkpointer.restore(f"{directory}/one")
    {'weights': array([1., 1., 1.])}
    """

    background = False

    def __init__(
        self,
        handler: CheckpointHandler,
        *,
        clock: Clock | None = None,
        coordinator: Coordinator | None = None,
        barrier_timeout_secs: Duration = "10m",
        **unknown: Never,
    ) -> None:
        refuse_unknown(type(self).__name__, unknown, type(self).__init__)
        self.handler = handler
        self._clock = clock or SystemClock()
        self._coordinator = coordinator
        self._timeout = seconds(barrier_timeout_secs, name="barrier_timeout_secs")

    @cached_property
    def _processes(self) -> ProcessGroup:
        # Created lazily, because a program may create a checkpointer before its processes are connected.
        return ProcessGroup("checkpointer", self._coordinator, self._timeout)

    def save(self, path: Place, item: Any, *, force: bool = False, **kwargs: Any) -> SaveReport | None:
        """Save an object.

        Args:
            path: The path or URL of the checkpoint, which must not exist unless ``force`` is set.
            item: The object to save.
            force: Replace an existing checkpoint. After a crash, either the old or the new checkpoint is complete.
            **kwargs: Additional arguments for the handler.

        Returns:
            The report of the save.

        Raises:
            CheckpointExistsError: The path exists, and it is not a checkpoint or ``force`` is not set.
            UnsupportedLeafError: The object cannot be saved; nothing was written.
            StorageConflictError: Another save to this path is in progress.
            StorageError: The storage reported an error; no files are left behind.
        """
        return self._complete(self._begin(path, item, force, kwargs))

    def restore(self, path: Place, item: Any = None, **kwargs: Any) -> Any:
        """Restore an object. Trees and JSON can also be restored from checkpoints of other libraries, such as Orbax.

        Args:
            path: The path or URL of the checkpoint.
            item: A template for the result, or the object to restore into, if the handler uses one.
            **kwargs: Additional arguments for the handler.

        Returns:
            The restored object.

        Raises:
            CheckpointNotFoundError: The path contains no committed checkpoint.
            DamagedCheckpointError: The stored data does not match its checksums.
        """
        return self._read(path, lambda stored, name: stored.restore(name, self.handler, item, kwargs))

    def structure(self, path: Place) -> Any:
        """Return the structure of a saved object, with a description of every leaf, without reading its data.

        Args:
            path: The path or URL of the checkpoint.
        """
        return self._read(path, lambda stored, name: stored.structure(name, self.handler))

    def _begin(self, path: Place, item: Any, force: bool, kwargs: Mapping[str, Any]) -> Save:
        return Save(
            as_location(path, writes=True),
            {ITEM: ItemToSave(self.handler, item, self.background, kwargs)},
            overwrite=force,
            rendezvous=self._processes.rendezvous("save"),
            timeout=self._timeout,
        )

    def _complete(self, save: Save, awaited: threading.Event | None = None) -> SaveReport | None:
        """Write and commit a save; return None if the save has already been aborted."""
        with save.completing() as claimed:
            if not claimed:
                return None
            items = save.write(awaited)
            return save.commit(None if items is None else self._record(items))[1]

    def _record(self, items: Mapping[str, ItemRecord]) -> CheckpointRecord:
        return CheckpointRecord(items=items, time=self._clock.now())

    def _read(self, path: Place, read: Callable[[StoredItems, str], Any]) -> Any:
        location = as_location(path)

        def read_own(record: CheckpointRecord) -> Any:
            if ITEM not in record.items:
                raise StateError(
                    f"{location}: this checkpoint has the items {', '.join(sorted(record.items))}; "
                    "restore it with a CheckpointManager, or with hf.load(path, item=...)"
                )
            return read(OwnItems(location, record), ITEM)

        try:
            return read_steadily(location, read_own)
        except CheckpointNotFoundError:
            source = None if is_ours(location) else recognise(location.snapshot())
            if source is None:
                raise
        other = OtherItems(source)
        return read(other, other.only_name(self.handler))


class AsyncCheckpointer(Checkpointer):
    """A :class:`Checkpointer` whose ``save`` returns as soon as the object may be changed again.

    Saves run one at a time, so each save waits for the previous one. The error of a failed save is raised once, by the
    next ``save`` (which still saves its object), ``wait_until_finished``, ``check_for_errors`` or ``close``.

    Args:
        handler: The handler that writes and reads the object.
        timeout_secs: The maximum time to wait for a save, in seconds, before an error is raised.
        clock: The clock that provides the time of the commit.
        coordinator: Connects the processes, as for :class:`Checkpointer`.
        barrier_timeout_secs: The maximum time to wait for other processes, in seconds or as text such as ``"10m"``.
    """

    background = True

    def __init__(
        self,
        handler: AsyncCheckpointHandler,
        *,
        timeout_secs: float = 3600.0,
        clock: Clock | None = None,
        coordinator: Coordinator | None = None,
        barrier_timeout_secs: Duration = "10m",
        **unknown: Never,
    ) -> None:
        if not isinstance(handler, AsyncCheckpointHandler):
            raise TypeError(
                f"{type(handler).__name__} cannot save in the background: use Checkpointer, "
                "or derive the handler from AsyncCheckpointHandler"
            )
        super().__init__(
            handler, clock=clock, coordinator=coordinator, barrier_timeout_secs=barrier_timeout_secs, **unknown
        )
        self._save = BackgroundSave(timeout_secs)

    def save(self, path: Place, item: Any, *, force: bool = False, **kwargs: Any) -> None:
        """Take a snapshot of an object and save it in the background.

        Args:
            path: The path or URL of the checkpoint, which must not exist unless ``force`` is set.
            item: The object to save, which may be changed as soon as this method returns.
            force: Replace an existing checkpoint.
            **kwargs: Additional arguments for the handler.

        Raises:
            SaveFailedError: The previous save failed. The new save has been started nevertheless.
        """
        self._save.join()
        save = self._begin(path, item, force, kwargs)
        earlier = self._save.take_error()
        self._start(save, path)
        if earlier is not None:
            raise earlier

    def _start(self, save: Save, path: Place, **ended: Any) -> None:
        try:
            self._save.start(functools.partial(self._complete, save), what=str(as_location(path)), **ended)
        except BaseException as error:  # an interrupt, or a failure to start a thread
            save.give_up(error)
            raise

    def restore(self, path: Place, item: Any = None, **kwargs: Any) -> Any:
        """Wait for the save in progress, and then restore an object."""
        self._save.join()
        return super().restore(path, item, **kwargs)

    def wait_until_finished(self) -> None:
        """Wait for the save in progress; raise SaveFailedError if it fails."""
        self._save.wait()

    def check_for_errors(self) -> None:
        """Raise SaveFailedError, without waiting, if a save has failed and its error has not been raised yet."""
        self._save.check()

    def close(self) -> None:
        """Wait for the save in progress; raise SaveFailedError if it fails."""
        self._save.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_save(handler: AsyncCheckpointHandler, path: Place, item: Any, *, force: bool) -> Future[SaveReport]:
    """Take a snapshot of an object and save it in the background; several such saves may run concurrently."""
    from .futures import SaveFuture  # imported lazily because importing concurrent.futures is slower than a save

    checkpointer = AsyncCheckpointer(handler)
    future = SaveFuture(checkpointer._save)
    checkpointer._start(checkpointer._begin(path, item, force, {}), path, ended=future.end)
    return future


class PyTreeCheckpointer(Checkpointer):
    """A :class:`Checkpointer` for trees of arrays.

    Args:
        clock: The clock that provides the time of the commit.
        coordinator: Connects the processes, as for :class:`Checkpointer`.
    """

    def __init__(self, *, clock: Clock | None = None, coordinator: Coordinator | None = None, **unknown: Never) -> None:
        super().__init__(PyTreeCheckpointHandler(), clock=clock, coordinator=coordinator, **unknown)


# ---- the items of a checkpoint


class OwnItems:
    """The items of a holdfast checkpoint, as listed in its commit record."""

    def __init__(self, location: Location, record: CheckpointRecord) -> None:
        self.location = location
        self.record = record
        self.names: Collection[str] = record.items.keys()

    def only_name(self, handler: CheckpointHandler) -> str:
        """Return the name under which a checkpointer saves its only object."""
        return ITEM

    def restore(self, name: str, handler: CheckpointHandler, template: Any, kwargs: Mapping[str, Any]) -> Any:
        """Restore an item; raise OptionError if a handler of another kind saved it."""
        saved = self.record.items[name]
        folder = self.location / saved.folder
        if handler.kind != saved.kind:
            raise OptionError(
                f"{folder} was written by a handler of kind {saved.kind!r:.80}; {type(handler).__name__} is of kind "
                f"{handler.kind!r}. Restore it with the handler that it was saved with"
            )
        if not handler.verifies:
            check_files(folder, saved.files)
        try:
            return handler.restore(folder, template, **_records(handler, saved), **kwargs)
        except UnknownArgumentError as error:
            raise UnknownArgumentError(f"{folder} was not restored: {error}") from None

    def structure(self, name: str, handler: CheckpointHandler) -> Any:
        """Describe an item without reading its data; return None if its handler does not support this."""
        saved = self.record.items[name]
        return handler.structure(self.location / saved.folder, **_records(handler, saved))


def _records(handler: CheckpointHandler, saved: ItemRecord) -> dict[str, Any]:
    return {"files": saved.files} if handler.verifies else {}


class OtherItems:
    """The items (trees and JSON) of another library's checkpoint, with the interface of :class:`OwnItems`."""

    def __init__(self, source: CheckpointSource) -> None:
        self.location = source.location
        self.names: Collection[str] = source.items.keys()
        self._source = source

    def only_name(self, handler: CheckpointHandler) -> str:
        items = self._source.items
        if not isinstance(handler, JsonCheckpointHandler):
            how = "restore it with a CheckpointManager of these items, or with hf.load(path, item=...)"
            return self._source.only_tree(how=how)
        names = [name for name, kind in items.items() if kind == JSON]
        if len(names) != 1:
            raise OptionError(f"{self.location} has the items {', '.join(sorted(items))}; not one of JSON")
        return names[0]

    def restore(self, name: str, handler: CheckpointHandler, template: Any, kwargs: Mapping[str, Any]) -> Any:
        kind = self._source.items[name]
        if isinstance(handler, PyTreeCheckpointHandler) and kind == TREE:
            return handler.restore(self.location, template, source=self._source.tree(name), **kwargs)
        if isinstance(handler, JsonCheckpointHandler) and kind != TREE and not kwargs:
            return self._source.value(name)
        raise OptionError(
            f"{self.location}: {type(handler).__name__} cannot restore item {name!r} ({kind}) of this "
            f"{self._source.format} checkpoint; hf.load(path, item={name!r}) reads trees and JSON"
        )

    def structure(self, name: str, handler: CheckpointHandler) -> Any:
        if isinstance(handler, PyTreeCheckpointHandler) and self._source.items[name] == TREE:
            return handler.structure(self.location, source=self._source.tree(name))
        return self.restore(name, handler, None, {}) if isinstance(handler, JsonCheckpointHandler) else None


StoredItems = OwnItems | OtherItems
