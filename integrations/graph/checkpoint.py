"""The checkpoint object: the objects attached to it are saved, and restored by name."""

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
    managers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # they count steps from the last restore
    reported: Mapping[Path, str] = field(default_factory=dict)  # skipped objects that the last save has logged
    restorations: list[Restoration] = field(default_factory=list)  # restores with values for later objects
    saver: _GraphSaver = field(default_factory=lambda: _GraphSaver())


class Checkpoint(Node):
    """Saves and restores the objects that are attached to it, by the names of the attributes that lead to them.

    Objects are torch modules and optimizers, flax nnx modules and optimizers, pytrees such as a ``TrainState``, arrays,
    numbers and text, lists, dictionaries, plain objects with attributes, and objects with ``get_state`` and
    ``set_state`` or ``state_dict`` and ``load_state_dict``, such as data iterators. An object that can be reached in
    several ways is saved once.

    Args:
        root: An object whose own attributes are saved as if they were the checkpoint's; or a weak reference to one.
        **objects: The objects to attach, by name.

    Raises:
        OptionError: A name is taken: by the root, or by a method of this class.

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
                    raise OptionError(f"{name}= is another object than the root's own {name!r}; choose another name")
        super().__init__(**objects)

    @property
    def save_counter(self) -> int:
        """The number of the last numbered save; 0 before the first."""
        return self._holdfast.counter or 0

    def save(self, prefix: Place, *, background: bool = False, layout: Layout | None = None) -> str:
        """Save to ``<prefix>-<number>``, with the next number that is free.

        Args:
            prefix: A path or URL whose last part is the beginning of a name.
            background: Return as soon as the objects may change again, and write then.
            layout: Sizes of chunks, segments and data files.

        Returns:
            The path of the checkpoint.

        Raises:
            UnsupportedLeafError: An attached object cannot be saved; nothing was written.
            StateError: Values of an earlier restore still wait for their objects, or objects for their values.
            SaveFailedError: The background save before this one failed; this one is done nevertheless.
        """
        base, saver = as_location(prefix, writes=True), self._holdfast.saver
        number = saver.next_number(base, self.save_counter)
        location = base.parent / f"{base.name}-{number}"
        with numbered(self, number) as item:
            return saver.put(location, item, number, background=background, layout=layout)

    def write(
        self, path: Place, *, overwrite: bool = False, background: bool = False, layout: Layout | None = None
    ) -> str:
        """Save to exactly this path; nothing is numbered.

        Args:
            path: A path or URL.
            overwrite: Replace a checkpoint that is there.
            background: Return as soon as the objects may change again, and write then.
            layout: Sizes of chunks, segments and data files.

        Returns:
            The path.

        Raises:
            CheckpointExistsError: Something is there already.
            UnsupportedLeafError: An attached object cannot be saved; nothing was written.
            StateError: Values of an earlier restore still wait for their objects, or objects for their values.
            SaveFailedError: The background save before this one failed; this one is done nevertheless.
        """
        location = as_location(path, writes=True)
        saver = self._holdfast.saver
        return saver.put(location, snapshot(self), overwrite=overwrite, background=background, layout=layout)

    def unsaved(self) -> Mapping[str, str]:
        """Return the objects that can be reached from here and are not saved, each with the reason."""
        return {format_node_path(path): reason for path, reason in walk(self, strict=False).skipped.items()}

    def wait_until_finished(self) -> None:
        """Wait for the save that is under way; raise SaveFailedError if it failed."""
        self._holdfast.saver.wait_until_finished()

    def close(self) -> None:
        """Wait for the save that is under way; raise SaveFailedError if it failed."""
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
        """Restore the objects that are attached now, and those attached later as soon as they are.

        Tensors, numpy arrays and nnx variables change in place; a value that cannot change is replaced where it is
        attached. Shapes and dtypes are validated before anything is changed.

        Args:
            path: A checkpoint, or a directory of numbered ones, whose newest is taken; None restores nothing.
            partial: As `RestoreStatus.expect_partial`; and finding nothing at all is no error.
            rename: For paths in the checkpoint, such as ``"net/l1"``, the paths in the program; or a path and a
                function of the array, such as ``("net/l1/kernel", np.transpose)``.
            select: Patterns of paths such as ``"net/**"``; only values that match are restored.
            exclude: Patterns of paths; values that match stay as they are.

        Returns:
            The status: assertions about the match, and the report.

        Raises:
            CheckpointNotFoundError: There is none.
            DamagedCheckpointError: It does not verify; nothing was changed.
            TreeMismatchError: Objects have other shapes or dtypes than their values, or nothing at all was found in the
                checkpoint; nothing was changed.
            UnsupportedLeafError: An attached object can be neither saved nor restored, and neither ``partial`` nor a
                choice of paths says that this is intended; nothing was changed.
        """
        if path is None:
            return RestoreStatus(None, self)
        template = CheckpointTemplate(self, partial=partial, rename=rename, select=select, exclude=exclude)
        return template.prepare(self._open(path))()

    def read(
        self,
        path: Place,
        *,
        partial: bool = False,
        rename: Rename | None = None,
        select: Patterns | None = None,
        exclude: Patterns | None = None,
    ) -> RestoreStatus:
        """Restore without touching the number of the next save: the counterpart of :meth:`write`.

        Args, result and errors are as for :meth:`restore`.
        """
        template = CheckpointTemplate(
            self, counts=False, partial=partial, rename=rename, select=select, exclude=exclude
        )
        return template.prepare(self._open(path))()

    def peek(self, path: Place) -> Peek:
        """Return what a restore would read: the step, and the numbers and texts of the program.

        This is for programs that must build objects for the step that they resume from. Nothing changes.

        Args:
            path: A checkpoint, or a directory of numbered ones, whose newest is taken.

        Returns:
            The step, metrics, and numbers and texts by their paths, such as ``{"epoch": 3}``; not the numbers and
            texts of optimizers, modules and objects with their own state.

        Raises:
            CheckpointNotFoundError: There is none.
            DamagedCheckpointError: It does not verify.
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
            raise CheckpointNotFoundError(f"{error}; do you mean {location.name}-1 or the like?") from error


