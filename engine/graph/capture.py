"""A live graph made into what is stored: a tree of values by readable path, and a document of nodes and edges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedLeafError
from ..tree import escape_key, flatten, unescape_key
from ..tree.containers import class_name
from ..tree.python_leaves import is_python_value
from ..tree.structure import MAX_DEPTH
from .cells import BoxCell, StateCell
from .paths import Path, PathFilter, shown, storage_name
from .views import Branch, Leaf
from .walk import SLOTS, LiveGraph, LiveNode


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A graph that is ready to be saved.

    Attributes:
        tree: The values in nested containers, each once, under the shortest path to it.
        document: Nodes and edges, as JSON.
        skipped: What was reachable and is not saved, each with the reason.
        notes: What people should know of objects that are saved.
        own: What each process has of its own, by storage names; None where all is saved together.
    """

    tree: Any
    document: dict[str, Any]
    skipped: Mapping[Path, str]
    notes: Mapping[Path, str]
    own: Mapping[str, Any] | None = None


OWN = "//"
"""What the storage names of values begin with that each process has of its own; no other name does."""


def capture(graph: LiveGraph, chosen: PathFilter | None = None, *, apart: bool = False) -> CapturedGraph:
    """Makes a graph ready to be saved.

    Args:
        graph: What a walk has found.
        chosen: Which values to save, by their shortest paths; None is all.
        apart: Whether the states of objects, such as data iterators, differ from process to process.

    Returns:
        Its values and its document. Arrays are not copied; states of objects are.
    """
    numbers = {id(node): number for number, node in enumerate(graph.nodes)}
    chosen = chosen or PathFilter()
    own = [node for node in graph.leaves() if apart and _is_state(node) and chosen.chooses(node.path)]
    shape = _nested(graph, numbers, chosen, {id(node) for node in own})
    flat = flatten(shape)
    names = dict(zip(flat.values, flat.names, strict=True))
    values = {number: _value(graph.nodes[number]) for number in names}
    names.update({numbers[id(node)]: OWN + escape_key(storage_name(node.path)) for node in own})
    nodes = [_node(node, numbers, names) for node in graph.nodes]
    states = {storage_name(node.path): _value(node) for node in own} if apart else None
    return CapturedGraph(_filled(shape, values), {"nodes": nodes}, graph.skipped, graph.notes, states)


def _is_state(node: LiveNode) -> bool:
    return isinstance(node.view, Leaf) and isinstance(node.view.cell, StateCell)


def _value(node: LiveNode) -> Any:
    assert isinstance(node.view, Leaf)
    return node.view.cell.get()


def _nested(graph: LiveGraph, numbers: dict[int, int], chosen: PathFilter, elsewhere: set[int]) -> Any:
    """Returns containers that hold the number of every value; of those without values, only what is an empty one."""
    inside: dict[Path, dict[Any, Any]] = {(): {}}
    kinds: dict[int, type] = {}
    empty: dict[int, type] = {}
    too_deep = [node for node in graph.leaves() if len(node.path) > MAX_DEPTH]
    if too_deep:
        raise UnsupportedLeafError(
            f"{shown(too_deep[0].path[:4])}/...: {len(too_deep)} values are more than {MAX_DEPTH} objects away from "
            "the checkpoint, and nothing was written; attach what holds them under a name of its own"
        )
    for node in graph.nodes:
        for segment, child in node.edges.items():
            if child.path != (*node.path, segment) or len(child.path) > MAX_DEPTH:
                continue  # stored under another path, or nothing that would be stored
            if isinstance(child.view, Branch):
                branch = inside[child.path] = {}
                inside[node.path][node.keys[segment]] = branch
                if child.view.sequence:
                    kinds[id(branch)] = tuple if child.view.label == "tuple" else list
                is_empty = not child.view.edges and (child.view.sequence or isinstance(child.value, dict))
                if is_empty and len(child.path) < MAX_DEPTH and chosen.chooses(child.path):
                    empty[id(branch)] = kinds.get(id(branch), dict)
            elif child.has_value and chosen.chooses(child.path) and id(child) not in elsewhere:
                inside[node.path][node.keys[segment]] = numbers[id(child)]
        for _, _, child in node.slots:
            if not chosen.chooses(child.path):
                continue
            branch = inside[node.path]
            for segment in child.path[len(node.path) : -1]:
                branch = branch.setdefault(unescape_key(segment), {})
            branch[unescape_key(child.path[-1])] = numbers[id(child)]
    return _pruned(inside[()], kinds, empty) or {}


def _pruned(branch: dict[Any, Any], kinds: Mapping[int, type], empty: Mapping[int, type]) -> Any:
    """Returns a container without those in it that have nothing to store, and are not empty containers of the program.

    It is a list or tuple where all elements of one are stored here.
    """
    kept = {}
    for key, child in branch.items():
        below = _pruned(child, kinds, empty) if isinstance(child, dict) else child
        if below is not None:
            kept[key] = below
    if not kept:
        return empty[id(branch)]() if id(branch) in empty else None
    kind = kinds.get(id(branch))
    whole = kind is not None and len(kept) == len(branch) and list(kept) == list(range(len(kept)))
    return kind(kept.values()) if kind is not None and whole else kept


def _filled(shape: Any, values: Mapping[int, Any]) -> Any:
    if isinstance(shape, int):
        return values[shape]
    if isinstance(shape, list | tuple):
        return type(shape)([_filled(child, values) for child in shape])
    return {key: _filled(child, values) for key, child in shape.items()}


def _node(node: LiveNode, numbers: dict[int, int], names: Mapping[int, str]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    number = numbers[id(node)]
    if isinstance(node.view, Branch):
        document["type"] = node.view.label
        document["edges"] = {segment: numbers[id(child)] for segment, child in node.edges.items()}
    elif node.view.in_place and isinstance(node.view.cell, BoxCell) and is_python_value(node.view.cell.get()):
        document["type"] = class_name(node.value)  # a box for a number, which is not that number
    if number in names:
        document["value"] = names[number]
    if node.slots:
        document[SLOTS] = [[numbers[id(one)], segment, numbers[id(value)]] for one, segment, value in node.slots]
    if node.groups:
        document["groups"] = [[numbers[id(parameter)] for parameter in group] for group in node.groups]
    return document
