"""Tree documents, which describe the containers and leaves of a tree as JSON for ``tree.json``.

A container is ``{"type": ..., "keys": [...], "children": [...]}``, with null in place of each leaf. The list
"leaves" contains a document for each leaf. A document that many leaves share is stored once, in the list "facts", and
"leaves" contains its index in "facts". Keys of type str are escaped as in leaf names, which keeps lone surrogates
out of JSON and distinguishes ``"1"`` from ``1``. Tuple keys are stored as lists. A document never names code to run.
"""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain, compress
from typing import Any, NamedTuple

from ..errors import DamagedCheckpointError
from .containers import FACTORIES, build_counter, build_mapping
from .flattening import MAX_DEPTH, Key, TreeDef, key_segments, plain_key, unflatten
from .names import Pattern, Patterns, choose, compiled, escape_key, unescape_key, unescape_keys

_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple}
_MAKERS: dict[str, Callable[[Any], Any]] = {"ordered_dict": OrderedDict, "counter": build_counter}
_MAPPINGS = {"dict", "ordered_dict", "default_dict", "counter", "mapping", "namedtuple", "dataclass", "node"}
_LENGTH = re.compile("[0-9]{1,18}")  # matches the maxlen of a deque, stored as text
_Keys = dict[tuple[str, ...], tuple[list[Key], list[str]]]  # decoded keys and segments, keyed by stored keys


class TreeDocument(NamedTuple):
    """The containers described by a document, as plain Python types; if ``structure`` is None, the tree is one leaf."""

    structure: TreeDef | None

    def build(self, values: Sequence[Any]) -> Any:
        """Rebuild the tree as dict, OrderedDict, defaultdict, Counter, list, tuple or deque; keys keep their types."""
        return unflatten(self.structure, values)

    def select(self, chosen: Sequence[bool]) -> TreeDocument:
        """Return the tree with only the chosen leaves, dropping containers that become empty."""
        if self.structure is None:
            return self
        return TreeDocument(_select(self.structure, iter(chosen)) or _plain_node("dict", [], []))

    def below(self, segments: Sequence[str]) -> TreeDocument:
        """Return the container at a path of escaped keys, which must exist."""
        node = self.structure
        for segment in segments:
            assert node is not None
            node = node.children[node.segments.index(segment)]
        return TreeDocument(node)


def to_document(structure: TreeDef | None, leaf_documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    tree = None if structure is None else _encode_node(structure)
    facts: list[dict[str, Any]] = []
    entries: dict[int, dict[str, Any] | int] = {}  # keyed by id, because leaves share documents
    equal: dict[str, int] = {}  # keyed by content, so that the output does not depend on which leaves share an object
    identities = list(map(id, leaf_documents))
    for identity, document in dict(zip(identities, leaf_documents, strict=True)).items():
        if _has_value(document):
            entries[identity] = document
            continue
        number = entries[identity] = equal.setdefault(repr(document), len(facts))
        if number == len(facts):
            facts.append(document)
    if not facts or len(facts) * 2 > len(leaf_documents):
        return {"tree": tree, "leaves": list(leaf_documents)}
    return {"tree": tree, "leaves": list(map(entries.__getitem__, identities)), "facts": facts}


def from_document(document: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]], TreeDocument]:
    """Return the leaf names, leaf documents and containers that `to_document` stored."""
    leaves, facts = document.get("leaves"), document.get("facts", [])
    if not isinstance(leaves, list) or not isinstance(facts, list) or "tree" not in document:
        raise DamagedCheckpointError("the tree's document lacks its 'tree' or its list of 'leaves'")
    if any(isinstance(fact, dict) and _has_value(fact) for fact in facts):
        raise DamagedCheckpointError("the tree's document has one value for several leaves")
    if facts:
        leaves = [facts[leaf] if type(leaf) is int and 0 <= leaf < len(facts) else leaf for leaf in leaves]
    for leaf in dict(zip(map(id, leaves), leaves, strict=True)).values():  # check shared documents only once
        if not isinstance(leaf, dict) or not isinstance(leaf.get("kind"), str):
            raise DamagedCheckpointError(f"leaf {leaves.index(leaf)} of the tree's document has no kind")
    names: list[str] = []
    structure = _decode_node(document["tree"], "", names, {}, 0)
    if len(names) != len(leaves):
        raise DamagedCheckpointError(f"the tree's document has {len(leaves)} leaves, its containers hold {len(names)}")
    return names, leaves, TreeDocument(structure)


