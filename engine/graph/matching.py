"""Which object of the program is which node of the checkpoint: both graphs walked together, edge by edge."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from .bindings import Bindings
from .cells import Assignment
from .contents import EntryCell, ListCell, PlainValues, is_plain
from .optimizer_matching import OptimizerMatching
from .paths import Path
from .saved import SavedGraph
from .tracked import Node
from .views import Branch, Leaf, Position, View, edge_at, look
from .walk import GROUPS, root_view


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


class Matching:
    """What is known of which object is which node.

    Args:
        graph: The graph of the checkpoint.
        plain: What in it is plain values.

    Attributes:
        graph: The graph.
        plain: The plain values.
        bindings: The objects that stand for nodes.
        unused: Values for which there is an object that cannot take them, with its path.
        waiting: Holders below which values are missing an object.
    """

    def __init__(self, graph: SavedGraph, plain: PlainValues) -> None:
        self.graph = graph
        self.plain = plain
        self.bindings = Bindings(graph)
        self.unused: dict[int, Path] = {}
        self.waiting: list[Any] = []
        self._optimizers = OptimizerMatching(graph, self.bindings, self.unused)

    def from_root(self, root: Node) -> Iterator[Assignment]:
        """Generates the values for everything that can be reached from a root."""
        self.bindings.begin()
        yield from self._match(deque([_Visit(0, root, root_view(root), ())]), anew=True)
        yield from self._optimizers.everything()

    def from_holder(self, holder: Any, key: object = None) -> Iterator[Assignment]:
        """Generates the values for what has turned up below a holder that is known already.

        Args:
            holder: The holder.
            key: The key under which it has turned up, as a holder of ours knows it; None where that is not known.
        """
        self.bindings.begin()
        edge = None if key is None else edge_at(holder, key)
        only = None if edge is None else edge.segment
        for number, binding in self.bindings.of(holder):
            target = None if binding.reference is None else binding.reference()
            target = holder if target is None else target  # the checkpoint that it was the root of may be gone
            position = Position(target, (), None)
            # With thousands of children, looking at all of them whenever one is added takes minutes.
            view = look(target, position) if edge is None else Branch("", [edge])
            yield from self._match(
                deque([_Visit(number, target, view, binding.path, position=position, only=only)]), anew=False
            )
        yield from self._optimizers.of(self.bindings.fresh)

    def undo(self) -> None:
        """Takes back what was found since `from_root` or `from_holder` was called last."""
        self.bindings.undo()
        self.waiting.clear()

    def node_at(self, holder: Any, segment: str) -> int | None:
        """Returns the node that an edge of a holder leads to in the checkpoint, or None."""
        for number, _ in self.bindings.of(holder):
            if segment in self.graph.nodes[number].edges:
                return self.graph.nodes[number].edges[segment]
        return None

    def _match(self, queue: deque[_Visit], *, anew: bool) -> Iterator[Assignment]:
        seen: set[tuple[int, int]] = set()
        kept = []  # so that ids stay those of what has been seen
        first = True
        while queue:
            visit = queue.popleft()
            number, value, view = visit.number, visit.value, visit.view
            if isinstance(view, Leaf):
                yield from self._leaf(visit, view)
            if not isinstance(view, Branch) or id(value) in visit.within:
                continue
            if not (anew or first) and self.bindings.binds(number, value):
                continue
            first = False
            if not view.functional and (number, id(value)) in seen:
                continue
            if not self.bindings.bind(number, value, visit.path, fixed=not view.functional):
                continue
            seen.add((number, id(value)))
            kept.append(value)
            if self.graph.nodes[number].value is not None:
                self.unused[number] = visit.path
            else:
                yield from self._branch(visit, view, queue)

    def _leaf(self, visit: _Visit, leaf: Leaf) -> Iterator[Assignment]:
        if not self.bindings.bind(visit.number, visit.value, visit.path, fixed=leaf.in_place):
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
            # What somebody else holds, too, has to stay the same object, as far as it is there.
            there = self.plain.shares(visit.number) and len(value) == len(self.graph.nodes[visit.number].edges)
            if covers is not None and is_plain(value) and not there:
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
