"""Writes one PyTree item: data files by every process, then the index over them and the tree's structure by process 0.

The order matters: data and index are durable before the caller writes its commit record, and nothing here is
visible as a checkpoint without that record.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..coordination import Member
from ..errors import OptionError, UnsupportedLeafError
from ..format import crc32c, encode_document
from ..record import FileRecord
from ..storage import DataFile, Location, Segment
from ..tree import ArrayLeaf, Node, Piece, display, to_document
from .catalog import Catalog, Chunks, HostLeaf
from .compressing import ChunkToCompress, write_compressed
from .fragments import data_path, short_token
from .merging import make_fragment, merge_fragments
from .plan import Layout, PlannedSegment, check_level, check_size, plan_files, planned_places
from .shares import own_share
from .sources import Bytes, Source, segment_parts
from .staging import StagingBuffer

MANIFEST = "manifest.ocdbt"
INDEX = "d/index"
TREE = "tree.json"
TREE_KIND = "tree"

_ALONE = Member()
_WORTH = 64 << 10  # bytes a leaf; to copy less takes no longer than to find out who writes it
_NAME_LIMIT = 60_000  # bytes; the index adds the numbers of chunks to it


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
    """A tree that is ready to be written, by one process or by several together.

    Args:
        tree: What to write. With several processes, every one has the same leaves; of their arrays, the parts that it
            holds.
        layout: Sizes of chunks, segments and data files, and how chunks are compressed.
        compression: The level of compression of some leaves, by name, where it is not that of the layout; None stores
            a leaf as it is. Like all sizes, the same on every process.
        chunk_bytes: The largest chunk of some leaves, by name, where it is not that of the layout.

    Raises:
        OptionError: A level or a size makes no sense, or the tree has no leaf of such a name.
    """

    def __init__(
        self,
        tree: HostTree,
        layout: Layout,
        *,
        compression: Mapping[str, int | None] | None = None,
        chunk_bytes: Mapping[str, int] | None = None,
    ) -> None:
        self._tree = tree
        self._layout = layout
        self._compression = compression or {}
        self._chunk_bytes = chunk_bytes or {}
        for name, level in self._compression.items():
            check_level(f"compression[{display(name)!r}]", level)
        for name, size in self._chunk_bytes.items():
            check_size(f"chunk_bytes[{display(name)!r}]", size)
        unknown = (self._compression.keys() | self._chunk_bytes.keys()).difference(tree.names)
        if unknown:
            raise OptionError(f"options are given for leaves that the tree does not have: {sorted(unknown)[:5]}")

    def take_snapshot(self, staging: StagingBuffer, member: Member = _ALONE) -> None:
        """Copies whatever may change, so that it may do so before the tree is written.

        Args:
            staging: Where the copies go.
            member: The process whose share will be written; what is others' to write is not copied where that saves
                more time than it takes to find out.
        """
        leaves = self._tree.leaves
        if member.count > 1 and staging.needed(leaves) >= _WORTH * len(leaves):
            leaves = own_share(self._catalog, leaves, self._share(member))
        self._tree = replace(self._tree, leaves=staging.snapshot(leaves))

    def write(self, location: Location, member: Member) -> bytes:
        """Writes this process's share into the item's folder, durably.

        Args:
            location: The folder; it is made if need be, and holds nothing else.
            member: Which share.

        Returns:
            What process 0 needs to know of it.

        Raises:
            StorageError: The storage refused; what was written so far stays behind for the caller to remove.
            UnsupportedLeafError: An array is divided among processes in a way that it cannot be written, or has a
                value that the dtype to which it is to be cast cannot hold.
        """
        catalog = self._catalog
        data = location / "d"
        data.make_directory()
        token = short_token(member.token or secrets.token_hex(16))
        alone = member.count == 1
        chunks = self._share(member)
        plain, packed = self._divided(chunks)
        sources = self._sources(chunks)
        specs = [form.spec for form in catalog.forms]

        layout = self._layout if location.is_local else self._layout.for_uploads()

        def write_file(number: int, size: int, segments: Sequence[Segment]) -> None:
            (location / data_path(token, member.index, number)).write_data(size, segments)

        files = plan_files(specs, layout, plain)
        location.write_data_files(
            [
                DataFile(
                    data_path(token, member.index, number),
                    file.size,
                    [_segment(segment, sources) for segment in file.segments],
                )
                for number, file in enumerate(files)
            ]
        )
        places, sizes = planned_places(files, specs), [file.size for file in files]
        if packed:
            compressed, more = write_compressed(packed, sources, layout, len(files), write_file)
            places = np.concatenate((places, np.array(compressed, np.int64)))
            sizes += more
        if not alone:  # otherwise merging is next and syncs this directory, too
            data.sync_directory()
        return make_fragment(catalog, member, token, places, sizes)

    def merge(self, location: Location, fragments: Sequence[bytes]) -> dict[str, FileRecord]:
        """Writes the index over all shares and the tree's structure, durably; on process 0 only.

        Args:
            location: The folder.
            fragments: What :meth:`write` has returned on every process, in their order.

        Returns:
            All files of the item.

        Raises:
            TreeMismatchError: A process has written another tree; names it and the leaves that differ.
            DamagedCheckpointError: A fragment is damaged, or a chunk was written by nobody or twice.
            StorageError: The storage refused.
            UnsupportedLeafError: The tree has too many leaves, or too much text outside of arrays, for one
                description.
        """
        index, written = merge_fragments(self._catalog, fragments)
        manifest, nodes = index.encode(node_file=INDEX, database_id=uuid.uuid4().bytes, created_ns=time.time_ns())
        try:
            structure = encode_document(TREE_KIND, {"tree": to_document(self._tree.structure, self._catalog.documents)})
        except ValueError as error:
            raise UnsupportedLeafError(
                f"{location}: this tree cannot be described: {error}; put texts in arrays"
            ) from error
        for path, content in ((INDEX, nodes), (TREE, structure), (MANIFEST, manifest)):
            (location / path).write_bytes(content, atomic=False)
            written[path] = FileRecord(len(content), crc32c(content))
        (location / "d").sync_directory()
        location.sync_directory()
        return written

    def _share(self, member: Member) -> Chunks:
        """Returns the chunks that a process writes."""
        catalog = self._catalog
        if member.count == 1:
            return catalog.ordered(*catalog.everything())
        return catalog.ordered(*catalog.spread(member.count).share(member.index))

    @cached_property
    def _catalog(self) -> Catalog:
        tree = self._tree
        return Catalog(tree.names, tree.leaves, self._layout, self._compression, self._chunk_bytes)

    def _divided(self, chunks: Chunks) -> tuple[list[tuple[int, int]], list[ChunkToCompress]]:
        """Divides a share into chunks that are stored as they are and chunks to compress."""
        levels = [form.compression for form in self._catalog.forms]
        share = list(zip(chunks[0].tolist(), chunks[1].tolist(), strict=True))
        if not any(levels):
            return share, []
        packed = [ChunkToCompress(*chunk, level) for chunk in share if (level := levels[chunk[0]]) is not None]
        return [chunk for chunk in share if levels[chunk[0]] is None], packed

    def _sources(self, chunks: Chunks) -> list[Source]:
        """Returns the sources of all arrays, by number; those that are not in the share have no pieces."""
        catalog = self._catalog
        mine = np.zeros(len(catalog.forms), bool)
        mine[chunks[0]] = True
        sources = []
        for own, position, form in zip(mine.tolist(), catalog.positions.tolist(), catalog.forms, strict=True):
            pieces: Sequence[Piece] = ()
            if own:
                leaf = self._tree.leaves[position]
                assert isinstance(leaf, ArrayLeaf)
                extra = form.stored.extra
                pieces = leaf.pieces if extra is None else [_raw(piece, extra) for piece in leaf.pieces]
            sources.append(Source(form.spec, form.stored.numpy, pieces, self._tree.names[position]))
        return sources


def _segment(segment: PlannedSegment, sources: Sequence[Source]) -> Segment:
    def parts() -> Iterator[Bytes]:
        return segment_parts(segment, sources)

    return Segment(segment.offset, segment.size, parts)


def _raw(piece: Piece, extra: int) -> Piece:
    """Returns a piece as bytes, with one more axis for the bytes of an element."""
    array = np.ascontiguousarray(piece.array).reshape(piece.array.shape)
    raw = array.reshape(-1).view(np.uint8) if extra else np.empty(0, np.uint8)
    return Piece((*piece.start, 0), raw.reshape(*array.shape, extra))
