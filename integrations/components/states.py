"""Capture and restore the state of a single component, without the components below it.

A component with its own ``get_state`` defines its state itself. The state of any other component is everything that
the walk of :mod:`~holdfast.integrations.graph` reaches from its attributes, down to the components below. The values
of a torch optimizer are saved with the optimizer, keyed by parameter path, even for parameters in other components.
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
    is_optimizer,
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
    walk,
)
from .live import LiveComponent, discovered, is_component, live_tree
from .names import format_component_path

_logger = logging.getLogger("holdfast")

F = TypeVar("F", bound=Callable[..., Any])

# State key under which the graph document is stored as a string; omitted if the names of the values imply the graph.
GRAPH = "__graph__"

_AT_ONCE = 32  # maximum number of concurrent state requests to remote components


class _GivenState(Location):
    """The location that error messages show for a state passed by the program."""

    @property
    def url(self) -> str:
        return "the state"


_GIVEN = _GivenState(LocalBackend(), "/")


@dataclass(slots=True)
class OwnReport:
    missing: tuple[str, ...] = ()  # values of the component that are missing from the state
    unused: tuple[str, ...] = ()  # values in the state that the component does not have
    different: dict[str, str] = field(default_factory=dict)  # reasons why values do not fit, keyed by path
    fresh: tuple[Any, ...] = ()  # the component's tensors whose saved values do not fit
    modes: tuple[str, ...] = ()  # descriptions of changed module modes, ``requires_grad`` flags and optimizer options


def inherited(method: F) -> F:
    """Mark a method as the default implementation, to distinguish it from overrides."""
    vars(method)["inherited"] = True
    return method


def overrides(value: Any, method: str) -> bool:
    """True if an object has its own implementation of ``method`` (``get_state`` or ``set_state``)."""
    implementation = getattr(type(value), method, None)
    # An optimizer's own methods are never used, because a walk gives its values better names.
    return implementation is not None and not hasattr(implementation, "inherited") and not is_optimizer(value)


def call_get_state(target: Any, /, **given: Any) -> Any:
    """Call an object's own ``get_state``, passing only arguments that it accepts and that are not None."""
    return target.get_state(**{key: value for key, value in given.items() if value is not None and takes(target, key)})


def takes(value: Any, name: str) -> bool:
    """True if an object's own ``get_state`` accepts an argument with the given name."""
    try:
        parameters = inspect.signature(value.get_state).parameters.values()
    except (TypeError, ValueError):  # C functions may have no signature.
        return False
    return any(parameter.kind is parameter.VAR_KEYWORD or parameter.name == name for parameter in parameters)


def is_remote(value: Any) -> bool:
    """True if the class declares that ``get_state`` may be called in a thread, concurrently with other calls."""
    return getattr(type(value), "__remote__", False) is True and overrides(value, "get_state")


@contextlib.contextmanager
def fetched(
    components: Iterable[LiveComponent], ask: Callable[[LiveComponent], Any]
) -> Iterator[Callable[[LiveComponent], Any]]:
    """Request the states of remote components concurrently; yield a function that returns a component's state."""
    remote = [component for component in components if is_remote(component.value)]
    pool = ThreadPoolExecutor(min(len(remote), _AT_ONCE) or 1, "holdfast-states")
    states = {id(component.value): pool.submit(contextvars.copy_context().run, ask, component) for component in remote}
    try:
        yield lambda live: states[id(live.value)].result() if id(live.value) in states else ask(live)
    finally:
        pool.shutdown(cancel_futures=True)


def own_states(components: Sequence[LiveComponent], *, snapshot: bool = False) -> dict[Path, Any]:
    """Capture component states; a ``snapshot``, which undoes a restore, is copied and may leave out other objects."""

    def ask(live: LiveComponent) -> Any:
        return call_get_state(live.value, not_components=sorted(child.name for child in live.children) or None)

    states = {}
    with fetched(components, ask) as take:
        for component in components:
            if not overrides(component.value, "get_state"):
                state = default_state(component, partial=snapshot)
                states[component.path] = copied(state) if snapshot else state
                continue
            state, names = take(component), {child.name for child in component.children}
            if isinstance(state, Mapping) and names & state.keys():
                state = {key: value for key, value in state.items() if key not in names}
            states[component.path] = copied(state) if snapshot else pack_tree(state)
    return states


def fresh_components(root: Any) -> dict[str, FreshObjects]:
    """Describe the components that lack their own ``get_state``; raise UnsupportedLeafError if one cannot be saved."""
    walked = [component for component in live_tree(root).walk() if not overrides(component.value, "get_state")]
    return {format_component_path(component.path): FreshObjects(own_graph(component)) for component in walked}


