"""Which object of the program is which node of the checkpoint: both graphs walked together, edge by edge."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..tree import unescape_key
from ..tree.frameworks import is_torch_tensor
from .cells import Cell
from .contents import EntryCell, ListCell, PlainValues, is_plain
from .paths import Path, shown
from .saved import SavedGraph, SavedNode
from .slots import OptimizerView
from .tracked import Node
from .views import Branch, Leaf, Position, View, edge_at, look
from .walk import GROUPS, SLOTS, root_view

_logger = logging.getLogger("holdfast")


@dataclass(slots=True, eq=False)
class Assignment:
    """A value of the checkpoint and the cell that it belongs into.

    Attributes:
        saved: The node of the checkpoint.
        cell: Where the value goes.
        path: The path of that in the program.
        likeness: What a tensor is made for that an optimizer does not have yet: the parameter, the name, the group.
        covers: Of a container of plain values that is restored as a whole: its values, with their paths from it.
    """

    saved: int
    cell: Cell
    path: Path
    likeness: tuple[Any, str, dict[str, Any]] | None = None
    covers: list[tuple[int, Path]] | None = None


@dataclass(slots=True, eq=False)
class Binding:
    """An object that stands for a node.

    Attributes:
        identity: What tells it from others while it lives; None for what may be another object after every restore.
        path: Its path.
        reference: Returns it as long as it lives; None where it cannot be referred to.
    """

    identity: int | None
    path: Path
    reference: Callable[[], Any] | None


class _Visit(NamedTuple):
    """An object that is about to be looked at.

    Attributes:
        number: The node that it may stand for.
        value: The object.
        view: What it is to the graph.
        path: Its path.
        within: What it is a part of, up to where things are no objects of their own. Such things are visited wherever
            they are, as each place is built anew; in themselves they are not visited again.
        position: Where it hangs; None for a root.
        only: The one edge to follow; None for all of them.
    """

    number: int
    value: Any
    view: View
    path: Path
    within: frozenset[int] = frozenset()
    position: Position | None = None
    only: str | None = None


@dataclass(slots=True)
class Matching:
    """What is known of which object is which node.

    Attributes:
        graph: The graph of the checkpoint.
        plain: What in it is plain values.
        bindings: The objects that stand for a node.
        unused: Values for which there is an object that cannot take them, with its path.
        conflicts: Nodes that two different objects stand for, with the paths of both.
        waiting: Holders below which values are missing an object.
    """

    graph: SavedGraph
    plain: PlainValues
    bindings: dict[int, list[Binding]] = field(default_factory=dict)
    unused: dict[int, Path] = field(default_factory=dict)
    conflicts: dict[int, tuple[Path, Path]] = field(default_factory=dict)
    waiting: list[Any] = field(default_factory=list)
    _by_identity: dict[int, list[tuple[int, Binding]]] = field(default_factory=dict)
    _optimizer_nodes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._optimizer_nodes = [number for number, node in enumerate(self.graph.nodes) if node.slots or node.groups]

    def from_root(self, root: Node) -> Iterator[Assignment]:
        """Generates the values for everything that can be reached from a root."""
        yield from self._match(deque([_Visit(0, root, root_view(root), ())]), anew=True)

    def from_holder(self, holder: Any, key: object = None) -> Iterator[Assignment]:
        """Generates the values for what has turned up below a holder that is known already.

        Args:
            holder: The holder.
            key: The key under which it has turned up, as a holder of ours knows it; None where that is not known.
        """
        edge = None if key is None else edge_at(holder, key)
        only = None if edge is None else edge.segment
        for number, binding in self._bound_to(holder):
            target = None if binding.reference is None else binding.reference()
            target = holder if target is None else target  # the checkpoint that it was the root of may be gone
            position = Position(target, (), None)
            # With thousands of children, looking at all of them whenever one is added takes minutes.
            view = look(target, position) if edge is None else Branch("", [edge])
            yield from self._match(
                deque([_Visit(number, target, view, binding.path, position=position, only=only)]), anew=False
            )

    def node_at(self, holder: Any, segment: str) -> int | None:
        """Returns the node that an edge of a holder leads to in the checkpoint, or None."""
        for number, _ in self._bound_to(holder):
            if segment in self.graph.nodes[number].edges:
                return self.graph.nodes[number].edges[segment]
        return None

    def _bound_to(self, holder: Any) -> list[tuple[int, Binding]]:
        return list(self._by_identity.get(_identity(holder), ()))

    def _match(self, queue: deque[_Visit], *, anew: bool) -> Iterator[Assignment]:
        seen: set[tuple[int, int]] = set()
        kept = []  # so that ids stay those of what has been seen
        first = True
        while queue:
            visit = queue.popleft()
            number, value, view = visit.number, visit.value, visit.view
            known = self._is_bound(number, value)
            if isinstance(view, Leaf):
                yield from self._leaf(visit, view)
            if not isinstance(view, Branch) or (known and not anew and not first) or id(value) in visit.within:
                continue
            first = False
            if (not view.functional and (number, id(value)) in seen) or not self._bind(number, value, view, visit.path):
                continue
            seen.add((number, id(value)))
            kept.append(value)
            if self.graph.nodes[number].value is not None:
                self.unused[number] = visit.path
            else:
                yield from self._branch(visit, view, queue)
        yield from self._optimizers()

    def _leaf(self, visit: _Visit, leaf: Leaf) -> Iterator[Assignment]:
        if not self._bind(visit.number, visit.value, leaf, visit.path):
            return
        if self.graph.nodes[visit.number].value is not None:
            yield Assignment(visit.number, leaf.cell, visit.path)
        elif visit.value is None and (covers := self.plain.below(visit.number)) is not None:
            yield Assignment(visit.number, leaf.cell, visit.path, covers=covers)

    def _branch(self, visit: _Visit, view: Branch, queue: deque[_Visit]) -> Iterator[Assignment]:
        """Follows the edges that both graphs have; plain values need none in the program."""
        value, path = visit.value, visit.path
        grows = None if view.functional else visit.position
        if grows is not None and isinstance(value, list):
            covers = self.plain.elements(visit.number)
            if covers is not None and is_plain(value):
                yield Assignment(visit.number, ListCell(value, grows.anchor, grows.trail), path, covers=covers)
                return
        edges = {edge.segment: edge for edge in view.edges}
        special = {GROUPS} if view.optimizer is not None else frozenset()
        within = visit.within | {id(value)} if view.functional else frozenset()
        saved = self.graph.nodes[visit.number].edges
        if visit.only is not None:
            saved = {visit.only: saved[visit.only]} if visit.only in saved else {}
        for segment, child in saved.items():
            below = (*path, segment)
            if segment in edges:
                edge = edges[segment]
                found = look(edge.value, edge.position)
                queue.append(_Visit(child, edge.value, found, below, within, edge.position))
            elif grows is not None and isinstance(value, dict) and (covers := self.plain.below(child)) is not None:
                cell = EntryCell(value, grows.anchor, (*grows.trail, segment), visit.number)
                yield Assignment(child, cell, below, covers=covers)
            elif segment not in special and self.graph.has_values_below(child):
                self.waiting.append(value)

    def _optimizers(self) -> Iterator[Assignment]:
        """Generates what optimizers keep, as far as both they and the parameters are known."""
        for number in self._optimizer_nodes:
            node = self.graph.nodes[number]
            for binding in self.bindings.get(number, ()):
                optimizer = None if binding.reference is None else binding.reference()
                view = None if optimizer is None else look(optimizer, Position(optimizer, (), None))
                if isinstance(view, Branch) and view.optimizer is not None:
                    yield from self._slots(node, view.optimizer, binding.path)
                    yield from self._options(node, view.optimizer, binding.path)

    def _slots(self, node: SavedNode, optimizer: OptimizerView, path: Path) -> Iterator[Assignment]:
        within = optimizer.group_by_parameter()
        for number, segment, value in node.slots:
            parameter, parameter_path = self._parameter(number)
            if parameter is None:
                continue
            where = (*path, SLOTS, *parameter_path, segment)
            if id(parameter) not in within:
                self.unused[value] = where
                continue
            name = unescape_key(segment)
            likeness = (parameter, name, within[id(parameter)])
            yield Assignment(value, optimizer.slot_cell(parameter, name), where, likeness)

    def _options(self, node: SavedNode, optimizer: OptimizerView, path: Path) -> Iterator[Assignment]:
        """Generates the options of groups: a group is known by its parameters, not by its number."""
        holder = node.edges.get(GROUPS)
        if holder is None:
            return
        group_of = {parameter: group for group, parameters in enumerate(node.groups) for parameter in parameters}
        known = {id(found): number for number in group_of if (found := self._parameter(number)[0]) is not None}
        for place, parameters in enumerate(optimizer.groups()):
            origins = {group_of[known[id(parameter)]] for parameter in parameters if id(parameter) in known}
            if len(origins) != 1:
                continue  # nothing is known of it, or it was made of several: its options stay as they are
            saved = self.graph.nodes[holder].edges.get(str(origins.pop()))
            options = {} if saved is None else self.graph.nodes[saved].edges
            for segment, value in options.items():
                name = unescape_key(segment)
                where = (*path, GROUPS, str(place), segment)
                likeness = (parameters[0], name, optimizer.optimizer.param_groups[place])
                yield Assignment(value, optimizer.option_cell(place, name), where, likeness)

    def _parameter(self, number: int) -> tuple[Any, Path]:
        for binding in self.bindings.get(number, ()):
            found = None if binding.reference is None else binding.reference()
            if is_torch_tensor(found):
                return found, binding.path
        return None, ()

    def _is_bound(self, number: int, value: Any) -> bool:
        return any(binding.identity == _identity(value) for binding in self.bindings.get(number, ()))

    def _bind(self, number: int, value: Any, view: Branch | Leaf, path: Path) -> bool:
        """Notes that an object stands for a node; tells whether it may."""
        bindings = self.bindings.setdefault(number, [])
        fixed = view.in_place if isinstance(view, Leaf) else not view.functional
        identity = _identity(value) if fixed else None
        if any(binding.identity == identity and binding.path == path for binding in bindings):
            return True
        for binding in [binding for binding in bindings if binding.path == path]:
            bindings.remove(binding)  # something else hangs there by now
        if fixed:
            others = [binding for binding in bindings if binding.identity not in (None, identity) and _lives(binding)]
            if others:
                if self.conflicts.get(number) != (others[0].path, path):
                    _logger.warning(
                        "%s is one object in the checkpoint, but %s and %s are two; only the first of them is restored",
                        shown(self.graph.path(number)),
                        shown(others[0].path),
                        shown(path),
                    )
                self.conflicts[number] = others[0].path, path
                return False
        reference = weakref.ref(value) if fixed and type(value).__weakrefoffset__ != 0 else None
        found = Binding(identity, path, reference)
        bindings.append(found)
        if identity is not None:
            self._by_identity.setdefault(identity, []).append((number, found))
        return True


def _lives(binding: Binding) -> bool:
    return binding.reference is None or binding.reference() is not None


def _identity(value: Any) -> int:
    """Returns what tells an object from others; a checkpoint is one with the object that it stands for."""
    root = value.__holdfast_root__() if isinstance(value, Node) else None
    return id(value if root is None else root)
