"""One restore: values are validated, read and written, now for the objects that exist, later for those that turn up."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any

from ..tree import collection_paused
from ..tree.structure import KeyProblem, key_segments
from .capture import OWN
from .cells import Assignment, write
from .contents import PLAIN_KINDS, PlainValues
from .ledger import Proxy, last_restore, next_number, note_restore
from .matching import Matching
from .outcome import Outcome
from .paths import Path, PathFilter, Patterns, shown
from .report import RestoreReport
from .saved import Rename
from .stored import StoredGraph
from .tracked import Node, expect, forget
from .values import Values
from .views import COUNTER
from .walk import walk

_logger = logging.getLogger("holdfast")
_waiting: weakref.WeakSet[Restoration] = weakref.WeakSet()


def others_wait(restoration: Restoration) -> bool:
    """Whether other restores still wait for objects."""
    return any(other is not restoration for other in _waiting)


class Restoration:
    """A restore into a root and everything that can be reached from it.

    Args:
        stored: The checkpoint.
        root: Where to begin; it is not kept alive.
        rename: For paths in the checkpoint the paths in the program.
        select: Patterns of paths in the program; only values that match are restored.
        exclude: Patterns of paths in the program; values that match stay as they are.
        ignore: Paths that are neither restored nor missed, whether they are there or not.

    Attributes:
        outcome: Which values were restored.
        retired: Whether a later restore has taken over all that it waits for.
        told: The paths of values whose objects a save has found.
    """

    def __init__(
        self,
        stored: StoredGraph,
        root: Node,
        *,
        rename: Rename | None = None,
        select: Patterns | None = None,
        exclude: Patterns | None = None,
        ignore: Iterable[Path] = (),
    ) -> None:
        self._root = weakref.ref(root)
        self._number = next_number()
        graph = stored.graph.renamed(rename) if rename else stored.graph
        plain = {
            number
            for number, node in graph.values()
            if (leaf := stored.leaves.get(str(node.value))) is not None
            and leaf.saved.kind in PLAIN_KINDS
            and not str(node.value).startswith(OWN)
            and node.transform is None
            and not node.type  # no box, which the program has to make
        }
        self._matching = Matching(graph, PlainValues(graph, plain))
        self._values = Values(stored, graph, self._matching.plain, str(stored.checkpoint))
        self._ignored = frozenset(ignore)
        self._filter = PathFilter(select, exclude)
        self._paths = {number: graph.path(number) for number, _ in graph.values()}
        self._filter.check(self._paths.values())
        self._wanted = {number for number, path in self._paths.items() if self._chooses(path)}
        self.outcome = Outcome(self._paths, self._wanted, str(stored.checkpoint))
        weakref.finalize(self, self.outcome.warn).atexit = False
        self._proxies: list[Proxy] = []
        self._left = len(self._wanted)
        self._settled: set[Path] = set()
        self.retired = False
        self.told: set[Path] = set()
        self._holders: list[weakref.ref[Any]] = []

    @property
    def done(self) -> bool:
        """Whether everything was restored, and nobody needs to know of that any more."""
        return self.retired or not (self.outcome.unrestored() or self._proxies)

    def retire(self) -> None:
        """Ends the restore: what turns up from now on is somebody else's."""
        self.retired = True
        self.outcome.partial = True
        self._stop_waiting()

    def advance(self) -> None:
        """Restores everything that can be reached from the root and was not restored yet.

        Raises:
            TreeMismatchError: An object does not fit its value; names all such objects. Nothing has been changed.
            DamagedCheckpointError: A value does not verify. Nothing has been changed.
        """
        root = self._root()
        if root is not None:
            with collection_paused():
                self._apply(self._matching.from_root(root))

    def resume(self, holder: object, key: object = None) -> None:
        """Restores what has turned up below a holder since: under one key, or anywhere.

        Raises:
            TreeMismatchError: An object does not fit its value. Nothing has been changed, and what has turned up counts
                as not having done so.
        """
        self._apply(self._matching.from_holder(holder, key))

    def awaited(self) -> list[Path]:
        """Returns the paths of values that `advance` would restore now; they stay as they are."""
        root = self._root()
        if root is None:
            return []
        due, known = self._sorted(self._matching.from_root(root))
        for one in known:
            self._note(one)
        self._wait()
        return [path for one in due for _, path in _values(one)]

    def expects_below(self, holder: object, key: object) -> bool:
        """Tells whether there are values for what may be attached below a key of a holder."""
        try:
            (segment,) = [str(key)] if isinstance(key, int) else key_segments([key])
        except KeyProblem:
            return False
        number = self._matching.node_at(holder, segment)
        return number is not None and bool(self._matching.graph.nodes[number].edges)

    @property
    def found_anything(self) -> bool:
        """Whether anything but the root was found in the checkpoint."""
        graph = self._matching.graph
        return any(
            number != 0 and path != (COUNTER,) and (number not in self._paths or self._chooses(path))
            for number in self._matching.bindings.numbers()
            if (path := graph.path(number)) is not None
        )

    def wanted(self) -> set[Path]:
        """Returns the values of the checkpoint that it restores."""
        return {self._paths[number] for number in self._wanted}

    def report(self, root: Node) -> RestoreReport:
        """Says what is restored and what is not, as the program is now."""
        live = walk(root, strict=False)
        restored, missing = [], []
        for node in live.leaves():
            cell = node.view.cell  # type: ignore[union-attr]  # leaves have one
            if node.path in self._settled or last_restore(cell) >= self._number:
                restored.append(shown(node.path))
            elif self._chooses(node.path):
                missing.append(shown(node.path))
        unused = self._matching.unused
        left = self.outcome.left()
        conflicts = self._matching.bindings.conflicts.items()
        return RestoreReport(
            checkpoint=self.outcome.where,
            restored=tuple(restored),
            missing=tuple(missing),
            pending=tuple(shown(self._paths[number]) for number in left if number not in unused),
            unused=tuple(shown(self._paths[number]) for number in left if number in unused),
            conflicts=tuple(
                (shown(self._matching.graph.path(number)), shown(one), shown(other))
                for number, (one, other) in conflicts
            ),
            skipped=tuple((shown(path), reason) for path, reason in live.skipped.items()),
            nontrivial=self.found_anything,
        )

    def _chooses(self, path: Path) -> bool:
        return path not in self._ignored and self._filter.chooses(path)

    # ---- from values to cells

    def _apply(self, found: Iterable[Assignment]) -> None:
        try:
            due, known = self._sorted(found)
            self._write(due)
        except BaseException:
            self._matching.undo()
            raise
        for one in due + known:
            self._note(one)
        self._wait()

    def _sorted(self, found: Iterable[Assignment]) -> tuple[list[Assignment], list[Assignment]]:
        """Returns what is to be restored, and what was by a later restore, or is by way of another path."""
        due: list[Assignment] = []
        known: list[Assignment] = []
        taken: dict[tuple[int, Path], Assignment] = {}
        for one in found:
            if one.path in self._settled or not all(
                number in self._wanted and self._chooses(path) for number, path in _values(one)
            ):
                continue
            place = id(one.cell.anchor), one.cell.trail
            if last_restore(one.cell) >= self._number or place in taken:
                known.append(one)
                if (first := taken.get(place)) and first.saved != one.saved:
                    what = "%s and %s are one object, and two in the checkpoint; it gets the value of the first"
                    _logger.warning(what, shown(first.path), shown(one.path))
                continue
            taken[place] = one
            due.append(one)
        return due, known

    def _note(self, one: Assignment) -> None:
        self._settled.add(one.path)
        for number, path in _values(one):
            if number in self._wanted and number not in self.outcome.restored:
                self._left -= 1
            self.outcome.restored.add(number)
            self._settled.add(path)
            self._matching.unused.pop(number, None)

    def _wait(self) -> None:
        """Has holders tell of what is attached to them, as long as values wait for that."""
        left = self._left > 0
        for holder in self._matching.waiting:
            for target in (holder, holder.__holdfast_root__() if isinstance(holder, Node) else None):
                if left and not self.retired and expect(target, self):
                    self._holders.append(weakref.ref(target))
        self._matching.waiting.clear()
        if left and not self.retired:
            _waiting.add(self)
        else:
            self._stop_waiting()
            self._proxies = self._proxies if others_wait(self) else []

    def _stop_waiting(self) -> None:
        for reference in self._holders:
            forget(reference(), self)
        self._holders.clear()
        _waiting.discard(self)

    def _write(self, due: list[Assignment]) -> None:
        """Validates everything, reads everything, and only then changes anything."""
        write(self._values.of(due))
        for one in due:
            note_restore(one.cell, self._number)
            if isinstance(one.cell.anchor, Proxy):
                self._proxies.append(one.cell.anchor)  # what was noted of it is known as long as it lives


def _values(one: Assignment) -> list[tuple[int, Path]]:
    """Returns the values that an assignment restores, each with its path in the program."""
    if one.covers is None:
        return [(one.saved, one.path)]
    return [(number, (*one.path, *below)) for number, below in one.covers]
