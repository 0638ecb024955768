"""Write a tree into its folder. Every process writes data files; process 0 writes the index and ``tree.json``.

Data files and the index are durable before the caller writes the commit record; until then, no checkpoint exists.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..distributed import ProcessInfo
from ..errors import UnsupportedLeafError
from ..format import FileRecord, crc32c, encode_document
from ..pytree import ArrayLeaf, Box, Details, Piece, TreeDef, ValueLeaf, format_path, to_document
from ..storage import DataFile, Location, Segment, max_concurrency, parallel_map
from .assignment import write_assignment
from .digests import INDEX, MANIFEST, TREE, TREE_KIND, Integers
from .encode import ChunkToCompress, Sources, segment_parts, write_compressed
from .fragments import Fragment, data_path, make_fragment, merge_fragments
from .grid import ArraySpec
from .plan import Catalog, ChunkIds, HostLeaf, Layout, chunk_table, plan_files
from .reuse import SharedFiles, WrittenFile, WrittenSteps
from .snapshot import Snapshot, StagingBuffer, snapshot_bytes

_WORTH = 64 << 10  # bytes per leaf; copying fewer bytes is cheaper than determining which process writes them
_ARRAYS = {"numpy", "jax", "torch", "key"}  # leaf kinds that are arrays
_LEAF_BYTES = 256  # approximate size of a leaf's entries in the index and ``tree.json``, in bytes
_SHOWN = 60  # maximum number of characters of a value in error messages
_NAME_LIMIT = 60_000  # maximum size of a name in bytes; leaves room for the chunk numbers that index keys append to it


def write_file(location: Location, content: bytes) -> FileRecord:
    """Write a small file without fsync (the commit makes it durable); return its entry for the commit record."""
    location.write_bytes(content, atomic=False, sync=False)
    return FileRecord(len(content), crc32c(content), durable=False)


@dataclass(frozen=True, slots=True)
class HostTree:
    """A tree whose leaves are on the host and stay unchanged until it is written."""

    names: Sequence[str]
    leaves: Sequence[HostLeaf]
    structure: TreeDef | None
    fresh: Details | None = None  # differences from the leaf types of the run's initial state, if known

    def __post_init__(self) -> None:
        for name in self.names:  # check the length first, because UTF-8 takes at most 4 bytes per character
            if len(name) * 4 > _NAME_LIMIT and (size := len(name.encode())) > _NAME_LIMIT:
                raise UnsupportedLeafError(
                    f"the leaf {format_path(name):.100}... has a path of {size} bytes, expected at most {_NAME_LIMIT}; "
                    "nothing was written: shorten its keys"
                )


class TreePlan:
    """Caches results that depend only on a tree's structure, for later saves of trees with the same structure."""

    def __init__(self) -> None:
        self.catalog: Catalog | None = None
        self._chunks: dict[tuple[int, int], ChunkIds] = {}
        self._document: tuple[list[dict[str, Any]], bytes] | None = None

    def chunks_of(self, catalog: Catalog, member: ProcessInfo) -> ChunkIds:
        """Return the chunks that a process writes, in tree order."""
        key = member.index, member.count
        if key not in self._chunks:
            alone = member.count == 1
            chunks = catalog.all_chunks() if alone else write_assignment(catalog, member.count).chunks_of(member.index)
            self._chunks[key] = catalog.in_tree_order(*chunks)
        return self._chunks[key]

    def document(self, tree: HostTree, documents: list[dict[str, Any]]) -> bytes:
        """Return the contents of ``tree.json``, cached until a value in it changes."""
        last = self._document  # read only once, because two saves of similar trees may run concurrently
        if last is None or last[0] != documents:
            content = to_document(tree.structure, documents) | ({} if tree.fresh is None else {"fresh": tree.fresh})
            last = self._document = documents, encode_document(TREE_KIND, {"tree": content})
        return last[1]


