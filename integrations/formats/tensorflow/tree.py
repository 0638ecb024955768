"""The values of a TensorFlow checkpoint as a tree, with the graph of the objects that they belonged to.

The message is ``TrackableObjectGraph`` of ``tensorflow/core/protobuf/trackable_object_graph.proto``. Values are called
by the shortest path to their object: ``net/l1/kernel/.ATTRIBUTES/VARIABLE_VALUE``, or, what an optimizer keeps,
``net/l1/kernel/.OPTIMIZER_SLOT/adam/m/.ATTRIBUTES/VARIABLE_VALUE``. In the name of an edge ``.`` is written ``..`` and
``/`` is written ``.S``.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....engine.arrays import NamedVariables
from ....engine.errors import DamagedCheckpointError, ObjectNotFoundError, UnsupportedLeafError
from ....engine.pytree import MAX_DEPTH, escape_key, join
from ....engine.sources import StoredArray, StoredTree, nested
from ....engine.storage import Location
from .bundle import Bundle, as_leaves, as_objects, unknown_type
from .index import content, fields, signed, text

GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"  # the name of the tensor that holds the graph
ATTRIBUTES = ".ATTRIBUTES"
VALUE = "VARIABLE_VALUE"  # the attribute of objects that are one value
_SLOT = "/.OPTIMIZER_SLOT/"
_SLOTS = "slots"  # the key above the slots of an optimizer, as in graphs that holdfast saves
_SHARING = 16  # objects that may share a value; no more than two in practice
_ESCAPED = re.compile(r"\.(?:\.|S)")


@dataclass(slots=True)
class ObjectNode:
    """One object."""

    children: dict[str, int] = field(default_factory=dict)  # the numbers of the objects that it holds, by name
    # Its values: the name of each, and the name of its tensor or the beginning of several names.
    attributes: list[tuple[str, str]] = field(default_factory=list)
    # The slots of an optimizer: the variable's number, the name of the slot, the value's number.
    slots: list[tuple[int, str, int]] = field(default_factory=list)


def decode_objects(message: bytes) -> list[ObjectNode]:
    nodes = [_node(content(value)) for number, value in fields(message) if number == 1]
    for node in nodes:
        numbers = [*node.children.values(), *(number for one, _, other in node.slots for number in (one, other))]
        if any(not 0 <= number < len(nodes) for number in numbers):
            raise DamagedCheckpointError(
                f"the graph of objects has an edge to an object that is not among its {len(nodes)}"
            )
    return nodes


def object_path(key: str) -> tuple[str, ...]:
    """Return the path of a value in a tree.

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
    """Return a graph in the form of holdfast's own documents.

    The value of an object that is one value is its own; other values are children of a child ``.ATTRIBUTES``.
    """
    keys = sorted(names)
    found: list[dict[str, Any]] = [{} for _ in nodes]
    owners: dict[str, int] = {}
    same = list(range(len(nodes)))  # an object with the value of another object is that object
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
        parts = dict(fields(content(value)))  # of repeated fields, the last one counts
        if number == 1:
            node.children[text(parts.get(2, b""))] = signed(parts.get(1, 0))
        elif number == 2:
            node.attributes.append((text(parts.get(1, b"")), text(parts.get(3, b""))))
        else:
            node.slots.append((signed(parts.get(1, 0)), text(parts.get(2, b"")), signed(parts.get(3, 0))))
    return node


def _matching(keys: Sequence[str], beginning: str, limit: int) -> Iterator[str]:
    """Yield the tensors of an attribute: the one of that name, or all whose names begin with it.

    Objects that save several tensors, such as tables, note only the beginning of their names.
    """
    index = bisect_left(keys, beginning)
    if index < len(keys) and keys[index] == beginning:
        yield beginning
        return
    while f"/{ATTRIBUTES}/" in f"/{beginning}" and index < len(keys) and keys[index].startswith(beginning):
        if limit <= 0:
            raise DamagedCheckpointError("in the graph of objects, too many objects share each value")
        yield keys[index]
        index, limit = index + 1, limit - 1


def _segments(path: str) -> list[str]:
    return [_ESCAPED.sub(_unescaped, segment) for segment in path.split("/")] if path else []


def _unescaped(found: re.Match[str]) -> str:
    return "." if found[0] == ".." else "/"


Path = tuple[str, ...]


