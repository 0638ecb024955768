"""The `Checkpoint` class, which saves the objects attached to it and restores them by name."""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

from ...engine.arrays import Layout
from ...engine.checkpoint import AsyncCheckpointer, Checkpointer
from ...engine.distributed import current_coordinator
from ...engine.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    OptionError,
    SaveFailedError,
    TreeMismatchError,
)
from ...engine.format import RECORD, CheckpointRecord, ItemRecord
from ...engine.manager import Peek
from ...engine.pytree import PathFilter, Patterns, collection_paused
from ...engine.storage import Location, Place, as_location
from .reader import locate, numbers_of, plain_values, saved_counter
from .restoration import Restoration, RestoreStatus, check_restored, describe_no_match
from .saved import Rename
from .slots import Path, format_node_path
from .stored import CapturedGraph, GraphCheckpointHandler, StoredGraph, capture, open_graph
from .tracked import Node, NodeState, stand_for
from .views import COUNTER, root_view
from .walk import check, walk

_logger = logging.getLogger("holdfast")


@dataclass(slots=True, eq=False)
class _CheckpointState(NodeState):
    managers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # managers to notify of each restore
    reported: Mapping[Path, str] = field(default_factory=dict)  # skip reasons and notes of the last save, keyed by path
    restorations: list[Restoration] = field(default_factory=list)  # restores that have values left to assign
    saver: _GraphSaver = field(default_factory=lambda: _GraphSaver())


