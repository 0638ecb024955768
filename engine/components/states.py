"""The state of one component, without what belongs to the components below it: taken, and given back.

A component that has a ``get_state`` of its own says itself what its state is. For all others it is what can be reached
from the object's attributes by the walk of :mod:`~holdfast.engine.graph`, up to the components below. What a torch
optimizer keeps for parameters of those belongs to the optimizer, by the paths of the parameters.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ..errors import DamagedCheckpointError, TreeMismatchError, UnsupportedLeafError
from ..graph import Restoration, StoredGraph, capture, shown
from ..graph.torch_objects import is_module, is_optimizer
from ..item import SavedLeaf
from ..storage import Location
from ..storage.local import LocalBackend
from ..tree import expand, flatten
from ..tree.frameworks import is_torch_tensor
from .live import LiveComponent
from .memory import MemoryTree
from .names import Names, Path, written
from .own_graph import called, own_graph, stand_in

_logger = logging.getLogger("holdfast")

F = TypeVar("F", bound=Callable[..., Any])

Keep = Callable[[Path, SavedLeaf | None], bool]

GRAPH = "__graph__"
"""Key of a state under which stands, as text, which objects its values belong to, where their names do not say that."""


class _Given(Location):
    """Stands, in messages, for where a state came from that somebody has given."""

    @property
    def url(self) -> str:
        return "the state"


_GIVEN = _Given(LocalBackend(), "/")


@dataclass(frozen=True, slots=True)
class OwnReport:
    """What a component's own state has done to it.

    Attributes:
        missing: Values of the component that the state does not have.
        unused: Values of the state that the component has no place for.
    """

    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


_inherited: set[Any] = set()


def inherited(method: F) -> F:
    """Marks a method as one that components inherit, to be told from what they say themselves."""
    _inherited.add(method)
    return method


def overrides(value: Any, method: str) -> bool:
    """Whether an object has a ``get_state`` or ``set_state`` that is not the one that all components inherit."""
    found = getattr(type(value), method, None)
    return found is not None and found not in _inherited


def own_state(component: LiveComponent, *, snapshot: bool) -> Any:
    """Takes the state of one component, without the states of those below.

    Args:
        component: The component.
        snapshot: Whether to copy what the program may change later.

    Returns:
        A tree.

    Raises:
        UnsupportedLeafError: Something in it cannot be saved; names all that cannot.
    """
    if not _speaks_for_itself(component.value, "get_state"):
        return default_state(component, snapshot=snapshot)
    names = {child.name for child in component.children}
    state = call_get_state(component.value, None, sorted(names) or None)
    if isinstance(state, Mapping) and names & state.keys():
        state = {key: value for key, value in state.items() if key not in names}
    return copied(state) if snapshot else state


def default_state(component: LiveComponent, *, snapshot: bool) -> dict[str, Any]:
    """Takes the state of a component that says nothing of it itself; see :func:`own_state`."""
    root = stand_in(component)
    graph, skipped = own_graph(component, root)
    for path, reason in skipped.items():
        _logger.warning("component %s: %s is not saved: it %s", written(component.path) or "(root)", path, reason)
    found = capture(graph)
    state: dict[str, Any] = dict(found.tree)
    if _says_more(found.document, found.tree):
        if GRAPH in state:
            raise UnsupportedLeafError(f"{called(component)} has an attribute {GRAPH!r}, a name that is taken")
        state[GRAPH] = json.dumps(found.document, separators=(",", ":"))
    return dict(copied(state)) if snapshot else state


def _speaks_for_itself(value: Any, method: str) -> bool:
    # Modules and optimizers have a state_dict, but their own places are known better by the walk.
    return overrides(value, method) and not is_optimizer(value)


def call_get_state(value: Any, components: Names | None, not_components: Names | None) -> Any:
    """Calls an object's own ``get_state`` with as many of the arguments as it takes."""
    method = value.get_state
    given = {"components": components, "not_components": not_components}
    arguments = {name: names for name, names in given.items() if names is not None}
    if arguments:
        try:
            parameters = inspect.signature(method).parameters.values()
        except (TypeError, ValueError):
            parameters = ()  # type: ignore[assignment]  # nothing is known of a function in C
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            known = {one.name for one in parameters}
            arguments = {name: names for name, names in arguments.items() if name in known}
    return method(**arguments)


def set_own_state(
    component: LiveComponent, state: Any, source: Location | None = None, keep: Keep | None = None
) -> OwnReport:
    """Gives a component its own state; those below stay as they are.

    Args:
        component: The component.
        state: What :func:`own_state` returned, or a part of it.
        source: Where it came from, for messages.
        keep: Tells of the path of a value, and of what is saved for it, whether the program's own value stays. A
            component that takes its state itself is not asked.

    Returns:
        What did not match.

    Raises:
        TreeMismatchError: Shapes or dtypes differ, or nothing at all matches; nothing was changed.
    """
    if _speaks_for_itself(component.value, "set_state"):
        component.value.set_state(state)
        return OwnReport()
    return set_default_state(component, state, source, keep)


