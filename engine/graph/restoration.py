"""One restore: values are validated, read and written, now for the objects that exist, later for those that turn up."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import TreeMismatchError
from ..item import SavedLeaf, naming
from ..tree import Saved, collection_paused, compare, describe_template, display, materialize, unescape_key
from ..tree.frameworks import is_torch_tensor
from ..tree.python_leaves import is_python_value
from ..tree.structure import KeyProblem, key_segments
from .capture import OWN
from .cells import Cell, StateCell, write
from .contents import PLAIN_KINDS, EntryCell, PlainValues
from .ledger import Proxy, last_restore, next_number, note_restore
from .matching import Assignment, Matching
from .outcome import Outcome
from .paths import Path, PathFilter, Patterns, shown
from .report import RestoreReport
from .saved import Rename
from .slots import is_simple
from .stored import StoredGraph
from .torch_objects import TensorCell, like_state_of
from .tracked import Node, expect, forget
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
        self._stored = stored
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
        }
        self._matching = Matching(graph, PlainValues(graph, plain))
        self._ignored = frozenset(ignore)
        self._filter = PathFilter(select, exclude)
        self._paths = {number: graph.path(number) for number, _ in graph.values()}
        self._filter.check(self._paths.values())
        self._wanted = {number for number, path in self._paths.items() if self._chooses(path)}
        self.outcome = Outcome(self._paths, self._wanted, str(stored.checkpoint))
        weakref.finalize(self, self.outcome.warn).atexit = False
        self._proxies: list[Proxy] = []
        self._kept_for = {value: one for node in graph.nodes for one, _, value in node.slots}
        self._settled: set[Path] = set()
        self._retired = False
        self._holders: list[weakref.ref[Any]] = []

    @property
    def done(self) -> bool:
        """Whether everything was restored, and nobody needs to know of that any more."""
        return self._retired or not (self.outcome.unrestored() or self._proxies)

    def retire(self) -> None:
        """Ends the restore: what turns up from now on is somebody else's."""
        self._retired = True
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
                self._apply(list(self._matching.from_root(root)))

    def resume(self, holder: object, key: object = None) -> None:
        """Restores what has turned up below a holder since: under one key, or anywhere."""
        self._apply(list(self._matching.from_holder(holder, key)))

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
            for number in self._matching.bindings
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
        conflicts = self._matching.conflicts.items()
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

    def _apply(self, found: list[Assignment]) -> None:
        due: list[Assignment] = []
        taken: dict[tuple[int, Path], Assignment] = {}
        for one in found:
            if one.path in self._settled or not all(
                number in self._wanted and self._chooses(path) for number, path in _values(one)
            ):
                continue
            place = id(one.cell.anchor), one.cell.trail
            if last_restore(one.cell) >= self._number or place in taken:
                self._note(one)  # by a later restore, or by way of another path
                if (first := taken.get(place)) and first.saved != one.saved:
                    what = "%s and %s are one object, and two in the checkpoint; it gets the value of the first"
                    _logger.warning(what, shown(first.path), shown(one.path))
                continue
            taken[place] = one
            due.append(one)
        self._write(due)
        for one in due:
            self._note(one)
        self._wait()

    def _note(self, one: Assignment) -> None:
        self._settled.add(one.path)
        for number, path in _values(one):
            self.outcome.restored.add(number)
            self._settled.add(path)
            self._matching.unused.pop(number, None)

    def _wait(self) -> None:
        """Has holders tell of what is attached to them, as long as values wait for that."""
        left = not self.outcome.restored >= self._wanted
        for holder in self._matching.waiting:
            for target in (holder, holder.__holdfast_root__() if isinstance(holder, Node) else None):
                if left and not self._retired and expect(target, self):
                    self._holders.append(weakref.ref(target))
        self._matching.waiting.clear()
        if left and not self._retired:
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
        trees: list[Assignment] = []
        leaves: list[Assignment] = []
        for one in due:
            whole = one.covers is not None or isinstance(one.cell, StateCell)
            is_tree = whole or self._value(one) not in self._stored.leaves
            (trees if is_tree else leaves).append(one)
        changes: list[tuple[Cell, Any]] = [(one.cell, self._tree(one)) for one in trees]
        changes += zip([one.cell for one in leaves], self._materialized(leaves), strict=True)
        write(changes)
        for one in due:
            note_restore(one.cell, self._number)
            if isinstance(one.cell.anchor, Proxy):
                self._proxies.append(one.cell.anchor)  # what was noted of it is known as long as it lives

    def _value(self, one: Assignment) -> str:
        """Returns the storage name of a value."""
        return self._matching.graph.nodes[one.saved].value or ""

    def _tree(self, one: Assignment) -> Any:
        if one.covers is not None:
            return self._contents(one, one.covers)
        if not isinstance(one.cell, StateCell):
            live = one.cell.get()
            if live is not ... and is_simple(live) and live is not None and not is_python_value(live):
                raise TreeMismatchError(
                    f"{shown(one.path)}: expected one array (program), found a tree of values (checkpoint)"
                )
        return self._stored.load(self._value(one))

    def _contents(self, one: Assignment, covers: list[tuple[int, Path]]) -> Any:
        """Returns a plain value, or a container of such values and of empty ones."""
        graph, plain = self._matching.graph, self._matching.plain

        def keys(number: int) -> dict[str, Any]:
            return self._stored.keys_at(graph.place(number))

        if isinstance(one.cell, EntryCell):
            segment = one.cell.trail[-1]
            one.cell.key = keys(one.cell.holder).get(segment, unescape_key(segment))
        numbers = [number for number, _ in covers]
        values = self._stored.values([str(graph.nodes[number].value) for number in numbers])
        return plain.build(one.saved, dict(zip(numbers, values, strict=True)), keys)

    def _materialized(self, due: list[Assignment]) -> list[Any]:
        """Returns the values for leaves, each like what is in the program."""
        nodes = [self._matching.graph.nodes[one.saved] for one in due]
        saved = [self._stored.leaves[self._value(one)].saved for one in due]
        arrays: list[NDArray[Any] | None] = []
        if any(node.transform is not None for node in nodes):
            arrays = self._read(due)
            for index, node in enumerate(nodes):
                if node.transform is not None:
                    arrays[index] = changed = np.ascontiguousarray(node.transform(arrays[index]))
                    saved[index] = Saved({"kind": "numpy"}, changed.dtype, changed.shape)
        templates = [_template(one, leaf) for one, leaf in zip(due, saved, strict=True)]
        names = [".".join(one.path) for one in due]
        targets = describe_template(names, templates)
        differences = [
            difference
            for target, leaf in zip(targets, saved, strict=True)
            if (difference := compare(target, leaf)) is not None
        ]
        differences += [what for one, leaf in zip(due, saved, strict=True) if (what := self._problem(one, leaf))]
        if differences:
            raise TreeMismatchError(
                f"{self.outcome.where}: {len(differences)} objects do not fit their values in the checkpoint; "
                "nothing was changed. Leave them out with exclude=, or change them:",
                [line.replace("(template)", "(program)") for line in differences],
            )
        if not arrays:
            arrays = self._read(due)
        with naming(self._stored.location):
            values = materialize(targets, saved, arrays, names)
        return [_likened(one, leaf, value) for one, leaf, value in zip(due, saved, values, strict=True)]

    def _read(self, due: list[Assignment]) -> list[NDArray[Any] | None]:
        """Reads arrays; one that has several places in the program is copied, as each becomes a part of the result."""
        names = [self._value(one) for one in due]
        unique = list(dict.fromkeys(names))
        found = dict(zip(unique, self._stored.read(unique), strict=True))
        used: set[str] = set()
        arrays = []
        for name in names:
            array = found[name]
            arrays.append(array.copy() if array is not None and name in used else array)
            used.add(name)
        return arrays

    def _problem(self, one: Assignment, leaf: Saved) -> str | None:
        """Says why a tensor cannot take its value, or what an optimizer kept does not fit its parameter."""
        if isinstance(one.cell, TensorCell) and one.cell.overlaps:
            return f"{shown(one.path)}: elements of this tensor share memory, as after expand(); make a copy of it"
        if one.likeness is None or not leaf.shape or one.cell.get() not in (None, ...):
            return None
        own = tuple(TensorCell(one.likeness[0]).template(leaf.shape).shape)
        kept_for = self._kept_for.get(one.saved)
        parameter = None if kept_for is None else self._leaf(kept_for)
        if parameter is None or not parameter.saved.shape == leaf.shape != own:
            return None
        where = display(".".join(one.path))
        return f"{where}: expected shape {list(own)} (its parameter), found {list(leaf.shape)} (checkpoint)"

    def _leaf(self, number: int) -> SavedLeaf | None:
        value = self._matching.graph.nodes[number].value
        return None if value is None else self._stored.leaves.get(value)


def _values(one: Assignment) -> list[tuple[int, Path]]:
    """Returns the values that an assignment restores, each with its path in the program."""
    if one.covers is None:
        return [(one.saved, one.path)]
    return [(number, (*one.path, *below)) for number, below in one.covers]


def _template(one: Assignment, leaf: Saved) -> Any:
    """Returns what the value has to be like; ``...`` where anything will do."""
    if isinstance(one.cell, TensorCell):
        return one.cell.template(leaf.shape or ())
    live = one.cell.get()
    if live is None or live is ... or (is_python_value(live) and leaf.kind == "none"):
        return ...  # a place for a value that was not there yet, or is not there any more
    if not (is_simple(live) or hasattr(live, "dtype")):
        return ...  # a container that an optimizer keeps
    return live


def _likened(one: Assignment, leaf: Saved, value: Any) -> Any:
    """Makes the tensors that an optimizer does not have yet."""
    if one.likeness is None or leaf.kind != "torch" or is_torch_tensor(value):
        return value
    parameter, name, group = one.likeness
    return like_state_of(parameter, name, value, group)
