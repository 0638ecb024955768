"""The component tree of a running program."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...engine.errors import OptionError, UnsupportedLeafError
from ...engine.pytree import PLAIN, is_jax_array, is_nnx, is_optimizer, is_torch_tensor
from ...engine.stateful import ActorState, adapted, is_stateful
from ..graph import Part, Path, is_actor_class, is_module, nnx_children, tracked_attributes, unwrapped
from .names import STATE, format_component_path, named_path

ARGUMENTS = "_holdfast_recipe"  # name of the attribute that holds the constructor arguments
_DEPTH = 8  # maximum depth to which containers are searched for components


@dataclass(slots=True, eq=False)
class LiveComponent(Part):
    """A component in the running program. A walk visits its attributes and children, even children saved elsewhere."""

    path: Path  # path from the root
    name: str = ""  # name in the parent component; empty for the root
    children: list[LiveComponent] = field(default_factory=list)
    # maps additional paths of components to their primary paths in the tree
    same: dict[Path, Path] = field(default_factory=dict)
    above: LiveComponent | None = None  # the tree's root; None for the root itself
    parameters: dict[int, Path] | None = None  # root only: tensor paths, keyed by tensor id; computed on demand

    @property
    def root(self) -> LiveComponent:
        return self.above or self

    @property
    def is_whole(self) -> bool:
        """True if a walk that starts at another component visits the object itself rather than its attributes."""
        value = self.value
        return is_module(value) or is_nnx(value) or is_optimizer(value) or not hasattr(value, "__dict__")

    def __holdfast_root__(self) -> Any:
        return unwrapped(self.value) if is_module(self.value) or is_nnx(self.value) else None

    def __holdfast_children__(self) -> dict[str, Any]:
        return {**self._children(), **self.added}

    def _children(self) -> dict[str, Any]:
        value = self.value
        if is_module(value):
            return attributes_with_state(self)
        if is_nnx(value) or isinstance(value, ActorState):
            return {}
        if is_optimizer(value) or isinstance(value, np.ndarray) or is_torch_tensor(value):
            return {STATE: value}  # the component is itself the value, so there is no attribute name to use
        attributes = dict(tracked_attributes(value))
        if not attributes and not hasattr(value, "__dict__"):
            which = f"component {format_component_path(self.path)}" if self.path else "the component"
            raise UnsupportedLeafError(
                f"{which} is a {type(value).__qualname__}, which has no attributes that could be restored in place: "
                "make it an attribute of a component, or give it get_state() and set_state(state)"
            )
        below = {id(child.value) for child in self.children}
        held = {name: child for name, child in attributes.items() if id(child) not in below and not is_component(child)}
        named = Part(None)
        for path, other in self.named():
            if path[0] not in held:
                named.add(path, other.value if other.is_whole else other)
            elif not other.is_whole:  # a walk reaches a whole object through its container
                named.add((f"{'/'.join(path)} (component)",), other)
        return {**held, **named.added}

    @property
    def ends(self) -> Callable[[Any], bool]:
        """A predicate that stops a walk at objects saved as components, including references back to this component."""
        below = {id(child.value) for child in self.children}
        return lambda value: isinstance(value, Part) or id(value) in below or is_component(value)

    def walk(self) -> Iterator[LiveComponent]:
        """Yield this component and all components below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def relative(self, child: LiveComponent) -> Path:
        return child.path[len(self.path) :]

    def named(self) -> list[tuple[Path, LiveComponent]]:
        """Return (relative path, child component) pairs; children that are saved under another path come last."""
        named = [(self.relative(child), child) for child in self.children]
        if self.same:
            by_path = paths_of(self.root)
            named += [(path[len(self.path) :], by_path[path]) for path in self.same if path in by_path]
        return named


def live_tree(root: Any, path: Path = (), name: str = "", top: LiveComponent | None = None) -> LiveComponent:
    """Build the component tree of an object. A component with several paths appears only under the first path."""
    start = LiveComponent(root, path, name, above=top)
    seen = {id(root): start}

    def visit(owner: LiveComponent) -> None:
        taken: dict[Path, bool] = {}  # True for paths of components, False for paths that only lead to components
        for name, value in components_of(owner.value):
            below = named_path(name, owner.value)
            above = [below[:length] for length in range(1, len(below))]
            if below in taken or any(taken.get(parent) for parent in above):
                raise OptionError(
                    f"{type(owner.value).__qualname__} has two components called {name!r}, or one inside the other; "
                    "every component needs its own name"
                )
            taken |= {**dict.fromkeys(above, False), below: True}
            path = (*owner.path, *below)
            first = seen.get(id(value))
            if first is not None:
                owner.same[path] = first.path
                continue
            child = seen[id(value)] = LiveComponent(value, path, name, above=start.root)
            owner.children.append(child)
            visit(child)

    visit(start)
    return start


