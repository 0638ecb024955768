"""The state of one component, without the components below it: how it is taken and restored.

A component with a ``get_state`` of its own decides what its state is. For all others it is everything that the walk of
:mod:`~holdfast.integrations.graph` reaches from the object's attributes, up to the components below. The values that a
torch optimizer keeps for parameters of those belong to the optimizer, by the paths of the parameters.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ...engine.arrays import MemoryTree, SavedLeaf
from ...engine.errors import DamagedCheckpointError, TreeMismatchError, UnsupportedLeafError, shortened
from ...engine.pytree import (
    ArrayLeaf,
    PackedNumbers,
    Saved,
    TreeDocument,
    collection_paused,
    describe,
    expand,
    flatten,
    is_leaf,
    is_python_value,
    is_torch_tensor,
    pack_tree,
    unescape_key,
)
from ...engine.sources import Misfits
from ...engine.stateful import adapted
from ...engine.storage import LocalBackend, Location
from ..graph import (
    OPTIMIZER_SLOTS,
    FreshObjects,
    LiveGraph,
    LiveNode,
    OptionSlot,
    Path,
    Restoration,
    StoredGraph,
    capture,
    format_node_path,
    is_optimizer,
    walk,
)
from .live import LiveComponent, discovered, is_component, live_tree
from .names import format_component_path

_logger = logging.getLogger("holdfast")

F = TypeVar("F", bound=Callable[..., Any])

# Key of a state for the document of its objects, as text, where the names of the values do not imply them.
GRAPH = "__graph__"

_AT_ONCE = 32  # states of remote components that are requested at the same time


class _GivenState(Location):
    """The location of a state that the program gave, for messages."""

    @property
    def url(self) -> str:
        return "the state"


_GIVEN = _GivenState(LocalBackend(), "/")


@dataclass(slots=True)
class OwnReport:
    missing: tuple[str, ...] = ()  # values of the component that the state does not have
    unused: tuple[str, ...] = ()  # values of the state that the component has no place for
    different: dict[str, str] = field(default_factory=dict)  # values that do not fit, each with the reason
    fresh: tuple[Any, ...] = ()  # the tensors among them
    modes: tuple[str, ...] = ()  # modes of modules and ``requires_grad`` flags that have changed, as text for users


# ---- components with a state of their own


def inherited(method: F) -> F:
    """Mark a method as the one that components inherit, to distinguish it from overrides."""
    vars(method)["inherited"] = True
    return method


def overrides(value: Any, method: str) -> bool:
    """Whether an object has a ``get_state`` or ``set_state`` other than the one that components inherit."""
    found = getattr(type(value), method, None)
    # The walk names the values of optimizers better.
    return found is not None and not hasattr(found, "inherited") and not is_optimizer(value)


def call_get_state(value: Any, /, **given: Any) -> Any:
    """Call an object's own ``get_state`` with those of the arguments that it takes, and that are not None."""
    return value.get_state(**{name: one for name, one in given.items() if one is not None and takes(value, name)})


def takes(value: Any, name: str) -> bool:
    """Whether an object's own ``get_state`` takes an argument by name."""
    try:
        parameters = inspect.signature(value.get_state).parameters.values()
    except (TypeError, ValueError):  # Functions in C may have no signature.
        return False
    return any(one.kind is one.VAR_KEYWORD or one.name == name for one in parameters)


def is_remote(value: Any) -> bool:
    """Whether ``get_state`` may run in a thread beside others, as the class declares."""
    return getattr(type(value), "__remote__", False) is True and overrides(value, "get_state")


@contextlib.contextmanager
def fetched(
    components: Iterable[LiveComponent], ask: Callable[[LiveComponent], Any]
) -> Iterator[Callable[[LiveComponent], Any]]:
    """Request the states of remote components at once; yield a function that returns one, or asks a component now."""
    remote = [one for one in components if is_remote(one.value)]
    pool = ThreadPoolExecutor(min(len(remote), _AT_ONCE) or 1, "holdfast-states")
    states = {id(one.value): pool.submit(contextvars.copy_context().run, ask, one) for one in remote}
    try:
        yield lambda one: states[id(one.value)].result() if id(one.value) in states else ask(one)
    finally:
        pool.shutdown(cancel_futures=True)


