"""Containers as JSON: the part of ``tree.json`` that says how the leaves hang together.

A container is ``{"type": ..., "keys": [...], "children": [...]}``, a leaf is null in its place; the leaves' own
documents follow in a list of their own. What is said of many leaves stands once, under "facts", and its number there
stands for it. Keys that are str are written escaped, as they stand in the leaves' names: that
keeps lone surrogates out of JSON, and tells ``"1"`` beside ``1``. Nothing here names code to be run.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import DamagedCheckpointError
from .containers import FACTORIES, build_counter, build_defaultdict, build_mapping
from .names import unescape_key
from .structure import MAX_DEPTH, Key, Node, key_segments, plain_key, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SEQUENCES = {"list": list, "tuple": tuple}
_MAPPINGS = {"dict", "ordered_dict", "default_dict", "counter", "mapping", "namedtuple", "dataclass", "node"}


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The containers that a document describes, made of plain Python types.

    Attributes:
        structure: The containers; None if the tree is one bare leaf.
    """

    structure: Node | None

    def build(self, values: Sequence[Any]) -> Any:
        """Puts the leaves into dict (with typed keys), OrderedDict, defaultdict, Counter, list and tuple.

        Args:
            values: One value for each leaf, in the order of the document.

        Raises:
            ValueError: The number of values is not the number of leaves.
        """
        return unflatten(self.structure, values)

    def select(self, chosen: Sequence[bool]) -> Skeleton:
        """Leaves out leaves, and the containers that have none left.

        Args:
            chosen: For each leaf, whether it stays.

        Returns:
            The skeleton of the leaves that stay. A list or tuple that loses some becomes a dict of those that stay, by
            index, so that they keep their paths. Containers that never held a leaf stay where nothing beside them goes.
        """
        flags = iter(chosen)
        if self.structure is None:
            return self
        return Skeleton(_select(self.structure, flags) or _plain_node("dict", [], []))


