"""Match the program's objects with the nodes of a checkpoint by walking both graphs together.

The values and options of a torch optimizer are matched by parameter if both graphs contain the parameters.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

from ...engine.pytree import NUMBERS, is_optimizer, is_python_value, is_torch_tensor, unescape_key
from .frameworks import GROUPS, OPTIMIZER_SLOTS, OptimizerSlot, OptionSlot, group_options, keras_children
from .outside import is_kin
from .saved import SavedGraph
from .slots import Assignment, Attachment, PartSlot, PartState, Path, Slot, format_node_path
from .tracked import Node, Part
from .values import SEQUENCES, SavedValues, is_plain
from .views import Branch, Edge, Leaf, View, classify, edge_at, root_view, sequence_slot

_logger = logging.getLogger("holdfast")
_TORCH = "torch.optim."
_SCHEDULED = "initial_lr"  # schedulers add this option to the groups of any optimizer


class _Visit(NamedTuple):
    """A saved node, together with an object that may correspond to it."""

    number: int
    value: Any
    view: View
    path: Path
    slot: Slot | None = None  # None for a root
    within: frozenset[int] = frozenset()  # ids of the immutable containers that hold the object


class Matching:
    """Matches checkpoint nodes with live objects; ``final`` means that no objects will be attached later."""

    def __init__(self, graph: SavedGraph, values: SavedValues, *, final: bool = False) -> None:
        self.graph = graph
        self.values = values
        self.bindings = Bindings(graph)
        self.unused: dict[int, Path] = {}  # saved values that the matching objects in the program do not have
        self.waiting: list[Any] = []  # holders in which the object for a saved value is missing
        self.orders: list[tuple[dict[Any, Any], list[Any]]] = []  # dictionaries, each with its keys in the saved order
        self.lacking: list[Path] = []  # paths of entries missing from the program's containers (final restore only)
        self.has_unmatched = False  # whether the program has an object that the checkpoint lacks
        self._final = final  # whether to create arrays that are missing from the program's containers
        self._optimizers: dict[int, _LiveOptimizer] = {}
        self._slots: dict[int, Slot] = {}  # first slot of each mutable container in this pass, keyed by container id

    def from_root(self, root: Node | Part) -> Iterator[Assignment]:
        """Yield assignments for everything reachable from the root."""
        self.bindings.begin()
        yield from self._match([_Visit(0, root, root_view(root), ())], rebind=True)
        self._optimizers.clear()
        yield from self._optimizer_values(range(len(self.graph.nodes)))

    def from_holder(self, holder: Any, key: object = None) -> Iterator[Assignment]:
        """Yield assignments for new objects under the given key of a bound holder; a key of None stands for any key."""
        self.bindings.begin()
        # Look only at the new child, because classifying all children whenever one is added could take minutes.
        edge = None if key is None else edge_at(holder, key)
        for number, binding in self.bindings.of(holder):
            if edge is None:
                slot = Attachment(holder, (), holder)
                start = _Visit(number, holder, classify(holder, slot), binding.path, slot)
                yield from self._match([start], start=start)
            elif edge.segment in self.graph.nodes[number].edges:
                child, path = self.graph.nodes[number].edges[edge.segment], (*binding.path, edge.segment)
                yield from self._match([_Visit(child, edge.value, classify(edge.value, edge.slot), path, edge.slot)])
        yield from self._optimizer_values(self.bindings.fresh)

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """If the ``with`` block fails, undo all bindings made since the last call of `from_root` or `from_holder`."""
        try:
            yield
        except BaseException:
            self.bindings.undo()
            self.waiting.clear()
            raise

    def _match(
        self, queue: list[_Visit], *, rebind: bool = False, start: _Visit | None = None, last: bool = False
    ) -> Iterator[Assignment]:
        """Walk both graphs; without ``rebind``, skip the contents of objects already bound, except ``start``."""
        seen: set[tuple[int, int]] = set()
        later: list[_Visit] = []
        self._slots.clear()
        for visit in queue:  # the queue grows in the loop; it keeps all objects alive, so that their ids stay unique
            number, value, view = visit.number, visit.value, visit.view
            has_aliases = self.values.below(number, arrays=self._final) and self.values.aliases[number]
            if not last and (has_aliases or (isinstance(view, Branch) and view.parameters)):
                later.append(visit)  # visit last, after its parameters and the nodes stored under other paths
                continue
            if isinstance(view, Leaf) and view.opened is not None and self._is_opened(number, view):
                view = view.opened()
            if isinstance(view, Leaf):
                yield from self._leaf(visit, view)
            # An immutable container is visited at each of its paths, because it is rebuilt for each path.
            if not isinstance(view, Branch) or id(value) in visit.within:
                continue
            if not rebind and visit is not start and any(bound == number for bound, _ in self.bindings.of(value)):
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
            yield from self._match(later, rebind=rebind, start=start, last=True)

    def _is_opened(self, number: int, leaf: Leaf) -> bool:
        """True if an object that is a single value in the program is stored as several values."""
        if leaf.packed is None:
            return self.graph.nodes[number].value is None
        is_plain = self.graph.nodes[number].type in SEQUENCES and self.values.below(number) is not None
        return not is_plain and self.values.kinds.get(number) != NUMBERS

    def _covers(self, number: int, *, arrays: bool) -> list[tuple[int, Path]] | None:
        # Return the values in a plain container, or None if it is not plain or holds an object that is bound elsewhere.
        covers = self.values.below(number, arrays=arrays)
        bound = (binding for one in self.values.aliases[number] for binding in self.bindings.by_number.get(one, ()))
        return covers if all(binding.identity is None for binding in bound) else None

    def _leaf(self, visit: _Visit, leaf: Leaf) -> Iterator[Assignment]:
        if not self.bindings.bind(visit.number, visit.value, visit.path, fixed=leaf.in_place):
            return
        if self.graph.nodes[visit.number].value is not None:
            slot, is_none = leaf.slot, self.values.kinds.get(visit.number) == "none"
            if is_none and self._final and leaf.in_place and visit.slot is not None:
                slot = visit.slot  # the object itself cannot become None, so replace it in its holder
                _logger.warning("%s is None in the checkpoint and is set to None", format_node_path(visit.path))
            yield Assignment(visit.number, slot, visit.path)
        elif visit.value is None or leaf.opened or isinstance(leaf.slot, PartState):  # accept a plain state_dict(), too
            covers = self._covers(visit.number, arrays=self._final)
            if covers is not None:
                yield Assignment(visit.number, leaf.slot, visit.path, covers=covers)

    def _branch(self, visit: _Visit, view: Branch, queue: list[_Visit]) -> Iterator[Assignment]:
        """Follow the edges that both graphs have; plain values do not need an edge in the program."""
        number, value, path = visit.number, visit.value, visit.path
        saved = self.graph.nodes[number].edges
        changes = view.sequence and len(view.edges) != len(saved)
        takes_arrays = self._final and changes
        slot = _slot_of_elements(visit, arrays=takes_arrays) if self.graph.nodes[number].type in SEQUENCES else None
        if slot is not None:
            # Fill an empty deque now, because objects that are appended later are restored in lists, but not in deques.
            takes_arrays = takes_arrays or (isinstance(value, deque) and not value)
            covers = self._covers(number, arrays=takes_arrays)
            # Elements of a tuple, and elements referenced elsewhere, keep their identity unless the length changes.
            if covers is not None and (changes or not (number in self.values.sharing or isinstance(value, tuple))):
                yield Assignment(number, slot, path, covers)
                return
        edges = {edge.segment: edge for edge in self._edges(number, _rooted(value), view)}
        within = visit.within | {id(value)} if view.functional else frozenset()
        if not self.has_unmatched:
            new = (edge.value for segment, edge in edges.items() if segment not in saved)
            self.has_unmatched = any(not is_python_value(value) for value in new)
        is_dict = isinstance(value, dict) and not view.functional
        owner, keys = (visit.slot, self.values.keys(number)) if is_dict else (None, {})
        if self._final and is_dict and type(value) in (dict, OrderedDict):
            order = [keys.get(segment, unescape_key(segment)) for segment in {**keys, **saved}]
            self.orders += [] if [*value] == order else [(value, order)]
        for segment, child in saved.items():
            below = (*path, segment)
            if segment in edges:
                part, slot = edges[segment].value, edges[segment].slot
                if isinstance(part, list | dict | deque) and not isinstance(slot, PartSlot):
                    slot = self._slots.setdefault(id(part), slot)
                queue.append(_Visit(child, part, classify(part, slot), below, slot, within))
            elif owner is not None and (covers := self._covers(child, arrays=self._final)) is not None:
                kind = OrderedDict if isinstance(value, OrderedDict) else dict  # dict.__setitem__ would lose the order
                add = partial(kind.__setitem__, value, keys.get(segment, unescape_key(segment)))
                yield Assignment(child, Attachment(owner.anchor, (*owner.trail, segment), ..., add), below, covers)
            elif child in self.graph.with_values and (view.optimizer is None or segment != GROUPS):
                self.waiting.append(value)
                # Skip graphs without has_own_states, because they may be plain trees with extra edges for dotted keys.
                if self._final and self.graph.has_own_states and isinstance(value, dict | list | tuple | deque):
                    self.lacking.append(below)

    def _edges(self, number: int, value: Any, view: Branch) -> list[Edge]:
        """Return an object's edges, named and ordered as in the checkpoint."""
        if view.edges_to is None:
            return view.edges
        if self.graph.numbers_keras:
            return view.edges_to(keras_children(value, numbered=True))
        node = self.graph.nodes[number]
        listed = node.edges.get("_trainable_variables")  # TensorFlow's list of parameters
        in_lists = [] if listed is None else list(self.graph.nodes[listed].edges.values())
        saved = node.groups[0] if node.groups else in_lists
        if not view.parameters or not saved:
            return view.edges_to(keras_children(value, saved=node.edges))
        bound = [{node for node, _ in self.bindings.of(parameter)} for parameter in view.parameters]
        order = [next((index for index, one in enumerate(saved) if one in numbers), -1) for numbers in bound]
        if sorted(order) == list(range(len(saved))):
            return view.edges_to(keras_children(value, order))
        return [edge for edge in view.edges if not isinstance(edge.value, list)]  # the saved parameters do not match

    def _optimizer_values(self, new: Collection[int]) -> Iterator[Assignment]:
        """Yield assignments of values and options for newly bound optimizers and parameters."""
        for number, kept in self.graph.optimizers.items():
            due = list(kept) if number in new else [parameter for parameter in new if parameter in kept]
            for optimizer, path in self.bindings.objects(number) if due else ():
                if is_optimizer(optimizer):
                    live = self._optimizers.get(id(optimizer))
                    if live is None or live.outdated(optimizer):
                        live = self._optimizers[id(optimizer)] = _LiveOptimizer(optimizer, self.graph, number)
                    yield from self._of_optimizer(optimizer, live, path, due)

    def _of_optimizer(self, optimizer: Any, live: _LiveOptimizer, path: Path, due: list[int]) -> Iterator[Assignment]:
        """Yield assignments for the optimizer state and group options of the parameters in ``due``."""
        groups = optimizer.param_groups
        touched: set[int] = set()
        for saved in due:
            tensors = ((tensor, path) for tensor, path in self.bindings.objects(saved) if is_torch_tensor(tensor))
            parameter, below = next(tensors, (None, ()))
            if parameter is None:
                continue
            index = live.group_of.get(id(parameter))
            for segment, value in live.kept[saved]:
                where, name = (*path, OPTIMIZER_SLOTS, *below, segment), unescape_key(segment)
                if index is None or not (live.related or name in optimizer.state.get(parameter, {})):
                    self.unused[value] = where
                else:
                    yield Assignment(value, OptimizerSlot(optimizer, groups[index], parameter, name), where)
            if index is not None and saved in live.saved_group:
                live.origins.setdefault(index, set()).add(live.saved_group[saved])
                touched.add(index)
        for index in sorted(touched):
            # If the parameters of a group come from several saved groups, its options stay unchanged.
            origin = min(live.origins[index]) if len(live.origins[index]) == 1 else -1
            for segment, value in live.saved_options.get(origin, {}).items():
                where, name = (*path, GROUPS, str(index), segment), unescape_key(segment)
                if live.related or name in groups[index] or name == _SCHEDULED:
                    yield Assignment(value, OptionSlot(optimizer, index, name), where)
                else:
                    self.unused[value] = where


