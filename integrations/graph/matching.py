"""Match the program's objects with a checkpoint's nodes by walking both graphs together, edge by edge.

Values and options of torch optimizers follow their parameters, if the program and the checkpoint both have these.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

from ...engine.pytree import NUMBERS, is_python_value, is_torch_tensor, unescape_key
from .frameworks import GROUPS, OPTIMIZER_SLOTS, OptimizerSlot, OptionSlot, group_options, is_optimizer
from .outside import is_kin
from .saved import SavedGraph
from .slots import Assignment, PartSlot, Path, Place, Slot, format_node_path
from .tracked import Node, Part
from .values import SEQUENCES, SavedValues, is_plain
from .views import Branch, Edge, Leaf, View, classify, edge_at, root_view, sequence_slot

_logger = logging.getLogger("holdfast")
_TORCH = "torch.optim."
_SCHEDULED = "initial_lr"  # schedulers add this option to groups of any optimizer


class _Visit(NamedTuple):
    """An object that may stand for a node."""

    number: int
    value: Any
    view: View
    path: Path
    place: Slot | None = None  # None for a root
    within: frozenset[int] = frozenset()  # the immutable containers around it


class Matching:
    """The objects found for the nodes of a checkpoint; ``final`` if the program builds none later."""

    def __init__(self, graph: SavedGraph, values: SavedValues, *, final: bool = False) -> None:
        self.graph = graph
        self.values = values
        self.bindings = Bindings(graph)
        self.unused: dict[int, Path] = {}  # values in whose place there is an object that cannot take them
        self.waiting: list[Any] = []  # holders below which values are missing an object
        self.has_unmatched = False  # whether the program has an object that the checkpoint does not have
        self._final = final  # arrays in containers are made where the program has none
        self._optimizers: dict[int, _LiveOptimizer] = {}
        self._places: dict[int, Slot] = {}  # by the ids of mutable containers: the first place of each in a pass

    def from_root(self, root: Node | Part) -> Iterator[Assignment]:
        """Generate the values for everything that can be reached from the root."""
        self.bindings.begin()
        yield from self._match([_Visit(0, root, root_view(root), ())], anew=True)
        self._optimizers.clear()
        yield from self._optimizer_values(range(len(self.graph.nodes)))

    def from_holder(self, holder: Any, key: object = None) -> Iterator[Assignment]:
        """Generate the values for new objects below a holder that is known already: under one key, or anywhere."""
        self.bindings.begin()
        # Classifying thousands of children whenever one is added would take minutes.
        edge = None if key is None else edge_at(holder, key)
        for number, binding in self.bindings.of(holder):
            if edge is None:
                place = Place(holder, (), holder)
                start = _Visit(number, holder, classify(holder, place), binding.path, place)
                yield from self._match([start], known=start)
            elif edge.segment in self.graph.nodes[number].edges:
                child, path = self.graph.nodes[number].edges[edge.segment], (*binding.path, edge.segment)
                yield from self._match([_Visit(child, edge.value, edge.view(), path, edge.place)])
        yield from self._optimizer_values(self.bindings.fresh)

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Take back all bindings since the last call of `from_root` or `from_holder` if the block fails."""
        try:
            yield
        except BaseException:
            self.bindings.undo()
            self.waiting.clear()
            raise

    def _match(
        self, queue: list[_Visit], *, anew: bool = False, known: _Visit | None = None, last: bool = False
    ) -> Iterator[Assignment]:
        """Walk both graphs; unless ``anew``, skip objects below those that are bound already, except ``known``."""
        seen: set[tuple[int, int]] = set()
        later: list[_Visit] = []
        self._places.clear()
        for visit in queue:  # the queue grows, and keeps all objects alive, so that their ids are unique
            number, value, view = visit.number, visit.value, visit.view
            has_aliases = self.values.below(number, arrays=self._final) and self.values.aliases[number]
            if not last and (has_aliases or (isinstance(view, Branch) and view.parameters)):
                later.append(visit)  # what an optimizer keeps is matched by its parameters, which come first
                continue
            if isinstance(view, Leaf) and view.opened is not None and self._is_opened(number, view):
                view = view.opened()
            if isinstance(view, Leaf):
                yield from self._leaf(visit, view)
            # Parts of an immutable container are visited in each place, because each place is rebuilt.
            if not isinstance(view, Branch) or id(value) in visit.within:
                continue
            if not anew and visit is not known and any(known == number for known, _ in self.bindings.of(value)):
                continue
            if not view.functional and (number, id(value)) in seen:
                continue
            if not self.bindings.bind(number, value, visit.path, fixed=not view.functional):
                continue
            seen.add((number, id(value)))
            if self.graph.nodes[number].value is None:
                yield from self._branch(visit, view, queue)
            elif self.values.kinds.get(number) == NUMBERS and (slot := _slot_of_elements(visit)) is not None:
                yield Assignment(number, slot, visit.path)
            else:
                self.unused[number] = visit.path
        if later:
            yield from self._match(later, anew=anew, known=known, last=True)

    def _is_opened(self, number: int, leaf: Leaf) -> bool:
        """Whether the checkpoint has an object in parts that is one value in the program."""
        if leaf.packed is None:
            return self.graph.nodes[number].value is None
        is_plain = self.graph.nodes[number].type in SEQUENCES and self.values.below(number) is not None
        return not is_plain and self.values.kinds.get(number) != NUMBERS

    def _covers(self, number: int, *, arrays: bool) -> list[tuple[int, Path]] | None:
        # None as well if it holds an object that the program has elsewhere.
        covers = self.values.below(number, arrays=arrays)
        bound = (binding for one in self.values.aliases[number] for binding in self.bindings.by_number.get(one, ()))
        return covers if all(binding.identity is None for binding in bound) else None

    def _leaf(self, visit: _Visit, leaf: Leaf) -> Iterator[Assignment]:
        if not self.bindings.bind(visit.number, visit.value, visit.path, fixed=leaf.in_place):
            return
        if self.graph.nodes[visit.number].value is not None:
            slot: Slot = leaf.slot
            if (
                self._final
                and leaf.in_place
                and visit.place is not None
                and self.values.kinds.get(visit.number) == "none"
            ):
                slot = visit.place  # what changes in place cannot become None
                _logger.warning("%s is None in the checkpoint, and becomes None", format_node_path(visit.path))
            yield Assignment(visit.number, slot, visit.path)
        elif visit.value is None or leaf.opened:
            covers = self._covers(visit.number, arrays=self._final)
            if covers is not None:
                yield Assignment(visit.number, leaf.slot, visit.path, covers=covers)

    def _branch(self, visit: _Visit, view: Branch, queue: list[_Visit]) -> Iterator[Assignment]:
        """Follow the edges that both graphs have; plain values need none in the program."""
        number, value, path = visit.number, visit.value, visit.path
        saved = self.graph.nodes[number].edges
        changes = view.sequence and len(view.edges) != len(saved)
        takes_arrays = self._final and changes
        slot = _slot_of_elements(visit, arrays=takes_arrays) if self.graph.nodes[number].type in SEQUENCES else None
        if slot is not None:
            # The program may append objects to a list later; nothing would notice objects that it appends to a deque.
            takes_arrays = takes_arrays or (isinstance(value, deque) and not value)
            covers = self._covers(number, arrays=takes_arrays)
            # Existing elements stay the same objects if other objects hold them, too, or if a tuple holds them.
            if covers is not None and (changes or not (number in self.values.sharing or isinstance(value, tuple))):
                yield Assignment(number, slot, path, covers)
                return
        edges = {edge.segment: edge for edge in self._edges(number, view)}
        within = visit.within | {id(value)} if view.functional else frozenset()
        if not self.has_unmatched:
            new = (edge.value for segment, edge in edges.items() if segment not in saved)
            self.has_unmatched = any(not is_python_value(one) for one in new)
        place = visit.place if isinstance(value, dict) and not view.functional else None
        for segment, child in saved.items():
            below = (*path, segment)
            if segment in edges:
                found, at = edges[segment].value, edges[segment].place
                if isinstance(found, list | dict | deque) and not isinstance(at, PartSlot):
                    at = self._places.setdefault(id(found), at)  # One object has one place, the first that leads to it.
                queue.append(_Visit(child, found, classify(found, at), below, at, within))
            elif place is not None and (covers := self._covers(child, arrays=self._final)) is not None:
                kind = OrderedDict if isinstance(value, OrderedDict) else dict  # An OrderedDict would not find the key.
                add = partial(kind.__setitem__, value, self.values.keys(number).get(segment, unescape_key(segment)))
                yield Assignment(child, Place(place.anchor, (*place.trail, segment), ..., add), below, covers)
            elif child in self.graph.with_values and (view.optimizer is None or segment != GROUPS):
                self.waiting.append(value)

    def _edges(self, number: int, view: Branch) -> list[Edge]:
        """Return the edges of an object as the checkpoint names and orders them."""
        if view.numbered is None or view.listed is None:
            return view.edges
        if self.graph.numbers_keras:
            return view.numbered()
        node = self.graph.nodes[number]
        listed = node.edges.get("_trainable_variables")  # as TensorFlow saves them
        in_lists = [] if listed is None else list(self.graph.nodes[listed].edges.values())
        saved = node.groups[0] if node.groups else in_lists
        if not view.parameters or not saved:
            return view.listed(None, node.edges)
        bound = [{one for one, _ in self.bindings.of(parameter)} for parameter in view.parameters]
        order = [next((index for index, one in enumerate(saved) if one in numbers), -1) for numbers in bound]
        if sorted(order) == list(range(len(saved))):
            return view.listed(order, ())
        return [edge for edge in view.edges if not isinstance(edge.value, list)]  # other parameters than those saved

    # ---- torch optimizers

    def _optimizer_values(self, new: Collection[int]) -> Iterator[Assignment]:
        """Generate the values and options of those optimizers and parameters that are new."""
        for number, kept in self.graph.optimizers.items():
            due = list(kept) if number in new else [parameter for parameter in new if parameter in kept]
            for optimizer, path in self.bindings.objects(number) if due else ():
                if is_optimizer(optimizer):
                    known = self._optimizers.get(id(optimizer))
                    if known is None or known.outdated(optimizer):
                        known = self._optimizers[id(optimizer)] = _LiveOptimizer(optimizer, self.graph, number)
                    yield from self._of_optimizer(optimizer, known, path, due)

    def _of_optimizer(self, optimizer: Any, known: _LiveOptimizer, path: Path, due: list[int]) -> Iterator[Assignment]:
        """Generate the values of an optimizer for parameters, and the options of the groups of these."""
        groups = optimizer.param_groups
        touched: set[int] = set()
        for saved in due:
            tensors = ((one, below) for one, below in self.bindings.objects(saved) if is_torch_tensor(one))
            parameter, below = next(tensors, (None, ()))
            if parameter is None:
                continue
            index = known.group_of.get(id(parameter))
            for segment, value in known.kept[saved]:
                where, name = (*path, OPTIMIZER_SLOTS, *below, segment), unescape_key(segment)
                if index is None or not (known.related or name in optimizer.state.get(parameter, {})):
                    self.unused[value] = where
                else:
                    yield Assignment(value, OptimizerSlot(optimizer, groups[index], parameter, name), where)
            if index is not None and saved in known.saved_group:
                known.origins.setdefault(index, set()).add(known.saved_group[saved])
                touched.add(index)
        for index in sorted(touched):
            # If the parameters were in several groups, the options stay as they are.
            origin = min(known.origins[index]) if len(known.origins[index]) == 1 else -1
            for segment, value in known.saved_options.get(origin, {}).items():
                where, name = (*path, GROUPS, str(index), segment), unescape_key(segment)
                if known.related or name in groups[index] or name == _SCHEDULED:
                    yield Assignment(value, OptionSlot(optimizer, index, name), where)
                else:
                    self.unused[value] = where


