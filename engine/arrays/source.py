"""Defines protocols for reading trees that holdfast or other libraries have saved, and for aggregate handlers.

Aggregate handlers store many small leaves in one file, instead of storing each leaf as an array in the database.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError, UnsupportedLeafError, itemized
from ..format import (
    ARRAY_EXTENSION,
    decode_array,
    decode_msgpack,
    dtype_from_name,
    dtype_name,
    encode_arrays,
    storage_dtype,
)
from ..progress import NULL
from ..pytree import EXTERNAL, ArrayLeaf, Box, Saved, TreeDocument, format_path, whole
from ..storage import Location

AGGREGATE_LIMIT = 256 << 20  # maximum size of an aggregate, in bytes


class Problem(NamedTuple):
    """A problem found in a checkpoint: the affected file, the leaf (or ``""``), and a description."""

    file: str
    leaf: str
    what: str


class SavedLeaf(NamedTuple):
    """One leaf of a checkpoint, with its storage name; its data has not been read yet."""

    name: str
    saved: Saved

    @property
    def nbytes(self) -> int:
        """Size of the leaf's array in bytes; 0 for a plain value."""
        dtype, shape = self.saved.dtype, self.saved.shape
        return 0 if dtype is None or shape is None else math.prod(shape) * dtype.itemsize


class NamedVariables(Protocol):
    """A checkpoint's values, under the names used by the library that wrote it."""

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
            UnsupportedLeafError: The element type of the value is not supported.
            DamagedCheckpointError: The value does not match its checksums.
        """
        ...


class TreeSource(Protocol):
    """One tree opened for reading: its structure is known, but no data has been read.

    Subclasses set ``location``, ``tree`` and ``leaves``, and define :meth:`read_leaves`. All other methods have
    defaults for formats that lack the respective feature.
    """

    location: Location  # the file or folder, for error messages
    tree: TreeDocument  # the containers
    # The leaves in the order of the tree, each with its storage name (``join`` of its keys).
    leaves: Sequence[SavedLeaf]
    left_out: Sequence[str] = ()  # one line, with the reason, for each item that the files contain but the tree lacks
    # The reason why each unreadable leaf cannot be read, keyed by leaf name; reading such a leaf raises an error.
    unreadable: Mapping[str, str] = {}
    # The values under the names used by the library that wrote them; None if these names equal the leaf paths.
    variables: NamedVariables | None = None
    # The files of the tree, if its location may contain unrelated files; None if everything there belongs to the tree.
    files_read: Sequence[Location] | None = None
    numbers: Sequence[int] | None = None  # the position of each leaf in the saved tree; None if all leaves are present

    def external(self) -> dict[str, int]:
        """Return the position in the saved tree of each leaf that only a type handler can read, keyed by leaf name."""
        numbers = range(len(self.leaves)) if self.numbers is None else self.numbers
        pairs = zip(self.leaves, numbers, strict=True)
        return {leaf.name: number for leaf, number in pairs if leaf.saved.kind == EXTERNAL}

    @abc.abstractmethod
    def read_leaves(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        """Read some of :attr:`leaves`.

        Returns:
            The array of each leaf, with the dtype and shape given in ``saved``, writable and owned by the caller; None
            for a leaf whose value is in ``saved.details``.

        Raises:
            DamagedCheckpointError: Data is missing or does not match its checksums; the error names leaf and file.
            UnsupportedLeafError: A leaf cannot be read without running code; the error names it.
        """

    def check_files(self) -> list[Problem]:
        """Verify the files' checksums, including those that leaf reads skip because they also cover other data."""
        return []

    def check_readable(self, leaves: Sequence[SavedLeaf]) -> None:
        """If any of the leaves cannot be read, raise the error that reading them would raise."""
        if self.unreadable:
            self.read_leaves([leaf for leaf in leaves if leaf.name in self.unreadable])

    def read_boxes(self, leaves: Sequence[SavedLeaf], boxes: Sequence[Sequence[Box]]) -> list[list[NDArray[Any]]]:
        """Read the listed boxes of each leaf.

        By default, boxes are cut out of whole arrays. Formats with chunks read only the chunks that overlap the boxes.
        """
        parts = []
        for array, wanted in zip(self.read_leaves(leaves), boxes, strict=True):
            assert array is not None
            everything = whole(array.shape)
            parts.append([array if box == everything else array[box.within(everything)].copy() for box in wanted])
        return parts

    @property
    def bytes_read(self) -> int:
        """Number of bytes read so far, including gaps between chunks; 0 for formats read by another library."""
        return 0

    @property
    def fingerprint(self) -> str:
        """Text that changes if the checkpoint at the path is replaced; "" for formats that cannot detect this."""
        return ""

    def chunks(self, leaf: SavedLeaf) -> tuple[int, ...]:
        """Return the shape of the chunks in which :meth:`read_boxes` reads an array; by default, the array's shape."""
        return leaf.saved.shape or ()

    def verify(self, advance: Callable[[int], None] = NULL.advance) -> list[Problem]:
        """Read and verify all data; return all problems, with leaf names formatted by ``format_path``.

        ``advance`` is called with the number of bytes read, either of array elements or of a file with a known digest.
        By default, leaves are read one by one; leaves that cannot be restored without running code are skipped.
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
        """Adapt the tree to a template whose leaves have these names.

        By default, ``kernel`` matches ``kernel/value`` and vice versa, because a flax.nnx variable is a container
        for its value, unlike a parameter in a plain dictionary. A format that stores less than a template specifies may
        override this method to rename more leaves, or to omit leaves that represent empty containers.
        """
        saved = {leaf.name: leaf for leaf in self.leaves}
        missing = {without_value(name): name for name in reversed(names) if name not in saved}
        if not missing:
            return self
        wanted = set(names)
        spare = {without_value(name): name for name in saved if name not in wanted}
        renamed = {name: missing[base] for base, name in spare.items() if base in missing}
        if not renamed:
            return self
        return PartialTree(self, {renamed.get(name, name): leaf for name, leaf in saved.items()}, self.tree)

    def graph_document(self) -> Any:
        """Return the graph document with nodes and edges (see ``graph.json``), or None if the format has none."""
        return None


def without_value(name: str) -> str:
    """Convert the leaf name of a flax.nnx variable's value to the name of the variable."""
    return name.removesuffix(".value")


