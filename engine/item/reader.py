"""Reads one PyTree item back: the tree's structure first, then the leaves that are asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..digests import check_file
from ..errors import DamagedCheckpointError, FormatVersionError, HoldfastError
from ..format import ArrayMetadata, decode_document, dtype_from_name
from ..record import FileRecord
from ..storage import Location
from ..tree import EXTERNAL, Box, Details, Saved, display, from_document, materialize
from .aggregation import AggregateHandler, MsgpackHandler, aggregated
from .database import ArrayDatabase, Problem, naming
from .writer import TREE, TREE_KIND


class SavedLeaf(NamedTuple):
    """One leaf of a checkpoint, before any data is read.

    Attributes:
        name: Its storage name.
        saved: What the checkpoint says about it.
    """

    name: str
    saved: Saved

    @property
    def nbytes(self) -> int:
        """Returns the bytes of its array's elements; 0 for a plain value."""
        dtype, shape = self.saved.dtype, self.saved.shape
        return 0 if dtype is None or shape is None else math.prod(shape) * dtype.itemsize


class TreeReader:
    """A PyTree item, opened for reading.

    Args:
        location: The item's folder.
        files: What the commit record says about its files, or None where there is none to compare with.
        aggregate: What reads the leaves that share one file; None is msgpack.

    Raises:
        DamagedCheckpointError: The structure or the index is missing or does not verify.
        FormatVersionError: A newer version of holdfast wrote it.

    Attributes:
        location: The item's folder.
        skeleton: The containers.
        leaves: The leaves, in the order of the tree.
    """

    def __init__(
        self,
        location: Location,
        files: Mapping[str, FileRecord] | None = None,
        *,
        aggregate: AggregateHandler | None = None,
    ) -> None:
        self.location = location
        self._files = files or {}
        self._database = ArrayDatabase(location, files)
        document = decode_document(self._database.read_file(TREE), TREE_KIND, source=str(location / TREE))
        with naming(location):
            names, details, self.skeleton = from_document(_tree_of(document, location))
            self._database.add(aggregated(names, details, self._database.read_file, aggregate or MsgpackHandler()))
            arrays = self._database.metadata(names)
            self.leaves = self._leaves(names, details, arrays)

    def read(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        """Reads leaves.

        Args:
            leaves: Some of :attr:`leaves`.

        Returns:
            For every one its array, with the saved shape and element type, writable and the caller's own; None for a
            plain value.

        Raises:
            DamagedCheckpointError: A chunk is missing or does not verify; names the leaf and the file.
        """
        arrays = [leaf for leaf in leaves if leaf.saved.dtype is not None]
        values, problems = self._database.read([leaf.name for leaf in arrays])
        self._refuse(problems)
        found = iter(values)
        return [
            None if leaf.saved.dtype is None else _as_saved(next(found), leaf.saved, leaf.saved.shape)
            for leaf in leaves
        ]

    def read_boxes(self, leaves: Sequence[SavedLeaf], boxes: Sequence[Sequence[Box]]) -> list[list[NDArray[Any]]]:
        """Reads parts of leaves: only the chunks that hold something of them.

        Args:
            leaves: Some of :attr:`leaves`, all of them arrays.
            boxes: For each the boxes that are wanted, inside its shape.

        Returns:
            For each leaf an array for every box, as :meth:`read` gives it.

        Raises:
            DamagedCheckpointError: A chunk is missing or does not verify; names the leaf and the file.
        """
        names = [leaf.name for leaf in leaves]
        axes = [len(metadata.shape) if metadata else 0 for metadata in self._database.metadata(names)]
        stored = [
            [_stored_box(box, count, leaf.saved) for box in wanted]
            for leaf, wanted, count in zip(leaves, boxes, axes, strict=True)
        ]
        values, problems = self._database.read_boxes(names, stored)
        self._refuse(problems)
        found = iter(values)
        return [
            [_as_saved(next(found), leaf.saved, box.shape) for box in wanted]
            for leaf, wanted in zip(leaves, boxes, strict=True)
        ]

    @property
    def bytes_read(self) -> int:
        """How many bytes of the item's files have been read so far."""
        return self._database.bytes_read

    def _refuse(self, problems: Sequence[Problem]) -> None:
        if problems:
            lines = [f"  {display(p.leaf)}: {self.location / p.file}: {p.what}" for p in problems]
            raise DamagedCheckpointError(
                "\n".join(
                    [
                        f"{self.location} is damaged in {len({p.leaf for p in problems})} of its leaves; "
                        "load another step, or load the others with select=",
                        *lines[:20],
                        *([f"  and {len(lines) - 20} more"] if len(lines) > 20 else []),
                    ]
                )
            )

    def verify(self) -> list[Problem]:
        """Reads every file and chunk and checks it.

        Returns:
            What is wrong; empty when the item is whole. Leaves are given as people write them.
        """
        problems = [
            Problem(path, "", what) for path, known in self._files.items() if (what := self._check(path, known))
        ]
        problems += [Problem(TREE, display(leaf.name), what) for leaf in self.leaves if (what := _value_problem(leaf))]
        found = self._database.verify([leaf.name for leaf in self.leaves if leaf.saved.dtype is not None])
        return problems + [problem._replace(leaf=display(problem.leaf)) for problem in found]

    def _check(self, path: str, known: FileRecord) -> str:
        """Compares a file with the commit record; returns what is wrong with it, or nothing."""
        try:
            if known.crc32c is not None:
                check_file(self.location / path, known)
                return ""
            if (self.location / path).has_size(known.size):
                return ""
            with (self.location / path).open_data() as file:
                return f"expected {known.size} bytes, found {file.size}"
        except (HoldfastError, OSError) as error:
            return str(error)

    def _leaves(
        self, names: Sequence[str], details: Sequence[Details], arrays: Sequence[ArrayMetadata | None]
    ) -> list[SavedLeaf]:
        known: dict[tuple[int, int], Saved] = {}  # most leaves share both documents, which stay alive meanwhile
        found = []
        for name, facts, metadata in zip(names, details, arrays, strict=True):
            key = id(facts), id(metadata)
            saved = known.get(key)
            if saved is None:
                saved = known[key] = self._saved(name, facts, metadata)
            found.append(saved)
        return list(map(SavedLeaf, names, found))

    def _saved(self, name: str, details: Details, metadata: ArrayMetadata | None) -> Saved:
        if metadata is None:
            if "value" in details or "base64" in details or details["kind"] in {"none", EXTERNAL}:
                return Saved(details)
            if isinstance(details.get("aggregate"), str):  # of a handler that is not at hand
                return Saved({**details, "kind": EXTERNAL, "handler": details["aggregate"]})
            raise DamagedCheckpointError(f"{self.location}: the index holds no array for leaf {display(name)}")
        try:
            dtype, shape = _logical(metadata, details)
        except (DamagedCheckpointError, FormatVersionError) as error:
            raise type(error)(f"{self.location}: leaf {display(name)}: {error}") from error
        if shape is None:
            raise DamagedCheckpointError(
                f"{self.location}: leaf {display(name)} is stored as {metadata.data_type}{list(metadata.shape)}, "
                f"which does not hold elements of {dtype}"
            )
        return Saved(details, dtype, shape)


def _value_problem(leaf: SavedLeaf) -> str:
    """Returns what is wrong with a plain value, or nothing."""
    if leaf.saved.dtype is None:
        try:
            materialize([None], [leaf.saved], [None], [leaf.name])
        except DamagedCheckpointError as error:
            return str(error)
    return ""


def _tree_of(document: dict[str, Any], location: Location) -> dict[str, Any]:
    tree = document.get("tree")
    if not isinstance(tree, dict):
        raise DamagedCheckpointError(f"{location / TREE} does not describe a tree")
    return tree


def _logical(metadata: ArrayMetadata, details: Mapping[str, Any]) -> tuple[np.dtype[Any], tuple[int, ...] | None]:
    """Returns the dtype and shape that were saved; the shape is None where what is stored cannot hold them."""
    stored = dtype_from_name(metadata.data_type)
    if "dtype" not in details:
        return stored, metadata.shape
    dtype = dtype_from_name(details["dtype"])
    if dtype == stored or dtype.newbyteorder("=") == stored:
        return dtype, metadata.shape
    # A type that zarr has no name for is stored as bytes, with one more axis for the bytes of an element.
    fits = stored == np.uint8 and bool(metadata.shape) and metadata.shape[-1] == dtype.itemsize
    return dtype, metadata.shape[:-1] if fits else None


def _stored_box(box: Box, axes: int, saved: Saved) -> Box:
    """Returns a box of elements as it is stored: these may be bytes, along one more axis."""
    if len(box.start) == axes or saved.dtype is None:
        return box
    return Box((*box.start, 0), (*box.stop, saved.dtype.itemsize))


def _as_saved(array: NDArray[Any] | None, saved: Saved, shape: tuple[int, ...] | None) -> NDArray[Any]:
    """Returns an array as it was saved: bytes become elements again, and big endian stays big endian."""
    assert array is not None
    if array.dtype is saved.dtype:
        return array
    assert saved.dtype is not None
    assert shape is not None
    if array.dtype == saved.dtype:
        return array
    if array.shape == shape:
        return array.astype(saved.dtype)
    if saved.dtype.itemsize == 0:
        return np.zeros(shape, saved.dtype)
    return array.reshape(-1).view(saved.dtype).reshape(shape)
