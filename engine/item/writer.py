"""Writes one PyTree item: data files, the index over them, and the tree's structure.

The order matters: data and index are durable before the caller writes its commit record, and nothing here is
visible as a checkpoint without that record.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..coordination import Member
from ..errors import UnsupportedLeafError
from ..format import (
    Entries,
    Stored,
    chunk_keys,
    crc32c,
    dtype_name,
    encode_array_metadata,
    encode_database,
    encode_document,
    metadata_key,
    storage_dtype,
)
from ..record import FileRecord
from ..storage import Location, Segment
from ..tree import ArrayLeaf, Node, Piece, ValueLeaf, display, to_document
from .plan import CHECKSUM_BYTES, ArraySpec, Layout, PlannedFile, PlannedSegment, chunk_shape, plan_files
from .sources import Bytes, Source, segment_parts

MANIFEST = "manifest.ocdbt"
INDEX = "d/index"
TREE = "tree.json"
TREE_KIND = "tree"

_NAME_LIMIT = 60_000  # bytes; the index adds the numbers of chunks to it

HostLeaf = ArrayLeaf | ValueLeaf


@dataclass(frozen=True, slots=True)
class HostTree:
    """A tree whose leaves are on the host and stay as they are until it has been written.

    Raises:
        UnsupportedLeafError: A name is too long for the index.
    """

    names: Sequence[str]
    leaves: Sequence[HostLeaf]
    structure: Node | None

    def __post_init__(self) -> None:
        if max(map(len, self.names), default=0) * 4 <= _NAME_LIMIT:  # no character takes more
            return
        for name in self.names:
            size = len(name.encode())
            if size > _NAME_LIMIT:
                raise UnsupportedLeafError(
                    f"the leaf {display(name):.100}... has a path of {size} bytes; at most {_NAME_LIMIT} can be "
                    "stored, and nothing was written"
                )


class TreeWriter:
    """A tree that is ready to be written.

    Args:
        tree: What to write.
        layout: Sizes of chunks, segments and data files.
    """

    def __init__(self, tree: HostTree, layout: Layout) -> None:
        self._tree = tree
        self._layout = layout
        self._files: dict[str, FileRecord] = {}

    def write(self, location: Location, member: Member) -> bytes:
        """Writes this process's share into the item's folder, durably.

        Args:
            location: The folder.
            member: Which share.

        Returns:
            What process 0 needs to know of it.
        """
        self._files = write_tree(location, self._tree, self._layout)
        return b""

    def merge(self, location: Location, fragments: Sequence[bytes]) -> dict[str, FileRecord]:
        """Writes the index over all shares and the tree's structure, durably; on process 0 only.

        Args:
            location: The folder.
            fragments: What :meth:`write` has returned on every process, in their order.

        Returns:
            All files of the item.
        """
        return self._files


def write_tree(location: Location, tree: HostTree, layout: Layout) -> dict[str, FileRecord]:
    """Writes a tree into a folder that holds nothing else yet.

    Args:
        location: The folder; it is made if need be.
        tree: What to write.
        layout: Sizes of chunks, segments and data files.

    Returns:
        The files that were written, by their path inside the folder; contents and names are durable.

    Raises:
        StorageError: The storage refused; what was written so far stays behind for the caller to remove.
        UnsupportedLeafError: The tree has too many leaves, or too much text outside of arrays, for one description.
    """
    data = location / "d"
    data.make_directory()
    metadata, sources, documents = _stored(tree, layout)
    files = plan_files([source.spec for source in sources], layout)
    written: dict[str, FileRecord] = {}
    for number, file in enumerate(files):
        (data / str(number)).write_data(file.size, [_segment(segment, sources) for segment in file.segments])
        written[f"d/{number}"] = FileRecord(file.size)
    manifest, index = encode_database(
        _entries(metadata, sources, files),
        node_file=INDEX,
        database_id=uuid.uuid4().bytes,
        created_ns=time.time_ns(),
    )
    try:
        structure = encode_document(TREE_KIND, {"tree": to_document(tree.structure, documents)})
    except ValueError as error:
        raise UnsupportedLeafError(
            f"{location}: this tree cannot be described: {error}; put texts in arrays"
        ) from error
    for path, content in ((INDEX, index), (TREE, structure), (MANIFEST, manifest)):
        (location / path).write_bytes(content, atomic=False)
        written[path] = FileRecord(len(content), crc32c(content))
    data.sync_directory()
    location.sync_directory()
    return written


def _segment(segment: PlannedSegment, sources: Sequence[Source]) -> Segment:
    def parts() -> Iterator[Bytes]:
        return segment_parts(segment, sources)

    return Segment(segment.offset, segment.size, parts)


class _Form(NamedTuple):
    """What arrays of one shape and element type have in common."""

    spec: ArraySpec
    stored: Stored
    metadata: bytes
    facts: dict[str, Any]  # what the array's own metadata cannot say


def _form(shape: tuple[int, ...], dtype: np.dtype[Any], layout: Layout) -> _Form:
    stored = storage_dtype(dtype)
    full = shape if stored.extra is None else (*shape, stored.extra)
    chunks = chunk_shape(full, stored.numpy.itemsize, layout.chunk_bytes)
    plain = stored.extra is None and dtype.isnative
    return _Form(
        ArraySpec(full, chunks, stored.numpy.itemsize),
        stored,
        encode_array_metadata(full, stored.data_type, chunks),
        {} if plain else {"dtype": dtype_name(dtype)},
    )


def _stored(tree: HostTree, layout: Layout) -> tuple[dict[str, bytes], list[Source], list[dict[str, Any]]]:
    """Returns the metadata of the arrays by name, their sources, and what ``tree.json`` says about every leaf."""
    metadata: dict[str, bytes] = {}
    sources: list[Source] = []
    documents: list[dict[str, Any]] = []
    forms: dict[tuple[tuple[int, ...], np.dtype[Any]], _Form] = {}
    for name, leaf in zip(tree.names, tree.leaves, strict=True):
        if isinstance(leaf, ValueLeaf):
            documents.append(leaf.details)
            continue
        form = forms.get((leaf.shape, leaf.dtype))
        if form is None:
            form = forms[leaf.shape, leaf.dtype] = _form(leaf.shape, leaf.dtype, layout)
        extra = form.stored.extra
        pieces = leaf.pieces if extra is None else [_raw(piece, extra) for piece in leaf.pieces]
        metadata[name] = form.metadata
        sources.append(Source(form.spec, form.stored.numpy, pieces))
        documents.append({**leaf.details, **form.facts} if form.facts else leaf.details)
    return metadata, sources, documents


def _raw(piece: Piece, extra: int) -> Piece:
    """Returns a piece as bytes, with one more axis for the bytes of an element."""
    array = np.ascontiguousarray(piece.array).reshape(piece.array.shape)
    raw = array.reshape(-1).view(np.uint8) if extra else np.empty(0, np.uint8)
    return Piece((*piece.start, 0), raw.reshape(*array.shape, extra))


def _entries(metadata: Mapping[str, bytes], sources: Sequence[Source], files: Sequence[PlannedFile]) -> Entries:
    """Returns the database's entries: an array's metadata inline, its chunks as places in the data files."""
    keys = [key for name, source in zip(metadata, sources, strict=True) for key in chunk_keys(name, source.spec.grid)]
    places = [
        (None, number, chunk.offset, sources[chunk.array].spec.chunk_nbytes + CHECKSUM_BYTES)
        for number, file in enumerate(files)
        for segment in file.segments
        for chunk in segment.chunks
    ]
    rows: list[tuple[bytes, bytes | None, int, int, int]] = [
        (key, *place) for key, place in zip(keys, places, strict=True)
    ]
    rows += [(metadata_key(name), content, 0, 0, 0) for name, content in metadata.items()]
    rows.sort(key=itemgetter(0))
    return Entries(
        keys=[row[0] for row in rows],
        inline=[row[1] for row in rows],
        files=[f"d/{number}" for number in range(len(files))],
        file_ids=np.array([row[2] for row in rows], np.int64),
        offsets=np.array([row[3] for row in rows], np.int64),
        lengths=np.array([row[4] for row in rows], np.int64),
    )