class TreeWriter:
    def __init__(
        self,
        tree: HostTree,
        layout: Layout,
        *,
        compression: Mapping[str, int | None] | None = None,
        chunk_bytes: Mapping[str, int] | None = None,
        plan: TreePlan | None = None,
        reuse: WrittenSteps | None = None,
    ) -> None:
        self.plan = plan or TreePlan()
        self.when_written: Callable[[], None] | None = None  # called after this process has written its share
        self._fragment: Fragment | None = None  # this process's fragment, if it is the only process
        self._tree = tree
        self._reuse = reuse
        self._layout = layout
        self._compression = compression  # compression level overrides, keyed by leaf name
        self._chunk_bytes = chunk_bytes

    def take_snapshot(self, staging: StagingBuffer, member: ProcessInfo, *, worth: int = _WORTH) -> Snapshot:
        """Copy the arrays that may change before the tree is written; return the copies."""
        leaves = self._tree.leaves
        if member.count > 1 and sum(snapshot_bytes(leaves)) >= worth * len(leaves):
            leaves = _needed(self._catalog, leaves, self.plan.chunks_of(self._catalog, member))
        copies = staging.snapshot(leaves)
        self._tree = replace(self._tree, leaves=copies)
        return copies

    def estimate_bytes(self) -> int:
        """Return the approximate total size in bytes of all arrays, the index and ``tree.json``."""
        leaves = self._tree.leaves
        if isinstance(leaves, Snapshot):
            leaves.complete()
        nbytes = self._catalog.column(lambda encoding: encoding.spec.chunks * encoding.spec.chunk_nbytes)
        return _LEAF_BYTES * len(leaves) + int(nbytes.sum())

    def write(self, location: Location, member: ProcessInfo) -> bytes:
        """Write this process's chunks. With several processes, fsync the files and return a fragment for process 0."""
        if isinstance(self._tree.leaves, Snapshot):
            self._tree.leaves.complete()
        data = location / "d"
        data.make_directory(sync=False)  # the commit syncs the parent folder
        sync = member.count > 1
        token = xxhash.xxh32_hexdigest((member.token or os.urandom(16).hex()).encode())  # prefix of the file names
        chunks = self.plan.chunks_of(self._catalog, member)
        sources = self._sources(chunks)
        layout = self._layout if location.is_local else self._layout.for_uploads()
        linked: list[WrittenFile] = []
        sizes: list[int] = []
        tables: list[Integers] = []
        rows: list[tuple[int, ...]] = []

        def path(number: int) -> str:
            return data_path(token, member.index, number)

        def write_packed(number: int, size: int, segments: Sequence[Segment]) -> None:
            (location / path(number)).write_data(size, segments, member.awaited, sync=sync)

        for group in self._in_turn(chunks):
            shared = SharedFiles([group])
            if self._reuse is not None:
                shared = self._reuse.share(location, self._catalog, sources, group, member.awaited)
            first = len(sizes)
            plain, packed = self._divided(shared.groups)
            files = plan_files(self._catalog.lengths, layout, *plain)
            checksums = np.zeros(sum(len(arrays) for arrays, _ in plain), np.uint32)
            encode = partial(segment_parts, sources=sources, checksums=checksums, digests=shared.digests)
            data_files = [
                DataFile(
                    path(number),
                    file.size,
                    [Segment(part.offset, part.size, partial(encode, part), lasting=True) for part in file.segments],
                )
                for number, file in enumerate(files, first)
            ]
            location.write_data_files(data_files, member.awaited, sync=sync)
            table = chunk_table(files, checksums, first)
            sizes += [file.size for file in files]
            for batch in packed:
                added, more = write_compressed(
                    batch, sources, layout, len(sizes), write_packed, shared.digests, member.awaited
                )
                table = np.concatenate((table, added))
                sizes += more
            if self._reuse is not None:
                self._reuse.note(shared, [path(number) for number in range(len(sizes))], sizes, table)
            tables.append(table)
            rows += [(*row[:2], len(linked) + row[2], *row[3:]) for row in shared.rows]
            linked += shared.linked
        if rows:
            shares = np.array(rows, np.int64)
            shares[:, 2] += len(sizes)
            tables.append(shares)
            sizes += [file.size for file in linked]
        table = np.concatenate(tables)
        if sync:
            data.sync_directory()
        if self.when_written is not None:
            self.when_written()
        values = _plain_values(self._tree) if member.index else None  # process 0 compares its values in merge()
        fragment = make_fragment(self._catalog, member, token, table, sizes, [file.path for file in linked], values)
        if member.count > 1:
            return fragment.encode()
        self._fragment = fragment
        return b""

    def _in_turn(self, chunks: ChunkIds) -> Iterator[ChunkIds]:
        """Yield groups of chunks as they arrive on the host, so that writing overlaps with copying from devices."""
        leaves = self._tree.leaves
        positions = self._catalog.positions[chunks[0]]
        start = 0
        for count in leaves.in_turn() if isinstance(leaves, Snapshot) else (len(leaves),):
            end = int(np.searchsorted(positions, count))
            if end > start or count == len(leaves):
                yield chunks[0][start:end], chunks[1][start:end]
            start = end

    def merge(self, location: Location, fragments: Sequence[bytes], *, describes: bool = True) -> dict[str, FileRecord]:
        """Write the index of all chunks and, if ``describes`` is set, ``tree.json``; return the file records."""
        if self._fragment is not None:
            index, written = merge_fragments(self._catalog, [self._fragment], 1)
        else:
            decoded = (Fragment.decode(data, process) for process, data in enumerate(fragments))
            index, written = merge_fragments(self._catalog, decoded, len(fragments), _plain_values(self._tree))
        manifest, nodes = index.encode(node_file=INDEX, database_id=os.urandom(16), created_ns=time.time_ns())
        files = {INDEX: nodes, MANIFEST: manifest}
        try:
            if describes:
                files[TREE] = self.plan.document(self._tree, self._catalog.documents(self._tree.leaves))
        except ValueError as error:
            raise UnsupportedLeafError(
                f"{location}: tree.json cannot hold this tree: {error}; put long texts into arrays"
            ) from error
        at_once = max_concurrency(location)
        records = parallel_map(lambda path: write_file(location / path, files[path]), list(files), at_once)
        return written | dict(zip(files, records, strict=True))

    @property
    def _catalog(self) -> Catalog:
        if self.plan.catalog is None:
            tree = self._tree
            self.plan.catalog = Catalog(tree.names, tree.leaves, self._layout, self._compression, self._chunk_bytes)
        return self.plan.catalog

    def _divided(self, groups: Sequence[ChunkIds]) -> tuple[list[ChunkIds], list[list[ChunkToCompress]]]:
        """Split each group into chunks to store uncompressed and chunks to compress."""
        levels = self._catalog.column(lambda encoding: encoding.compression or 0)
        plain: list[ChunkIds] = []
        packed: list[list[ChunkToCompress]] = []
        for arrays, numbers in groups:
            level = levels[arrays]
            stored, some = level == 0, level > 0
            plain.append((arrays[stored], numbers[stored]))
            columns = (column[some].tolist() for column in (arrays, numbers, level))
            packed.append(list(map(ChunkToCompress, *columns)))
        return plain, [group for group in packed if group]

    def _sources(self, chunks: ChunkIds) -> Sources:
        catalog, leaves = self._catalog, self._tree.leaves
        positions = catalog.positions.tolist()
        pieces: list[Sequence[Piece]] = list(map(attrgetter("pieces"), map(leaves.__getitem__, positions)))
        extra = catalog.column(lambda encoding: encoding.stored.extra is not None, bool)
        for array in set(chunks[0][extra[chunks[0]]].tolist()):
            width = catalog.encodings[array].stored.extra or 0
            pieces[array] = [_raw(piece, width) for piece in pieces[array]]
        specs = [encoding.spec for encoding in catalog.encodings]
        return Sources(specs, [encoding.stored.numpy for encoding in catalog.encodings], pieces, catalog.names)


