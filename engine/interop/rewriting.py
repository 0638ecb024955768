"""A tree of another library as an item that is about to be saved: read again leaf by leaf while it is written."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, cast

from numpy.typing import NDArray

from ..handlers import PreparedItem, PyTreeCheckpointHandler
from ..item import HostTree, Layout, SavedLeaf, TreeWriter
from ..tree import ArrayLeaf, Node, Piece, ValueLeaf
from .batches import batches
from .graph_document import PreparedGraph
from .source import TreeSource
from .templates import OPTIONAL

_BATCH = 32 << 20  # bytes of leaves that are read together
_KEPT = 8  # batches; as many as there are threads that write


class TreeSourceHandler(PyTreeCheckpointHandler):
    """Saves a `TreeSource` as the tree that it is, and never holds more of it in memory than a few leaves."""

    def prepare(self, item: Any, *, snapshot: bool, **kwargs: Any) -> PreparedItem:
        """Makes a tree ready to be written.

        Args:
            item: The `TreeSource`; it must not change before it has been written.
            snapshot: Makes no difference, as nothing is copied.
            **kwargs: As for any tree.

        Raises:
            UnsupportedLeafError: There are leaves that cannot be read without running code.
        """
        source: TreeSource = item
        source.read([leaf for leaf in source.leaves if leaf.saved.dtype is None])
        loader = _Loader(source)
        # Where a writer does not tell a None from a container without leaves, it is the container: an optimizer's
        # empty state, nearly always. A template that has one there fits, then.
        kept = [OPTIONAL not in leaf.saved.details for leaf in source.leaves]
        leaves = [leaf for leaf, stays in zip(source.leaves, kept, strict=True) if stays]
        structure = source.skeleton.structure
        if structure is not None and not all(kept):
            structure = _with_empties(structure, iter(kept))
        tree = HostTree([leaf.name for leaf in leaves], [_host_leaf(leaf, loader) for leaf in leaves], structure)
        writer = TreeWriter(tree, Layout())
        document = source.graph_document() if hasattr(source, "graph_document") else None
        return writer if document is None else PreparedGraph(writer, document)


class _Loader:
    """Reads leaves in batches when they are asked for, and keeps the last few batches."""

    def __init__(self, source: TreeSource) -> None:
        self._source = source
        arrays = sorted((leaf for leaf in source.leaves if leaf.saved.dtype is not None), key=lambda leaf: leaf.name)
        self._batches = list(batches(arrays, _BATCH))
        self._batch_of = {leaf.name: number for number, batch in enumerate(self._batches) for leaf in batch}
        self._loaded: OrderedDict[int, dict[str, NDArray[Any]]] = OrderedDict()
        self._lock = threading.Lock()
        self._reading = threading.Lock()

    def array(self, name: str) -> NDArray[Any]:
        """Returns the array of a leaf; threads may ask at the same time, and wait while one of them reads."""
        number = self._batch_of[name]
        found = self._known(number)
        if found is None:
            with self._reading:  # sources need not be able to do two things at once
                found = self._known(number) or self._read(number)
        return found[name]

    def _known(self, number: int) -> dict[str, NDArray[Any]] | None:
        with self._lock:
            found = self._loaded.get(number)
            if found is not None:
                self._loaded.move_to_end(number)
        return found

    def _read(self, number: int) -> dict[str, NDArray[Any]]:
        batch = self._batches[number]
        arrays = self._source.read(batch)
        found = {leaf.name: array for leaf, array in zip(batch, arrays, strict=True) if array is not None}
        with self._lock:
            self._loaded[number] = found
            while len(self._loaded) > _KEPT:
                self._loaded.popitem(last=False)
        return found


class _LaterPiece:
    """A `Piece` that is all of an array, read whenever it is looked at."""

    __slots__ = ("_loader", "_name", "start")

    def __init__(self, name: str, start: tuple[int, ...], loader: _Loader) -> None:
        self.start = start
        self._name = name
        self._loader = loader

    @property
    def array(self) -> NDArray[Any]:
        """The elements."""
        return self._loader.array(self._name)


def _with_empties(node: Node, kept: Iterator[bool]) -> Node:
    """Puts a dictionary without entries in the place of every leaf that does not stay."""
    children = [
        (None if next(kept) else Node("dict", [], [], dict)) if child is None else _with_empties(child, kept)
        for child in node.children
    ]
    return Node(node.kind, node.keys, children, node.build, node.label)


def _host_leaf(leaf: SavedLeaf, loader: _Loader) -> ArrayLeaf | ValueLeaf:
    saved = leaf.saved
    if saved.dtype is None or saved.shape is None:
        return ValueLeaf(saved.details)
    pieces: Sequence[Any] = [_LaterPiece(leaf.name, (0,) * len(saved.shape), loader)]
    return ArrayLeaf(saved.dtype, saved.shape, cast("list[Piece]", pieces), False, saved.details)