def _slot_of_elements(visit: _Visit, *, arrays: bool = False) -> Slot | None:
    """Return the slot for all elements of a plain sequence in the program, or None for any other object."""
    value, slot = visit.value, visit.slot
    if slot is None or not isinstance(value, list | tuple | deque) or not is_plain(value, {}, arrays=arrays):
        return None
    return sequence_slot(value, slot)


class Binding(NamedTuple):
    """Records that an object is bound to a node."""

    identity: int | None  # id of the object; None if a restore may replace it
    path: Path
    reference: Callable[[], Any] | None  # None if the object does not support weak references

    @property
    def lives(self) -> bool:
        """True if the object still exists, or does not support weak references."""
        return self.reference is None or self.reference() is not None


class Bindings:
    """Binds objects to nodes. The bindings made in one pass can be undone together."""

    def __init__(self, graph: SavedGraph) -> None:
        self.conflicts: dict[int, tuple[Path, Path]] = {}  # paths of two different objects that match the same node
        self._graph = graph
        self.by_number: dict[int, list[Binding]] = {}
        self._numbers: dict[int, dict[int, None]] = {}  # nodes to which an object may be bound, keyed by object id
        self._before: list[tuple[int, list[Binding]]] = []  # nodes, each with its bindings before the pass

    @property
    def fresh(self) -> dict[int, None]:
        """The nodes that have been bound to objects since the pass began."""
        return dict.fromkeys(number for number, _ in self._before)

    def begin(self) -> None:
        self._before.clear()

    def undo(self) -> None:
        for number, bindings in reversed(self._before):
            self.by_number[number] = bindings
        self.begin()

    def objects(self, number: int) -> list[tuple[Any, Path]]:
        """Return the live objects that are bound to a node, with their paths."""
        references = [(reference, path) for _, path, reference in self.by_number.get(number, []) if reference]
        return [(target, path) for reference, path in references if (target := reference()) is not None]

    def of(self, holder: Any) -> list[tuple[int, Binding]]:
        """Return the nodes to which an object is bound, each with its binding."""
        identity = id(_rooted(holder))
        pairs = [(number, binding) for number in self._numbers.get(identity, ()) for binding in self.by_number[number]]
        # A new object may reuse the id of a deleted one.
        return [(number, binding) for number, binding in pairs if binding.identity == identity and binding.lives]

    def bind(self, number: int, value: Any, path: Path, *, fixed: bool) -> bool:
        """Bind an object to a node; return False if another object is already bound to the node."""
        bindings, value = self.by_number.get(number, []), _rooted(value)
        identity = id(value) if fixed else None
        if any(binding.identity == identity and binding.path == path and binding.lives for binding in bindings):
            return True
        kept = [binding for binding in bindings if binding.path != path]  # a binding at the same path is replaced
        others = [binding for binding in kept if binding.identity not in (None, identity) and binding.lives]
        if fixed and others:
            if self.conflicts.get(number) != (others[0].path, path):
                text = "%s is one object in the checkpoint, but %s and %s are two; only the first of them is restored"
                _logger.warning(text, *map(format_node_path, (self._graph.path(number), others[0].path, path)))
            self.conflicts[number] = others[0].path, path
            return False
        if identity is not None:
            self._numbers.setdefault(identity, {})[number] = None
        can_be_watched = fixed and type(value).__weakrefoffset__ != 0
        self._before.append((number, bindings))
        self.by_number[number] = [*kept, Binding(identity, path, weakref.ref(value) if can_be_watched else None)]
        return True