def default_state(component: LiveComponent, *, partial: bool = False) -> dict[str, Any]:
    """Return the state of a component without its own ``get_state``; if not ``partial``, refuse what would be lost."""
    graph = own_graph(component)
    if not partial:
        _refuse_unnamed(component, graph)
        _refuse_outside(component, graph)
    captured = capture(graph.without_names())
    for path, reason in graph.skipped.items():
        where = format_component_path(component.path)
        _logger.warning("component %s: %s is not saved: it %s", where, format_node_path(path), reason)
    state: dict[str, Any] = dict(captured.tree)
    if _needs_document(captured.document, captured.tree):
        if GRAPH in state:
            raise UnsupportedLeafError(f"{_called(component)} has an attribute {GRAPH!r}, which is a reserved name")
        state[GRAPH] = json.dumps(captured.document, separators=(",", ":"))
    return state


def _refuse_unnamed(component: LiveComponent, graph: LiveGraph) -> None:
    """Raise UnsupportedLeafError if a component is inside an object that is not searched for components."""
    named = {id(other.value) for other in component.root.walk()}
    # Exempt components among the attributes: if get_checkpointable_components() omits one, a save only logs a warning.
    named |= {id(adapted(child)) for _, child in discovered(component.value)}
    lost = [
        format_node_path((*node.path, segment))
        for node in graph.own
        for segment, child in node.edges.items()
        if child.outside and is_component(child.value) and id(adapted(child.value)) not in named
    ]
    if lost:
        raise UnsupportedLeafError(
            f"{_called(component)}: {shortened(lost)}: a component inside an object that is not one would not be "
            "saved; nothing was written. Make it an attribute of a component, or part of a list, dictionary, deque "
            "or module that is one; or return it from get_checkpointable_components(); or name it in __untracked__"
        )


def _refuse_outside(component: LiveComponent, graph: LiveGraph) -> None:
    """Raise UnsupportedLeafError if optimizer values would be lost because no component holds their parameters."""
    lines = [
        f"  {format_node_path(node.path)}: {len(parameters)} of its parameters, of shapes "
        f"{shortened([str(list(parameter.shape)) for parameter in parameters], 3)}"
        for node in graph.nodes
        if (parameters := outside_parameters(node))
    ]
    if lines:
        raise UnsupportedLeafError(
            f"{_called(component)}: parameters of these optimizers are in no component, so their optimizer states "
            "(moments, learning rates) would be lost; nothing was written. Make the module that owns "
            "them an attribute of a component of this tree and save the tree from its root; or name the optimizer in "
            "__untracked__:\n" + "\n".join(lines)
        )


def _needs_document(document: Mapping[str, Any], tree: Any) -> bool:
    """True if a graph cannot be rebuilt from its tree of values alone, for example because objects are shared."""
    nodes = document["nodes"]
    names = set(flatten(tree).names)
    edges = sum(len(node.get("edges", ())) for node in nodes)
    return (
        edges != len(nodes) - 1
        or any(node.get("slots") or node.get("groups") or node.get("training") is False for node in nodes)
        or any("value" in node and node["value"] not in names for node in nodes)
    )


def copied(tree: Any) -> Any:
    """Copy a tree; the copy shares no mutable objects with the original."""
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if is_torch_tensor(tree):
        return tree.detach().clone()
    if isinstance(tree, PackedNumbers):
        return tree.unpack()
    contents = None if is_leaf(tree) else expand(tree)
    if contents is not None and contents.kind != "mapping":  # Some mapping types cannot be built from a dictionary.
        return contents.build([copied(child) for child in contents.values])
    return copy.copy(tree) if isinstance(tree, set) else tree


def divided(live: LiveComponent, state: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[LiveComponent, Any]]]:
    """Split a state into a component's own state and its children's states, which may be nested by path as in RLlib."""
    flat = dict(state)
    for child in live.children:
        *keys, last = child.name.split("/")
        holder: Any = flat
        for key in keys if child.name not in state else ():
            if not isinstance(holder.get(key), Mapping):
                break
            holder[key] = dict(holder[key])  # copied, because the child's state is removed from it
            holder = holder[key]
        else:
            if holder is not flat and last in holder:
                flat[child.name] = holder.pop(last)
    for name in {child.name.partition("/")[0] for child in live.children}:
        if flat.get(name) == {} and state.get(name):
            del flat[name]  # the removed entry held only states of child components
    return flat, [(child, flat.pop(child.name)) for child in live.children if child.name in flat]


