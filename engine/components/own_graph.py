"""A component as a graph of its own: what can be reached from it, up to the components below."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import UnsupportedLeafError
from ..graph import LiveGraph, LiveNode, Node, shown, walk
from ..graph.flax_objects import is_nnx_object
from ..graph.torch_objects import is_module, is_optimizer
from ..graph.views import Leaf
from ..tree.frameworks import is_torch_tensor
from .live import LiveComponent, attributes_of, attributes_with_state, is_component
from .names import OWN, Path, written


class _Part:
    """Stands for an object that belongs to a component below: its parameters are known by their paths, no more."""


def stand_in(component: LiveComponent) -> Node:
    """Returns a node with the component's own attributes, and with the components below under their names."""
    node = Node()
    value = component.value
    if is_module(value) or is_nnx_object(value):
        object.__setattr__(node, "_holdfast_root", value)
        if is_module(value):
            vars(node).update(attributes_with_state(component))
    elif is_optimizer(value) or isinstance(value, np.ndarray) or is_torch_tensor(value):
        vars(node)[OWN] = value  # an object without a name of its own
    else:
        _fill(node, component)
    return node


def _fill(node: Any, component: LiveComponent) -> None:
    below = {id(child.value) for child in component.children}
    attributes = attributes_of(component.value)
    if not attributes and not hasattr(component.value, "__dict__"):
        raise UnsupportedLeafError(
            f"{f'component {written(component.path)}' if component.path else 'the component'} is a "
            f"{type(component.value).__qualname__}, which has no attributes that could be restored in place: make it "
            "an attribute of a component, or give it get_state() and set_state(state)"
        )
    for name, value in attributes.items():
        if id(value) not in below and not is_component(value):
            vars(node)[name] = value
    kept = set(vars(node))
    for child in component.children:
        path = component.relative(child)
        if path[0] not in kept:
            *between, last = path
            holder = node
            for segment in between:
                holder = vars(holder).setdefault(segment, _Part())
            vars(holder)[last] = _part(child)
        elif isinstance(part := _part(child), _Part):  # others are found where they are, in a container
            vars(node)[f"{'/'.join(path)} (component)"] = part


def _part(component: LiveComponent) -> Any:
    value = component.value
    if is_module(value) or is_nnx_object(value) or is_optimizer(value) or not hasattr(value, "__dict__"):
        return value
    part = _Part()
    _fill(part, component)
    return part


def own_graph(component: LiveComponent, root: Node) -> tuple[LiveGraph, dict[str, str]]:
    """Walks over a component, and keeps only values that are its own; returns what is its own and cannot be saved."""
    graph = walk(root)
    own = {id(graph.root)}
    skipped = {shown(path): reason for path, reason in graph.skipped.items()}
    queue = [graph.root]
    for node in queue:
        for segment, child in node.edges.items():
            if isinstance(child.value, _Part) or _is_elsewhere(component, child.value):
                path = shown((*node.path, segment))
                skipped = {one: why for one, why in skipped.items() if one != path and not one.startswith(f"{path}/")}
            elif id(child) not in own:
                own.add(id(child))
                queue.append(child)
        own.update(id(value) for _, _, value in node.slots)
    if any(node.slots or node.groups for node in graph.nodes if id(node) in own):
        for node in graph.nodes:
            if id(node) not in own:
                _hide(node)
        return graph, skipped
    for node in graph.nodes:
        node.edges = {segment: child for segment, child in node.edges.items() if id(child) in own}
    return LiveGraph([node for node in graph.nodes if id(node) in own], graph.skipped, graph.notes), skipped


def _is_elsewhere(component: LiveComponent, value: Any) -> bool:
    """Whether an object has a state of its own: a component, also the one itself where something refers back to it."""
    return is_component(value) or any(child.value is value for child in component.children)


def _hide(node: LiveNode) -> None:
    """Keeps a node of a component below as a name without a value."""
    node.slots, node.groups = [], []
    if isinstance(node.view, Leaf):
        node.view = Leaf(node.view.cell, node.view.shared, ready=False)


def called(component: LiveComponent) -> str:
    """Returns how messages call a component."""
    path: Path = component.path
    name = type(component.value).__qualname__
    return f"component {written(path)} ({name})" if path else name