class BundleVariables(NamedVariables):
    """The tensors of a checkpoint by their names in TensorFlow."""

    def __init__(self, bundle: Bundle, tree: StoredTree, names: Mapping[str, str]) -> None:
        self._bundle = bundle
        self._tree = tree
        leaves = {leaf.name: leaf for leaf in tree.leaves}
        self._leaves = {name: leaves.get(ours) for name, ours in names.items()}

    def shapes(self) -> dict[str, list[int]]:
        return {name: list(entry.shape) for name, entry in self._bundle.tensors.items()}

    def dtypes(self) -> dict[str, np.dtype[Any] | None]:
        return {
            name: np.dtype(object) if self._bundle.is_text(name) else entry.dtype
            for name, entry in self._bundle.tensors.items()
        }

    def read(self, name: str) -> Any:
        if name not in self._bundle.tensors:
            raise ObjectNotFoundError(f"{self._bundle.prefix} has no tensor {name!r:.200}")
        if self._bundle.is_text(name):
            return as_objects(self._bundle.texts(name), self._bundle.tensors[name].shape)
        leaf = self._leaves.get(name)
        if leaf is None:
            kind = self._bundle.tensors[name].kind
            raise UnsupportedLeafError(f"{self._bundle.prefix}: tensor {name!r:.200} has {unknown_type(kind)}")
        (array,) = self._tree.read([leaf])
        return array


class BundleTree(StoredTree):
    """The values of a checkpoint, with their names in TensorFlow and the objects that they belonged to."""

    variables: BundleVariables
    _objects: Sequence[ObjectNode] | None
    _tensor_names: Mapping[str, str]

    @classmethod
    def open(cls, prefix: Location) -> BundleTree:
        bundle = Bundle(prefix)
        bundle.check_texts()
        objects = _objects(bundle)
        known = [name for name in bundle.tensors if name != GRAPH_KEY or objects is None]
        values: dict[str, Any] = {}
        left_out: list[str] = []
        for name in known:
            try:
                values[name] = _value(bundle, name)
            except UnsupportedLeafError as error:
                left_out.append(f"{name!r:.200} ({error})")
        paths = _arranged(
            {name: object_path(name) if objects is not None else tuple(name.split("/")) for name in values}
        )
        tree = nested(((path, values[name]) for name, path in paths.items()), root_is_dict=True, number=str)
        found = cls.of(prefix, tree, bundle.nbytes, left_out=left_out)
        found._objects = objects
        found._tensor_names = {name: join(path) for name, path in paths.items()}
        found.variables = BundleVariables(bundle, found, found._tensor_names)
        return found

    def graph_document(self) -> Any:
        return None if self._objects is None else graph_document(self._objects, self._tensor_names)

    def file(self, path: str) -> Location:
        return self.location.parent / path if path else self.location


def _objects(bundle: Bundle) -> list[ObjectNode] | None:
    """Read the graph of objects, if the checkpoint has one."""
    entry = bundle.tensors.get(GRAPH_KEY)
    if entry is None or not bundle.is_text(GRAPH_KEY) or entry.shape:
        return None
    try:
        return decode_objects(bundle.texts(GRAPH_KEY)[0]) or None
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{bundle.prefix}: its graph of objects cannot be read: {error}") from error


def _value(bundle: Bundle, name: str) -> Any:
    if not bundle.is_text(name):
        return bundle.array(name)
    entry = bundle.tensors[name]
    try:
        return as_leaves(bundle.texts(name), entry)
    except DamagedCheckpointError as error:
        what = str(error)

    def refuse() -> Any:
        raise DamagedCheckpointError(what)

    return StoredArray(np.dtype("S1"), entry.shape, {"kind": "numpy"}, refuse)


def _arranged(paths: Mapping[str, Path]) -> dict[str, Path]:
    """Arrange paths so that no value is below another value.

    In TensorFlow 1, the slot ``Adam`` of ``w`` has the name ``w/Adam``: it goes beside ``w``, as one key.
    """
    values = set(paths.values())
    found = {name: _beside(path, values) for name, path in paths.items()}
    taken = set(found.values())
    if len(taken) < len(found) or any(len(path) >= MAX_DEPTH or _is_below(path, taken) for path in taken):
        return {name: (name,) for name in paths}
    return found


def _beside(path: Path, values: Iterable[Path]) -> Path:
    for length in range(1, min(len(path), MAX_DEPTH)):
        if path[:length] in values:
            return (*path[: length - 1], "/".join(path[length - 1 :]))
    return path


def _is_below(path: Path, values: Iterable[Path]) -> bool:
    return any(path[:length] in values for length in range(1, len(path)))
