"""The protocol of trees opened for reading, of holdfast and of other libraries."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..clock import UNHEARD
from ..errors import DamagedCheckpointError, UnsupportedLeafError, itemized
from ..pytree import ArrayLeaf, Box, Saved, TreeDocument, format_path, whole
from ..storage import Location
from .database import Problem


class SavedLeaf(NamedTuple):
    """One leaf of a checkpoint, by its storage name; its data is not read yet."""

    name: str
    saved: Saved

    @property
    def nbytes(self) -> int:
        """Bytes of its array's elements; 0 for a plain value."""
        dtype, shape = self.saved.dtype, self.saved.shape
        return 0 if dtype is None or shape is None else math.prod(shape) * dtype.itemsize


class NamedVariables(Protocol):
    """Values by the names that the library which wrote the checkpoint gives them."""

    def shapes(self) -> dict[str, list[int]]:
        """Return the shape of every value."""
        ...

    def dtypes(self) -> dict[str, np.dtype[Any] | None]:
        """Return the dtype of every value: object for text, None for values without a dtype."""
        ...

    def read_value(self, name: str) -> Any:
        """Read a value.

        Raises:
            ObjectNotFoundError: No value has this name.
            UnsupportedLeafError: Its elements have a type that holdfast does not read.
            DamagedCheckpointError: It does not match its checksums.
        """
        ...


class TreeSource(Protocol):
    """One tree, opened for reading: its structure is known, no data has been read.

    Classes that read trees derive from this one. They set the three attributes and define :meth:`read_leaves`; all
    other methods have a default that fits a format without that ability.
    """

    location: Location  # the file or folder, for messages
    tree: TreeDocument  # the containers
    # The leaves in the order of the tree, each with its storage name (``join`` of its keys).
    leaves: Sequence[SavedLeaf]
    left_out: Sequence[str] = ()  # contents of the file that the tree lacks, one line each, with the reason
    # The leaves that are listed and cannot be read, by name, with the reason: reading one of them is an error.
    unreadable: Mapping[str, str] = {}
    # The values by the names of the library that wrote them; None if those names are their paths.
    variables: NamedVariables | None = None

    @abc.abstractmethod
    def read_leaves(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        """Read some of :attr:`leaves`.

        Returns:
            For each leaf its array, with the dtype and shape in its ``saved``, writable and owned by the caller; None
            for a leaf whose value is in ``saved.details``.

        Raises:
            DamagedCheckpointError: Data is missing or does not match its checksums; names the leaf and the file.
            UnsupportedLeafError: Only running code could produce a leaf; names it.
        """

    def read_boxes(self, leaves: Sequence[SavedLeaf], boxes: Sequence[Sequence[Box]]) -> list[list[NDArray[Any]]]:
        """Read, for each leaf, the boxes listed for it.

        By default, whole arrays are read and cut. Formats with chunks read only the chunks that overlap the boxes.
        """
        found = []
        for array, wanted in zip(self.read_leaves(leaves), boxes, strict=True):
            assert array is not None
            everything = whole(array.shape)
            found.append([array if [box] == [everything] else array[box.within(everything)].copy() for box in wanted])
        return found

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, gaps between chunks included; 0 for a format whose own library reads it."""
        return 0

    @property
    def fingerprint(self) -> str:
        """Text that differs where the same path holds another checkpoint; "" for a format that cannot tell."""
        return ""

    def chunks(self, leaf: SavedLeaf) -> tuple[int, ...]:
        """Return the shape of the parts in which :meth:`read_boxes` reads an array; by default, all of the array."""
        return leaf.saved.shape or ()

    def verify(self, advance: Callable[[int], None] = UNHEARD.advance) -> list[Problem]:
        """Read and check everything; return all damage, with leaves as ``format_path`` writes them.

        ``advance`` is given bytes as they have been read: of elements, or of files where those are known. By default,
        leaves are read one after the other; leaves that need code to be run are skipped.
        """
        problems = []
        for leaf in self.leaves:
            try:
                self.read_leaves([leaf])
            except DamagedCheckpointError as error:
                problems.append(Problem("", format_path(leaf.name), str(error)))
            except UnsupportedLeafError:
                continue
            advance(leaf.nbytes)
        return problems

    def for_template(self, names: Sequence[str]) -> TreeSource:
        """Return the tree as it fits a template with leaves of these names.

        By default, ``kernel`` matches ``kernel/value`` and vice versa: variables of flax.nnx are containers of their
        value, unlike plain dictionaries of the same parameters. A format that stores less than a template specifies may
        rename more leaves, or leave out leaves that represent empty containers.
        """
        saved = {leaf.name: leaf for leaf in self.leaves}
        missing = [name for name in names if name not in saved]
        if not missing:
            return self
        wanted = set(names)
        spare = {_without_value(name): name for name in saved if name not in wanted}
        pairs = ((name, spare.pop(_without_value(name), None)) for name in missing)
        renamed = {there: name for name, there in pairs if there is not None}
        if not renamed:
            return self
        return PartialTree(self, {renamed.get(name, name): leaf for name, leaf in saved.items()}, self.tree)

    def graph_document(self) -> Any:
        """Return the document of nodes and edges (see ``graph.json``), or None if the format has none."""
        return None


def _without_value(name: str) -> str:
    return name.removesuffix(".value")


class PartialTree(TreeSource):
    """Some leaves of a tree, perhaps under other names."""

    def __init__(self, source: TreeSource, leaves: Mapping[str, SavedLeaf], tree: TreeDocument) -> None:
        self.location = source.location
        self.tree = tree
        self.leaves = [SavedLeaf(name, leaf.saved) for name, leaf in leaves.items()]
        self.unreadable = {
            name: source.unreadable[leaf.name] for name, leaf in leaves.items() if leaf.name in source.unreadable
        }
        self._source = source
        self._originals = leaves

    def read_leaves(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        return self._source.read_leaves([self._originals[leaf.name] for leaf in leaves])

    def read_boxes(self, leaves: Sequence[SavedLeaf], boxes: Sequence[Sequence[Box]]) -> list[list[NDArray[Any]]]:
        return self._source.read_boxes([self._originals[leaf.name] for leaf in leaves], boxes)

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    @property
    def fingerprint(self) -> str:
        return self._source.fingerprint

    def chunks(self, leaf: SavedLeaf) -> tuple[int, ...]:
        return self._source.chunks(self._originals[leaf.name])


class MemoryTree(TreeSource):
    """A tree that is all in memory; reading copies the arrays of its leaves."""

    def __init__(
        self,
        location: Location,
        tree: TreeDocument,
        leaves: Sequence[SavedLeaf],
        arrays: Mapping[str, NDArray[Any] | ArrayLeaf],
        document: Any = None,
    ) -> None:
        self.location = location
        self.tree = tree
        self.leaves = leaves
        self._arrays = arrays
        self._document = document

    def read_leaves(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        return [self._arrays[leaf.name].copy() if leaf.name in self._arrays else None for leaf in leaves]

    def graph_document(self) -> Any:
        return self._document


def damaged_leaves(
    location: Location, problems: Sequence[tuple[str, str]], *, unreadable: bool = False
) -> DamagedCheckpointError:
    """Return one error for damaged leaves, given as pairs of a path and what is wrong."""
    count = len({leaf for leaf, _ in problems})
    headline = f"{location} is damaged in {count} of its leaves; load another step, or load the others with select="
    lines = [f"{leaf}: {what}" for leaf, what in problems]
    return DamagedCheckpointError(itemized(headline, lines), unreadable=unreadable)
