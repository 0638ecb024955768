"""A saved tree as containers that read a leaf when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ..tree import Key, Node, expand, flatten, materialize, unflatten
from .database import naming
from .reader import TreeReader


class LeafCache:
    """The leaves of a saved tree that functions have asked for, each read once and whole.

    Arrays are read-only, so that nobody changes what somebody else is given.

    Args:
        reader: The saved tree.
    """

    def __init__(self, reader: TreeReader) -> None:
        self._reader = reader
        self._arrays: dict[int, NDArray[Any] | None] = {}
        self._sizes: dict[int, int] = {}
        self._views: dict[int, LazySequence | LazyMapping] = {}

    def tree(self) -> Any:
        """Returns the saved tree; leaves are read when they are indexed. A tree that is one leaf is read at once."""
        return self.view(self._reader.skeleton.structure, 0)

    def view(self, node: Node | None, start: int) -> Any:
        """Returns a container, or reads a leaf.

        Args:
            node: The container, or None for a leaf.
            start: Number of its first leaf.
        """
        if node is None:
            return self.values([start])[0]
        if id(node) not in self._views:
            kind = LazySequence if node.keys is None else LazyMapping
            self._views[id(node)] = kind(self, node, start)
        return self._views[id(node)]

    def __contains__(self, number: int) -> bool:
        return number in self._arrays

    def size(self, node: Node | None) -> int:
        """Returns how many leaves a container has; a leaf counts as one."""
        if node is None:
            return 1
        if id(node) not in self._sizes:
            self._sizes[id(node)] = sum(map(self.size, node.children))
        return self._sizes[id(node)]

    def arrays(self, numbers: Sequence[int]) -> list[NDArray[Any] | None]:
        """Returns the stored arrays of leaves, None for plain values; reads those that were not read yet."""
        missing = [number for number in dict.fromkeys(numbers) if number not in self._arrays]
        if missing:
            for number, array in zip(
                missing, self._reader.read([self._reader.leaves[number] for number in missing]), strict=True
            ):
                if array is not None:
                    array.flags.writeable = False
                self._arrays[number] = array
        return [self._arrays[number] for number in numbers]

    def values(self, numbers: Sequence[int]) -> list[Any]:
        """Returns leaves as they are without a template; see :meth:`arrays`."""
        leaves = [self._reader.leaves[number] for number in numbers]
        arrays = self.arrays(numbers)
        with naming(self._reader.location):
            return materialize(
                [None] * len(leaves), [leaf.saved for leaf in leaves], arrays, [leaf.name for leaf in leaves]
            )


class _Lazy:
    """A container of a saved tree, of which nothing was read.

    Args:
        cache: Where leaves come from.
        node: The container.
        start: Number of its first leaf.
    """

    def __init__(self, cache: LeafCache, node: Node, start: int) -> None:
        self._cache = cache
        self._node = node
        self._starts = [start]
        for child in node.children:
            self._starts.append(self._starts[-1] + cache.size(child))

    def read(self) -> Any:
        """Reads all of it, in one go, into plain containers."""
        return unflatten(self._node, self._cache.values(range(self._starts[0], self._starts[-1])))

    def _child(self, position: int) -> Any:
        return self._cache.view(self._node.children[position], self._starts[position])

    def __len__(self) -> int:
        return len(self._node.children)

    def __repr__(self) -> str:
        return f"<{self._node.kind} of {len(self)} in a checkpoint, read when indexed>"


class LazyMapping(_Lazy, Mapping[Key, Any]):
    """A dictionary, namedtuple, dataclass or other container with keys."""

    def __init__(self, cache: LeafCache, node: Node, start: int) -> None:
        super().__init__(cache, node, start)
        self._positions = {key: position for position, key in enumerate(node.keys or ())}

    def __getitem__(self, key: Key) -> Any:
        return self._child(self._positions[key])

    def __iter__(self) -> Iterator[Key]:
        return iter(self._positions)


class LazySequence(_Lazy, Sequence[Any]):
    """A list or tuple; slices of it are plain ones, which are read."""

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            found = [plain(self._child(position)) for position in range(len(self))[index]]
            return tuple(found) if self._node.kind == "tuple" else found
        return self._child(range(len(self))[index])


def plain(value: Any) -> Any:
    """Reads every lazy container that is left in a value; what holds none is returned as it is."""
    if isinstance(value, _Lazy):
        return value.read()
    contents = None if isinstance(value, np.ndarray) else expand(value)
    if contents is None:
        return value
    children = [plain(child) for child in contents.values]
    if all(one is other for one, other in zip(children, contents.values, strict=True)):
        return value
    return contents.build(children)


def own(tree: Any) -> Any:
    """Returns a tree whose numpy arrays are writable and nobody else's: those of the cache are copied."""
    flat = flatten(tree)
    copies = [value.copy() if _is_shared(value) else value for value in flat.values]
    if all(one is other for one, other in zip(copies, flat.values, strict=True)):
        return tree
    return unflatten(flat.structure, copies)


def _is_shared(value: Any) -> bool:
    return isinstance(value, np.ndarray) and not value.flags.writeable