def _slot_of_elements(visit: _Visit, *, arrays: bool = False) -> Slot | None:
    """Return the slot of all elements of a plain sequence of the program; None for anything else."""
    value, place = visit.value, visit.place
    if place is None or not isinstance(value, list | tuple | deque) or not is_plain(value, {}, arrays=arrays):
        return None
    return sequence_slot(value, place)


# ---- bindings


class Binding(NamedTuple):
    """An object that stands for a node."""

    identity: int | None  # None for an object that a restore may replace
    path: Path
    reference: Callable[[], Any] | None  # None for an object without weak references

    @property
    def lives(self) -> bool:
        """Whether the object still exists; an object without weak references counts as if it did."""
        return self.reference is None or self.reference() is not None


class Bindings:
    """The objects that stand for nodes; the additions of a pass over them can be taken back."""

    def __init__(self, graph: SavedGraph) -> None:
        # The paths of two different objects that stand for one node.
        self.conflicts: dict[int, tuple[Path, Path]] = {}
        self._graph = graph
        self.by_number: dict[int, list[Binding]] = {}
        self._numbers: dict[int, dict[int, None]] = {}  # candidate nodes of an object, by its identity
        self._before: list[tuple[int, list[Binding]]] = []  # the bindings before the pass, by node

    @property
    def fresh(self) -> dict[int, None]:
        """The nodes that objects have been bound to since the pass began."""
        return dict.fromkeys(number for number, _ in self._before)

    def begin(self) -> None:
        self._before.clear()

    def undo(self) -> None:
        for number, bindings in reversed(self._before):
            self.by_number[number] = bindings
        self.begin()

    def objects(self, number: int) -> list[tuple[Any, Path]]:
        """Return the live objects that stand for a node, with their paths."""
        known = self.by_number.get(number, [])
        found = [(binding.reference(), binding.path) for binding in known if binding.reference is not None]
        return [(thing, path) for thing, path in found if thing is not None]

    def of(self, holder: Any) -> list[tuple[int, Binding]]:
        """Return the nodes that an object stands for."""
        identity = id(_rooted(holder))
        known = [(number, one) for number in self._numbers.get(identity, ()) for one in self.by_number[number]]
        # A new object may have the id of one that is gone.
        return [(number, one) for number, one in known if one.identity == identity and one.lives]

    def bind(self, number: int, value: Any, path: Path, *, fixed: bool) -> bool:
        """Note that an object stands for a node; return whether no other object does."""
        bindings, value = self.by_number.get(number, []), _rooted(value)
        identity = id(value) if fixed else None
        if any(one.identity == identity and one.path == path and one.lives for one in bindings):
            return True
        kept = [binding for binding in bindings if binding.path != path]  # an object at the same path is replaced
        others = [one for one in kept if one.identity not in (None, identity) and one.lives] if fixed else []
        if others:
            if self.conflicts.get(number) != (others[0].path, path):
                _logger.warning(
                    "%s is one object in the checkpoint, but %s and %s are two; only the first of them is restored",
                    format_node_path(self._graph.path(number)),
                    format_node_path(others[0].path),
                    format_node_path(path),
                )
            self.conflicts[number] = others[0].path, path
            return False
        if identity is not None:
            self._numbers.setdefault(identity, {})[number] = None
        can_be_watched = fixed and type(value).__weakrefoffset__ != 0
        self._before.append((number, bindings))
        self.by_number[number] = [*kept, Binding(identity, path, weakref.ref(value) if can_be_watched else None)]
        return True


