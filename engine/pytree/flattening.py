"""Flattens trees into named leaves and containers, and unflattens them."""

from __future__ import annotations

import gc
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError, UnsupportedLeafError
from ..forks import Lock
from .containers import NnxObjects, expand
from .host_leaves import INT64
from .leaves import (
    MIXED,
    NUMBER_TYPES,
    NUMBERS,
    PLAIN,
    ArrayLeaf,
    Details,
    LeafMetadata,
    StaticLeaf,
    is_jax_abstract,
    library_of,
)
from .names import escape_first, escape_keys, format_path

# A mapping key or an attribute name. Although True == 1 in Python, documents distinguish these keys. The elements of a
# tuple must also be keys; numpyro states, for example, use tuples as keys for groups of parameters.
Key = str | int | tuple[Any, ...]

MAX_DEPTH = 200  # maximum nesting of containers; code that walks trees, including the json module, is recursive

_LARGEST_KEY = 1 << 63  # integer keys must fit into 64 bits
_DEEPEST_KEY = 8  # maximum tuple nesting in a key
# Array types of imported frameworks are added on first use.
_LEAF_TYPES: set[type] = {*PLAIN, set, frozenset, np.ndarray, LeafMetadata, StaticLeaf}


@dataclass(slots=True)
class TreeDef:
    # "dict", "ordered_dict", "default_dict", "counter", "mapping", "list", "tuple", "deque", "namedtuple", "dataclass",
    # or "node" (a type registered as a jax pytree node).
    kind: str
    keys: list[Key] | None  # one key for each child, or None for the sequences "list", "tuple" and "deque"
    children: list[TreeDef | None]  # the definition of each child, or None for a leaf
    build: Callable[[list[Any]], Any]  # builds the container from its children's values, in the order of `children`
    label: str | None = None  # name of the class or default factory; for a deque, its maxlen

    @property
    def segments(self) -> list[str]:
        """The name segment that each child adds to the names of the leaves below it."""
        return key_segments(self.keys, len(self.children))

    def named_children(self, name: str) -> list[tuple[str, TreeDef | None]]:
        """Return the children with their full names, given the container's name."""
        prefix = f"{name}." if name else ""
        return [(prefix + segment, child) for segment, child in zip(self.segments, self.children, strict=True)]

    @property
    def has_leaves(self) -> bool:
        return any(child is None or child.has_leaves for child in self.children)


@dataclass(slots=True)
class Flattened:
    names: list[str]  # leaf names, all different
    values: list[Any]  # leaves, in the order of the names
    structure: TreeDef | None  # the containers; None if the tree is a bare leaf


def flatten(tree: Any, leaf_types: tuple[type, ...] = ()) -> Flattened:
    """Flatten a tree into leaves, names and containers.

    Containers are dict, its subclasses and other mappings (with keys of type `Key`, in iteration order), list, tuple,
    deque, named tuples, dataclasses, and all types registered with jax. None and values of any other type are
    leaves; `describe` refuses leaves that cannot be saved.

    Instances of `leaf_types` are leaves even if they are containers. The structure may keep the original containers and
    their arrays alive, unlike a document made from it. A single error names every key that is not a `Key`, every
    container that contains itself, and every container nested deeper than `MAX_DEPTH`.
    """
    walk = _Walk(leaf_types)
    with collection_paused():
        structure = walk.visit(tree, "", 0)
    if walk.problems:
        lines = "\n  ".join(walk.problems)
        raise UnsupportedLeafError(f"this tree has containers that cannot be stored:\n  {lines}")
    return Flattened(walk.names, walk.values, structure)


class _Walk:
    def __init__(self, leaf_types: tuple[type, ...]) -> None:
        self.leaf_types = leaf_types
        self.names: list[str] = []
        self.values: list[Any] = []
        self.problems: list[str] = []
        self.objects = NnxObjects()
        self.above: dict[int, str] = {}  # names of the containers on the current path, keyed by id

    def visit(self, value: Any, name: str, depth: int) -> TreeDef | None:
        if is_leaf(value) or isinstance(value, self.leaf_types) or (contents := expand(value, self.objects)) is None:
            self.names.append(name)
            self.values.append(value)
            return None
        if id(value) in self.above or depth == MAX_DEPTH:
            problem = (
                f"containers are nested deeper than {MAX_DEPTH} levels; keep their values in one list, such as that "
                "of jax.tree.leaves, and rebuild the containers with jax.tree.unflatten"
            )
            if id(value) in self.above:
                above = format_path(self.above[id(value)])
                problem = f"{type(value).__name__} contains itself: it is also at {above}"
            self.problems.append(f"{format_path(name)}: {problem}")
            return None
        kind, keys, values, build, label = contents
        try:
            segments = key_segments(keys, len(values))
        except KeyProblem as problem:
            self.problems.append(f"{format_path(name)}: {type(value).__name__} {problem}")
            return None
        prefix = f"{name}." if name else ""
        self.above[id(value)] = name
        children: list[TreeDef | None] = []
        for segment, child in zip(segments, values, strict=True):
            if type(child) in _LEAF_TYPES:  # `visit` inlined, for speed
                self.names.append(prefix + segment)
                self.values.append(child)
                children.append(None)
            else:
                children.append(self.visit(child, prefix + segment, depth + 1))
        del self.above[id(value)]
        return TreeDef(kind, keys, children, build, label)


