"""The checkpoint object: what is attached to it is saved, and restored by name."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any, Protocol, Self

from ..checkpointer import Place
from ..coordination import current_coordinator
from ..errors import CheckpointNotFoundError, OptionError, SaveFailedError, TreeMismatchError
from ..item import Layout
from ..storage import Location, as_location
from ..tree import collection_paused
from .capture import CapturedGraph, capture
from .latest import locate, numbers_of
from .paths import Path, Patterns, shown
from .pending import check_restored
from .restoration import Restoration
from .saved import Rename
from .saver import GraphSaver
from .status import RestoreStatus, nothing_matched
from .stored import StoredGraph, open_graph
from .tracked import Node
from .views import COUNTER
from .walk import root_view, walk

_logger = logging.getLogger("holdfast")


class _Manager(Protocol):
    """Whoever has to know of what was restored."""

    def note_restore(self, stored: StoredGraph) -> None: ...


class Checkpoint(Node):
    """Saves and restores the objects that are attached to it, by the names of the attributes that lead to them.

    Objects are torch modules and optimizers, flax nnx modules and optimizers, pytrees such as a ``TrainState``, arrays,
    numbers and text, lists, dictionaries, plain objects with attributes, and whatever has ``get_state`` and
    ``set_state`` or ``state_dict`` and ``load_state_dict``, such as data iterators. An object that can be reached in
    several ways is saved once.

    Args:
        root: An object whose own attributes are saved as if they were the checkpoint's; or a weak reference to one.
        **objects: What to attach.

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

    __slots__ = ("_holdfast_managers", "_holdfast_restorations", "_holdfast_saver", "_holdfast_told")
    _holdfast_managers: weakref.WeakSet[_Manager]
    _holdfast_restorations: list[Restoration]
    _holdfast_saver: GraphSaver | None
    _holdfast_told: dict[Path, str]

    def __init__(self, /, root: Any = None, **objects: Any) -> None:
        object.__setattr__(self, "_holdfast_root", root)
        if root is not None:
            known = {edge.segment: edge.value for edge in root_view(self).edges}
            for name, value in objects.items():
                if known.get(name, value) is not value:
                    raise OptionError(f"{name}= is another object than the root's own {name!r}; choose another name")
        super().__init__(**objects)

    def __new__(cls, *_: Any, **__: Any) -> Self:  # noqa: D102 - also called for copies, which have no __init__
        found = super().__new__(cls)
        for name, value in (("managers", weakref.WeakSet()), ("restorations", []), ("saver", None), ("told", {})):
            object.__setattr__(found, f"_holdfast_{name}", value)
        return found

    # ---- saving

    @property
    def save_counter(self) -> int:
        """The number of the last numbered save; 0 before the first."""
        return self._holdfast_counter or 0

    def save(self, prefix: Place, *, background: bool = False, layout: Layout | None = None) -> str:
        """Saves to ``<prefix>-<number>``, with the next number that is free.

        Args:
            prefix: A path or URL whose last part is the beginning of a name.
            background: Return as soon as the objects may change again, and write then.
            layout: Sizes of chunks, segments and data files.

        Returns:
            The path of the checkpoint.

        Raises:
            UnsupportedLeafError: Something that is attached cannot be saved; nothing was written.
            StateError: Values of an earlier restore still wait for their objects, or objects for their values.
            SaveFailedError: The background save before this one failed; this one is done nevertheless.
        """
        place = as_location(prefix)
        before = self._holdfast_counter
        number = self._saving().next_number(place, self.save_counter)
        object.__setattr__(self, "_holdfast_counter", number)
        try:
            return self._write(place.parent / f"{place.name}-{number}", number, background=background, layout=layout)
        except BaseException as error:
            if not (isinstance(error, SaveFailedError) and self._saving().began):  # then only the one before failed
                object.__setattr__(self, "_holdfast_counter", before)
            raise

    def write(
        self, path: Place, *, overwrite: bool = False, background: bool = False, layout: Layout | None = None
    ) -> str:
        """Saves to exactly this path; nothing is numbered.

        Args:
            path: A path or URL.
            overwrite: Replace a checkpoint that is there.
            background: Return as soon as the objects may change again, and write then.
            layout: Sizes of chunks, segments and data files.

        Returns:
            The path.

        Raises:
            CheckpointExistsError: Something is there already.
            UnsupportedLeafError: Something that is attached cannot be saved; nothing was written.
            StateError: Values of an earlier restore still wait for their objects, or objects for their values.
            SaveFailedError: The background save before this one failed; this one is done nevertheless.
        """
        return self._write(as_location(path), None, overwrite=overwrite, background=background, layout=layout)

    def unsaved(self) -> Mapping[str, str]:
        """Returns what can be reached from here and is not saved, each with the reason."""
        return {shown(path): reason for path, reason in walk(self, strict=False).skipped.items()}

    def wait_until_finished(self) -> None:
        """Waits for the save that is under way. Raises SaveFailedError if it failed."""
        self._saving().wait_until_finished()

    def close(self) -> None:
        """Waits for the save that is under way. Raises SaveFailedError if it failed."""
        self._saving().close()

    # ---- restoring

    def restore(
        self,
        path: Place | None,
        *,
        partial: bool = False,
        rename: Rename | None = None,
        select: Patterns | None = None,
        exclude: Patterns | None = None,
    ) -> RestoreStatus:
        """Restores the objects that are attached now, and, later, those that are attached then.

        Tensors, numpy arrays and nnx variables are changed in place; what cannot be changed is replaced where it hangs.
        Shapes and dtypes are validated before anything is changed.

        Args:
            path: A checkpoint, or a directory of numbered ones, of which the newest is taken; None restores nothing.
            partial: As `RestoreStatus.expect_partial`, and it is no error if nothing at all is found.
            rename: For paths in the checkpoint, such as ``"net/l1"``, the paths in the program; or a path and a
                function of the array, such as ``("net/l1/kernel", np.transpose)``.
            select: Patterns of paths such as ``"net/**"``; only values that match are restored.
            exclude: Patterns of paths; values that match stay as they are.

        Returns:
            The status: assertions about what was matched, and the report.

        Raises:
            CheckpointNotFoundError: There is none.
            DamagedCheckpointError: It does not verify; nothing was changed.
            TreeMismatchError: Objects have other shapes or dtypes than their values, or nothing at all was found in the
                checkpoint; nothing was changed.
        """
        if path is None:
            return RestoreStatus(None, self)
        stored = self._open(path)
        return self._restore(stored, partial=partial, counts=True, rename=rename, select=select, exclude=exclude)

    def read(
        self,
        path: Place,
        *,
        partial: bool = False,
        rename: Rename | None = None,
        select: Patterns | None = None,
        exclude: Patterns | None = None,
    ) -> RestoreStatus:
        """Restores without touching the number of the next save: the counterpart of :meth:`write`.

        Args:
            path: As for :meth:`restore`.
            partial: As for :meth:`restore`.
            rename: As for :meth:`restore`.
            select: As for :meth:`restore`.
            exclude: As for :meth:`restore`.

        Returns:
            The status.
        """
        stored = self._open(path)
        return self._restore(stored, partial=partial, counts=False, rename=rename, select=select, exclude=exclude)

    # ---- within

    def _open(self, path: Place) -> StoredGraph:
        self._saving().join()
        try:
            with collection_paused():
                return open_graph(locate(path))
        except CheckpointNotFoundError as error:
            location = as_location(path)
            if not numbers_of(location.parent, location.name):
                raise
            raise CheckpointNotFoundError(f"{error}; a name like {location.name}-1 may be meant") from error

    def _restore(
        self,
        stored: StoredGraph,
        *,
        partial: bool,
        counts: bool,
        rename: Rename | None = None,
        select: Patterns | None = None,
        exclude: Patterns | None = None,
    ) -> RestoreStatus:
        has_counter = COUNTER in stored.graph.nodes[0].edges
        ignore: set[Path] = set() if counts and has_counter else {(COUNTER,)}
        before = self._holdfast_counter
        if counts and before is None:
            object.__setattr__(self, "_holdfast_counter", 0)
        try:
            restoration = Restoration(stored, self, rename=rename, select=select, exclude=exclude, ignore=ignore)
            restoration.outcome.partial = True  # until it has begun well
            restoration.advance()
            status = RestoreStatus(restoration, self)
            if not partial and not restoration.found_anything and restoration.outcome.unrestored():
                report = status.report
                if report.missing:
                    raise TreeMismatchError(f"{nothing_matched(report)}\nIf that is as intended, pass partial=True")
        except BaseException:
            object.__setattr__(self, "_holdfast_counter", before)
            raise
        restoration.outcome.partial = partial
        for other in self._holdfast_restorations:
            if set(other.outcome.unrestored()) <= restoration.wanted():
                other.retire()  # all that it waits for is in the newer one
        waiting = [other for other in self._holdfast_restorations if not other.done]
        object.__setattr__(self, "_holdfast_restorations", [*waiting, restoration])
        for manager in self._holdfast_managers if counts else ():
            manager.note_restore(stored)
        return status

    def _capture(self) -> CapturedGraph:
        """Takes what is attached for a save."""
        check_restored(self._holdfast_restorations)
        with collection_paused():
            found = capture(walk(self), apart=current_coordinator().process_count > 1)
        told = {**found.skipped, **found.notes}
        for path, reason in told.items():
            if self._holdfast_told.get(path) != reason:
                if path in found.skipped:
                    _logger.warning("%s: not saved: %s", shown(path), reason)
                else:
                    _logger.info("%s: %s", shown(path), reason)
        object.__setattr__(self, "_holdfast_told", told)
        return found

    def _saving(self) -> GraphSaver:
        if self._holdfast_saver is None:
            object.__setattr__(self, "_holdfast_saver", GraphSaver())
        assert self._holdfast_saver is not None
        return self._holdfast_saver

    def _write(
        self,
        location: Location,
        number: int | None,
        *,
        overwrite: bool = False,
        background: bool = False,
        layout: Layout | None = None,
    ) -> str:
        saver = self._saving()
        kwargs = {} if layout is None else {"layout": layout}
        saver.put(location, self._capture(), number, overwrite=overwrite, background=background, kwargs=kwargs)
        return str(location)