def snapshot(checkpoint: Checkpoint) -> CapturedGraph:
    """Return what a save writes; log skipped objects; raise StateError or UnsupportedLeafError."""
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
    """Yield the snapshot of a numbered save; the number becomes free again if the save fails at once."""
    state = checkpoint._holdfast
    before, state.counter = state.counter, number
    try:
        yield snapshot(checkpoint)
    except SaveFailedError:  # of the previous save: this one is under way, or done
        raise
    except BaseException:
        state.counter = before
        raise


@dataclass(frozen=True)
class CheckpointTemplate:
    """The values of a graph that a checkpoint object takes; the arguments are those of `Checkpoint.restore`."""

    checkpoint: Checkpoint
    _: KW_ONLY
    counts: bool = True  # whether the number of the next save is restored
    partial: bool = False
    rename: Rename | None = None
    select: Patterns | None = None
    exclude: Patterns | None = None

    def prepare(self, stored: StoredGraph) -> Callable[[], RestoreStatus]:
        """Read and compare the values; return a function that changes the objects and returns the status."""
        checkpoint, state = self.checkpoint, self.checkpoint._holdfast
        if not (self.partial or self.select or self.exclude):
            check(checkpoint)  # objects that cannot be saved are an error now, not at the first save
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
                    other.retire()  # this restore has all values that the other one waits for
            state.restorations = [other for other in state.restorations if not other.retired and other.progress.left()]
            state.restorations.append(restoration)
            for manager in state.managers if self.counts else ():
                manager._note_restore(stored)
            return RestoreStatus(restoration, checkpoint)

        return apply


class _GraphSaver(AsyncCheckpointer):
    """Saves graphs, numbered or not, at once or in the background."""

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
        saver = copy.copy(self)  # Another thread, or the handler of a signal, may save meanwhile.
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
        """Wait for the save that is under way, and keep its error."""
        self._save.join()

    def next_number(self, prefix: Location, counter: int) -> int:
        """Return the next free number, the same on all processes."""
        decide = partial(self._processes.decide, f"number {prefix.url}")
        return int(decide(lambda: max([counter, *numbers_of(prefix.parent, prefix.name)]) + 1))

    def _record(self, items: Mapping[str, ItemRecord]) -> CheckpointRecord:
        record = super()._record(items)
        if self._number is None:
            return record
        # Retention policies are for checkpoints of a manager; these stay until a user removes them.
        return replace(record, step=self._number, pinned=True, reason="saved by Checkpoint.save")
