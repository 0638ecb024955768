"""The tree of components of a running program: which there are, and what each of them is called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import OptionError
from ..graph.flax_objects import is_nnx_object, nnx_children
from ..graph.torch_objects import is_module, is_optimizer
from ..stateful import is_stateful
from ..tree.frameworks import is_jax_array, is_torch_tensor
from .names import Path, named_path
from .recipes import CtorArguments

RECIPE = "_holdfast_recipe"
"""Name of the attribute that the arguments of the constructor are kept in."""
_DEPTH = 8  # containers inside containers that are searched for components


@dataclass(slots=True, eq=False)
class LiveComponent:
    """A component of the program.

    Attributes:
        value: The object.
        path: Its path from the root.
        name: What the component above calls it; ``""`` for the root.
        children: Its own components.
        same: Components of other names that are the same object as one elsewhere in the tree: that one's path.
    """

    value: Any
    path: Path
    name: str = ""
    children: list[LiveComponent] = field(default_factory=list)
    same: dict[Path, Path] = field(default_factory=dict)

    def walk(self) -> Iterator[LiveComponent]:
        """Generates this component and all below it, those above first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def relative(self, child: LiveComponent) -> Path:
        """Returns the path of a component below this one, seen from here."""
        return child.path[len(self.path) :]


def live_tree(root: Any) -> LiveComponent:
    """Finds all components below one, the nearest first; each object is found once.

    Args:
        root: Where to begin.

    Raises:
        OptionError: A component has two of the same name, or one that is no name.
    """
    start = LiveComponent(root, ())
    seen = {id(root): start}
    queue = [start]
    for owner in queue:
        taken: set[Path] = set()
        around: set[Path] = set()  # "a" beside "a/b" would be two owners of one directory
        for name, value in components_of(owner.value):
            below = named_path(name, owner.value)
            above = {below[:length] for length in range(1, len(below))}
            if below in taken or below in around or above & taken:
                raise OptionError(
                    f"{type(owner.value).__qualname__} has two components called {name!r}, or one inside the other; "
                    "every component needs a name of its own"
                )
            taken.add(below)
            around |= above
            path = (*owner.path, *below)
            known = seen.get(id(value))
            if known is not None:
                owner.same[path] = known.path
                continue
            child = seen[id(value)] = LiveComponent(value, path, name)
            owner.children.append(child)
            queue.append(child)
    return start


def components_of(value: Any) -> list[tuple[str, Any]]:
    """Returns the components of an object by name, as it tells them itself; none if it cannot tell.

    Args:
        value: Any object.
    """
    method = method_of(value, "get_checkpointable_components")
    if method is None:
        return []
    found = method()
    pairs = list(found.items()) if isinstance(found, dict) else list(found)
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise OptionError(
                f"{type(value).__qualname__}.get_checkpointable_components() must return pairs of name and component, "
                f"found {pair!r:.80}"
            )
    return [(name, child) for name, child in pairs]


def is_component(value: Any) -> bool:
    """Whether an object is a component by its own methods: it has a state, and can tell what is below it."""
    return all(method_of(value, name) for name in ("get_state", "set_state", "get_checkpointable_components"))


def method_of(value: Any, name: str) -> Callable[..., Any] | None:
    """Returns a method of an object, or None; one whose class makes up attributes as they are asked for has none."""
    if isinstance(value, type) or not (hasattr(type(value), name) or name in getattr(value, "__dict__", ())):
        return None
    found = getattr(value, name, None)
    return found if callable(found) else None


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object that belong to its state.

    Args:
        value: Any object; what its class lists in ``__untracked__`` is left out.
    """
    left_out = {name for kind in type(value).__mro__ for name in getattr(kind, "__untracked__", ())}
    return {
        name: child
        for name, child in getattr(value, "__dict__", {}).items()
        if name not in left_out and not isinstance(child, CtorArguments)
    }


def attributes_with_state(component: LiveComponent) -> dict[str, Any]:
    """Returns the attributes of a torch module that torch does not know of and that are surely no configuration.

    Args:
        component: The module.
    """
    below = {id(child.value) for child in component.children}
    return {
        name: value
        for name, value in attributes_of(component.value).items()
        if id(value) not in below and not is_component(value) and not name.startswith("_") and _has_state(value, 0)
    }


def _has_state(value: Any, depth: int) -> bool:
    if isinstance(value, np.ndarray) or is_torch_tensor(value) or is_jax_array(value) or is_optimizer(value):
        return True
    if isinstance(value, dict | list | tuple):
        return depth < _DEPTH and any(_has_state(child, depth + 1) for _, child in _elements(value))
    return is_stateful(value) and not is_module(value) and not is_component(value)


def unnamed(value: Any, known: Collection[int]) -> list[str]:
    """Returns the attributes of a component that are components, and that nobody has named as such.

    Args:
        value: The component.
        known: The identities of all components of the tree.
    """
    return [name for name, child in discovered(value) if id(child) not in known]


def discovered(value: Any) -> list[tuple[str, Any]]:
    """Finds components among an object's attributes, also in lists, tuples, dictionaries and containers of torch.

    Args:
        value: Any object.

    Returns:
        The components by path: attributes by their name, elements by their key below that.
    """
    found: list[tuple[str, Any]] = []
    attributes = attributes_of(value)
    if is_module(value):
        attributes = {**attributes, **value._modules}
    for name, child in attributes.items():
        _discover((str(name),), child, found, 0)
    return found


def _discover(keys: tuple[str, ...], value: Any, found: list[tuple[str, Any]], depth: int) -> None:
    if is_component(value):
        found.append(("/".join(keys), value))
        return
    if depth < _DEPTH:
        for key, child in _elements(value):
            _discover((*keys, str(key)), child, found, depth + 1)


def _elements(value: Any) -> Sequence[tuple[Any, Any]]:
    if isinstance(value, dict):
        return [(key, child) for key, child in value.items() if isinstance(key, str | int) and key != ""]
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if is_module(value):  # a ModuleDict, a ModuleList, or a module that is no component
        return [(key, child) for key, child in value._modules.items() if child is not None]
    return nnx_children(value) if is_nnx_object(value) else []
