"""Trees taken apart into named leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UnsupportedLeafError
from .containers import expand
from .frameworks import is_jax_abstract, is_jax_array, is_torch_tensor
from .garbage import collection_paused
from .metadata import LeafMetadata
from .names import display
from .structure import MAX_DEPTH, KeyProblem, Node, key_segments

_SCALARS = (type(None), bool, int, float, complex, str, bytes, set, frozenset)
_LEAF_TYPES: set[type] = {*_SCALARS, np.ndarray, LeafMetadata}  # grows with the array types of the frameworks in use


@dataclass(slots=True)
class Flattened:
    """A tree taken apart.

    Attributes:
        names: The name of each leaf (see `names`); all are different.
        values: The leaves, in the same order.
        structure: The containers; None if the tree is one bare leaf.
    """

    names: list[str]
    values: list[Any]
    structure: Node | None


def flatten(tree: Any, leaf_types: tuple[type, ...] = ()) -> Flattened:
    """Takes a tree apart into leaves, names and containers.

    Containers are dict and its subclasses and other mappings (keys str or int, in their own order), list, tuple,
    namedtuple, dataclasses, and every type that is registered with jax. None is a leaf. What is no container is a leaf
    here, of whatever type; `describe` says whether it can be saved.

    Args:
        tree: Any value.
        leaf_types: Instances of these are leaves, containers or not.

    Returns:
        Names, leaves and containers. A structure may refer to the containers themselves (never copies leaves): keep the
        document made from it, not the structure, when the arrays in them should be freed.

    Raises:
        UnsupportedLeafError: A key is neither str nor int, a container contains itself, or containers are nested
            deeper than `MAX_DEPTH`. All such places are named.
    """
    walk = _Walk(leaf_types)
    with collection_paused():
        structure = walk.visit(tree, "", 0)
    if walk.problems:
        lines = "\n  ".join(walk.problems)
        raise UnsupportedLeafError(f"this tree has containers that cannot be stored:\n  {lines}")
    return Flattened(walk.names, walk.values, structure)


class _Walk:
    __slots__ = ("above", "leaf_types", "names", "problems", "values")

    def __init__(self, leaf_types: tuple[type, ...]) -> None:
        self.leaf_types = leaf_types
        self.names: list[str] = []
        self.values: list[Any] = []
        self.problems: list[str] = []
        self.above: dict[int, str] = {}  # containers that are being walked: id -> name

    def visit(self, value: Any, name: str, depth: int) -> Node | None:
        if (
            type(value) in _LEAF_TYPES
            or _is_leaf(value)
            or isinstance(value, self.leaf_types)
            or (contents := expand(value)) is None
        ):
            self.names.append(name)
            self.values.append(value)
            return None
        if id(value) in self.above or depth == MAX_DEPTH:
            self.problems.append(f"{display(name)}: {self._why_not(value)}")
            return None
        kind, keys, values, build, label = contents
        try:
            segments = map(str, range(len(values))) if keys is None else key_segments(keys)
        except KeyProblem as problem:
            self.problems.append(f"{display(name)}: {type(value).__name__} {problem}")
            return None
        prefix = f"{name}." if name else ""
        self.above[id(value)] = name
        children: list[Node | None] = []
        for segment, child in zip(segments, values, strict=True):
            if type(child) in _LEAF_TYPES:  # `visit` without the call
                self.names.append(prefix + segment)
                self.values.append(child)
                children.append(None)
            else:
                children.append(self.visit(child, prefix + segment, depth + 1))
        del self.above[id(value)]
        return Node(kind, keys, children, build, label)

    def _why_not(self, value: Any) -> str:
        if id(value) in self.above:
            return f"{type(value).__name__} contains itself: it is also at {display(self.above[id(value)])}"
        return f"containers are nested deeper than {MAX_DEPTH} levels"


def _is_leaf(value: Any) -> bool:
    """Whether a value is an array or a scalar, which must not be opened although it may be iterable or registered."""
    kind = type(value)
    if isinstance(value, np.ndarray | np.generic | str | bytes | int | float | complex):
        return True  # subclasses; not remembered, as a program may make classes without end
    if is_jax_array(value):
        if kind.__module__.startswith(
            "jaxlib"
        ):  # the one concrete array type; tracers and keys are looked at each time
            _LEAF_TYPES.add(kind)
        return True
    if is_torch_tensor(value):
        if kind.__module__.startswith("torch"):
            _LEAF_TYPES.add(kind)
        return True
    return is_jax_abstract(value)