def _rooted(value: Any) -> Any:
    """Return the root of a checkpoint object, which is bound in its place; any other object as it is."""
    root = value.__holdfast_root__() if isinstance(value, Node | Part) else None
    return value if root is None else root


class _LiveOptimizer:
    """An optimizer of the program that stands for one of the checkpoint; groups are known by their parameters."""

    def __init__(self, optimizer: Any, graph: SavedGraph, number: int) -> None:
        node, groups = graph.nodes[number], optimizer.param_groups
        self.kept = graph.optimizers[number]
        self.saved_group = {parameter: index for index, group in enumerate(node.groups) for parameter in group}
        self.group_of = {id(one): index for index, group in enumerate(groups) for one in group["params"]}
        self.origins: dict[int, set[int]] = {}  # by group: the groups of the checkpoint that its parameters were in
        self._reference, self._sizes = weakref.ref(optimizer), [len(group["params"]) for group in groups]
        holder = node.edges.get(GROUPS)
        options = {} if holder is None else graph.nodes[holder].edges
        self.saved_options = {int(key): graph.nodes[one].edges for key, one in options.items() if key.isdecimal()}
        # Related are the same class, a base or derived one, and classes of torch with the same options: before torch
        # 2.7, AdamW was no Adam.
        kind = type(getattr(optimizer, "optimizer", optimizer))
        of_torch = node.type.startswith(_TORCH) and kind.__module__.startswith(_TORCH)
        alike = of_torch and self.saved_options.get(0, {}).keys() == group_options(groups[0]).keys()
        self.related = alike or is_kin(kind, node.type)

    def outdated(self, optimizer: Any) -> bool:
        """Whether this describes another optimizer, or parameters have been added since."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        return self._reference() is not optimizer or self._sizes != sizes