# ---- taking


def own_states(
    components: Iterable[LiveComponent], *, snapshot: bool = False, partial: bool = False
) -> dict[Path, Any]:
    """Take the states of components; ``partial`` leaves out values for parameters outside of the tree."""

    def ask(one: LiveComponent) -> Any:
        return call_get_state(one.value, not_components=sorted(child.name for child in one.children) or None)

    known, states = list(components), dict[Path, Any]()
    with fetched(known, ask) as take:
        for one in known:
            if not overrides(one.value, "get_state"):
                states[one.path] = default_state(one, snapshot=snapshot, partial=partial)
                continue
            state, names = take(one), {child.name for child in one.children}
            if isinstance(state, Mapping) and names & state.keys():
                state = {key: value for key, value in state.items() if key not in names}
            states[one.path] = copied(state) if snapshot else pack_tree(state)
    return states


def fresh_components(root: Any) -> dict[str, FreshObjects]:
    """Return what the components of a tree are that have no ``get_state`` of their own; calls nothing of theirs.

    Raise UnsupportedLeafError if one of them holds what no save can take.
    """
    own = [one for one in live_tree(root).walk() if not overrides(one.value, "get_state")]
    return {format_component_path(one.path): FreshObjects(own_graph(one)) for one in own}


def default_state(component: LiveComponent, *, snapshot: bool, partial: bool = False) -> dict[str, Any]:
    """Take the state of a component that has no ``get_state`` of its own."""
    graph = own_graph(component)
    if not partial:
        _refuse_unnamed(component, graph)
        _refuse_outside(component, graph)
    found = capture(graph.without_names())
    for path, reason in graph.skipped.items():
        where = format_component_path(component.path)
        _logger.warning("component %s: %s is not saved: it %s", where, format_node_path(path), reason)
    state: dict[str, Any] = dict(found.tree)
    if _needs_document(found.document, found.tree):
        if GRAPH in state:
            raise UnsupportedLeafError(f"{_called(component)} has an attribute {GRAPH!r}, a name that is taken")
        state[GRAPH] = json.dumps(found.document, separators=(",", ":"))
    return dict(copied(state)) if snapshot else state


def _refuse_unnamed(component: LiveComponent, graph: LiveGraph) -> None:
    """Raise UnsupportedLeafError for components inside objects in which no component looks for them."""
    known = {id(one.value) for one in component.root.walk()}
    # Components among the attributes are named on purpose, or left out with a warning.
    known |= {id(adapted(child)) for _, child in discovered(component.value)}
    lost = [
        format_node_path((*node.path, segment))
        for node in graph.own
        for segment, child in node.edges.items()
        if child.outside and is_component(child.value) and id(adapted(child.value)) not in known
    ]
    if lost:
        raise UnsupportedLeafError(
            f"{_called(component)}: {shortened(lost)}: a component inside of an object that is none would not be "
            "saved, and nothing was written. Make it an attribute of a component, or part of a list, dictionary, deque "
            "or module that is one; or return it from get_checkpointable_components(); or name it in __untracked__"
        )


def _refuse_outside(component: LiveComponent, graph: LiveGraph) -> None:
    """Raise UnsupportedLeafError for optimizers whose values would be lost, as nothing names their parameters."""
    lost = [(node, outside_parameters(node)) for node in graph.nodes if node.groups]
    lines = [
        f"  {format_node_path(node.path)}: {len(parameters)} of its parameters, of shapes "
        f"{shortened([str(list(one.shape)) for one in parameters], 3)}"
        for node, parameters in lost
        if parameters
    ]
    if lines:
        raise UnsupportedLeafError(
            f"{_called(component)}: parameters of these optimizers are in no component, so that what the optimizers "
            "keep for them (moments, learning rates) would be lost, and nothing was written. Make the module that owns "
            "them an attribute of a component of this tree and save the tree from its root; or name the optimizer in "
            "__untracked__:\n" + "\n".join(lines)
        )


