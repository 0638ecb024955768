"""A tree and a checkpoint in memory, with the least that a format has to define."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.arrays import SavedLeaf, TreeSource
from holdfast.engine.errors import DamagedCheckpointError, UnsupportedLeafError
from holdfast.engine.pytree import Saved, TreeDocument, flatten, format_path
from holdfast.engine.sources import TREE, CheckpointSource
from holdfast.engine.storage import Location


class FakeTree(TreeSource):
    """Arrays in memory; some leaves may be damaged, or need code to be read."""

    def __init__(
        self, location: Location, tree: Any, *, damaged: Collection[str] = (), unreadable: Collection[str] = ()
    ) -> None:
        flat = flatten(tree)
        self.location = location
        self.tree = TreeDocument(flat.structure)
        self.leaves = [
            SavedLeaf(name, Saved({"kind": "numpy"}, array.dtype, array.shape))
            for name, array in zip(flat.names, flat.values, strict=True)
        ]
        self.calls: list[list[str]] = []
        self._arrays: dict[str, NDArray[Any]] = dict(zip(flat.names, flat.values, strict=True))
        self._damaged = damaged
        self._unreadable = unreadable

    def read_leaves(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        self.calls.append([leaf.name for leaf in leaves])
        for leaf in leaves:
            if leaf.name in self._damaged:
                raise DamagedCheckpointError(f"{self.location}: leaf {format_path(leaf.name)}: damaged on purpose")
            if leaf.name in self._unreadable:
                raise UnsupportedLeafError(f"{self.location}: leaf {format_path(leaf.name)} needs code")
        return [np.array(self._arrays[leaf.name]) for leaf in leaves]


class FakeCheckpoint(CheckpointSource):
    """Trees and values in memory."""

    format = "fake"

    def __init__(self, location: Location, trees: Mapping[str, TreeSource], kinds: Mapping[str, str] = {}) -> None:
        self.location = location
        self.items = {**dict.fromkeys(trees, TREE), **kinds}
        self.nbytes = sum(leaf.nbytes for tree in trees.values() for leaf in tree.leaves)
        self._trees = trees

    def tree(self, item: str) -> TreeSource:
        return self._trees[item]