def set_default_state(
    component: LiveComponent, state: Any, source: Location | None = None, keep: Keep | None = None
) -> OwnReport:
    """Gives its state to a component that does not do that itself; see :func:`set_own_state`."""
    if not isinstance(state, Mapping):
        raise TreeMismatchError(f"{called(component)}: expected a dictionary as state, found {type(state).__name__}")
    source = source or _GIVEN
    stored = _stored(component, state, source)
    root = stand_in(component)
    before = dict(vars(root))
    graph, _ = own_graph(component, root)
    own = {shown(node.path) for node in graph.leaves()}
    restoration = Restoration(stored, root, exclude=_excluded(stored, keep) or None)
    restoration.outcome.partial = True  # what is left over is in the report
    try:
        restoration.advance()
    except TreeMismatchError as error:
        if not error.differences:
            raise
        other = "leave them out" if source is _GIVEN else "say which of its own it keeps, restore_from_path(keep=...)"
        raise TreeMismatchError(
            f"{source}: these values do not fit {called(component)}; nothing was changed. "
            f"Change the program, or {other}:",
            error.differences,
        ) from error
    for name, value in vars(root).items():
        if before.get(name) is not value:
            setattr(component.value, name, value)
    report = restoration.report(root)
    unused = report.pending + report.unused
    if unused and own and not set(report.restored) & own:
        raise TreeMismatchError(
            f"{source}: nothing in it matches {called(component)}, and nothing was changed. It has {_some(unused)}; "
            f"the component has {_some(sorted(own))}"
        )
    return OwnReport(tuple(path for path in report.missing if path in own), unused)


def ask(component: LiveComponent, state: Any, source: Location, keep: Keep) -> None:
    """Asks of every value that a component is about to be given whether it stays; changes nothing."""
    if isinstance(state, Mapping) and not _speaks_for_itself(component.value, "set_state"):
        _excluded(_stored(component, state, source), keep)


def _stored(component: LiveComponent, state: Mapping[str, Any], source: Location) -> StoredGraph:
    """Opens a state as if it were a checkpoint."""
    values = {key: value for key, value in state.items() if key != GRAPH}
    if is_module(component.value):
        values = _nested(values)
    return StoredGraph(MemoryTree(values, _document(state, source), source), source)


def _nested(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Takes the names of a ``state_dict()`` apart at their dots, which no attribute of a module has."""
    found: dict[Any, Any] = {}
    for name, value in state.items():
        *above, last = name.split(".") if isinstance(name, str) else [name]
        inner = found
        for key in above:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise TreeMismatchError(f"the state has a value at {key!r}, and {name!r} below it")
        inner[last] = value
    return found


def _excluded(stored: StoredGraph, keep: Keep | None) -> list[str]:
    """Returns patterns for exactly the values that stay as they are in the program."""
    if keep is None:
        return []
    paths = [(stored.graph.path(number), node.value) for number, node in stored.graph.values()]
    kept = [shown(path) for path, value in paths if keep(path, stored.leaves.get(value or ""))]
    return [re.sub(r"([*?[])", r"[\1]", path) for path in kept]


def _says_more(document: Mapping[str, Any], tree: Any) -> bool:
    """Whether a graph is more than its values in their containers."""
    nodes = document["nodes"]
    names = set(flatten(tree).names)
    edges = sum(len(node.get("edges", ())) for node in nodes)
    return (
        edges != len(nodes) - 1
        or any(node.get("slots") or node.get("groups") for node in nodes)
        or any("value" in node and node["value"] not in names for node in nodes)
    )


def _document(state: Mapping[str, Any], source: Location) -> Any:
    text = state.get(GRAPH)
    if text is None:
        return None
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{source}: {GRAPH} does not describe a graph: {error}") from error


# ---- values


def copied(tree: Any) -> Any:
    """Returns a tree with copies of everything that can change."""
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if is_torch_tensor(tree):
        return tree.detach().clone()
    if isinstance(tree, dict | list) or type(tree) is tuple:
        contents = expand(tree)
        if contents is not None:
            return contents.build([copied(child) for child in contents.values])
    return copy.copy(tree) if isinstance(tree, set) else tree


def _some(names: Any) -> str:
    shortened = ", ".join(map(repr, names[:8])) or "no values"
    return shortened + (f" and {len(names) - 8} more" if len(names) > 8 else "")