def leaves_at(document: dict[str, Any], patterns: Patterns) -> tuple[dict[str, Any], list[int]]:
    """Return a document with only the leaves that match patterns, and the positions of these leaves in the tree.

    All other leaves are skipped without creating objects for them. Every pattern must match at least one leaf.
    """
    lookup = _Lookup(compiled(patterns, "select"))
    try:
        tree = lookup.below(document["tree"], [(pattern, pattern.begin) for pattern in lookup.unmatched], 0)
        leaves = [document["leaves"][number] for number in lookup.numbers]
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, RecursionError):
        lookup.numbers = []  # a bare leaf, or a damaged document; decoding the whole document below reports damage
    if lookup.unmatched or not lookup.numbers:
        names = from_document(document)[0]
        choose(names, patterns)
        return document, list(range(len(names)))
    return {**document, "tree": tree, "leaves": leaves}, lookup.numbers


_FEW = 8  # maximum number of keys to search for one by one; for more keys, a loop over all children is faster
_Progress = Sequence[tuple[Pattern, Collection[int]]]  # (pattern, positions reached in it so far); see `Pattern`


class _Lookup:
    """Finds the positions of matching leaves in a container document, and the patterns that match no leaf."""

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        self.unmatched = {*patterns}
        self.numbers: list[int] = []
        self._counts: dict[int, int] = {}  # number of leaves below each container, keyed by id

    def below(self, node: dict[str, Any], progress: _Progress, number: int) -> dict[str, Any] | None:
        """Reduce a container to its matching leaves; None if no leaf matches. ``number`` leaves precede it."""
        children, stored = node["children"], node.get("keys")
        segments = [*map(str, range(len(children)))] if stored is None else stored
        try:
            text = "\n".join(["", *segments, ""])
        except TypeError:  # some keys are not strings
            segments = _decode_keys(stored, "", {})[1]
            text = "\n".join(["", *segments, ""])
        wild: list[tuple[Pattern, Collection[int]]] = []
        literal: dict[str, list[tuple[Pattern, Collection[int]]]] = {}  # patterns, keyed by the next key to match
        for pattern, positions in progress:
            keys = pattern.literal(positions)
            for entries in [wild] if keys is None else [literal.setdefault(each, []) for each in {*keys}]:
                entries.append((pattern, positions))
        indices: Iterable[int] = range(len(children))
        if not wild:  # avoid a Python loop over the children
            texts = {each.replace(".", "%2E") for each in literal}
            if len(texts) <= _FEW and not any(f"\n{each}%2E" in text for each in texts):
                offsets = [text.find(f"\n{each}\n") for each in texts]
                indices = sorted(text.count("\n", 0, offset) for offset in offsets if offset >= 0)
            elif "%2E" in text:  # an escaped dot may separate several pattern keys
                heads = ((each, each.partition("%2E")[0]) for each in segments)
                indices = compress(indices, [not texts.isdisjoint(each) for each in heads])
            else:
                indices = compress(indices, map(texts.__contains__, segments))
        kept: dict[int, Any] = {}
        begin = 0
        for index in indices:
            key, child = segments[index].replace("%2E", "."), children[index]
            candidates = chain(wild, *(literal.get(each, ()) for each in {key, key.partition(".")[0]}))
            reached = [(pattern, after) for pattern, before in candidates if (after := pattern.after(before, key))]
            number += self._count(children[begin:index])
            begin = index
            is_taken = Pattern.ends if child is None else Pattern.takes_all
            ends = [pattern for pattern, after in reached if is_taken(pattern, after)]
            takes_all = ends and (child is None or len(ends) == len(reached))
            if takes_all and (count := self._count([child])):
                kept[index] = child
                self.numbers += range(number, number + count)
                self.unmatched.difference_update(ends)
            elif child is not None and reached and (part := self.below(child, reached, number)) is not None:
                kept[index] = part
        if not kept:
            return None
        if all(index in kept or not self._count([child]) for index, child in enumerate(children)):
            return {**node, "children": [kept.get(index, child) for index, child in enumerate(children)]}
        named = list(kept) if stored is None else [stored[index] for index in kept]
        kind = "dict" if stored is None else node["type"]
        label = {"class": node["class"]} if stored is not None and "class" in node else {}
        return {"type": kind, **label, "keys": named, "children": list(kept.values())}

    def _count(self, children: list[Any]) -> int:
        bare = children.count(None)
        return bare if bare == len(children) else bare + sum(map(self._leaves_in, filter(None, children)))

    def _leaves_in(self, node: dict[str, Any]) -> int:
        count = self._counts.get(id(node))
        if count is None:
            count = self._counts[id(node)] = self._count(node["children"])
        return count


def _has_value(document: dict[str, Any]) -> bool:
    """True if a document has a value; leaves must not share it, or a few bytes could expand to many large values."""
    return "value" in document or "base64" in document


def _encode_node(node: TreeDef) -> dict[str, Any]:
    document: dict[str, Any] = {"type": node.kind}
    if node.label is not None:
        document["class"] = node.label
    if node.keys is not None:
        document["keys"] = [
            segment if isinstance(key, str) else _encode_key(plain_key(key))
            for segment, key in zip(key_segments(node.keys), node.keys, strict=True)
        ]
    document["children"] = [None if child is None else _encode_node(child) for child in node.children]
    return document