def _rooted(value: Any) -> Any:
    """Return the root that a node represents; return any other object unchanged."""
    root = value.__holdfast_root__() if isinstance(value, Node | Part) else None
    return value if root is None else root


class _LiveOptimizer:
    """Matches an optimizer in the program with a saved optimizer by the parameters in their groups."""

    def __init__(self, optimizer: Any, graph: SavedGraph, number: int) -> None:
        node, groups = graph.nodes[number], optimizer.param_groups
        self.kept = graph.optimizers[number]
        self.saved_group = {parameter: index for index, group in enumerate(node.groups) for parameter in group}
        self.group_of = {id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]}
        self.origins: dict[int, set[int]] = {}  # for each group index, the saved groups that its parameters come from
        self._reference, self._sizes = weakref.ref(optimizer), [len(group["params"]) for group in groups]
        holder = node.edges.get(GROUPS)
        options = {} if holder is None else graph.nodes[holder].edges
        self.saved_options = {int(key): graph.nodes[child].edges for key, child in options.items() if key.isdecimal()}
        # Classes are related if they are equal, if one derives from the other, or if both are torch optimizers with the
        # same options. The last rule is for AdamW, which did not derive from Adam before torch 2.7.
        cls = type(getattr(optimizer, "optimizer", optimizer))
        of_torch = node.type.startswith(_TORCH) and cls.__module__.startswith(_TORCH)
        alike = of_torch and self.saved_options.get(0, {}).keys() == group_options(groups[0]).keys()
        self.related = alike or is_kin(cls, node.type)

    def outdated(self, optimizer: Any) -> bool:
        """True if ``optimizer`` is not the matched optimizer, or has gained parameters since it was matched."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        return self._reference() is not optimizer or self._sizes != sizes