def _needs_document(document: Mapping[str, Any], tree: Any) -> bool:
    """Whether a graph is more than its values in their containers."""
    nodes = document["nodes"]
    names = set(flatten(tree).names)
    edges = sum(len(node.get("edges", ())) for node in nodes)
    return (
        edges != len(nodes) - 1
        or any(node.get("slots") or node.get("groups") or node.get("training") is False for node in nodes)
        or any("value" in node and node["value"] not in names for node in nodes)
    )


def copied(tree: Any) -> Any:
    """Return a tree with copies of everything that can change."""
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if is_torch_tensor(tree):
        return tree.detach().clone()
    if isinstance(tree, PackedNumbers):
        return tree.unpack()
    contents = None if is_leaf(tree) else expand(tree)
    if contents is not None and contents.kind != "mapping":  # Some mappings cannot be made from a dictionary.
        return contents.build([copied(child) for child in contents.values])
    return copy.copy(tree) if isinstance(tree, set) else tree


# ---- restoring


def divided(one: LiveComponent, state: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[LiveComponent, Any]]]:
    """Return the own part of a state, and the states of the components below, of which RLlib nests names like paths."""
    flat = dict(state)
    for child in one.children:
        *keys, last = child.name.split("/")
        holder: Any = flat
        for key in keys if child.name not in state else ():
            if not isinstance(holder.get(key), Mapping):
                break
            holder[key] = dict(holder[key])  # The state is taken out of a copy.
            holder = holder[key]
        else:
            if holder is not flat and last in holder:
                flat[child.name] = holder.pop(last)
    for name in {child.name.partition("/")[0] for child in one.children}:
        if flat.get(name) == {} and state.get(name):
            del flat[name]  # Only states of components were in it.
    below = [(child, flat.pop(child.name)) for child in one.children if child.name in flat]
    return flat, below


def prepare_state(
    component: LiveComponent,
    stored: StoredGraph,
    *,
    ignore: Iterable[Path] = (),  # paths of values that stay as they are
    fitting: bool = False,  # whether only values that fit are read
    modes: bool = False,  # whether modules get the modes that they had, too
) -> Callable[[], OwnReport]:
    """Read the state of a component that has no ``set_state``; return a function that changes the component."""
    source = stored.checkpoint
    graph = own_graph(component)
    restoration = Restoration(stored, component, ignore=ignore, final=True, ends=component.ends)
    restoration.progress.partial = True  # The report lists the values that are left over.
    misfits = Misfits()
    try:
        prepared = restoration.prepare(misfits if fitting else None)
    except TreeMismatchError as error:
        if not error.differences:
            raise
        other = "leave them out" if source is _GIVEN else "name values that stay with restore_from_path(keep=...)"
        raise TreeMismatchError(
            f"{source}: these values do not fit {_called(component)}; nothing was changed. "
            f"Change the program, or {other}:",
            error.differences,
        ) from error

    def apply() -> OwnReport:
        before = {} if modes else _options(graph)
        prepared()
        report = restoration.report()
        unused = report.pending + report.unused
        # Earlier versions left out what optimizers keep for parameters of some components.
        without = [number for number, node in enumerate(stored.graph.nodes) if node.groups and not any(node.groups)]
        lost = [format_node_path((*stored.graph.path(number), OPTIMIZER_SLOTS)) for number in without]
        if unused and report.missing and not (report.restored or lost or fitting):
            raise TreeMismatchError(
                f"{source}: nothing in it matches {_called(component)}, and nothing was changed. It has "
                f"{shortened(map(repr, unused))}; the component has {shortened(map(repr, sorted(report.missing)))}"
            )
        kept = misfits.kept
        missing = [path for path in report.missing if path not in kept]
        unused = tuple(path for path in unused if path not in kept)
        fresh = [node.value for node in graph.leaves() if format_node_path(node.path) in kept]
        pairs = {} if modes else {path: (before.get(path, value), value) for path, value in _options(graph).items()}
        changed = [f"{path} = {now} (program {mine})" for path, (mine, now) in pairs.items() if mine != now]
        changed += restoration.restore_modes() if modes else []
        return OwnReport((*lost, *missing), unused, kept, tuple(filter(is_torch_tensor, fresh)), tuple(changed))

    return apply