def to_document(structure: Node | None, leaf_documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Describes a tree in JSON.

    Args:
        structure: What `flatten` said of the tree.
        leaf_documents: What is to be stored about each leaf, with at least its "kind"; in the order of `flatten`.

    Returns:
        A document for `from_document`; everything in it is strict JSON.
    """
    tree = None if structure is None else _node_document(structure)
    facts: list[dict[str, Any]] = []
    numbers: dict[int, int] = {}  # by the identity of the documents: leaves share them
    leaves: list[dict[str, Any] | int] = []
    for document in leaf_documents:
        number = numbers.get(id(document))
        if number is None:
            if _has_value(document):
                leaves.append(document)
                continue
            if not facts or document != facts[-1]:
                facts.append(document)
            number = numbers[id(document)] = len(facts) - 1
        leaves.append(number)
    if len(facts) * 2 > len(leaf_documents):
        return {"tree": tree, "leaves": list(leaf_documents)}
    return {"tree": tree, "leaves": leaves, "facts": facts} if facts else {"tree": tree, "leaves": leaves}


def from_document(document: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]], Skeleton]:
    """Reads what `to_document` wrote.

    Args:
        document: Parsed JSON, not trusted in any way.

    Returns:
        The names of the leaves, their documents, and the skeleton to build the tree with.

    Raises:
        DamagedCheckpointError: The document does not describe a tree.
    """
    leaves, facts = document.get("leaves"), document.get("facts", [])
    if not isinstance(leaves, list) or not isinstance(facts, list) or "tree" not in document:
        raise DamagedCheckpointError("the tree's document lacks its 'tree' or its list of 'leaves'")
    if any(isinstance(fact, dict) and _has_value(fact) for fact in facts):
        raise DamagedCheckpointError("the tree's document says of several leaves that they have the same value")
    if facts:
        leaves = [facts[leaf] if type(leaf) is int and 0 <= leaf < len(facts) else leaf for leaf in leaves]
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, dict) or not isinstance(leaf.get("kind"), str):
            raise DamagedCheckpointError(f"leaf {index} of the tree's document has no kind")
    names: list[str] = []
    structure = _read_node(document["tree"], "", names, 0)
    if len(names) != len(leaves):
        raise DamagedCheckpointError(f"the tree's document has {len(leaves)} leaves, its containers hold {len(names)}")
    return names, leaves, Skeleton(structure)


def _has_value(document: dict[str, Any]) -> bool:
    """Whether a leaf's value stands in its document. Such a document never stands for several leaves: a few bytes could
    ask for any number of large values."""
    return "value" in document or "base64" in document


def _node_document(node: Node) -> dict[str, Any]:
    document: dict[str, Any] = {"type": node.kind}
    if node.label is not None:
        document["class"] = node.label
    if node.keys is not None:
        segments = key_segments(node.keys)
        plain = [plain_key(key) for key in node.keys]
        document["keys"] = [
            segment if isinstance(key, str) else key for segment, key in zip(segments, plain, strict=True)
        ]
    document["children"] = [None if child is None else _node_document(child) for child in node.children]
    return document


def _read_node(document: Any, name: str, names: list[str], depth: int) -> Node | None:
    if document is None:
        names.append(name)
        return None
    where = f"container {name!r} of the tree's document"
    if depth > MAX_DEPTH:
        raise DamagedCheckpointError(f"{where} is nested deeper than {MAX_DEPTH} levels")
    if not isinstance(document, dict) or not isinstance(document.get("children"), list):
        raise DamagedCheckpointError(f"{where} has no list of children")
    kind, children, label = document.get("type"), document["children"], document.get("class")
    if not isinstance(kind, str) or (kind not in _SEQUENCES and kind not in _MAPPINGS):
        raise DamagedCheckpointError(f"{where} is of the unknown type {kind!r:.80}")
    if label is not None and not isinstance(label, str):
        raise DamagedCheckpointError(f"{where} has a class that is not text")
    keys: list[Key] | None = None
    segments: list[str] = [str(index) for index in range(len(children))]
    if kind in _MAPPINGS:
        keys, segments = _read_keys(document.get("keys"), where)
        if len(keys) != len(children):
            raise DamagedCheckpointError(f"{where} has {len(keys)} keys and {len(children)} children")
    prefix = f"{name}." if name else ""
    nodes = [
        _read_node(child, prefix + segment, names, depth + 1) for segment, child in zip(segments, children, strict=True)
    ]
    return _plain_node(kind, keys, nodes, label)


def _read_keys(stored: Any, where: str) -> tuple[list[Key], list[str]]:
    if not isinstance(stored, list):
        raise DamagedCheckpointError(f"{where} has no list of keys")
    keys: list[Key] = []
    segments: list[str] = []
    for item in stored:
        if isinstance(item, str):
            try:
                keys.append(unescape_key(item))
            except ValueError as error:
                raise DamagedCheckpointError(f"{where}: {error}") from error
            segments.append(item)
        elif isinstance(item, int) and -(1 << 63) <= item < 1 << 63:
            keys.append(item)
            segments.append(str(item))
        else:
            raise DamagedCheckpointError(f"{where} has the key {item!r:.80}; keys are str or int")
    if len(set(keys)) != len(keys) or len(set(segments)) != len(segments):
        raise DamagedCheckpointError(f"{where} has two keys that are the same")
    return keys, segments


def _plain_node(kind: str, keys: list[Key] | None, children: list[Node | None], label: str | None = None) -> Node:
    build: Callable[[list[Any]], Any]
    if keys is None:
        build = _SEQUENCES[kind]
    elif kind == "ordered_dict":
        build = partial(build_mapping, OrderedDict, keys)
    elif kind == "default_dict":
        build = partial(build_defaultdict, FACTORIES.get(label) if label else None, keys)
    elif kind == "counter":
        build = partial(build_counter, keys)
    else:
        build = partial(build_mapping, dict, keys)
    return Node(kind, keys, children, build, label)


def _select(node: Node, flags: Any) -> Node | None:
    """Keeps what is chosen below a node; None when nothing is."""
    kept: list[tuple[int, Node | None]] = []
    empty = 0
    for index, child in enumerate(node.children):
        if child is None:
            if next(flags):
                kept.append((index, None))
        elif not _has_leaves(child):
            empty += 1
        elif (smaller := _select(child, flags)) is not None:
            kept.append((index, smaller))
    if not kept:
        return None
    if len(kept) + empty == len(node.children):
        smaller_children = dict(kept)
        children = [smaller_children.get(index, child) for index, child in enumerate(node.children)]
        return _plain_node(node.kind, node.keys, children, node.label)
    keys: list[Key] = [index if node.keys is None else node.keys[index] for index, _ in kept]
    kind = "dict" if node.keys is None else node.kind
    return _plain_node(kind, keys, [child for _, child in kept], node.label)


def _has_leaves(node: Node) -> bool:
    return any(child is None or _has_leaves(child) for child in node.children)