def is_leaf(value: Any) -> bool:
    """True for arrays, scalars and the like, which are leaves even if they are iterable or registered with jax."""
    kind = type(value)
    if kind in _LEAF_TYPES:
        return True
    if isinstance(value, PLAIN):
        return True  # subclasses are not cached, because a program may create any number of them
    library = library_of(value)
    # Tracers, keys and the program's own classes are not cached either.
    if library in ("jax", "torch") and kind.__module__.startswith(("jaxlib", "torch")):
        _LEAF_TYPES.add(kind)
    return library is not None or is_jax_abstract(value)


class KeyProblem(ValueError):  # noqa: N818 - callers add the path of the key
    """Raised for a key that cannot be stored; the message gives the reason."""


def key_segments(keys: Sequence[object] | None, count: int = 0) -> list[str]:
    """Return the name segment for each key of a container, or for each of the ``count`` children of a sequence.

    All segments differ: if an int and a str key have the same text (``1`` and ``"1"``), the str is escaped.
    """
    if keys is None:
        return [str(index) for index in range(count)]
    has_others = set(map(type, keys)) - {str}
    texts = [str.__str__(key) if isinstance(key, str) else repr(plain_key(key)) for key in keys] if has_others else keys
    segments = escape_keys(cast("Sequence[str]", texts))
    if has_others:
        taken = {segment for segment, key in zip(segments, keys, strict=True) if not isinstance(key, str)}
        for index, key in enumerate(keys):
            if isinstance(key, str) and segments[index] in taken:
                segments[index] = escape_first(str.__str__(key))
    if len(set(segments)) != len(segments):
        raise KeyProblem("has two keys that become the same plain str or int")
    return segments


def plain_key(key: object, depth: int = 0) -> Key:
    """Convert a key to an equal plain str, int or bool, or a tuple of these."""
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, bool | np.bool_):
        return bool(key)
    if isinstance(key, int | np.integer):
        number = int(key)
        if not -_LARGEST_KEY <= number < _LARGEST_KEY:
            raise KeyProblem("has an integer key that does not fit 64 bits; use a string")
        return number
    if isinstance(key, tuple) and depth < _DEEPEST_KEY:
        return tuple([plain_key(part, depth + 1) for part in key])
    raise KeyProblem(
        f"has the key {key!r:.80} of type {type(key).__name__}; keys must be str or int, or tuples of them"
    )


def unflatten(structure: TreeDef | None, values: Sequence[Any]) -> Any:
    """Rebuild a tree from leaves in the order of `flatten`; if ``structure`` is None, the tree is a bare leaf."""
    remaining = iter(values)
    try:
        tree = next(remaining) if structure is None else _build(structure, remaining)
    except StopIteration:
        raise ValueError(f"the tree has more leaves than the {len(values)} values given") from None
    left = sum(1 for _ in remaining)
    if left:
        raise ValueError(f"the tree has {len(values) - left} leaves, but {len(values)} values were given")
    return tree


def _build(node: TreeDef, values: Any) -> Any:
    return node.build([next(values) if child is None else _build(child, values) for child in node.children])


class Outline:
    """The containers and keys of a tree, used to recognize later trees with the same structure.

    An outline refers only to keys and class names, not to leaves or containers.
    """

    def __init__(self, structure: TreeDef | None) -> None:
        self.structure = None if structure is None else _Container(structure)

    def leaves_of(self, tree: Any) -> list[Any] | None:
        """Return the leaves of a tree in the order of `flatten`; None if its containers differ.

        Values at the positions of leaves are not checked and may be containers, so the caller must compare their types.
        """
        if self.structure is None:
            return [tree]
        leaves: list[Any] = []
        return leaves if self.structure.collect(tree, leaves, NnxObjects()) else None