def prepare_state(
    component: LiveComponent,
    stored: StoredGraph,
    *,
    ignore: Iterable[Path] = (),  # paths of values to leave unchanged
    fitting: bool = False,  # whether to read only values that fit
    modes: bool = False,  # whether to restore module modes as well
) -> Callable[[], OwnReport]:
    """Read the state for a component without its own ``set_state``; return a function that applies the state."""
    source = stored.checkpoint
    graph = own_graph(component)
    restoration = Restoration(stored, component, ignore=ignore, final=True, ends=component.ends)
    misfits = Misfits()
    try:
        prepared = restoration.prepare(misfits if fitting else None)
    except TreeMismatchError as error:
        if not error.differences:
            raise
        other = "leave them out" if source is _GIVEN else "name values to keep with restore_from_path(keep=...)"
        raise TreeMismatchError(
            f"{source}: these values do not fit {_called(component)}; nothing was changed. "
            f"Change the program, or {other}:",
            error.differences,
        ) from error

    def apply() -> OwnReport:
        before = _options(graph)
        prepared()
        report = restoration.report()
        unused = report.pending + report.unused
        # Earlier versions saved no optimizer values for parameters in some components; report these values as missing.
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
        pairs = [(path, before.get(path, now), now) for path, now in _options(graph).items() if not modes]
        options = [f"{path} = {now} (program {mine})" for path, mine, now in pairs if mine != now]
        changed = restoration.restore_modes() if modes else options
        return OwnReport((*lost, *missing), unused, kept, tuple(filter(is_torch_tensor, fresh)), tuple(changed))

    return apply


def _options(graph: LiveGraph) -> dict[str, Any]:
    """Return the plain torch optimizer options that no scheduler controls, such as learning rates, keyed by path."""
    slots = [(node.path, node.slot) for node in graph.leaves() if isinstance(node.slot, OptionSlot)]
    fixed = [(path, slot.get()) for path, slot in slots if slot.name == "initial_lr" or "initial_lr" not in slot.group]
    return {format_node_path(path): value for path, value in fixed if is_python_value(value)}


def forget_moments(component: LiveComponent, tensors: Sequence[Any]) -> list[str]:
    """Remove a component's optimizer values for tensors whose shape has changed; return a message for each."""
    # Call this only after all components are restored, when all parameters that do not fit are known.
    if overrides(component.value, "set_state"):
        return []
    graph = own_graph(component)
    paths, lines = _parameters(component.root), []
    for node in graph.nodes:
        for tensor in tensors if node.optimizer is not None else ():
            if node.optimizer.state.pop(tensor, None):
                which = format_component_path(paths.get(id(tensor), ()))
                lines.append(f"{format_node_path(node.path)}: its values for {which}, whose shape has changed")
    return lines


def _called(component: LiveComponent) -> str:
    name = type(component.value).__qualname__
    return f"component {format_component_path(component.path)} ({name})" if component.path else name


def stored_state(state: Mapping[str, Any], source: Location = _GIVEN) -> StoredGraph:
    """Open an in-memory state for a component without its own ``set_state``."""
    values = {key: value for key, value in state.items() if key != GRAPH}
    document = None if state.get(GRAPH) is None else read_document(state[GRAPH], source)
    flat = flatten(pack_tree(values))
    packed = [name for name, value in zip(flat.names, flat.values, strict=True) if isinstance(value, PackedNumbers)]
    if any(json.dumps(f"{name}.0") in str(state.get(GRAPH)) for name in packed):
        flat = flatten(values)  # earlier versions' graph documents name each number of the sequence separately
    described = dict(zip(flat.names, describe(flat.names, flat.values), strict=True))
    leaves = [SavedLeaf(name, Saved.of(leaf)) for name, leaf in described.items()]
    arrays = {name: leaf for name, leaf in described.items() if isinstance(leaf, ArrayLeaf)}
    return StoredGraph(MemoryTree(source, TreeDocument(flat.structure), leaves, arrays), source, document=document)


def read_document(text: Any, source: Location) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{source}: {GRAPH} does not describe a graph: {error}") from error


_TREE = "(tree)"  # first edge in the path of an optimizer parameter that belongs to another component


def _parameters(top: LiveComponent) -> dict[int, Path]:
    """Return the paths of all tensors in a component tree, keyed by tensor id."""
    if top.parameters is None:
        top.parameters = {}
        for component in top.walk():
            with contextlib.suppress(UnsupportedLeafError):  # a component that cannot be walked has its own get_state()
                for node in walk(component, strict=False).nodes:
                    if is_torch_tensor(node.value):
                        top.parameters.setdefault(id(node.value), (*component.path, *node.path))
    return top.parameters


@collection_paused()
def own_graph(component: LiveComponent) -> LiveGraph:
    """Return the graph of a component's own values; the graph ends at other components."""
    component.added.clear()
    graph = walk(component, ends=component.ends)
    # Optimizer parameters without a name in this component are added under their paths from the root of the tree.
    for parameter in [outside for node in graph.nodes for outside in outside_parameters(node)]:
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