def paths_of(root: LiveComponent) -> dict[Path, LiveComponent]:
    """Return a dict from path to component for a whole tree; a component may have several paths."""
    by_path = {component.path: component for component in root.walk()}
    for component in list(by_path.values()):
        for path, goal in component.same.items():
            for inside in by_path[goal].walk() if goal in by_path else ():
                by_path.setdefault((*path, *by_path[goal].relative(inside)), inside)
    return by_path


def modules_of(root: Any) -> dict[str, Any]:
    """Return the torch modules among a tree's components, keyed by path."""
    return {"/".join(part.path): part.value for part in live_tree(root).walk() if is_module(part.value)}


def refreshed(old: LiveComponent) -> LiveComponent:
    """Rebuild the tree of a component whose child components may have changed."""
    root = live_tree(old.root.value, old.root.path, old.root.name)
    same = next((other for other in root.walk() if other.value is old.value), None)
    return live_tree(old.value, old.path, old.name, root) if same is None or same.path != old.path else same


def components_of(value: Any) -> list[tuple[str, Any]]:
    """Return the result of ``get_checkpointable_components`` as a list, or [] if the object has no such method."""
    method = method_of(value, "get_checkpointable_components")
    if method is None:
        return []
    named = method()
    pairs = list(named.items()) if isinstance(named, dict) else list(named)
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise OptionError(
                f"{type(value).__qualname__}.get_checkpointable_components() must return pairs of name and component, "
                f"found {pair!r:.80}"
            )
    return [(name, adapted(child)) for name, child in pairs]


def is_component(value: Any) -> bool:
    return all(method_of(adapted(value), name) for name in ("get_state", "set_state", "get_checkpointable_components"))


def method_of(value: Any, name: str) -> Callable[..., Any] | None:
    """Return an object's method, or None; attributes that only ``__getattr__`` provides do not count."""
    is_known = hasattr(type(value), name) or name in getattr(value, "__dict__", ())
    if not is_known or isinstance(value, type) or is_actor_class(type(value)):
        return None
    method = getattr(value, name, None)
    return method if callable(method) else None


def attributes_with_state(component: LiveComponent) -> dict[str, Any]:
    """Return the attributes of a torch module that hold state unknown to torch."""
    below = {id(child.value) for child in component.children}
    return {
        name: value
        for name, value in tracked_attributes(component.value)
        if not (name.startswith("_") or id(value) in below or is_component(value))
        and any(_search(value, _has_state, objects=False))
    }


def _has_state(value: Any) -> bool:
    if isinstance(value, np.ndarray) or is_torch_tensor(value) or is_jax_array(value) or is_optimizer(value):
        return True
    return is_stateful(value) and not is_module(value) and not is_component(value)


def discovered(value: Any) -> list[tuple[str, Any]]:
    """Return the components among an object's attributes, including those in containers and modules."""
    attributes = dict(tracked_attributes(value)) | (value._modules if is_module(value) else {})
    return [pair for name, child in attributes.items() for pair in _search(child, is_component, str(name))]


def _search(
    value: Any, is_goal: Callable[[Any], bool], name: str = "", depth: int = 0, *, objects: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each object that ``is_goal`` accepts; search modules only if ``objects`` is true."""
    if is_goal(value):
        yield name, value
    elif depth < _DEPTH and (objects or isinstance(value, dict | list | tuple | deque)):
        for key, child in _elements(value):
            yield from _search(child, is_goal, f"{name}/{key}", depth + 1, objects=objects)


def _elements(value: Any) -> Sequence[tuple[Any, Any]]:
    """Return the keys and elements of a container, or [] if it holds only plain values."""
    if isinstance(value, dict | list | tuple | deque):
        if set(map(type, value.values() if isinstance(value, dict) else value)).issubset(PLAIN):
            return []
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return [(key, child) for key, child in pairs if isinstance(key, str | int) and key != ""]
    if is_module(value):  # A ModuleDict, a ModuleList, or a module that is not a component.
        return [(key, child) for key, child in value._modules.items() if child is not None]
    return nnx_children(value) if is_nnx(value) else []