def _options(graph: LiveGraph) -> dict[str, Any]:
    """Return the plain options of torch optimizers, such as learning rates that no schedule changes, by path."""
    slots = [(node.path, node.slot) for node in graph.leaves() if isinstance(node.slot, OptionSlot)]
    fixed = [(path, one.get()) for path, one in slots if one.name == "initial_lr" or "initial_lr" not in one.group]
    return {format_node_path(path): value for path, value in fixed if is_python_value(value)}


def forget_moments(component: LiveComponent, tensors: Sequence[Any]) -> list[str]:
    """Remove what a component's torch optimizers keep for tensors that have another shape; return a line for each."""
    # A component that restores an optimizer does not see the values of another component's parameters.
    if overrides(component.value, "set_state"):
        return []
    graph = own_graph(component)
    known, lines = _parameters(component.root), []
    for node in graph.nodes:
        for tensor in tensors if node.optimizer is not None else ():
            if node.optimizer.state.pop(tensor, None):
                which = format_component_path(known.get(id(tensor), ()))
                lines.append(f"{format_node_path(node.path)}: its values for {which}, which has another shape")
    return lines


def _called(component: LiveComponent) -> str:
    name = type(component.value).__qualname__
    return f"component {format_component_path(component.path)} ({name})" if component.path else name


# ---- a state in memory, opened as a checkpoint is


def stored_state(state: Any, source: Location = _GIVEN) -> StoredGraph:
    """Open a state in memory for a component that has no ``set_state`` of its own."""
    if not isinstance(state, Mapping):
        raise TreeMismatchError(f"{source}: expected a dictionary as state, found {type(state).__name__}")
    values = {key: value for key, value in state.items() if key != GRAPH}
    document = None if state.get(GRAPH) is None else read_document(state[GRAPH], source)
    flat = flatten(pack_tree(values))
    packed = [name for name, value in zip(flat.names, flat.values, strict=True) if isinstance(value, PackedNumbers)]
    if any(json.dumps(f"{name}.0") in str(state.get(GRAPH)) for name in packed):
        flat = flatten(values)  # Documents of earlier versions name every element.
    found = dict(zip(flat.names, describe(flat.names, flat.values), strict=True))
    leaves = [SavedLeaf(name, Saved.of(leaf)) for name, leaf in found.items()]
    arrays = {name: leaf for name, leaf in found.items() if isinstance(leaf, ArrayLeaf)}
    return StoredGraph(MemoryTree(source, TreeDocument(flat.structure), leaves, arrays), source, document=document)


def read_document(text: Any, source: Location) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{source}: {GRAPH} does not describe a graph: {error}") from error


# ---- a component as a graph of its own

_TREE = "(tree)"  # name of the edge to the parameters of other components that have no name in this one


def _parameters(top: LiveComponent) -> dict[int, Path]:
    """Return the paths of all tensors of a tree of components, by identity."""
    if top.parameters is None:
        top.parameters = {}
        for one in top.walk():
            with contextlib.suppress(UnsupportedLeafError):  # Its own get_state() replaces the walk.
                for node in walk(one, strict=False).nodes:
                    if is_torch_tensor(node.value):
                        top.parameters.setdefault(id(node.value), (*one.path, *node.path))
    return top.parameters


@collection_paused()
def own_graph(component: LiveComponent) -> LiveGraph:
    """Return the graph of a component's own values, which ends at other components."""
    component.added.clear()
    graph = walk(component, ends=component.ends)
    # Parameters of its optimizers that it has no name for are in it by their paths from the root of the tree.
    for parameter in [one for node in graph.nodes for one in outside_parameters(node)]:
        if (path := _parameters(component.root).get(id(parameter))) is not None:
            component.add((_TREE, *map(unescape_key, path)), parameter)
    return walk(component, ends=component.ends) if component.added else graph


def outside_parameters(node: LiveNode) -> list[Any]:
    """Return the parameters of an optimizer that are not in the graph."""
    if node.optimizer is None or not node.groups:
        return []
    within = {id(parameter.value) for group in node.groups for parameter in group}
    every = [parameter for group in node.optimizer.param_groups for parameter in group["params"]]
    return [parameter for parameter in every if id(parameter) not in within]
