"""The graph of objects in a TensorFlow checkpoint, and the names that its values have. Pure.

The message is ``TrackableObjectGraph`` of ``tensorflow/core/protobuf/trackable_object_graph.proto``. Values are called
by the shortest path to their object: ``net/l1/kernel/.ATTRIBUTES/VARIABLE_VALUE``, or, what an optimizer keeps,
``net/l1/kernel/.OPTIMIZER_SLOT/adam/m/.ATTRIBUTES/VARIABLE_VALUE``. In the name of an edge ``.`` is written ``..`` and
``/`` is written ``.S``.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import DamagedCheckpointError
from ..tree import escape_key
from .tensorflow_wire import content, fields, signed, text

GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""What the tensor is called that holds the graph."""
ATTRIBUTES = ".ATTRIBUTES"
VALUE = "VARIABLE_VALUE"
"""The one attribute of objects that are a value and nothing else."""
_SLOT = "/.OPTIMIZER_SLOT/"
_SLOTS = "slots"  # what optimizers keep lies below a key of this name, as in graphs that holdfast saves
_SHARING = 16  # objects that may have a value between them; there are no more than two in practice
_ESCAPED = re.compile(r"\.(?:\.|S)")


@dataclass(slots=True)
class ObjectNode:
    """One object.

    Attributes:
        children: The numbers of the objects that it holds, by name.
        attributes: Its values: the name of each, and what the tensors' names are or begin with.
        slots: What it keeps for variables, if it is an optimizer: the variable's number, the name, the value's number.
    """

    children: dict[str, int] = field(default_factory=dict)
    attributes: list[tuple[str, str]] = field(default_factory=list)
    slots: list[tuple[int, str, int]] = field(default_factory=list)


def decode_objects(message: bytes) -> list[ObjectNode]:
    """Reads a graph.

    Returns:
        The objects; the first is the root.

    Raises:
        DamagedCheckpointError: It is none.
    """
    nodes = [_node(content(value)) for number, value in fields(message) if number == 1]
    for node in nodes:
        numbers = [*node.children.values(), *(number for one, _, other in node.slots for number in (one, other))]
        if any(not 0 <= number < len(nodes) for number in numbers):
            raise DamagedCheckpointError(f"the graph of objects leads to one that is not among its {len(nodes)}")
    return nodes


def object_path(key: str) -> tuple[str, ...]:
    """Returns where a value belongs in a tree.

    Args:
        key: What the tensor is called, in a checkpoint with a graph.

    >>> object_path("net/l1/kernel/.OPTIMIZER_SLOT/adam/m/.ATTRIBUTES/VARIABLE_VALUE")
    ('adam', 'slots', 'net', 'l1', 'kernel', 'm')
    >>> object_path("odd/a.Sb/.ATTRIBUTES/VARIABLE_VALUE"), object_path("table/.ATTRIBUTES/table-keys")
    (('odd', 'a/b'), ('table', '.ATTRIBUTES', 'table-keys'))
    """
    head, mark, attribute = key.partition(f"/{ATTRIBUTES}/")
    if not mark:
        return tuple(key.split("/"))
    variable, mark, slot = head.partition(_SLOT)
    path = [*_segments(slot)[:-1], _SLOTS, *_segments(variable), _segments(slot)[-1]] if mark else _segments(head)
    return tuple(path) if attribute == VALUE and path else (*path, ATTRIBUTES, attribute)


def graph_document(nodes: Sequence[ObjectNode], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns a graph as holdfast itself would have written it.

    Objects that are a value have it; of others, the values are the children of a child called ``.ATTRIBUTES``.

    Args:
        nodes: The objects.
        names: For every tensor what its value is called in the tree.
    """
    keys = sorted(names)
    found: list[dict[str, Any]] = [{} for _ in nodes]
    owners: dict[str, int] = {}
    same = list(range(len(nodes)))  # an object whose value is that of another one is that one
    budget = _SHARING * (len(keys) + len(nodes))
    for number, node in enumerate(nodes):
        values = [(key, names[key]) for _, beginning in node.attributes for key in _matching(keys, beginning, budget)]
        budget -= len(values)
        is_value = number > 0 and not node.children and [name for name, _ in node.attributes] == [VALUE]
        if is_value and len(values) == 1:
            owner = owners.setdefault(values[0][1], number)
            if owner == number:
                found[number] = {"value": values[0][1]}
            same[number] = owner
            continue
        found[number] = {"edges": {escape_key(name): child for name, child in node.children.items()}}
        inner: dict[str, int] = {}
        for key, value in values:
            if value not in owners:
                owners[value] = inner[escape_key(key.rpartition(f"/{ATTRIBUTES}/")[2])] = len(found)
                found.append({"value": value})
        if inner:
            found[number]["edges"].setdefault(escape_key(ATTRIBUTES), len(found))
            found.append({"edges": inner})
        if node.slots:
            found[number][_SLOTS] = [[one, escape_key(name), value] for one, name, value in node.slots]
    same += range(len(same), len(found))
    for entry in found:
        if "edges" in entry:
            entry["edges"] = {segment: same[child] for segment, child in entry["edges"].items()}
        if _SLOTS in entry:
            entry[_SLOTS] = [[same[one], segment, same[value]] for one, segment, value in entry[_SLOTS]]
    return {"nodes": found}


def _node(message: bytes) -> ObjectNode:
    node = ObjectNode()
    for number, value in fields(message):
        if number not in (1, 2, 3):
            continue
        parts = dict(fields(content(value)))  # of a field that is there twice, the last counts
        if number == 1:
            node.children[text(parts.get(2, b""))] = signed(parts.get(1, 0))
        elif number == 2:
            node.attributes.append((text(parts.get(1, b"")), text(parts.get(3, b""))))
        else:
            node.slots.append((signed(parts.get(1, 0)), text(parts.get(2, b"")), signed(parts.get(3, 0))))
    return node


def _matching(keys: Sequence[str], beginning: str, limit: int) -> Iterator[str]:
    """Generates the tensors of an attribute: the one that is called so, or all whose names begin so.

    Objects that save several tensors, such as tables, note only what the names of all of them begin with.
    """
    index = bisect_left(keys, beginning)
    if index < len(keys) and keys[index] == beginning:
        yield beginning
        return
    while f"/{ATTRIBUTES}/" in f"/{beginning}" and index < len(keys) and keys[index].startswith(beginning):
        if limit <= 0:
            raise DamagedCheckpointError("the graph of objects gives its values to very many objects each")
        yield keys[index]
        index, limit = index + 1, limit - 1


def _segments(path: str) -> list[str]:
    return [_ESCAPED.sub(_unescaped, segment) for segment in path.split("/")] if path else []


def _unescaped(found: re.Match[str]) -> str:
    return "." if found[0] == ".." else "/"