class Checkpoint(Node):
    """Saves and restores the objects attached to it, identifying each object by its path of attribute names.

    Objects can be torch modules and optimizers, flax nnx modules and optimizers, pytrees like a ``TrainState``, arrays,
    numbers and strings, lists, dictionaries, plain objects with attributes, and objects with ``get_state`` and
    ``set_state`` or ``state_dict`` and ``load_state_dict``, such as data iterators. An object that can be reached by
    several paths is saved only once.

    Args:
        root: An object whose attributes are saved like the checkpoint's own, or a weak reference to that object.
        **objects: The objects to attach, by name.

    Raises:
        OptionError: A name is already used by the root or by a method of this class.

    >>> import tempfile, numpy as np
    >>> weights, loaded = np.arange(3.0), np.zeros(3)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = Checkpoint(net=Node(weights=weights), step=7).save(f"{directory}/ckpt")
    ...     restored = Checkpoint(net=Node(weights=loaded), step=0)
    ...     _ = restored.restore(path).assert_consumed()
    >>> loaded, restored.step
    (array([0., 1., 2.]), 7)
    """

    _holdfast_state = _CheckpointState
    _holdfast: _CheckpointState

    def __init__(self, /, root: Any = None, **objects: Any) -> None:
        stand_for(self, root)
        if root is not None:
            of_root = {edge.segment: edge.value for edge in root_view(self).edges}
            for name, value in objects.items():
                if of_root.get(name, value) is not value:
                    raise OptionError(f"{name}= is not the same object as the root's own {name!r}; choose another name")
        super().__init__(**objects)

    @property
    def save_counter(self) -> int:
        """The number of the most recent numbered save, or 0 if there has been none."""
        return self._holdfast.counter or 0

    def save(self, prefix: Place, *, background: bool = False, layout: Layout | None = None) -> str:
        """Save to ``<prefix>-<number>``, using the next free number.

        Args:
            prefix: A path or URL whose last component is the start of the checkpoint's name.
            background: Write in the background, and return as soon as it is safe to modify the objects.
            layout: Sizes of chunks, segments and data files.

        Returns:
            The path of the checkpoint.

        Raises:
            UnsupportedLeafError: An attached object cannot be saved; nothing was written.
            StateError: Saving would lose values that an earlier restore has not yet assigned to objects.
            SaveFailedError: The previous background save failed; the current save is performed anyway.
        """
        base, saver = as_location(prefix, writes=True), self._holdfast.saver
        number = saver.next_number(base, self.save_counter)
        location = base.parent / f"{base.name}-{number}"
        with numbered(self, number) as item:
            return saver.put(location, item, number, background=background, layout=layout)

    def write(
        self, path: Place, *, overwrite: bool = False, background: bool = False, layout: Layout | None = None
    ) -> str:
        """Save to exactly the given path, without adding a number.

        Args:
            path: A path or URL.
            overwrite: Replace an existing checkpoint at the path.
            background: Write in the background, and return as soon as it is safe to modify the objects.
            layout: Sizes of chunks, segments and data files.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointExistsError: The path already exists.
            UnsupportedLeafError: An attached object cannot be saved; nothing was written.
            StateError: Saving would lose values that an earlier restore has not yet assigned to objects.
            SaveFailedError: The previous background save failed; the current save is performed anyway.
        """
        location = as_location(path, writes=True)
        saver = self._holdfast.saver
        return saver.put(location, snapshot(self), overwrite=overwrite, background=background, layout=layout)

    def unsaved(self) -> Mapping[str, str]:
        """Return the reachable objects that are not saved, as a mapping from path to reason."""
        return {format_node_path(path): reason for path, reason in walk(self, strict=False).skipped.items()}

    def wait_until_finished(self) -> None:
        """Wait for the save in progress, and raise SaveFailedError if it fails."""
        self._holdfast.saver.wait_until_finished()

    def close(self) -> None:
        """Wait for the save in progress, and raise SaveFailedError if it fails."""
        self._holdfast.saver.wait_until_finished()

    def restore(
        self,
        path: Place | None,
        *,
        partial: bool = False,
        rename: Rename | None = None,
        select: Patterns | None = None,
        exclude: Patterns | None = None,
    ) -> RestoreStatus:
        """Restore all attached objects now, and any other objects as soon as they are attached.

        Tensors, numpy arrays and nnx variables are updated in place; immutable values are replaced in the object that
        holds them. Shapes and dtypes are validated before anything is changed.

        Args:
            path: The path of a checkpoint, or of a directory whose newest checkpoint is used; None restores nothing.
            partial: Allow values to stay unrestored (see `RestoreStatus.expect_partial`), even if nothing matches.
            rename: Maps paths in the checkpoint, such as ``"net/l1"``, to paths in the program, or to pairs of a path
                and a function to apply to the array, such as ``("net/l1/kernel", np.transpose)``.
            select: Path patterns such as ``"net/**"``; only matching values are restored.
            exclude: Path patterns; matching values are left unchanged.

        Returns:
            The status of the restore, with a report and methods that check whether program and checkpoint match.

        Raises:
            CheckpointNotFoundError: There is no checkpoint at the path.
            DamagedCheckpointError: The checkpoint fails verification; nothing was changed.
            TreeMismatchError: An object and its value differ in shape or dtype, or none of the objects is in the
                checkpoint; nothing was changed.
            UnsupportedLeafError: An attached object can be neither saved nor restored, and none of ``partial``,
                ``select`` and ``exclude`` is given; nothing was changed.
        """
        if path is None:
            return RestoreStatus(None, self)
        values = CheckpointTemplate(self, partial=partial, rename=rename, select=select, exclude=exclude)
        return values.prepare(self._open(path))()

    def read(
        self,
        path: Place,
        *,
        partial: bool = False,
        rename: Rename | None = None,
        select: Patterns | None = None,
        exclude: Patterns | None = None,
    ) -> RestoreStatus:
        """Restore without changing the number of the next save; this is the counterpart of :meth:`write`.

        The arguments, return value and exceptions are the same as for :meth:`restore`.
        """
        values = CheckpointTemplate(self, counts=False, partial=partial, rename=rename, select=select, exclude=exclude)
        return values.prepare(self._open(path))()

    def peek(self, path: Place) -> Peek:
        """Return the step, numbers and strings that a restore would read, without restoring anything.

        This is for programs that build different objects depending on the step they resume from.

        Args:
            path: The path of a checkpoint, or of a directory whose newest checkpoint is used.

        Returns:
            The step, the metrics, and the numbers and strings by path, such as ``{"epoch": 3}``. Values inside
            optimizers, modules and objects with their own state are left out.

        Raises:
            CheckpointNotFoundError: There is no checkpoint at the path.
            DamagedCheckpointError: The checkpoint fails verification.
        """
        return plain_values(self._open(path))

    def _open(self, path: Place) -> StoredGraph:
        self._holdfast.saver.join()
        try:
            with collection_paused():
                return open_graph(locate(path))
        except CheckpointNotFoundError as error:
            location = as_location(path)
            if not numbers_of(location.parent, location.name):
                raise
            raise CheckpointNotFoundError(f"{error}; did you mean {location.name}-1 or similar?") from error


def snapshot(checkpoint: Checkpoint) -> CapturedGraph:
    """Capture the objects for a save and log the skipped objects; raise StateError if the save would lose values."""
    state = checkpoint._holdfast
    check_restored(state.restorations)
    with collection_paused():
        live = walk(checkpoint)
        captured = capture(live, apart=current_coordinator().process_count > 1)
    reported = {**live.skipped, **live.notes}
    for path, reason in reported.items():
        if state.reported.get(path) != reason:
            if path in live.skipped:
                _logger.warning("%s: not saved: %s", format_node_path(path), reason)
            else:
                _logger.info("%s: %s", format_node_path(path), reason)
    state.reported = reported
    return captured


