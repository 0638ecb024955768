"""Load a saved tree into a different structure, reading only the leaves that are needed.

A saved leaf that becomes exactly one new leaf, without changes, is read by `load_tree`. Functions that take the
whole tree receive it as lazy containers, which read a leaf when it is indexed.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import TreeMismatchError
from ..pytree import (
    ArrayLeaf,
    Call,
    Computed,
    Flattened,
    Key,
    LeafMetadata,
    LeafRequest,
    Origin,
    OriginalTree,
    Saved,
    Taken,
    TreeDef,
    TreeDocument,
    compare,
    describe,
    describe_template,
    evaluate,
    expand,
    flatten,
    format_path,
    has_values,
    plan_transformations,
    unfilled_error,
    unflatten,
)
from .load import load_tree, made_values
from .source import MemoryTree, PartialTree, SavedLeaf, TreeSource


class LeafCache:
    """Caches leaves of a saved tree so that each is read only once. Arrays are read-only, as functions share them."""

    def __init__(self, source: TreeSource) -> None:
        self._source = source
        self._arrays: dict[int, NDArray[Any] | None] = {}

    def tree(self) -> Any:
        """Return the tree as lazy containers, which read a leaf when it is indexed. If the tree is a leaf, read it."""
        structure = self._source.tree.structure
        return self.values([0])[0] if structure is None else _lazy(self, structure, 0)

    def __contains__(self, number: int) -> bool:
        return number in self._arrays

    def arrays(self, numbers: Sequence[int]) -> list[NDArray[Any] | None]:
        """Return the stored array of each leaf (None for a plain value); read those that are not in the cache yet."""
        missing = [number for number in dict.fromkeys(numbers) if number not in self._arrays]
        read = self._source.read_leaves([self._source.leaves[number] for number in missing]) if missing else []
        for number, array in zip(missing, read, strict=True):
            if array is not None:
                array.flags.writeable = False
            self._arrays[number] = array
        return [self._arrays[number] for number in numbers]

    def values(self, numbers: Sequence[int]) -> list[Any]:
        leaves = [self._source.leaves[number] for number in numbers]
        return made_values(self._source, leaves, [None] * len(leaves), (self.arrays(numbers), {}))


class _Lazy:
    stop: int  # one past the index of the container's last leaf

    def __init__(self, cache: LeafCache, node: TreeDef, start: int) -> None:
        self._cache, self._node, self._start = cache, node, start
        self._positions = {key: position for position, key in enumerate(node.keys or ())}
        self._children: list[_Lazy | int] = []  # leaves are represented by their index
        for child in node.children:
            below = start if child is None else _lazy(cache, child, start)
            self._children.append(below)
            start = below.stop if isinstance(below, _Lazy) else start + 1
        self.stop = start

    def read_all(self) -> Any:
        return unflatten(self._node, self._cache.values(range(self._start, self.stop)))

    def _child(self, position: int) -> Any:
        child = self._children[position]
        return child if isinstance(child, _Lazy) else self._cache.values([child])[0]

    def __len__(self) -> int:
        return len(self._children)

    def __repr__(self) -> str:
        return f"<{self._node.kind} of {len(self)} in a checkpoint, read when indexed>"


def _lazy(cache: LeafCache, node: TreeDef, start: int) -> _Lazy:
    return (LazySequence if node.keys is None else LazyMapping)(cache, node, start)


class LazyMapping(_Lazy, Mapping[Key, Any]):
    """A lazy dictionary, namedtuple, dataclass or other container with keys."""

    def __getitem__(self, key: Key) -> Any:
        return self._child(self._positions[key])

    def __iter__(self) -> Iterator[Key]:
        return iter(self._positions)


class LazySequence(_Lazy, Sequence[Any]):
    """A lazy list or tuple; slicing reads the leaves and returns a plain list or tuple."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            children = [plain(self._child(position)) for position in range(len(self))[index]]
            return tuple(children) if self._node.kind == "tuple" else children
        return self._child(range(len(self))[index])


def plain(value: Any) -> Any:
    """Replace all lazy containers in a value with their contents. If there are none, return the value unchanged."""
    if isinstance(value, _Lazy):
        return value.read_all()
    contents = None if isinstance(value, np.ndarray) else expand(value)
    if contents is None:
        return value
    children = [plain(child) for child in contents.values]
    if all(map(operator.is_, children, contents.values)):
        return value
    return contents.build(children)


def writable(tree: Any) -> Any:
    """Replace read-only numpy arrays in a tree with writable copies, because they may belong to the cache."""
    flat = flatten(tree)
    are_shared = [isinstance(value, np.ndarray) and not value.flags.writeable for value in flat.values]
    if not any(are_shared):
        return tree
    pairs = zip(flat.values, are_shared, strict=True)
    return unflatten(flat.structure, [value.copy() if is_shared else value for value, is_shared in pairs])


def load_transformed_tree(
    source: TreeSource,
    transformations: Any,
    new_tree: Any,
    *,
    default_to_original: bool = True,
    requests: Mapping[str, LeafRequest] | None = None,
) -> Any:
    """Transform a saved tree like `apply_transformations`, but read only the leaves that are used."""
    new = flatten(new_tree)
    original = OriginalTree(
        [leaf.name for leaf in source.leaves],
        source.tree.structure,
        [leaf.saved.kind == "none" for leaf in source.leaves],
        str(source.location),
    )
    origins = plan_transformations(original, transformations, new, default_to_original)
    return unflatten(new.structure, _Loader(source, new, origins, requests or {}).load())