def _decode_node(document: Any, name: str, names: list[str], decoded: _Keys, depth: int) -> TreeDef | None:
    if document is None:
        names.append(name)
        return None
    if depth > MAX_DEPTH:
        raise _damaged(name, f"is nested deeper than {MAX_DEPTH} levels")
    if not isinstance(document, dict) or not isinstance(document.get("children"), list):
        raise _damaged(name, "has no list of children")
    kind, children, label = document.get("type"), document["children"], document.get("class")
    if not isinstance(kind, str) or (kind not in _SEQUENCES and kind not in _MAPPINGS and kind != "deque"):
        raise _damaged(name, f"is of the unknown type {kind!r:.80}")
    if label is not None and not isinstance(label, str):
        raise _damaged(name, "has a class that is not text")
    if kind == "deque" and label is not None and not (_LENGTH.fullmatch(label) and int(label) >= len(children)):
        raise _damaged(name, f"has {len(children)} children, but at most {label!r:.80}")
    keys: list[Key] | None = None
    if kind not in _MAPPINGS:
        segments = [str(index) for index in range(len(children))]
    else:
        keys, segments = _decode_keys(document.get("keys"), name, decoded)
        if len(keys) != len(children):
            raise _damaged(name, f"has {len(keys)} keys, but {len(children)} children")
    below = [f"{name}.{segment}" for segment in segments] if name else segments
    if children.count(None) == len(children):  # the common case
        names += below
        return _plain_node(kind, keys, children, label)
    nodes = [_decode_node(child, path, names, decoded, depth + 1) for path, child in zip(below, children, strict=True)]
    return _plain_node(kind, keys, nodes, label)


def _decode_keys(stored: Any, name: str, decoded: _Keys) -> tuple[list[Key], list[str]]:
    if not isinstance(stored, list):
        raise _damaged(name, "has no list of keys")
    texts = tuple(stored) if set(map(type, stored)) <= {str} else None
    if texts is not None and texts in decoded:
        return decoded[texts]
    try:
        if texts is not None:
            keys: list[Key] = [*unescape_keys(texts)]
            segments = [*texts]
        else:
            pairs = list(map(_decode_key, stored))
            keys, segments = [key for key, _ in pairs], [segment for _, segment in pairs]
    except ValueError as error:
        raise _damaged(name, f"has a key that no save writes: {error}") from error
    if len(set(segments)) != len(segments) or (keys != segments and len(set(keys)) != len(keys)):
        raise _damaged(name, "has two keys that are the same")
    if texts is not None:
        decoded[texts] = keys, segments
    return keys, segments


def _decode_key(stored: Any) -> tuple[Key, str]:
    """Decode a stored key; return the key and the segment that it adds to leaf names."""
    if isinstance(stored, str):
        return unescape_key(stored), stored
    if isinstance(stored, int) and -(1 << 63) <= stored < 1 << 63:
        return stored, str(stored)
    if isinstance(stored, list):
        key = plain_key(tuple([_decode_key(part)[0] for part in stored]))
        return key, escape_key(repr(key))
    raise ValueError(f"{stored!r:.80}; keys are str, int or lists of them")


def _damaged(name: str, problem: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"container {name!r} of the tree's document {problem}")


def _encode_key(key: Key) -> Any:
    if isinstance(key, str):
        return escape_key(key)
    return list(map(_encode_key, key)) if isinstance(key, tuple) else key


def _plain_node(kind: str, keys: list[Key] | None, children: list[TreeDef | None], label: str | None = None) -> TreeDef:
    build: Callable[[list[Any]], Any]
    if kind == "deque":
        build = partial(deque, maxlen=None if label is None else int(label))
    elif keys is None:
        build = _SEQUENCES[kind]
    else:
        factory = FACTORIES.get(label or "")
        make: Callable[[Any], Any] = (
            partial(defaultdict, factory) if kind == "default_dict" else _MAKERS.get(kind, dict)
        )
        build = partial(build_mapping, make, keys)
    return TreeDef(kind, keys, children, build, label)


def _select(node: TreeDef, flags: Any) -> TreeDef | None:
    """Return a container with only the chosen leaves, or None if no leaf is chosen."""
    kept: dict[int, TreeDef | None] = {}
    for index, child in enumerate(node.children):
        if child is None:
            if next(flags):
                kept[index] = None
        elif (smaller := _select(child, flags)) is not None:
            kept[index] = smaller
    if not kept:
        return None
    children = dict(enumerate(node.children))
    if all(index in kept or (child is not None and not child.has_leaves) for index, child in children.items()):
        return _plain_node(node.kind, node.keys, list((children | kept).values()), node.label)
    keys: list[Key] = [index if node.keys is None else node.keys[index] for index in kept]
    return _plain_node("dict" if node.keys is None else node.kind, keys, list(kept.values()), node.label)