class PartialTree(TreeSource):
    """A subset of a tree's leaves, possibly renamed."""

    def __init__(self, source: TreeSource, leaves: Mapping[str, SavedLeaf], tree: TreeDocument) -> None:
        self.location = source.location
        self.tree = tree
        self.leaves = [SavedLeaf(name, leaf.saved) for name, leaf in leaves.items()]
        self.unreadable = {
            name: source.unreadable[leaf.name] for name, leaf in leaves.items() if leaf.name in source.unreadable
        }
        self.left_out = source.left_out
        self.files_read = source.files_read
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
    """An in-memory tree; reading copies the leaf arrays."""

    def __init__(
        self,
        location: Location,
        tree: TreeDocument,
        leaves: Sequence[SavedLeaf],
        arrays: Mapping[str, NDArray[Any] | ArrayLeaf],
    ) -> None:
        self.location = location
        self.tree = tree
        self.leaves = leaves
        self._arrays = arrays

    def read_leaves(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        return [self._arrays[leaf.name].copy() if leaf.name in self._arrays else None for leaf in leaves]


def damaged_leaves(
    location: Location, problems: Sequence[tuple[str, str]], *, unreadable: bool = False
) -> DamagedCheckpointError:
    """Build one error for all damaged leaves, given as pairs of path and problem."""
    count = len({leaf for leaf, _ in problems})
    headline = f"{location} is damaged in {count} of its leaves; load another step, or load the others with select="
    lines = [f"{leaf}: {what}" for leaf, what in problems]
    return DamagedCheckpointError(itemized(headline, lines), unreadable=unreadable)


# ---- aggregates: many leaves of a tree in one file


class AggregateHandler(abc.ABC):
    """Stores many leaves of one tree in one file: the leaves saved with ``SaveArgs(aggregate=True)``.

    Attributes:
        name: Name of this handler in ``tree.json``. A handler with this name is required to load the leaves.
        filename: Name of the file in the item's folder.
    """

    name: str
    filename: str

    @abc.abstractmethod
    def serialize(self, leaves: Mapping[str, NDArray[Any]]) -> bytes:
        """Encode leaves as the contents of the file.

        Args:
            leaves: Host arrays, keyed by leaf name; Python numbers are 0-d arrays.

        Returns:
            The contents of the file.
        """

    @abc.abstractmethod
    def deserialize(self, content: bytes) -> Mapping[str, NDArray[Any]]:
        """Decode the contents of the file.

        Args:
            content: The bytes from :meth:`serialize`. They match their digest, but may come from an untrusted source,
                so they must not cause this method to run code, or to allocate memory out of proportion to their size.

        Returns:
            The arrays, keyed by leaf name, with the saved dtypes and shapes.

        Raises:
            DamagedCheckpointError: The bytes do not have the format that :meth:`serialize` writes.
        """


class MsgpackHandler(AggregateHandler):
    """Stores leaves in a msgpack file that ``flax.serialization.msgpack_restore`` can read: a dict keyed by leaf name.

    See https://github.com/msgpack/msgpack/blob/master/spec.md for the format. An array is an extension of type 1 that
    contains its shape, the name of its dtype and its bytes in C order, encoded as msgpack.
    """

    name = "msgpack"
    filename = "aggregate.msgpack"

    def serialize(self, leaves: Mapping[str, NDArray[Any]]) -> bytes:
        return encode_arrays(leaves)

    def deserialize(self, content: bytes) -> dict[str, NDArray[Any]]:
        arrays = decode_msgpack(content, extension=_array)
        if not isinstance(arrays, dict) or not all(isinstance(array, np.ndarray) for array in arrays.values()):
            raise DamagedCheckpointError("this msgpack file does not hold a dictionary of arrays")
        return arrays


def _array(code: int, data: bytes, _depth: int) -> NDArray[Any]:
    if code != ARRAY_EXTENSION:
        raise DamagedCheckpointError(f"it holds an extension of type {code}, expected arrays only")
    return decode_array(data)


def aggregate_details(array: NDArray[Any], handler: AggregateHandler) -> dict[str, Any]:
    """Return the details that ``tree.json`` stores for an aggregated leaf, in addition to its kind."""
    plain = storage_dtype(array.dtype).extra is None and array.dtype.isnative
    return {"aggregate": handler.name} | ({} if plain else {"dtype": dtype_name(array.dtype)})


def aggregated_array(array: NDArray[Any], details: Mapping[str, Any]) -> NDArray[Any]:
    """Check an array from an aggregate file against ``tree.json``, and return it with the dtype listed there."""
    try:
        storage_dtype(array.dtype)
    except (TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"it holds something that is not an array of numbers: {error}") from error
    dtype = dtype_from_name(details["dtype"]) if "dtype" in details else array.dtype
    if array.dtype.newbyteorder("=") != dtype.newbyteorder("="):
        raise DamagedCheckpointError(f"it holds elements of {array.dtype}, but tree.json says {dtype}")
    return array.astype(dtype, copy=False)