# Container types that `_Container` opens itself; all others are opened by `expand`.
_EXACT: dict[str, type] = {"dict": dict, "list": list, "tuple": tuple, "ordered_dict": OrderedDict}


class _Container(TreeDef):
    """A container in an outline. Its build function is a stub, because a real one might keep arrays alive."""

    __slots__ = ("are_leaves", "type", "type_of", "types")

    def __init__(self, node: TreeDef) -> None:
        children: list[TreeDef | None] = [None if child is None else _Container(child) for child in node.children]
        super().__init__(node.kind, None if node.keys is None else [*node.keys], children, list, node.label)
        self.type = _EXACT.get(node.kind) if node.label is None else None
        # Types are compared as well, because 1, True and np.int64(1) are equal.
        self.type_of = _types_in if node.keys is not None and any(isinstance(key, tuple) for key in node.keys) else type
        self.types = None if node.keys is None else list(map(self.type_of, node.keys))
        self.are_leaves = all(child is None for child in children)

    def collect(self, value: Any, leaves: list[Any], objects: NnxObjects) -> bool:
        """Append the leaves of a container to ``leaves``; return False if its structure differs from the outline."""
        is_exact = type(value) is self.type
        if self.type is None:
            contents = None if is_leaf(value) else expand(value, objects)
            if contents is None or (contents.kind, contents.label) != (self.kind, self.label):
                return False
            keys: list[Any] | None = contents.keys
            values: Any = contents.values
        elif not is_exact:
            return False
        elif self.keys is None:
            keys, values = None, value
        else:
            keys, values = list(value), value.values()
        if len(values) != len(self.children) or keys != self.keys:
            return False
        if keys and list(map(self.type_of, keys)) != self.types:
            return False
        if self.are_leaves:
            leaves.extend(values)
            return True
        for child, container in zip(values, self.children, strict=True):
            if container is None:
                leaves.append(child)
            elif isinstance(container, _Container) and not container.collect(child, leaves, objects):
                return False
        return True


def _types_in(key: object) -> object:
    return tuple(map(_types_in, key)) if isinstance(key, tuple) else type(key)


_lock = Lock()
_holders = 0
_was_enabled = False


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause automatic garbage collection in all threads while the block runs.

    Processing ten thousand leaves creates about thirty thousand objects, none of which is garbage. If a framework
    is loaded, the full collections that these objects trigger take several times as long as the work itself.
    """
    global _holders, _was_enabled
    with _lock:
        if _holders == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0 and _was_enabled:
                gc.enable()


def _end_pauses() -> None:
    """Resume garbage collection in a forked process, because the threads that paused it do not exist there."""
    global _holders
    if _holders and _was_enabled:
        gc.enable()
    _holders = 0


os.register_at_fork(after_in_child=_end_pauses)


# ---- long sequences of numbers
#
# A list, tuple or deque of many numbers is packed into one leaf and stored as an array. Loading restores its elements
# with their values and types. A shorter sequence stays a container with a leaf for each element.

PACKED_FROM = 32  # minimum length of sequences that are packed

_SEQUENCES: dict[Any, str] = {list: "list", tuple: "tuple", deque: "deque"}
_ELEMENTS: dict[Any, str] = {kind: name for name, kind in NUMBER_TYPES.items()}
_DTYPES = {name: np.dtype(kind) for kind, name in _ELEMENTS.items()}
_NUMPY = "numpy"  # elements are numpy scalars
# Mixed elements take nine bytes each: a type code, and the value as eight little-endian bytes.
_MIXED_TYPES = (bool, int, float)
_MIXED_WIDTH = 9


class PackedNumbers:
    """A copy of a list, tuple or deque of numbers that forms a single leaf.

    The array is created on demand: code that walks live objects only needs to know whether a sequence can be packed.
    """

    __slots__ = ("_details", "_items")

    def __init__(self, items: list[Any], details: Details) -> None:
        self._items = items
        self._details = details

    def describe(self) -> ArrayLeaf:
        items, elements = self._items, self._details["elements"]
        array = _mixed(items) if elements == MIXED else np.array(items, _DTYPES.get(elements))
        return ArrayLeaf.of(array, self._details)

    def unpack(self) -> Any:
        """Return a new sequence with the same elements."""
        return _built(self._details, list(self._items))


def pack_numbers(value: object) -> PackedNumbers | None:
    """Pack a list, tuple or deque of at least `PACKED_FROM` numbers; return None for everything else."""
    sequence = _SEQUENCES.get(type(value))
    if sequence is None or len(value) < PACKED_FROM:  # type: ignore[arg-type]  # it is one of the three
        return None
    items: list[Any] = list(value)  # type: ignore[call-overload]
    elements = _elements_of(items)
    if elements is None:
        return None
    details: Details = {"kind": NUMBERS, "sequence": sequence, "elements": elements}
    if isinstance(value, deque) and value.maxlen is not None:
        details["maxlen"] = value.maxlen
    return PackedNumbers(items, details)


def _elements_of(items: list[Any]) -> str | None:
    """Return the name of the items' common type, or `MIXED`; None if they cannot be packed."""
    kinds: set[Any] = set(map(type, items))
    if int in kinds:
        integers = [item for item in items if type(item) is int]
        if min(integers) not in INT64 or max(integers) not in INT64:
            return None
    if len(kinds) > 1:
        return MIXED if kinds <= set(_MIXED_TYPES) else None
    (kind,) = kinds
    is_scalar = issubclass(kind, np.bool_ | np.number) and kind not in (np.longdouble, np.clongdouble)
    return _ELEMENTS.get(kind, _NUMPY if is_scalar else None)


