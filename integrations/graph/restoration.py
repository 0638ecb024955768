"""Restore existing objects immediately, and new objects when they are attached.

A save never restores values into objects that were built after the restore, because the program may have changed them
in the meantime. :func:`check_restored` rejects a save that would lose values still waiting to be restored.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from ...engine.distributed import current_coordinator
from ...engine.errors import StateError, UnmatchedObjectsError, shortened
from ...engine.pytree import KeyProblem, PathFilter, Patterns, collection_paused, is_torch_tensor, key_segments
from ...engine.sources import Misfits
from ...engine.stateful import is_stream
from .frameworks import is_module
from .matching import Matching
from .saved import Rename
from .slots import (
    Assignment,
    Keeper,
    MemberSlot,
    Path,
    StateSlot,
    format_node_path,
    format_section,
    last_writer,
    note_writer,
    restore_numbers,
    write_slots,
)
from .stored import StoredGraph
from .tracked import Node, Part, expect, forget
from .values import SavedValues
from .views import Leaf
from .walk import LiveGraph, LiveNode, walk

_logger = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """A report on the progress of a restore.

    A graph restore lists values by their paths, such as ``net/l1/weight``. A restore of a component tree lists
    components by their paths, with the root as ``(root)``, and their values as ``learner/p0: net/bias``.

    Attributes:
        checkpoint: The checkpoint's path or URL; ``""`` if no checkpoint was given.
        restored: Values or components in the program that were restored.
        missing: Values or components in the program that the checkpoint lacks; they are left unchanged.
        missing_values: Values that the checkpoint lacks, although their components were restored.
        pending: Values in the checkpoint that are waiting for an object to be attached.
        unused: Values in the checkpoint that the matching object in the program does not have, or components in the
            checkpoint that the program does not have.
        unused_values: Values in the checkpoint that a restored component does not have, or that cannot be read as data.
        conflicts: Objects in the checkpoint that match two different objects in the program, each with its path in the
            checkpoint and both paths in the program.
        separate: Pairs of components that are one object in the checkpoint, but two in the program. Both were restored,
            but they will diverge as training continues.
        skipped: Objects in the program that are neither saved nor restored, each with the reason.
        nontrivial: True if anything but the root was found in the checkpoint.
    """

    checkpoint: str = ""
    restored: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    missing_values: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    unused_values: tuple[str, ...] = ()
    conflicts: tuple[tuple[str, str, str], ...] = ()
    separate: tuple[tuple[str, str], ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    nontrivial: bool = False

    @property
    def complete(self) -> bool:
        """True if program and checkpoint match exactly."""
        return not self.problems()

    def problems(self) -> list[str]:
        """Return one report line for each kind of mismatch that occurred."""
        twice = [f"{saved}: {first} and {second}" for saved, first, second in self.conflicts]
        twice += [f"{first} and {second}" for first, second in self.separate]
        return [
            *format_section("in the program, not in the checkpoint", (*self.missing, *self.missing_values)),
            *format_section("in the checkpoint, not in the program", self.pending),
            *format_section("in the checkpoint, without a place in the program", (*self.unused, *self.unused_values)),
            *format_section("one object in the checkpoint, two in the program", twice),
        ]

    def _note(self, misfits: Misfits) -> None:
        misfits.missing((*self.missing, *self.missing_values))
        misfits.surplus((*self.pending, *self.unused, *self.unused_values))
        for path, first, second in self.conflicts:
            misfits.kept.setdefault(path, f"{path}: one object in the checkpoint, but {first} and {second} are two")

    def __str__(self) -> str:
        return "\n".join([f"{self.checkpoint or 'no checkpoint'}: {len(self.restored)} restored", *self.problems()])


class RestoreStatus:
    """The status of a restore, which may still be waiting for objects to be created.

    Objects created after the restore are restored when they are attached. `try_complete` and the ``assert_*`` methods
    restore the remaining objects. A save never restores objects.

    Args:
        restoration: The restore, or None if no checkpoint was given.
        root: The object that is being restored; the status keeps it alive.
    """

    def __init__(self, restoration: Restoration | None, root: Node) -> None:
        self._restoration = restoration
        self._root = root

    @property
    def report(self) -> RestoreReport:
        """A report on restored and unrestored values, based on the objects that currently exist."""
        return RestoreReport() if self._restoration is None else self._restoration.report()

    def try_complete(self) -> Self:
        """Restore objects that were created after the restore, wherever they are attached.

        Objects attached to a `Node` or to a tracked list or dictionary are restored immediately. This method is for
        objects attached elsewhere, such as a layer assigned to a module. The assertions call it as well. Values that
        have already been restored are left unchanged.

        Raises:
            TreeMismatchError: An object does not fit its value; nothing was changed.
        """
        if self._restoration is not None and not self._restoration.retired:
            self._restoration.advance()
        return self

    def assert_consumed(self) -> Self:
        """Check that program and checkpoint match exactly.

        Raises:
            UnmatchedObjectsError: A value exists in only one of the two.
        """
        report = self._checked()
        if not report.complete:
            raise UnmatchedObjectsError(f"program and checkpoint do not match exactly: {report}", report)
        return self

    def assert_existing_objects_matched(self) -> Self:
        """Check that every value that currently exists in the program was restored.

        Raises:
            UnmatchedObjectsError: A value was not restored.
        """
        report = self._checked()
        if report.missing or report.conflicts:
            raise UnmatchedObjectsError(f"not everything in the program was restored: {report}", report)
        return self

    def assert_nontrivial_match(self) -> Self:
        """Check that at least one object besides the root was found in the checkpoint.

        Raises:
            UnmatchedObjectsError: Nothing but the root was found.
        """
        report = self._checked()
        if not report.nontrivial:
            raise UnmatchedObjectsError(describe_no_match(report), report)
        return self

    def expect_partial(self) -> Self:
        """Declare that values in the checkpoint may stay unrestored.

        From now on, unrestored values cause no warning. A save discards them and stores the program's own values,
        with a warning about objects that exist but were not restored. Objects attached to a `Node` are still restored.
        """
        if self._restoration is not None:
            self._restoration.progress.partial = True
        return self

    def _checked(self) -> RestoreReport:
        if self._restoration is None:
            raise UnmatchedObjectsError("no checkpoint was given: restore(None) restores nothing", self.report)
        if self._restoration.progress.left():
            self.try_complete()
        return self.report


def describe_no_match(report: RestoreReport) -> str:
    """Describe a restore that matched nothing, and list the values in the program and in the checkpoint."""
    why = ", because nothing has been attached yet"
    if report.missing or report.restored:
        why = (
            ". Names in the program and in the checkpoint differ from the first key on: for example, "
            "Checkpoint(model) and Checkpoint(model=model) use different names"
        )
    sections = format_section("in the program", report.missing) + format_section("in the checkpoint", report.pending)
    return "\n".join([f"{report.checkpoint}: nothing was restored{why}", *sections])


@dataclass(slots=True)
class RestoreProgress:
    """Tracks restored checkpoint values. It outlives the restore so that unrestored values can be logged."""

    wanted: dict[int, Path]  # paths of the values to restore, keyed by node number
    where: str
    restored: set[int] = field(default_factory=set)  # nodes of the values that have been restored
    partial: bool = True  # whether values may stay unrestored; True until the restore succeeds

    def left(self) -> dict[int, Path]:
        return {number: path for number, path in self.wanted.items() if number not in self.restored}

    def end(self) -> None:
        """Log the values that were never restored; called when the checkpoint object is garbage-collected."""
        if not self.partial and (left := self.left()):
            text = "a checkpoint object was deleted before all values of %s were used; call expect_partial() if that "
            lines = format_section("not restored", _formatted(left.values()))
            _logger.warning(f"{text}is intended:\n%s", self.where, "\n".join(lines))


class Restoration:
    """Restores all objects reachable from a root; with ``final``, does not wait for objects to be attached later."""

    def __init__(
        self,
        stored: StoredGraph,
        root: Node | Part,
        *,
        rename: Rename | None = None,
        select: Patterns | None = None,
        exclude: Patterns | None = None,
        ignore: Iterable[Path] = (),
        final: bool = False,
        ends: Callable[[Any], bool] = lambda _: False,
    ) -> None:
        self._root = weakref.ref(root)
        self._ends = ends  # returns True for objects at which the report's walk stops
        self._number = next(restore_numbers)
        graph = stored.graph.unwrapped()
        graph = graph.renamed(rename) if rename else graph
        self._values = SavedValues(stored, graph)
        self._matching = Matching(graph, self._values, final=final)
        self._stored = stored
        self._ignored = frozenset(ignore)
        self._filter = PathFilter(select, exclude)
        paths = {number: graph.path(number) for number, _ in graph.values()}
        self._filter.check(paths.values())
        wanted = {number: path for number, path in paths.items() if self._chooses(path)}
        self.progress = RestoreProgress(wanted, str(stored.checkpoint))
        weakref.finalize(self, self.progress.end).atexit = False
        self._settled: set[Path] = set()
        self._replaced: set[Path] = set()  # paths of plain containers whose contents were replaced as a whole
        self._fresh: set[Path] = set()  # random streams for which the checkpoint has no state from this process
        self.retired = False  # whether a later restore supersedes this one
        self.reported: set[Path] = set()  # paths of unrestored values that a save has already logged
        self._holders: list[weakref.ref[Any]] = []
        self._keeper = Keeper()

    @property
    def root(self) -> Node | Part:
        """The object whose values are restored; the caller must keep a strong reference to it."""
        root = self._root()
        assert root is not None
        return root

    def retire(self) -> None:
        """End this restore because a later one supersedes it."""
        self.retired = True
        self.progress.partial = True
        self._stop_waiting()

    def advance(self) -> None:
        """Restore all values below the root that have not been restored yet."""
        self._write(*self._prepared(self._matching.from_root(self.root)))

    def prepare(self, misfits: Misfits | None = None) -> Callable[[], None]:
        """Read the values to restore (with ``misfits``, only values that fit); return a function that assigns them."""
        values, settled = self._prepared(self._matching.from_root(self.root), misfits)
        self._note(*(assignment for assignment, _ in values), *settled)  # so that the report counts them as restored
        return partial(self._write, values, settled)

    def restore_modes(self) -> list[str]:
        """Restore ``requires_grad`` and ``training`` (not saved by holdfast 0.1.0); return a message per change."""
        changed = []
        graph = self._matching.graph
        for number, node in enumerate(graph.nodes):
            saved = self._stored.leaves.get(str(node.value))
            for target, path in self._matching.bindings.objects(number):
                if is_module(target) and graph.has_own_states and target.training is not node.training:
                    target.training = node.training
                    changed.append(f"{format_node_path(path)}.training = {node.training}")
                elif saved is not None and saved.saved.kind == "torch" and is_torch_tensor(target) and target.is_leaf:
                    needed = saved.saved.details.get("requires_grad") is True
                    if target.requires_grad is not needed and target.is_floating_point():
                        target.requires_grad_(needed)
                        changed.append(f"{format_node_path(path)}.requires_grad = {needed}")
        return changed

    def resume(self, holder: object, key: object = None) -> None:
        self._write(*self._prepared(self._matching.from_holder(holder, key)))

    def awaited(self) -> list[Path]:
        """Return the paths of the values that `advance` would restore now, without restoring them."""
        due, settled = self._sorted(self._matching.from_root(self.root))
        self._note(*settled)
        self._wait()
        return [path for assignment in due for _, path in assignment.values()]

    def expects_below(self, holder: object, key: object) -> bool:
        try:
            (segment,) = [str(key)] if isinstance(key, int) else key_segments([key])
        except KeyProblem:
            return False
        graph = self._matching.graph
        children = (graph.nodes[number].edges.get(segment) for number, _ in self._matching.bindings.of(holder))
        return any(child is not None and graph.nodes[child].edges for child in children)

    @property
    def found_anything(self) -> bool:
        """True if anything but the root was found in the checkpoint."""
        graph = self._matching.graph
        numbers = self._matching.bindings.by_number.keys() - {0}
        return any(number in self.progress.wanted or graph.nodes[number].value is None for number in numbers)

    @collection_paused()
    def report(self) -> RestoreReport:
        live = walk(self.root, strict=False, ends=self._ends)
        restored, missing = self._divided(live)
        graph, unused = self._matching.graph, self._matching.unused
        left = self.progress.left()
        lacking, depths = self._matching.lacking, {len(path) for path in self._matching.lacking}
        named = {path[:depth] for path in left.values() for depth in depths}
        lacking = [path for path in lacking if path not in named]  # drop entries whose values are already in `left`
        return RestoreReport(
            checkpoint=self.progress.where,
            restored=_formatted(node.path for node in restored),
            missing=_formatted(node.path for node in missing),
            pending=_formatted([*lacking, *(path for number, path in left.items() if number not in unused)]),
            unused=_formatted(path for number, path in left.items() if number in unused),
            conflicts=tuple(
                (format_node_path(graph.path(number)), format_node_path(first), format_node_path(second))
                for number, (first, second) in self._matching.bindings.conflicts.items()
            ),
            skipped=tuple((format_node_path(path), reason) for path, reason in live.skipped.items()),
            nontrivial=self.found_anything,
        )

    def _divided(self, live: LiveGraph) -> tuple[list[LiveNode], list[LiveNode]]:
        """Return the restored and missing nodes; add nodes that keep their fresh state to ``live.skipped``."""
        # Paths of state that holdfast 0.1.0 did not save.
        too_new = [] if self._matching.graph.has_own_states else live.own_states
        parts = {path[:depth] for path in self._settled for depth in range(1, len(path))}
        restored, missing = [], []
        for node in live.leaves():
            if node.path in self._fresh:
                live.skipped[node.path] = "keeps its fresh state: the checkpoint has none for this process"
            elif (
                node.path in self._settled
                or last_writer(node.slot) >= self._number
                or any(node.path[:depth] in self._replaced for depth in range(1, len(node.path)))
            ):
                restored.append(node)
            elif isinstance(node.view, Leaf) and node.view.opened is not None and node.path in parts:
                restored.append(node)  # a sequence or an optimizer that was restored value by value
            elif any(node.path[: len(path)] == path for path in too_new):
                live.skipped[node.path] = "keeps its fresh state: the checkpoint is from a version that did not save it"
            elif self._chooses(node.path):
                missing.append(node)
        return restored, missing

    def warn_of_missing(self) -> None:
        """Log a warning about shared objects, such as parameters, for which the checkpoint has no values."""
        if not (self._matching.has_unmatched or self._matching.unused):
            return
        _, nodes = self._divided(walk(self.root, strict=False))
        missing = _formatted(node.path for node in nodes if isinstance(node.view, Leaf) and node.view.shared)
        if missing:
            lines = format_section("in the program, not in the checkpoint", missing)
            lines += format_section("in the checkpoint, not in the program", _formatted(self.progress.left().values()))
            text = "%s has no values for objects of the program, which keep their own; pass partial=True if that "
            _logger.warning(f"{text}is intended:\n%s", self.progress.where, "\n".join(lines))

    def _chooses(self, path: Path) -> bool:
        return path not in self._ignored and self._filter.chooses(path)

    @collection_paused()
    def _prepared(
        self, assignments: Iterable[Assignment], misfits: Misfits | None = None
    ) -> tuple[list[tuple[Assignment, Any]], list[Assignment]]:
        """Read and validate values; return pairs (assignment, value), and the assignments that are already done."""
        with self._matching.undone_on_error():
            due, settled = self._sorted(assignments)
            values = self._values.read_values(due, misfits)
            for assignment, value in values:
                if isinstance(assignment.slot, MemberSlot):
                    assignment.slot.member(value)
        return values, settled

    @collection_paused()
    def _write(self, values: list[tuple[Assignment, Any]], settled: list[Assignment]) -> None:
        with self._matching.undone_on_error():
            write_slots([(assignment.slot, value) for assignment, value in values])
        for mapping, order in self._matching.orders:
            for key in filter(mapping.__contains__, order):
                mapping[key] = mapping.pop(key)
        for assignment, _ in values:
            note_writer(assignment.slot, self._number, self._keeper)
        self._note(*(assignment for assignment, _ in values), *settled)
        self._wait()

    def _sorted(self, assignments: Iterable[Assignment]) -> tuple[list[Assignment], list[Assignment]]:
        """Split assignments into due ones and completed ones (done by a later restore or under another path)."""
        due: dict[tuple[int, Path], Assignment] = {}  # keyed by slot
        settled: list[Assignment] = []
        fresh: list[Path] = []
        for assignment in assignments:
            slot, values, wanted = assignment.slot, assignment.values(), self.progress.wanted
            if assignment.path in self._settled or not all(n in wanted and self._chooses(path) for n, path in values):
                continue
            key = id(slot.anchor), slot.trail
            first = due.get(key)
            if not self._stored.has_own and type(slot) is StateSlot and is_stream(slot.target):
                settled.append(assignment)  # the checkpoint has no state from this process, so the stream keeps its own
                fresh.append(assignment.path)
            elif first is None and last_writer(slot) < self._number:
                due[key] = assignment
            else:
                settled.append(assignment)
                if first is not None and first.saved != assignment.saved:
                    message = "%s and %s are one object, but two in the checkpoint; it gets the value of the first"
                    _logger.warning(message, format_node_path(first.path), format_node_path(assignment.path))
        if fresh:
            message = "%s has no random streams and data positions of process %d, which keeps its fresh ones: %s"
            names = shortened(map(format_node_path, fresh))
            _logger.warning(message, self.progress.where, current_coordinator().process_index, names)
            self._fresh.update(fresh)
        return list(due.values()), settled

    def _note(self, *done: Assignment) -> None:
        for assignment in done:
            self._settled.add(assignment.path)
            if assignment.covers is not None:
                self._replaced.add(assignment.path)
            for number, path in assignment.values():
                self.progress.restored.add(number)
                self._settled.add(path)
                self._matching.unused.pop(number, None)

    def _wait(self) -> None:
        """If values remain to be restored, subscribe to the holders in which objects for saved values are missing."""
        waits = not self.retired and len(self.progress.restored) < len(self.progress.wanted)
        for holder in self._matching.waiting if waits else ():
            for target in (holder, holder.__holdfast_root__() if isinstance(holder, Node) else None):
                if expect(target, self):
                    self._holders.append(weakref.ref(target))
        self._matching.waiting.clear()
        if not waits:
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        for reference in self._holders:
            forget(reference(), self)
        self._holders.clear()


def _formatted(paths: Iterable[Path]) -> tuple[str, ...]:
    return tuple(map(format_node_path, paths))


def check_restored(restorations: Sequence[Restoration]) -> None:
    """Raise StateError if a save would lose values that are still waiting to be restored."""
    lost: list[str] = []
    unrestored: list[str] = []
    superseded: set[Path] = set()  # paths for which later restores have values
    for restoration in reversed(restorations):
        progress = restoration.progress
        if waiting := list(progress.left().values()):
            late = [path for path in restoration.awaited() if path not in superseded]
            if not progress.partial:
                unrestored += [f"{format_node_path(path)} ({progress.where})" for path in late]
                waiting = [path for path in waiting if path not in superseded.union(late)]
                lost += [f"{format_node_path(path)} ({progress.where})" for path in waiting]
            elif new := format_section(
                "not restored", _formatted(path for path in late if path not in restoration.reported)
            ):
                message = "objects created since the restore from %s keep the values of the program:\n%s"
                _logger.warning(message, progress.where, "\n".join(new))
            restoration.reported.update(late)
        superseded.update(progress.wanted.values())
    if lost or unrestored:
        lines = format_section("values waiting for their objects, which a save would lose", lost)
        lines += format_section("objects created since the restore, without their values", unrestored)
        raise StateError(
            "\n".join(["a restore is not complete, and nothing was written:", *lines]) + "\n"
            "Create the objects and call try_complete() on the status that the restore returned, to load the "
            "values of the checkpoint (manager.status is the status of a manager's restore_or_initialize); "
            "or call expect_partial() on it, to ignore them and save the values of the program"
        )
