"""Writes OCDBT databases from columns of entries; :mod:`.ocdbt_read` describes the format.

All nodes are written to a single file, leaves first and uncompressed. Each leaf is followed by the checksums of its
values. TensorStore's ``ocdbt`` driver can read the database.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .codecs import crc32c, encode_varint, encode_varints, varint_sizes
from .ocdbt_read import (
    CHECKSUM,
    CHECKSUMS_MAGIC,
    HEAD,
    INLINE_LIMIT,
    KEY_LIMIT,
    LENGTH,
    MANIFEST_MAGIC,
    MISSING,
    NODE_LIMIT,
    NODE_MAGIC,
    PATH_LIMIT,
    SHORTEST_FRAME,
    SINGLE,
    Root,
)
from .zarr import chunk_keys, metadata_keys

_ENTRY_BYTES = 40  # maximum size in bytes of the eight numbers that an interior node stores with each key
_FIXED = 64  # maximum total size, in bytes, of the fields in a node that do not depend on its entries
_ARITY_LIMIT = 1 << 20  # maximum number of entries per node that TensorStore accepts
# Configuration stored in the manifest. TensorStore uses it when adding entries to a database.
_INLINE_BYTES = 100
_NODE_BYTES = 8 << 20
_ARITY_LOG2 = 4
_NO_ROOT = Root(0, "", b"", MISSING, MISSING, 0, 0, 0)  # root of an empty database


@dataclass(slots=True, eq=False)
class Rows:
    """Consecutive entries of a database. Every array has one element per key."""

    key: Callable[[int], bytes]  # returns the key of a row
    shared: NDArray[np.integer]  # number of bytes that each key shares with the previous key; 0 for the first
    suffix_ends: NDArray[np.int64]  # position in `text` at which the suffix of the key (its unshared bytes) ends
    text: bytes  # all suffixes, concatenated
    outside: NDArray[np.bool_]  # whether the value is in a data file
    lengths: NDArray[np.int64]  # size of the value in bytes, inline or in a data file
    file_ids: NDArray[np.integer]  # index into `files`; undefined if the value is inline
    offsets: NDArray[np.int64]  # offset of the value in its file, in bytes; undefined if the value is inline
    inline: Sequence[bytes]  # the inline values, in row order
    files: Sequence[str]  # paths of the data files, relative to the database's directory
    # CRC-32C of each value (undefined if the value is inline), or None if no checksums are written.
    checksums: NDArray[np.uint32] | None = None

    def __len__(self) -> int:
        return len(self.shared)


def encode_database(
    batches: Iterable[Rows], *, node_file: str, database_id: bytes, created_ns: int, node_limit: int = NODE_LIMIT
) -> tuple[bytes, bytes]:
    """Encode a database with a single version, and return its manifest and its node file."""
    level = [node for rows in batches for node in encode_leaves(rows, node_limit)]
    if not level:
        return encode_manifest(_NO_ROOT, database_id, created_ns), b""
    parts: list[bytes] = []
    height = size = 0
    while True:
        offsets = []
        for node in level:
            offsets.append(size)
            parts += (node.frame, node.following)
            size += len(node.frame) + len(node.following)
        if len(level) == 1:
            break
        height += 1
        level = _parents(level, offsets, height, node_file, node_limit)
    (top,) = level
    root = Root(height, node_file, b"", offsets[0], len(top.frame), *top[2:5])
    return encode_manifest(root, database_id, created_ns), b"".join(parts)


def encode_manifest(root: Root, database_id: bytes, created_ns: int) -> bytes:
    if len(database_id) != 16:
        raise ValueError(f"a database id has 16 bytes, not {len(database_id)}")
    configuration = (
        database_id,
        *map(encode_varint, (SINGLE, _INLINE_BYTES, _NODE_BYTES)),
        bytes([_ARITY_LOG2]),
        b"\0",  # nodes are not compressed
    )
    versions = (
        encode_files([root.file]),
        b"\1\1",  # one version with generation 1
        bytes([root.height, 0]),
        *map(encode_varint, root[3:]),  # offset, length and statistics
        struct.pack("<Q", created_ns),
        b"\0",  # no nodes of older versions
    )
    return encode_frame(MANIFEST_MAGIC, *configuration, *versions)


class _Node(NamedTuple):
    """A node, and the fields that its parent stores about it. Counts and sizes include all nodes below the node."""

    frame: bytes
    key: bytes  # the first key
    key_count: int
    tree_bytes: int  # total size of the nodes, in bytes
    value_bytes: int  # total size of the values in data files, in bytes
    following: bytes = b""  # the checksums of a leaf's values


def encode_leaves(rows: Rows, node_limit: int) -> list[_Node]:
    suffix_sizes = np.diff(rows.suffix_ends, prepend=0)
    inline_ends = np.cumsum(~rows.outside)  # number of inline values up to and including each row
    inline_sizes = np.where(rows.outside, 0, rows.lengths)
    costs = varint_sizes(rows.shared) + varint_sizes(suffix_sizes) + suffix_sizes
    costs += varint_sizes(rows.lengths) + 1 + inline_sizes
    costs += np.where(rows.outside, len(encode_varint(len(rows.files))) + varint_sizes(rows.offsets), 0)
    ends = np.cumsum(costs)
    leaves: list[_Node] = []
    start = 0
    while start < len(rows):
        key = rows.key(start)
        stop, table, file_ids = _leaf_end(rows, ends, start, node_limit - _FIXED - int(rows.shared[start]))
        outside, lengths = rows.outside[start:stop], rows.lengths[start:stop]
        first_inline = int(inline_ends[start - 1]) if start else 0
        body = (
            b"\0",
            table,
            encode_varint(stop - start),
            encode_varints(rows.shared[start + 1 : stop]),
            encode_varint(len(key)),
            encode_varints(suffix_sizes[start + 1 : stop]),
            key,
            rows.text[int(rows.suffix_ends[start]) : int(rows.suffix_ends[stop - 1])],
            encode_varints(lengths),
            outside.astype(np.uint8).tobytes(),
            encode_varints(file_ids),
            encode_varints(rows.offsets[start:stop][outside]),
            *rows.inline[first_inline : int(inline_ends[stop - 1])],
        )
        following = b""
        if rows.checksums is not None:
            following = CHECKSUMS_MAGIC + rows.checksums[start:stop][outside].astype("<u4").tobytes()
        frame = encode_frame(NODE_MAGIC, *body)
        leaves.append(_Node(frame, key, stop - start, len(frame), int(lengths[outside].sum()), following))
        start = stop
    return leaves


def _leaf_end(rows: Rows, ends: NDArray[np.int64], start: int, room: int) -> tuple[int, bytes, NDArray[np.int64]]:
    """Return the end of the leaf that starts at row `start`, its file table, and the table index of each value."""
    spent = int(ends[start - 1]) if start else 0
    reserve = 0  # bytes reserved for the file table, whose size depends on the rows in the leaf
    while True:
        stop = int(np.searchsorted(ends, spent + max(0, room - reserve), "right"))
        stop = min(max(stop, start + 1), start + _ARITY_LIMIT, len(rows))
        file_ids = rows.file_ids[start:stop][rows.outside[start:stop]]
        used = np.zeros(len(rows.files), bool)
        used[file_ids] = True
        table = encode_files([rows.files[i] for i in np.flatnonzero(used).tolist()])
        if int(ends[stop - 1]) - spent + len(table) <= room or stop == start + 1:
            return stop, table, (np.cumsum(used) - 1)[file_ids]
        reserve = min(len(table), (room + reserve + 1) // 2)


def _parents(
    nodes: Sequence[_Node], offsets: Sequence[int], height: int, node_file: str, node_limit: int
) -> list[_Node]:
    """Encode the parents of the nodes at ``offsets`` in the node file. Every parent has at least two children."""
    # An entry consists of the key, without the bytes that it shares with the previous key, and eight numbers.
    keys = [node.key for node in nodes]
    ends = np.cumsum(np.array([len(key) for key in keys]) - shared_prefixes(keys) + _ENTRY_BYTES)
    parents: list[_Node] = []
    start = 0
    while start < len(nodes):
        # The first key of a node is stored in full.
        room = node_limit - _FIXED - len(node_file) - len(keys[start]) + (int(ends[start - 1]) if start else 0)
        stop = max(start + 2, int(np.searchsorted(ends, room, "right")))
        stop = len(nodes) if stop >= len(nodes) - 1 else stop  # avoid a last parent with a single child
        parents.append(_parent(nodes[start:stop], offsets[start:stop], height, node_file))
        start = stop
    return parents


def _parent(nodes: Sequence[_Node], offsets: Sequence[int], height: int, node_file: str) -> _Node:
    shared, sizes, text = key_columns([node.key for node in nodes])
    counts = [np.array(column, np.int64) for column in zip(*(node[2:5] for node in nodes), strict=True)]
    lengths = np.array([len(node.frame) for node in nodes], np.int64)
    count = len(nodes)
    # The zero bytes are the lengths of the children's common key prefixes and the indices of their files.
    head = (bytes([height]), encode_files([node_file]), encode_varint(count))
    keys = (encode_varints(shared[1:]), encode_varints(sizes), bytes(count), text)
    columns = map(encode_varints, (np.array(offsets, np.int64), lengths, *counts))
    frame = encode_frame(NODE_MAGIC, *head, *keys, bytes(count), *columns)
    key_count, tree_bytes, value_bytes = (int(column.sum()) for column in counts)
    return _Node(frame, nodes[0].key, key_count, tree_bytes + len(frame), value_bytes)


def key_columns(keys: list[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64], bytes]:
    """Return the number of bytes that each key shares with the previous key, the suffix sizes, and all suffixes."""
    shared = shared_prefixes(keys)
    suffixes = [key[size:] for key, size in zip(keys, shared.tolist(), strict=True)]
    return shared, np.array([len(suffix) for suffix in suffixes], np.int64), b"".join(suffixes)


def encode_frame(magic: int, *body: bytes) -> bytes:
    length = SHORTEST_FRAME + sum(map(len, body))
    frame = b"".join((HEAD.pack(magic), LENGTH.pack(length), b"\0\0", *body))
    return frame + CHECKSUM.pack(crc32c(frame))


def encode_files(paths: Sequence[str]) -> bytes:
    encoded = [path.encode() for path in paths]
    longest = max(map(len, encoded), default=0)
    if longest > PATH_LIMIT:
        raise ValueError(f"the path of a data file has {longest} bytes; the limit is {PATH_LIMIT}")
    shared, sizes, text = key_columns(encoded)
    bases = bytes(len(encoded))  # one varint per path: the length of its base path, which is 0
    return encode_varint(len(encoded)) + encode_varints(shared[1:]) + encode_varints(sizes) + bases + text


_LOWEST_BITS = np.uint64(1) << np.arange(0, 64, 8, dtype=np.uint64)


def shared_prefixes(keys: list[bytes]) -> NDArray[np.int64]:
    """Count the bytes that each key shares with the previous key."""
    shared = np.zeros(len(keys), np.int64)
    if len(keys) < 2:
        return shared
    lengths = np.array([len(key) for key in keys], np.int64)
    starts = np.cumsum(lengths) - lengths
    # Keys are compared eight bytes at a time, through a view of the joined keys as overlapping 64-bit words.
    joined = b"".join((*keys, bytes(8)))
    words: NDArray[np.uint64] = np.ndarray((len(joined) - 7,), "<u8", joined, strides=(1,))
    limits = np.minimum(lengths[1:], lengths[:-1])
    pairs = np.flatnonzero(limits)
    done = 0
    while pairs.size:
        differ = words[starts[pairs] + done] ^ words[starts[pairs + 1] + done]
        lowest = differ & (~differ + np.uint64(1))  # isolates the lowest differing bit
        equal = np.where(differ == 0, 8, np.searchsorted(_LOWEST_BITS, lowest, "right") - 1)
        counts = np.minimum(done + equal, limits[pairs])
        shared[pairs + 1] = counts
        done += 8
        pairs = pairs[counts >= done]
    return shared


# ---- the index of the chunks of many zarr arrays
# An index may have ten million keys, so keys are not Python objects, and arrays with the same grid share a template.

Grid = tuple[int, ...]


def key_order(names: Sequence[str]) -> list[int]:
    """Return the indices that sort the arrays by key."""
    # Sorting strings by code point gives the same order as sorting their UTF-8 bytes.
    return sorted(range(len(names)), key=[f"{name}/" for name in names].__getitem__)


@dataclass(frozen=True, slots=True, eq=False)
class ArrayIndex:
    """The chunk locations of zarr arrays: a name, grid and metadata per array, and columns with one entry per chunk."""

    names: Sequence[str]  # unique array names, in the order of `key_order`
    grids: Sequence[Grid]  # number of chunks of each array along each axis
    metadata: Sequence[bytes]  # the ``zarr.json`` of each array
    files: Sequence[str]  # paths of the data files, relative to the database's directory
    # Index into `files`. In all columns, chunks are in array order, and in C order within an array.
    file_ids: NDArray[np.integer]
    offsets: NDArray[np.int64]  # offset of the chunk in its file, in bytes
    lengths: NDArray[np.int64]  # size of the chunk in its file, in bytes
    checksums: NDArray[np.uint32]  # CRC-32C of the chunk's stored bytes, except for the checksum at their end
    # Index of each array's first chunk, followed by the total number of chunks.
    starts: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        counts = {grid: int(np.prod(grid, dtype=np.int64)) for grid in set(self.grids)}
        starts = np.zeros(len(self.grids) + 1, np.int64)
        np.cumsum([counts[grid] for grid in self.grids], out=starts[1:])
        object.__setattr__(self, "starts", starts)
        if {len(self.file_ids), len(self.offsets), len(self.lengths), len(self.checksums)} != {int(starts[-1])}:
            raise ValueError(f"the arrays have {starts[-1]} chunks, but the columns have other lengths")

    def encode(
        self, *, node_file: str, database_id: bytes, created_ns: int, node_limit: int = NODE_LIMIT, batch: int = 1 << 20
    ) -> tuple[bytes, bytes]:
        """Encode the index as an OCDBT database, and return its manifest and its node file.

        At most ``batch`` keys are laid out in memory at a time, unless a single array has more.
        """
        rows = self._batches(batch)
        return encode_database(
            rows, node_file=node_file, database_id=database_id, created_ns=created_ns, node_limit=node_limit
        )

    def _batches(self, size: int) -> Iterator[Rows]:
        templates: dict[Grid, _Template] = {}
        first = 0
        while first < len(self.names):
            # A batch has at least one array. An array has a key for each chunk and one for its metadata.
            ends = self.starts[first + 1 :] - self.starts[first] + np.arange(1, len(self.names) - first + 1)
            last = first + max(1, int(np.searchsorted(ends, size, "right")))
            grids = set(self.grids[first:last])
            templates = {grid: templates.get(grid) or _Template(grid) for grid in grids}
            yield self._rows(first, last, templates)
            first = last

    def _rows(self, first: int, last: int, templates: dict[Grid, _Template]) -> Rows:
        """Lay out the keys of consecutive arrays. For each array, the sorted chunk keys precede the metadata key."""
        grids, metadata = self.grids[first:last], self.metadata[first:last]
        prefixes = [f"{name}/".encode() if name else b"" for name in self.names[first:last]]
        prefix_sizes = np.array([len(prefix) for prefix in prefixes], np.int64)
        common = shared_prefixes(prefixes)  # also valid for whole keys, because no prefix starts with another prefix
        bases = self.starts[first:last]
        begins = bases - bases[0] + np.arange(last - first)
        total = int(self.starts[last] - bases[0]) + last - first
        shared, sizes = np.empty(total, np.int32), np.empty(total, np.int64)
        columns: dict[str, NDArray[Any]] = {
            "file_ids": np.zeros(total, np.int32),
            "offsets": np.zeros(total, np.int64),
            "lengths": np.empty(total, np.int64),
            "checksums": np.zeros(total, np.uint32),
        }
        outside = np.ones(total, bool)
        numbers = {grid: number for number, grid in enumerate(templates)}
        template_ids = [numbers[grid] for grid in grids]
        counts = np.bincount(template_ids, minlength=len(numbers))
        groups = np.split(np.argsort(template_ids, kind="stable"), np.cumsum(counts)[:-1])
        for template, members in zip(templates.values(), groups, strict=True):
            rows = begins[members][:, None] + np.arange(len(template.keys))
            chunks = bases[members][:, None] + template.order
            shared[rows] = template.shared + prefix_sizes[members][:, None]
            sizes[rows] = template.sizes
            for column in ("file_ids", "offsets", "lengths", "checksums"):
                columns[column][rows[:, :-1]] = getattr(self, column)[chunks]
            if template.longest + int(prefix_sizes[members].max()) > KEY_LIMIT:
                raise ValueError(f"a key has more than {KEY_LIMIT} bytes")
        shared[begins] = common
        sizes[begins] += prefix_sizes - common
        ends = np.append(begins[1:], total) - 1
        outside[ends] = False
        columns["lengths"][ends] = [len(text) for text in metadata]
        if max(map(len, metadata)) > INLINE_LIMIT:
            raise ValueError(f"the metadata of an array has more than {INLINE_LIMIT} bytes")

        def key(row: int) -> bytes:
            position = int(np.searchsorted(begins, row, "right")) - 1
            return prefixes[position] + templates[grids[position]].keys[row - int(begins[position])]

        suffixes = zip(prefixes, common.tolist(), grids, strict=True)
        return Rows(
            key=key,
            shared=shared,
            suffix_ends=np.cumsum(sizes),
            text=b"".join([prefix[size:] + templates[grid].text for prefix, size, grid in suffixes]),
            outside=outside,
            inline=metadata,
            files=self.files,
            **columns,
        )


class _Template:
    """Keys without the array name, shared by all arrays with the same grid."""

    def __init__(self, grid: tuple[int, ...]) -> None:
        keys = chunk_keys("", grid)
        order = sorted(range(len(keys)), key=keys.__getitem__)
        self.keys = [*(keys[number] for number in order), *metadata_keys([""])]
        self.longest = max(map(len, self.keys))
        self.order: NDArray[Any] = np.array(order, np.int64)  # chunk index of each chunk key, in key order
        self.shared, self.sizes, self.text = key_columns(self.keys)
