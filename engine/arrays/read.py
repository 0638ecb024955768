"""Read a saved tree: its structure first, then the requested leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError, HoldfastError
from ..format import (
    DOCUMENT_LIMIT,
    GRAPH,
    GRAPH_KIND,
    ArrayMetadata,
    FileRecord,
    decode_document,
    dtype_from_name,
)
from ..progress import NULL
from ..pytree import (
    EXTERNAL,
    Box,
    Details,
    Patterns,
    Saved,
    decode_value,
    format_path,
    from_document,
    leaves_at,
    whole,
)
from ..storage import Location
from .assemble import Assembly
from .database import ArrayDatabase, naming
from .digests import TREE, TREE_KIND, FileCheck, open_folder
from .source import AggregateHandler, MsgpackHandler, Problem, SavedLeaf, TreeSource, aggregated_array, damaged_leaves

if TYPE_CHECKING:
    from ..pytree import LeafType


class TreeReader(TreeSource):
    """A pytree item written by holdfast, opened for reading."""

    files: Mapping[str, FileRecord]  # the files in the tree's folder, as listed in the commit record
    numbers: Sequence[int]  # the position of each leaf in the saved tree

    def __init__(
        self,
        location: Location,
        files: Mapping[str, FileRecord] | None = None,
        *,
        aggregate: AggregateHandler | None = None,
        select: Patterns | None = None,
    ) -> None:
        """Open a tree, or only the leaves that match the patterns in ``select``."""
        location, files = open_folder(location, files)
        self.location = location
        self.files = files or {}
        self._database = ArrayDatabase(location, files)
        document = decode_document(self._database.read_file(TREE), TREE_KIND, source=str(location / TREE))
        with naming(location):
            stored = document.get("tree")
            if not isinstance(stored, dict):
                raise DamagedCheckpointError(f"{location / TREE} does not describe a tree")
            stored, numbers = (stored, None) if select is None else leaves_at(stored, select)
            names, details, self.tree = from_document(stored)
            self.numbers = range(len(names)) if numbers is None else numbers
            self._aggregated = self._read_aggregated(names, details, aggregate or MsgpackHandler())
            self.leaves = self._leaves(names, details, self._database.metadata(names))
        self._began = stored.get("fresh")

    def external(self) -> dict[str, int]:
        return {} if self._all_as_stored else super().external()

    def read_leaves(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        names, metadata = self._arrays_of(leaves)
        assembly = Assembly(metadata, keep=True)
        arrays = self._verified(self._database.read(names, assembly), assembly)
        if self._all_as_stored:
            return arrays
        stored = iter(arrays)
        return [
            _as_saved(next(stored), saved, saved.shape)
            if saved.stored is not None
            else self._aggregated[name].copy()
            if name in self._aggregated
            else None
            for name, saved in leaves
        ]

    def read_boxes(self, leaves: Sequence[SavedLeaf], boxes: Sequence[Sequence[Box]]) -> list[list[NDArray[Any]]]:
        names, metadata = self._arrays_of(leaves)
        pairs = [(leaf, wanted) for leaf, wanted in zip(leaves, boxes, strict=True) if leaf.saved.stored is not None]
        stored_boxes = [
            [_stored_box(box, len(array.shape), leaf.saved) for box in wanted]
            for (leaf, wanted), array in zip(pairs, metadata, strict=True)
        ]
        assembly = Assembly(metadata, stored_boxes, keep=True)
        stored = iter(self._verified(self._database.read(names, assembly), assembly))

        def parts(leaf: SavedLeaf, wanted: Sequence[Box]) -> list[NDArray[Any]]:
            array = self._aggregated.get(leaf.name)
            if array is None:
                return [_as_saved(next(stored), leaf.saved, box.shape) for box in wanted]
            return [array[box.within(whole(array.shape))].copy() for box in wanted]

        return list(map(parts, leaves, boxes))

    def chunks(self, leaf: SavedLeaf) -> tuple[int, ...]:
        shape, stored = leaf.saved.shape or (), leaf.saved.stored
        # An array whose elements are stored as bytes has one more axis than the leaf.
        return stored.chunk_shape[: len(shape)] if isinstance(stored, ArrayMetadata) else shape

    def began(self) -> dict[str, LeafType] | None:
        """Return the leaf types of the run's initial state; None if they are not recorded."""
        if self._began is None:
            return None
        from ..pytree import recorded_types  # imported lazily, because few reads need templates

        return recorded_types(self._began, {leaf.name: leaf.saved for leaf in self.leaves}, self.location / TREE)

    def graph_document(self) -> Any:
        if GRAPH not in self.files:
            return None
        content = self._database.read_file(GRAPH, DOCUMENT_LIMIT)
        return decode_document(content, GRAPH_KIND, source=str(self.location / GRAPH))

    @property
    def bytes_read(self) -> int:
        return self._database.bytes_read

    @property
    def fingerprint(self) -> str:
        return str(sorted((path, record.size, record.crc32c) for path, record in self.files.items()))

    def _verified(self, problems: Sequence[Problem], assembly: Assembly) -> list[NDArray[Any] | None]:
        """Return the assembled arrays, or raise one error that lists all problems."""
        if problems:
            raise damaged_leaves(
                self.location,
                [(format_path(p.leaf), f"{self.location / p.file}: {p.what}") for p in problems],
                unreadable=self._database.unreadable,
            )
        return assembly.finish()

    def verify(self, advance: Callable[[int], None] = NULL.advance) -> list[Problem]:
        problems = []
        for path, record in self.files.items():
            if problem := self._file_problem(path, record):
                problems.append(Problem(path, "", problem))
            if record.crc32c is not None:
                advance(record.size)
        for leaf in self.leaves:
            if leaf.saved.dtype is None:
                try:
                    decode_value(leaf.saved.details, leaf.name)
                except DamagedCheckpointError as error:
                    problems.append(Problem(TREE, format_path(leaf.name), str(error)))
        names, metadata = self._arrays_of(self.leaves)
        damaged = self._database.read(names, Assembly(metadata, keep=False), advance)
        return problems + [problem._replace(leaf=format_path(problem.leaf)) for problem in damaged]

    def _file_problem(self, path: str, record: FileRecord) -> str:
        """Describe how a file differs from the commit record; return "" if it does not."""
        try:
            if record.crc32c is not None:
                FileCheck(record).check(self.location / path)
                return ""
            if (self.location / path).has_size(record.size):
                return ""
            with (self.location / path).open_data() as file:
                return f"expected {record.size} bytes, found {file.size}"
        except (HoldfastError, OSError) as error:
            return str(error)

    def _read_aggregated(
        self, names: Sequence[str], details: Sequence[Details], handler: AggregateHandler
    ) -> dict[str, NDArray[Any]]:
        distinct = {id(leaf): leaf for leaf in details}  # visit each dict once, because many leaves share a few dicts
        if all(leaf.get("aggregate") != handler.name for leaf in distinct.values()):
            return {}
        pairs = zip(names, details, strict=True)
        wanted = {name: leaf for name, leaf in pairs if leaf.get("aggregate") == handler.name}
        content = self._database.read_file(handler.filename)
        try:
            arrays = handler.deserialize(content)
            missing = [format_path(name) for name in wanted if name not in arrays]
            if missing:
                raise DamagedCheckpointError(f"it lacks the leaf {missing[0]}, which tree.json says it holds")
            return {name: aggregated_array(arrays[name], leaf) for name, leaf in wanted.items()}
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{handler.filename}: {error}") from error

    def _leaves(
        self, names: Sequence[str], details: Sequence[Details], arrays: Sequence[ArrayMetadata | None]
    ) -> list[SavedLeaf]:
        # Describe leaves with the same details and metadata objects only once, unless some leaves are aggregated.
        keys: Sequence[Any] = names if self._aggregated else list(map(id, arrays))
        if not self._aggregated and len(set(map(id, details))) > 1:
            keys = list(zip(map(id, details), keys, strict=True))
        first = dict(zip(reversed(keys), reversed(range(len(keys))), strict=True))
        saved_of = {key: self._saved(names[n], details[n], arrays[n]) for key, n in reversed(first.items())}
        self._all_as_stored = all(
            isinstance(saved.stored, ArrayMetadata) and saved.stored.dtype == saved.dtype for saved in saved_of.values()
        )
        # Like `SavedLeaf._make`, but without a Python call per leaf.
        make = partial(tuple.__new__, SavedLeaf)
        return list(map(make, zip(names, map(saved_of.__getitem__, keys), strict=True)))

    def _arrays_of(self, leaves: Sequence[SavedLeaf]) -> tuple[list[str], list[ArrayMetadata]]:
        """Return the names and metadata of the leaves that are stored as arrays in the database."""
        if not self._all_as_stored:
            leaves = [leaf for leaf in leaves if isinstance(leaf.saved.stored, ArrayMetadata)]
        stored: list[Any] = [saved.stored for _, saved in leaves]
        return [name for name, _ in leaves], stored

    def _saved(self, name: str, details: Details, metadata: ArrayMetadata | None) -> Saved:
        aggregated = self._aggregated.get(name)
        if aggregated is not None:
            return Saved(details, aggregated.dtype, aggregated.shape)
        if metadata is None:
            if "value" in details or "base64" in details or details["kind"] in {"none", EXTERNAL}:
                return Saved(details)
            if isinstance(details.get("aggregate"), str):  # the caller passed no handler for this aggregate
                return Saved({**details, "kind": EXTERNAL, "handler": details["aggregate"]})
            raise DamagedCheckpointError(f"{self.location}: the index holds no array for leaf {format_path(name)}")
        with naming(self.location, f": leaf {format_path(name)}"):
            dtype, shape = _logical(metadata, details)
        if shape is None:
            raise DamagedCheckpointError(
                f"{self.location}: leaf {format_path(name)} is stored as {metadata.data_type}{list(metadata.shape)}, "
                f"which does not hold elements of {dtype}"
            )
        return Saved(details, dtype, shape, metadata)