def _plain_values(tree: HostTree) -> dict[str, str]:
    """Return plain values and unsharded 0-d arrays as text keyed by name, to detect processes at different steps."""
    lines = {}
    for name, leaf in zip(tree.names, tree.leaves, strict=True):
        if isinstance(leaf, ValueLeaf):
            kind, *values = leaf.details.values() if list(leaf.details)[:1] == ["kind"] else (leaf.details,)
            lines[name] = _on_one_line(" ".join(["a value of kind", str(kind), *map(repr, values)]))
        elif leaf.parts is None and leaf.pieces and (leaf.details["kind"] not in _ARRAYS or leaf.shape == ()):
            array, kind = np.asarray(leaf.pieces[0].array), leaf.details["kind"]
            text = str(array) if leaf.shape == () else f"{list(leaf.shape)} {array.tobytes().hex()}"
            lines[name] = _on_one_line(f"{leaf.dtype if kind in _ARRAYS else kind} {text}")
    return lines


def _on_one_line(text: str) -> str:
    """Return a text on one line; a long text is truncated, and a digest of the full text is appended."""
    if len(text) <= _SHOWN and text.isprintable():
        return text
    digest = xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))
    return f"{''.join(filter(str.isprintable, text[:_SHOWN]))}... (digest {digest})"


def _raw(piece: Piece, extra: int) -> Piece:
    """View a piece as bytes, with an additional axis for the bytes of each element."""
    array = np.ascontiguousarray(piece.array).reshape(piece.array.shape)
    raw = array.reshape(-1).view(np.uint8) if extra else np.empty(0, np.uint8)
    return Piece((*piece.start, 0), raw.reshape(*array.shape, extra))


def _needed(catalog: Catalog, leaves: Sequence[HostLeaf], chunks: ChunkIds) -> list[HostLeaf]:
    """Return the leaves, reduced to the chunks that a process writes."""
    needed = list(leaves)
    arrays, numbers = chunks
    order = np.lexsort((numbers, arrays))
    ends = np.searchsorted(arrays[order], np.arange(len(catalog.encodings)), "right").tolist()
    start = 0
    for position, encoding, end in zip(catalog.positions.tolist(), catalog.encodings, ends, strict=True):
        written, start = numbers[order[start:end]], end
        leaf = leaves[position]
        if not isinstance(leaf, ArrayLeaf) or not leaf.volatile or not leaf.shape:
            continue
        # Leaves that are stored as bytes are not reduced, because their chunks have one more axis.
        if len(written) < encoding.spec.chunks and encoding.stored.extra is None:
            boxes = list(_boxes(encoding.spec, written))
            needed[position] = replace(leaf, pieces=[part for piece in leaf.pieces for part in _parts(piece, boxes)])
    return needed


def _boxes(spec: ArraySpec, numbers: NDArray[np.int64]) -> Iterator[Box]:
    """Yield the boxes that an array's chunks cover, in ascending order; adjacent boxes are merged."""
    current: Box | None = None
    for number in numbers.tolist():
        new = spec.chunk_box(number)
        if current is not None:
            joined = Box(current.start, new.stop)
            if joined.size == current.size + new.size:  # the two boxes are adjacent along one axis
                current = joined
                continue
            yield current
        current = new
    if current is not None:
        yield current


def _parts(piece: Piece, boxes: Sequence[Box]) -> Iterator[Piece]:
    for box in boxes:
        if (common := box.common(piece.box)) is not None:
            yield Piece(common.start, piece.array[common.within(piece.box)])
