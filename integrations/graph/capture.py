"""Capture of a live graph for saving: a tree of values by readable path, and a document of nodes and edges."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...engine.errors import UnsupportedLeafError, shortened
from ...engine.pytree import (
    MAX_DEPTH,
    class_name,
    escape_key,
    flatten,
    is_python_value,
    is_torch_tensor,
    unescape_key,
    unflatten,
)
from .frameworks import is_module, is_uninitialized
from .paths import format_node_path, storage_name
from .slots import BoxSlot, MemberSlot, StateSlot
from .views import Branch, Leaf
from .walk import OPTIMIZER_SLOTS, OWN_STATES, LiveGraph, LiveNode

# Prefix of the storage names of values of which each process saves its own; no other name begins with it.
PER_PROCESS = "//"


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    tree: Any  # the values, each once, under the shortest path to it
    document: dict[str, Any]  # nodes and edges, as JSON
    per_process: Mapping[str, Any] | None = None  # the values of which each process saves its own, by storage name


def capture(graph: LiveGraph, *, apart: bool = False) -> CapturedGraph:
    """Take the values and the structure of a graph; ``apart`` separates the states of objects for each process."""
    numbers = {id(node): number for number, node in enumerate(graph.nodes)}
    states = [node for node in graph.leaves() if apart and isinstance(node.slot, StateSlot)]
    too_deep = [node for node in graph.leaves() if len(node.path) > MAX_DEPTH]
    if too_deep:
        raise UnsupportedLeafError(
            f"{format_node_path(too_deep[0].path[:4])}/...: {len(too_deep)} values are more than {MAX_DEPTH} objects "
            "away from the checkpoint, and nothing was written; attach the objects that hold them under names of their "
            "own"
        )
    unborn = [node for node in graph.nodes if is_torch_tensor(node.value) and is_uninitialized(node.value)]
    if unborn:
        raise UnsupportedLeafError(
            f"{shortened([format_node_path(node.path) for node in unborn])}: no shape yet, as the lazy module has not "
            "run, and nothing was written; run the module once before the first save"
        )
    flat = flatten(_nested(graph.root, numbers, {id(node) for node in states}) or {})
    names = dict(zip(flat.values, flat.names, strict=True))
    tree = unflatten(flat.structure, [_stored(graph.nodes[number]) for number in flat.values])
    names.update({numbers[id(node)]: PER_PROCESS + escape_key(storage_name(node.path)) for node in states})
    nodes = [_node_document(node, numbers, names) for node in graph.nodes]
    per_process = {storage_name(node.path): _stored(node) for node in states} if apart else None
    return CapturedGraph(tree, {"nodes": nodes, OWN_STATES: True}, per_process)


def _stored(node: LiveNode) -> Any:
    try:
        return node.stored_value()
    except Exception as error:
        error.add_note(f"raised by {format_node_path(node.path)}, which was asked for its state; nothing was written")
        raise


def _nested(node: LiveNode, numbers: Mapping[int, int], elsewhere: Collection[int]) -> Any:
    """Return the containers below a node with the number of each value in its place.

    None stands for a container that holds no value, unless it is empty in the program.
    """
    if not isinstance(node.view, Branch):
        return numbers[id(node)] if node.has_value and id(node) not in elsewhere else None
    found: dict[Any, Any] = {}
    complete = True
    for segment, child in node.edges.items():
        if child.path != (*node.path, segment) or len(child.path) > MAX_DEPTH:
            continue  # stored under another path, or too deep to hold a value
        below = _nested(child, numbers, elsewhere)
        if below is not None:
            found[node.keys[segment]] = below
        elif isinstance(child.view, Branch):
            complete = False
    for _, _, value in node.optimizer_slots:
        branch = found
        for segment in value.path[len(node.path) : -1]:
            branch = branch.setdefault(unescape_key(segment), {})
        branch[unescape_key(value.path[-1])] = numbers[id(value)]
    sequence: Any = tuple if node.view.label == "tuple" else list
    if isinstance(node.value, deque):
        sequence = partial(deque, maxlen=node.value.maxlen)
    if found:
        is_sequence = node.view.sequence and complete and list(found) == list(range(len(found)))
        return sequence(found.values()) if is_sequence else found
    if node.view.edges or len(node.path) == MAX_DEPTH:
        return None
    if node.view.sequence:
        return sequence()
    return {} if isinstance(node.value, dict) else None


def _is_box(node: LiveNode) -> bool:
    """Whether a node is a box for a number."""
    assert isinstance(node.view, Leaf)
    return node.view.in_place and isinstance(node.slot, BoxSlot) and is_python_value(node.slot.get())


def _node_document(node: LiveNode, numbers: dict[int, int], names: Mapping[int, str]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    number = numbers[id(node)]
    if isinstance(node.view, Branch):
        document["type"] = node.view.label
        if is_module(node.value) and not node.value.training:
            document["training"] = False
        document["edges"] = {segment: numbers[id(child)] for segment, child in node.edges.items()}
    elif _is_box(node) or isinstance(node.slot, MemberSlot):
        document["type"] = class_name(node.value)  # which is not that number or text
    if number in names:
        document["value"] = names[number]
    if node.optimizer_slots:
        document[OPTIMIZER_SLOTS] = [
            [numbers[id(one)], segment, numbers[id(value)]] for one, segment, value in node.optimizer_slots
        ]
    if node.groups:
        document["groups"] = [[numbers[id(parameter)] for parameter in group] for group in node.groups]
    return document