def _logical(metadata: ArrayMetadata, details: Mapping[str, Any]) -> tuple[np.dtype[Any], tuple[int, ...] | None]:
    """Return the saved dtype and shape of a leaf; the shape is None if the stored array cannot hold this dtype."""
    stored = dtype_from_name(metadata.data_type)
    if "dtype" not in details:
        return stored, metadata.shape
    dtype = dtype_from_name(details["dtype"])
    if dtype == stored or dtype.newbyteorder("=") == stored:
        return dtype, metadata.shape
    # A dtype without a zarr name is stored as bytes, with one more axis for the bytes of an element.
    fits = stored == np.uint8 and bool(metadata.shape) and metadata.shape[-1] == dtype.itemsize
    return dtype, metadata.shape[:-1] if fits else None


def _stored_box(box: Box, axes: int, saved: Saved) -> Box:
    """Convert a box of a leaf to a box of its stored array, which has one more axis if elements are stored as bytes."""
    return box if len(box.start) == axes or saved.dtype is None else box.with_axis(saved.dtype.itemsize)


def _as_saved(array: NDArray[Any] | None, saved: Saved, shape: tuple[int, ...] | None) -> NDArray[Any]:
    """Convert a stored array to its saved dtype, viewing bytes as elements or swapping the byte order if necessary."""
    assert array is not None
    assert saved.dtype is not None
    assert shape is not None
    if array.dtype == saved.dtype:
        return array
    if array.shape == shape:
        return array.astype(saved.dtype)
    if saved.dtype.itemsize == 0:
        return np.zeros(shape, saved.dtype)
    return array.reshape(-1).view(saved.dtype).reshape(shape)