@contextlib.contextmanager
def numbered(checkpoint: Checkpoint, number: int) -> Iterator[CapturedGraph]:
    """Yield a snapshot for a numbered save; if the ``with`` block fails, reset the save counter."""
    state = checkpoint._holdfast
    before, state.counter = state.counter, number
    try:
        yield snapshot(checkpoint)
    except SaveFailedError:  # raised for the previous save; the current one is in progress or done
        raise
    except BaseException:
        state.counter = before
        raise


@dataclass(frozen=True)
class CheckpointTemplate:
    """A template for restoring a checkpoint object, with the arguments of `Checkpoint.restore`."""

    checkpoint: Checkpoint
    _: KW_ONLY
    counts: bool = True  # whether to restore the save counter
    partial: bool = False
    rename: Rename | None = None
    select: Patterns | None = None
    exclude: Patterns | None = None

    def prepare(self, stored: StoredGraph) -> Callable[[], RestoreStatus]:
        """Read and validate the values; return a function that assigns them and returns the status."""
        checkpoint, state = self.checkpoint, self.checkpoint._holdfast
        if not (self.partial or self.select or self.exclude):
            check(checkpoint)  # report unsupported objects now, rather than at the first save
        restoration = Restoration(
            stored, checkpoint, rename=self.rename, select=self.select, exclude=self.exclude, ignore=[(COUNTER,)]
        )
        prepared = restoration.prepare()
        if not self.partial and not restoration.found_anything and restoration.progress.left():
            report = restoration.report()
            if report.missing:
                raise TreeMismatchError(f"{describe_no_match(report)}\nIf that is intended, pass partial=True")
        counts = self.counts and PathFilter(self.select, self.exclude).chooses((COUNTER,))
        counter = saved_counter(stored) if counts else None

        def apply() -> RestoreStatus:
            prepared()
            if counter is not None:
                state.counter = counter
            if not self.partial:
                restoration.warn_of_missing()
            restoration.progress.partial = self.partial
            wanted = set(restoration.progress.wanted.values())
            for other in state.restorations:
                if wanted.issuperset(other.progress.left().values()):
                    other.retire()  # this restore has values for everything that `other` is waiting for
            state.restorations = [other for other in state.restorations if not other.retired and other.progress.left()]
            state.restorations.append(restoration)
            for manager in state.managers if self.counts else ():
                manager._note_restore(stored)
            return RestoreStatus(restoration, checkpoint)

        return apply


class _GraphSaver(AsyncCheckpointer):
    """Saves numbered and unnumbered checkpoints, in the foreground or in the background."""

    def __init__(self) -> None:
        super().__init__(GraphCheckpointHandler())
        self._number: int | None = None

    def put(
        self,
        location: Location,
        item: CapturedGraph,
        number: int | None = None,
        *,
        overwrite: bool = False,
        background: bool,
        layout: Layout | None,
    ) -> str:
        self.join()
        saver = copy.copy(self)  # a copy, because another thread or a signal handler may save at the same time
        saver._number, saver.background = number, background
        save = saver.save if background else partial(Checkpointer.save, saver)
        try:
            save(location, item, force=overwrite, layout=layout)
        except CheckpointExistsError as error:
            if overwrite or not (location / RECORD).exists():
                raise
            advice = "choose another path, or replace it with write(path, overwrite=True)"
            if number is not None:
                advice = "another program has saved under this number since; save again"
            raise CheckpointExistsError(f"{location}: a checkpoint is there already; {advice}") from error
        if not background:
            self.check_for_errors()
        return str(location)

    def join(self) -> None:
        """Wait for the save in progress without raising its error."""
        self._save.join()

    def next_number(self, prefix: Location, counter: int) -> int:
        """Return the next free number, agreed on by all processes."""
        decide = partial(self._processes.decide, f"number {prefix.url}")
        return int(decide(lambda: max([counter, *numbers_of(prefix.parent, prefix.name)]) + 1))

    def _record(self, items: Mapping[str, ItemRecord]) -> CheckpointRecord:
        record = super()._record(items)
        if self._number is None:
            return record
        # Pin the checkpoint, because without a manager there is no retention policy and only the user may delete it.
        return replace(record, step=self._number, pinned=True, reason="saved by Checkpoint.save")