class _Loader:
    """Fills the leaves of a new tree; caches saved leaves that are used more than once or passed to functions."""

    def __init__(
        self, source: TreeSource, new: Flattened, origins: Sequence[Origin], requests: Mapping[str, LeafRequest]
    ) -> None:
        self._source = source
        self._requests = requests
        self._new = new
        self._origins = origins
        self._cache = LeafCache(source)
        needed = [number for number, origin in enumerate(origins) if origin is not None]
        described = describe_template(
            [new.names[number] for number in needed], [new.values[number] for number in needed]
        )
        self._targets = dict(zip(needed, described, strict=True))

    def load(self) -> list[Any]:
        self._check()
        cache, origins = self._cache, dict(enumerate(self._origins))
        computed = {number: origin for number, origin in origins.items() if isinstance(origin, Computed)}
        made = dict(evaluate(self._new, computed, run=self._run, take=self._take))
        # Leaves that functions have read are not read again, and a leaf that is used several times is read only once.
        taken = {number: origin for number, origin in origins.items() if isinstance(origin, Taken)}
        takers = Counter(origin.start for origin in taken.values() if origin.container is None)
        direct = {
            number: self._source.leaves[origin.start]
            for number, origin in taken.items()
            if origin.is_leaf and takers[origin.start] == 1 and origin.start not in cache
        }
        part = PartialTree(self._source, {leaf.name: leaf for leaf in direct.values()}, self._source.tree)
        results = dict(enumerate(self._new.values))
        results |= self._through(part, {number: leaf.name for number, leaf in direct.items()})
        rest = {number: origin for number, origin in taken.items() if number not in direct}
        cache.arrays([leaf for origin in rest.values() for leaf in range(origin.start, origin.stop)])
        applied = {number: origin for number, origin in rest.items() if not origin.is_leaf}
        made |= evaluate(self._new, applied, run=self._run, take=self._take)
        cached = {number: origin.start for number, origin in rest.items() if origin.is_leaf}
        results |= self._fitted(dict(sorted(made.items())), cached)
        return list(results.values())

    def _run(self, call: Call) -> Any:
        return plain(call.run(self._cache.tree()))

    def _take(self, taken: Taken) -> Any:
        return unflatten(taken.container, self._cache.values(range(taken.start, taken.stop)))

    def _check(self) -> None:
        """Before any leaf is read, check that all leaves fit the template, except those that functions will compute."""
        differences = []
        for number, origin in enumerate(self._origins):
            name, value = self._new.names[number], self._new.values[number]
            if origin is None and not has_values(value):
                differences.append(
                    f"{format_path(name)}: expected a value, found only a shape and dtype in the new tree"
                )
            elif isinstance(origin, Taken) and origin.is_leaf and not self._asks(number):
                path, leaf = format_path(name), self._source.leaves[origin.start]
                where = path if path == origin.path else f"{path} (saved as {format_path(leaf.name)})"
                difference = compare(self._targets[number], leaf.saved, where)
                if difference is not None:
                    differences.append(difference)
        self._raise(differences)

    def _through(self, source: TreeSource, names: Mapping[int, str]) -> Iterator[tuple[int, Any]]:
        """Load leaves of the new tree; ``names`` maps each index to the saved name. Yield pairs of index and value."""
        if not names:
            return
        leaves = TreeDef("list", None, [None] * len(names), list)
        template = Flattened(list(names.values()), [self._new.values[number] for number in names], leaves)
        asked = {name: self._requests[self._new.names[number]] for number, name in names.items() if self._asks(number)}
        yield from zip(names, load_tree(source, like=template, requests=asked), strict=True)

    def _asks(self, number: int) -> bool:
        return self._new.names[number] in self._requests

    def _fitted(self, made: Mapping[int, Any], cached: Mapping[int, int]) -> Iterator[tuple[int, Any]]:
        """Convert computed values and cached leaves as the template requires; yield pairs of index and value."""
        differences: list[str] = []
        saved: dict[int, SavedLeaf] = {}
        arrays: dict[str, NDArray[Any] | ArrayLeaf | None] = {}
        for number, start in cached.items():
            name = self._new.names[number]
            saved[number] = SavedLeaf(name, self._source.leaves[start].saved)
            (arrays[name],) = self._cache.arrays([start])
        for number, value in made.items():
            target, name = self._targets[number], self._new.names[number]
            free = target.kind == "any" and not self._asks(number)
            if not free or isinstance(target.leaf, LeafMetadata):
                described, array = _described(name, value)
                difference = None if self._asks(number) else compare(target, described)
                if difference is not None:
                    function = "multi_value_fn" if isinstance(self._origins[number], Computed) else "value_fn"
                    differences.append(difference.replace("(checkpoint)", f"(returned by {function})"))
            if free:
                yield number, writable(value)
            else:
                saved[number], arrays[name] = SavedLeaf(name, described), array
        self._raise(differences)
        held = {name: array for name, array in arrays.items() if array is not None}
        source = MemoryTree(self._source.location, TreeDocument(None), list(saved.values()), held)
        yield from self._through(source, {number: leaf.name for number, leaf in saved.items()})

    def _raise(self, differences: Sequence[str]) -> None:
        if differences:
            raise unfilled_error(str(self._source.location), len(self._new.names), differences)


def _described(name: str, value: Any) -> tuple[Saved, ArrayLeaf | None]:
    """Describe a value as a checkpoint would; also return its array leaf (None for a plain value)."""
    [leaf] = describe([name], [value])
    if not isinstance(leaf, ArrayLeaf):
        return Saved.of(leaf), None
    if sum(piece.array.size for piece in leaf.pieces) != math.prod(leaf.shape):
        raise TreeMismatchError(
            f"{format_path(name)}: its function returned an array that is partly held by other processes; return a "
            "numpy array, which is then placed as in the new tree"
        )
    return Saved.of(leaf), leaf
