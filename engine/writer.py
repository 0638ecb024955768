"""Writes one PyTree item: data files, the index over them, and the tree's structure.

The order matters: data and index are durable before the caller writes its commit record, and nothing here is
visible as a checkpoint without that record.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .format import (
    Entries,
    chunk_keys,
    crc32c,
    dtype_name,
    encode_array_metadata,
    encode_database,
    encode_document,
    metadata_key,
    storage_dtype,
)
from .plan import ArraySpec, Layout, PlannedFile, PlannedSegment, chunk_shape, grid_of, plan_files
from .record import FileRecord
from .sources import Bytes, Source, segment_parts
from .storage import Location, Segment
from .tree import ArrayLeaf, Node, Piece, ValueLeaf, to_document

MANIFEST = "manifest.ocdbt"
INDEX = "d/index"
TREE = "tree.json"
TREE_KIND = "tree"

HostLeaf = ArrayLeaf | ValueLeaf


@dataclass(frozen=True, slots=True)
class HostTree:
    """A tree whose leaves are on the host and stay as they are until it has been written."""

    names: Sequence[str]
    leaves: Sequence[HostLeaf]
    structure: Node | None


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
    """
    data = location / "d"
    data.make_directory()
    names, sources, documents = _stored(tree, layout)
    files = plan_files([source.spec for source in sources], layout)
    written: dict[str, FileRecord] = {}
    for number, file in enumerate(files):
        (data / str(number)).write_data(file.size, [_segment(segment, sources) for segment in file.segments])
        written[f"d/{number}"] = FileRecord(file.size)
    manifest, index = encode_database(
        _entries(names, sources, files),
        node_file=INDEX,
        database_id=uuid.uuid4().bytes,
        created_ns=time.time_ns(),
    )
    structure = encode_document(TREE_KIND, {"tree": to_document(tree.structure, documents)})
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


def _stored(tree: HostTree, layout: Layout) -> tuple[list[str], list[Source], list[dict[str, Any]]]:
    """Returns the names and sources of the arrays, and what ``tree.json`` says about every leaf."""
    names: list[str] = []
    sources: list[Source] = []
    documents: list[dict[str, Any]] = []
    cut: dict[tuple[tuple[int, ...], int], ArraySpec] = {}
    for name, leaf in zip(tree.names, tree.leaves, strict=True):
        if isinstance(leaf, ValueLeaf):
            documents.append(leaf.details)
            continue
        stored = storage_dtype(leaf.dtype)
        shape = leaf.shape if stored.extra is None else (*leaf.shape, stored.extra)
        itemsize = stored.numpy.itemsize
        spec = cut.get((shape, itemsize))
        if spec is None:
            spec = cut[shape, itemsize] = ArraySpec(shape, chunk_shape(shape, itemsize, layout.chunk_bytes), itemsize)
        pieces = leaf.pieces if stored.extra is None else [_raw(piece, stored.extra) for piece in leaf.pieces]
        names.append(name)
        sources.append(Source(spec, stored.numpy, pieces))
        # The array's own metadata cannot say this: a dtype without a zarr name, or bytes that were big endian.
        plain = stored.extra is None and leaf.dtype.isnative
        documents.append(leaf.details if plain else {**leaf.details, "dtype": dtype_name(leaf.dtype)})
    return names, sources, documents


def _raw(piece: Piece, extra: int) -> Piece:
    """Returns a piece as bytes, with one more axis for the bytes of an element."""
    array = np.ascontiguousarray(piece.array).reshape(piece.array.shape)
    raw = array.reshape(-1).view(np.uint8) if extra else np.empty(0, np.uint8)
    return Piece((*piece.start, 0), raw.reshape(*array.shape, extra))


def _entries(names: Sequence[str], sources: Sequence[Source], files: Sequence[PlannedFile]) -> Entries:
    """Returns the database's entries: an array's metadata inline, its chunks as places in the data files."""
    keys = [key for name, source in zip(names, sources, strict=True) for key in _chunk_keys(name, source.spec)]
    chunks = [(number, chunk) for number, file in enumerate(files) for part in file.segments for chunk in part.chunks]
    place = {key: (*found, sources[found[1].array]) for key, found in zip(keys, chunks, strict=True)}
    inline = {metadata_key(name): _metadata(source) for name, source in zip(names, sources, strict=True)}
    ordered = sorted([*place, *inline])
    file_ids = np.zeros(len(ordered), np.int64)
    offsets = np.zeros(len(ordered), np.int64)
    lengths = np.zeros(len(ordered), np.int64)
    for row, key in enumerate(ordered):
        found = place.get(key)
        if found is not None:
            number, chunk, source = found
            file_ids[row] = number
            offsets[row] = chunk.offset
            lengths[row] = source.spec.chunk_nbytes + 4
    return Entries(
        keys=ordered,
        inline=[inline.get(key) for key in ordered],
        files=[f"d/{number}" for number in range(len(files))],
        file_ids=file_ids,
        offsets=offsets,
        lengths=lengths,
    )


def _chunk_keys(name: str, spec: ArraySpec) -> list[bytes]:
    return chunk_keys(name, grid_of(spec.shape, spec.chunk_shape))


def _metadata(source: Source) -> bytes:
    return encode_array_metadata(source.spec.shape, storage_dtype(source.dtype).data_type, source.spec.chunk_shape)