def _mixed(items: list[Any]) -> NDArray[Any]:
    codes: dict[Any, int] = {kind: code for code, kind in enumerate(_MIXED_TYPES)}
    types = np.frombuffer(bytes([codes[type(item)] for item in items]), np.uint8)
    values = np.fromiter(items, "<f8", len(items))
    bits = values.view("<i8")
    is_integer = types != codes[float]
    exact = is_integer & (np.abs(values) < 1 << 53)  # integers that a float can represent exactly
    bits[exact] = values[exact].astype("<i8")
    rest = np.flatnonzero(is_integer & ~exact)
    bits[rest] = np.array([items[index] for index in rest.tolist()], "<i8")
    return np.column_stack([types, bits.view(np.uint8).reshape(len(items), 8)])


def pack_tree(tree: Any, depth: int = 0) -> Any:
    """Pack every long number sequence in a tree; containers without such sequences are returned unchanged."""
    packed = pack_numbers(tree)
    if packed is not None:
        return packed
    contents = None if is_leaf(tree) or depth > MAX_DEPTH else expand(tree)  # `flatten` refuses deeper trees
    if contents is None:
        return tree
    values = [pack_tree(value, depth + 1) for value in contents.values]
    if all(map(is_, values, contents.values)):
        return tree
    return contents.build(values)


def unpack_numbers(details: Details, array: NDArray[Any], name: str) -> Any:
    """Unpack a packed sequence from its details and its array, which are untrusted input."""
    sequence, elements, limit = (details.get(key) for key in ("sequence", "elements", "maxlen"))
    mixed = elements == MIXED
    expected = np.dtype(np.uint8) if mixed else _DTYPES.get(str(elements), array.dtype)
    is_known = str(elements) in {*_DTYPES, _NUMPY, MIXED} and sequence in _SEQUENCES.values()
    fits = array.shape[1:] == ((_MIXED_WIDTH,) if mixed else ()) and array.ndim > 0 and array.dtype == expected
    if not (is_known and fits and (limit is None or (type(limit) is int and len(array) <= limit < 1 << 63))):
        raise DamagedCheckpointError(
            f"leaf {format_path(name)} is of kind {NUMBERS}, but its details {details!r:.200} do not fit "
            f"{array.dtype}{list(array.shape)}"
        )
    if mixed and len(array) and (last := int(array[:, 0].max())) >= len(_MIXED_TYPES):
        raise DamagedCheckpointError(f"leaf {format_path(name)}: type {last} of an element is unknown")
    items = list(array) if elements == _NUMPY else _unmixed(array) if mixed else array.tolist()
    return _built(details, items)


def _built(details: Details, items: list[Any]) -> Any:
    if details["sequence"] == "deque":
        return deque(items, details.get("maxlen"))
    return tuple(items) if details["sequence"] == "tuple" else items


def _unmixed(array: NDArray[Any]) -> list[Any]:
    bits = np.ascontiguousarray(array[:, 1:]).view("<i8")[:, 0]
    elements = np.empty(len(bits), object)
    for code, kind in enumerate(_MIXED_TYPES):
        chosen = array[:, 0] == code
        values = bits[chosen]
        elements[chosen] = values.view("<f8") if kind is float else values.astype(kind)
    return list(elements)
