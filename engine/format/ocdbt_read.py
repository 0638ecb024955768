"""Reads OCDBT databases, TensorStore's ordered key-value maps.

A database consists of a manifest and the nodes of a B+tree, which are stored in data files. The manifest locates the
root node of each version. A node begins with a table of the files that it refers to. It stores its entries in columns,
and omits from each key the prefix that the key shares with the previous key. The manifest and the nodes are frames,
which consist of a magic number, length, version, compression method, body and checksum. The format is documented at
https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format
"""

from __future__ import annotations

import struct
from bisect import bisect, bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter, lt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError, FormatVersionError
from .archive import is_inside
from .codecs import INT64_MAX, Cursor, crc32c, decompress

NODE_LIMIT = 128 << 10  # maximum node size in bytes; nodes are read as a whole and decoded in about a millisecond
MANIFEST_NAME = "manifest.ocdbt"  # file name of the manifest in a database's directory
MANIFEST_MAGIC = 0x0CDB3A2A
NODE_MAGIC = 0x0CDB20DE
MISSING = (1 << 64) - 1  # offset and length of the root in an empty database
SINGLE, _NUMBERED = 0, 1  # manifest kinds
# Magic number between a leaf node and the checksums of the leaf's values. Earlier versions of holdfast wrote the
# checksums of all values at the end of the node file, followed by this magic number.
CHECKSUMS_MAGIC = b"HfCrc32c"

KEY_LIMIT = 65535  # maximum key length in bytes
INLINE_LIMIT = 1 << 20  # maximum size of an inline value in bytes
PATH_LIMIT = 65535  # maximum length of a data file's path in bytes
_MEMORY_LIMIT = 1 << 30  # default memory limit, in bytes, for the nodes and entries of a database
_BODY_LIMIT = 256 << 20  # maximum size of a decoded body in bytes; TensorStore's default node size is 8 MiB
_FRAME_LIMIT = _BODY_LIMIT + 64
_SEARCHED = 8  # if more than 1/8 of the keys are looked up, a dictionary of all keys is faster than bisection
_FILES_LIMIT = 1 << 17  # maximum number of files in one table
_TABLE_LIMIT = 4 << 20  # maximum total length of the paths in one table, in bytes

HEAD = struct.Struct(">I")
LENGTH = struct.Struct("<Q")
CHECKSUM = struct.Struct("<I")
SHORTEST_FRAME = HEAD.size + LENGTH.size + 2 + CHECKSUM.size


@dataclass(slots=True, eq=False)
class Entries:
    """Entries of a database. All lists and arrays except `files` have one element per key."""

    keys: list[bytes]  # keys in strictly increasing order
    inline: list[bytes | None]  # the value, or None if it is in a data file
    # Paths of the data files that contain values, relative to the database's directory, in the order of first use.
    files: list[str]
    file_ids: NDArray[np.int64]  # index into `files`; 0 if the value is inline
    offsets: NDArray[np.int64]  # offset of the value in the file, in bytes; 0 if the value is inline
    lengths: NDArray[np.int64]  # length of the value in the file, in bytes; 0 if the value is inline
    # Expected CRC-32C of the value; -1 if it is unknown, as for inline values. holdfast writes checksums next to the
    # nodes, because a checksum inside a data file does not prove that the bytes belong to the key.
    checksums: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.keys)

    def part(self, start: int, stop: int) -> Entries:
        """Return the entries at positions ``start`` to ``stop - 1``."""
        columns = (self.file_ids, self.offsets, self.lengths, self.checksums)
        cut = slice(start, stop)
        return Entries(self.keys[cut], self.inline[cut], self.files, *(column[cut] for column in columns))

    def find(self, wanted: list[bytes]) -> list[int]:
        """Return the position of each key, or -1 if it is missing. Equally spaced positions are found faster."""
        keys = self.keys
        if len(wanted) > 1:
            first = bisect_left(keys, wanted[0])
            step = bisect_left(keys, wanted[1]) - first
            stop = first + len(wanted) * step
            if step > 0 and keys[first:stop:step] == wanted:
                return list(range(first, stop, step))
        if len(wanted) * _SEARCHED > len(keys):
            numbers = dict(zip(keys, range(len(keys)), strict=True))
            return [numbers.get(key, -1) for key in wanted]
        positions = [(key, bisect_left(keys, key)) for key in wanted]
        return [position if keys[position : position + 1] == [key] else -1 for key, position in positions]


class Root(NamedTuple):
    """The root node of one version of a database."""

    height: int  # number of levels below the root
    file: str  # path of the file that contains the root node, relative to the database's directory
    base: bytes  # base path, as bytes, to which the paths in the node are relative
    offset: int  # offset of the node in the file, in bytes
    length: int  # size of the node in bytes
    key_count: int  # number of keys in the tree
    tree_bytes: int  # total size of all nodes, in bytes
    value_bytes: int  # total size of all values in data files, in bytes


class NodePlace(NamedTuple):
    """A byte range in a file: the path relative to the database's directory, and the offset and length in bytes."""

    file: str
    offset: int
    length: int


# A function that yields the contents of each byte range in order; it yields fewer bytes if the file ends early.
ReadNodes = Callable[[Sequence[NodePlace]], Iterable[bytes]]
KeyRange = tuple[bytes, bytes]  # inclusive start and exclusive end


def add_early_checksums(nodes: bytes, entries: Entries, source: str) -> None:
    """Read the checksums of the entries from the end of a node file, where earlier holdfast versions wrote them."""
    if nodes.endswith(CHECKSUMS_MAGIC) and entries.checksums.size and entries.checksums.max() < 0:
        outside = np.flatnonzero(entries.lengths)
        end = len(nodes) - len(CHECKSUMS_MAGIC)
        if end < 4 * len(outside):
            raise DamagedCheckpointError(f"{source} is damaged: it lacks the checksums of its {len(outside)} values")
        entries.checksums[outside] = np.frombuffer(nodes, "<u4", len(outside), end - 4 * len(outside))


def decode_manifest(manifest: bytes) -> Root | None:
    cursor = decode_frame(MANIFEST_MAGIC, manifest, MANIFEST_NAME)
    cursor.take(16)
    kind = cursor.varint()
    if kind == _NUMBERED:
        raise FormatVersionError(
            f"{MANIFEST_NAME} belongs to an OCDBT database with numbered manifests, which holdfast does not read; "
            "copy it with TensorStore into a database with a single manifest"
        )
    if kind != SINGLE:
        cursor.fail(f"manifest kind {kind} is not one of 0 (single) and 1 (numbered)")
    cursor.varints(2, (1 << 32) - 1)
    arity_log2 = cursor.byte()
    if not 1 <= arity_log2 <= 16:
        cursor.fail(f"its version tree has an arity of 2**{arity_log2}")
    compression = cursor.varint()
    if compression > 1:
        raise FormatVersionError(
            f"{MANIFEST_NAME} names the compression method {compression}; known are 0 and 1 (zstd)"
        )
    cursor.take(4 * compression)  # skip the zstd level
    root = _decode_versions(cursor, 1 << arity_log2)
    cursor.finish()
    return root


def _decode_versions(cursor: Cursor, arity: int) -> Root | None:
    files = decode_files(cursor, b"")
    count = cursor.varint(arity)
    if not count:
        cursor.fail("it holds no version")
    generations = cursor.varints(count)
    if generations[0] < 1 or (generations[1:] <= generations[:-1]).any():
        cursor.fail("the generations of its versions are not increasing")
    heights = cursor.take(count)
    file_ids = cursor.varints(count, len(files) - 1)
    places = [cursor.wide_varints(count) for _ in range(2)]
    statistics = [int(cursor.wide_varints(count)[-1]) for _ in range(3)]
    cursor.take(8 * count)  # skip the commit times
    older = cursor.varint(64)
    cursor.varints(older)  # skip generations
    cursor.varints(older, len(files) - 1)
    for _ in range(3):  # skip offsets, lengths and numbers of generations
        cursor.varints(older)
    cursor.take(9 * older)  # skip commit times and heights
    offset, length = (int(place[-1]) for place in places)
    if offset == length == MISSING:
        if heights[-1] or statistics[0]:
            cursor.fail("its newest version has keys but no root")
        return None
    if offset + length > INT64_MAX:
        cursor.fail(f"its root lies at offset {offset}, past the end of any file")
    file = files[int(file_ids[-1])]
    return Root(heights[-1], file.path, file.base, offset, length, *statistics)


_ENTRY_BYTES = 100  # approximate memory, in bytes, of an entry without its key and value
_GROWTH = 32  # bytes added to the memory limit for each byte of a node; large databases need about 15
_NODES_AT_A_TIME = 16  # number of nodes read per batch
_NODE_BYTES = 4096  # bytes charged per node in addition to its size; limits the number of tiny nodes


class _Reference(NamedTuple):
    """An unread node, as described by its parent."""

    height: int
    file: str
    base: bytes
    offset: int
    length: int
    prefix: bytes  # common prefix of all keys below the node
    first: bytes  # inclusive lower bound of the keys below the node
    end: bytes | None  # exclusive upper bound of the keys below the node; None if unbounded
    key_count: int  # number of keys below the node

    def place(self, checksums: bool) -> NodePlace:
        """Return the byte range of the node; if ``checksums`` is true, include the checksums that may follow a leaf."""
        more = len(CHECKSUMS_MAGIC) + 4 * min(self.key_count, self.length) if checksums and not self.height else 0
        return NodePlace(self.file, self.offset, self.length + more)


class Database:
    """The newest version of a database. Nodes are read only when their keys are needed.

    A malicious tree can refer to the same node many times, so that a small file describes a huge database. Therefore,
    all nodes count towards a single memory limit, which is raised only for nodes that do not overlap others.

    If ``checksums`` is False, the checksums that holdfast writes after leaf nodes are not read.
    """

    def __init__(self, manifest: bytes, *, memory_limit: int = _MEMORY_LIMIT, checksums: bool = True) -> None:
        self._checksums = checksums
        self._followed: bool | None = None  # whether checksums follow the leaf nodes; set by the first leaf
        root = decode_manifest(manifest)
        self.key_count = 0 if root is None else root.key_count  # number of keys in the tree
        none = np.zeros(0, np.int64)
        self.entries = Entries([], [], [], none, none, none, none)  # the entries decoded so far
        self._unread: list[_Reference] = []  # nodes that have not been read yet, in key order
        if root is not None:
            self._unread.append(_Reference(*root[:5], b"", b"", None, root.key_count))
        self._memory_limit = memory_limit
        self._left = memory_limit
        self._inline: dict[bytes, bytes] = {}  # inline values, interned because many arrays have the same metadata
        self._files: dict[str, int] = {}
        self._read_parts: dict[str, list[tuple[int, int]]] = {}
        self._nodes: list[Entries] = []  # decoded leaf nodes that are not yet in `entries`

    def decode(self, read_nodes: ReadNodes, ranges: Sequence[KeyRange] | None = None) -> None:
        """Decode all nodes that may contain keys in ``ranges`` (None: all nodes); add their entries to `entries`."""
        while positions := self._unread_nodes(ranges):
            self._decode_nodes(positions, read_nodes)
        if not self._nodes:
            return
        # Sorting by first key is enough, because the keys of a node ascend and lie within the bounds set by its parent.
        nodes, decoded, start = [], self.entries, 0
        for node in sorted(self._nodes, key=lambda node: node.keys[0]):
            end = bisect(decoded.keys, node.keys[0])
            nodes += [decoded.part(start, end), node] if start < end else [node]
            start = end
        nodes += [decoded.part(start, len(decoded))] if start < len(decoded) else []
        keys = list(chain.from_iterable(node.keys for node in nodes))
        if not self._unread and len(keys) != self.key_count:
            raise DamagedCheckpointError(
                f"the database is damaged: expected {self.key_count} sorted keys, found {len(keys)}"
            )
        inline = list(chain.from_iterable(node.inline for node in nodes))
        tables = [(node.file_ids, node.offsets, node.lengths, node.checksums) for node in nodes]
        columns = [np.concatenate(column) for column in zip(*tables, strict=True)]
        self.entries = Entries(keys, inline, list(self._files), *columns)
        self._nodes = []

    def _unread_nodes(self, ranges: Sequence[KeyRange] | None) -> list[int]:
        """Return the positions of the unread nodes that may contain keys in ``ranges``; None means all keys."""
        if ranges is None:
            return list(range(len(self._unread)))
        positions = set()
        for first, end in ranges:
            position = max(bisect(self._unread, first, key=attrgetter("first")) - 1, 0)
            while position < len(self._unread) and (node := self._unread[position]).first < end:
                if node.end is None or first < node.end:
                    positions.add(position)
                position += 1
        return sorted(positions)

    def _decode_nodes(self, positions: Sequence[int], read_nodes: ReadNodes) -> None:
        """Decode the unread nodes at the given positions, replacing each with its children; stop at the first error."""
        below: dict[int, list[_Reference]] = {}
        try:
            for start in range(0, len(positions), _NODES_AT_A_TIME):
                batch = positions[start : start + _NODES_AT_A_TIME]
                nodes = [self._unread[position] for position in batch]
                for node in nodes:
                    if node.length > _FRAME_LIMIT:
                        raise DamagedCheckpointError(
                            f"the database is damaged: a node in {node.file} has {node.length} bytes, "
                            f"more than the limit of {_FRAME_LIMIT}"
                        )
                contents = iter(read_nodes([node.place(self._checksums) for node in nodes]))
                for position, node in zip(batch, nodes, strict=True):
                    data, left = next(contents), (self._left, self._memory_limit)
                    try:
                        self._spend(node.length + _NODE_BYTES, node.file)
                        below[position] = self._decode_node(node, data)
                    except BaseException:  # the node may be read again and must not be counted twice
                        if self._memory_limit != left[1]:  # the node has raised the limit
                            self._read_parts[node.file].remove((node.offset, node.offset + node.length))
                        self._left, self._memory_limit = left
                        raise
        finally:
            unread, start = [], 0
            for position, children in below.items():
                unread += [*self._unread[start:position], *children]
                start = position + 1
            self._unread = unread + self._unread[start:]

    def _spend(self, size: int, source: str) -> None:
        self._left -= size
        if self._left < 0:
            raise DamagedCheckpointError(f"{source} describes a database of more than {self._memory_limit} bytes")

    def _grow(self, node: _Reference) -> None:
        """Raise the memory limit for a node unless it overlaps a node that has already been read."""
        parts = self._read_parts.setdefault(node.file, [])
        start, end = node.offset, node.offset + node.length
        position = bisect(parts, (start, end))
        if (position and parts[position - 1][1] > start) or (position < len(parts) and parts[position][0] < end):
            return
        parts.insert(position, (start, end))
        self._left += _GROWTH * node.length
        self._memory_limit += _GROWTH * node.length

    def _decode_node(self, node: _Reference, data: bytes) -> list[_Reference]:
        source = f"the node at offset {node.offset} of {node.file}"
        cursor = decode_frame(NODE_MAGIC, data[: node.length], source)
        self._grow(node)
        self._spend(cursor.remaining, cursor.source)
        height = cursor.byte()
        if height != node.height:
            cursor.fail(f"expected a node of height {node.height}, found {height}")
        files = decode_files(cursor, node.base)
        count = cursor.varint()
        if not count:
            cursor.fail("it has no entries")
        self._spend(count * _ENTRY_BYTES, cursor.source)
        prefix_lengths = cursor.varints(count - 1, KEY_LIMIT)
        suffix_lengths = cursor.varints(count, KEY_LIMIT)
        common = cursor.varints(count, KEY_LIMIT) if height else None
        keys = decode_keys(cursor, prefix_lengths, suffix_lengths, node.prefix, self._left)
        self._spend(len(b"".join(keys)), cursor.source)
        if keys[0] < node.first or (node.end is not None and keys[-1] >= node.end):
            cursor.fail("its keys lie outside the range that its parent gives")
        if common is None:
            self._decode_values(cursor, keys, files, data[node.length :])
            return []
        return self._decode_children(cursor, node, keys, common, files)

    def _decode_values(self, cursor: Cursor, keys: list[bytes], files: list[DataFile], following: bytes) -> None:
        count = len(keys)
        lengths = cursor.varints(count)
        kinds = np.frombuffer(cursor.take(count), np.uint8)
        if kinds.max() > 1:
            cursor.fail(f"the value kind {kinds.max()} is not one of 0 (inline) and 1 (in a data file)")
        outside = np.flatnonzero(kinds)
        local = cursor.varints(len(outside), len(files) - 1)
        file_ids, offsets = np.zeros(count, np.int64), np.zeros(count, np.int64)
        offsets[outside] = cursor.varints(len(outside))
        if (offsets > INT64_MAX - lengths).any():
            cursor.fail("a value lies past the end of any file")
        if len(outside):
            used = np.flatnonzero(np.bincount(local))
            ids = np.zeros(len(files), np.int64)
            ids[used] = [self._files.setdefault(files[i].path, len(self._files)) for i in used.tolist()]
            file_ids[outside] = ids[local]
        sizes = lengths[kinds == 0]
        if sizes.size and int(sizes.max()) > INLINE_LIMIT:
            cursor.fail(f"an inline value has {sizes.max()} bytes; the limit is {INLINE_LIMIT}")
        data = cursor.take(int(sizes.sum()))
        cursor.finish()
        self._spend(len(data), cursor.source)
        first = data[: int(sizes[0])] if sizes.size else b""
        # Usually, all values are equal. Compare the sizes too, because all-zero values may differ only in size.
        if sizes.size and int(sizes.min()) == int(sizes.max()) and data == first * len(sizes):
            inline = [self._inline.setdefault(first, first)] * len(sizes)
        else:
            ends = np.cumsum(sizes)
            parts = [data[start:end] for start, end in zip((ends - sizes).tolist(), ends.tolist(), strict=True)]
            inline = [self._inline.setdefault(value, value) for value in parts]
        values = np.full(count, None, object)
        values[kinds == 0] = inline
        checksums = np.full(count, -1, np.int64)
        followed = following.startswith(CHECKSUMS_MAGIC)
        if self._followed is None:
            self._followed = followed
        if followed != self._followed:
            cursor.fail(f"checksums follow some nodes; after this one, found {following[: len(CHECKSUMS_MAGIC)]!r}")
        if followed:
            if len(following) < len(CHECKSUMS_MAGIC) + 4 * len(outside):
                cursor.fail(f"it lacks the checksums of its {len(outside)} values")
            checksums[outside] = np.frombuffer(following, "<u4", len(outside), len(CHECKSUMS_MAGIC))
        lengths = np.where(kinds, lengths, 0)
        self._nodes.append(Entries(keys, values.tolist(), [], file_ids, offsets, lengths, checksums))

    def _decode_children(
        self, cursor: Cursor, node: _Reference, keys: list[bytes], common: NDArray[np.int64], files: list[DataFile]
    ) -> list[_Reference]:
        count = len(keys)
        if (common + len(node.prefix) > [len(key) for key in keys]).any():
            cursor.fail("the prefix of a child is longer than its key")
        children = [files[file_id] for file_id in cursor.varints(count, len(files) - 1).tolist()]
        offsets, lengths = cursor.varints(count), cursor.varints(count)
        key_counts = cursor.wide_varints(count)
        for _ in range(2):  # skip the total sizes of nodes and of values
            cursor.wide_varints(count)
        cursor.finish()
        if (offsets > INT64_MAX - lengths).any():
            cursor.fail("a child lies past the end of any file")
        prefixes = [key[:size] for key, size in zip(keys, (common + len(node.prefix)).tolist(), strict=True)]
        paths, bases = zip(*children, strict=True)
        places = (paths, bases, offsets.tolist(), lengths.tolist())
        bounds = (prefixes, keys, [*keys[1:], node.end], key_counts.tolist())
        return [_Reference(node.height - 1, *facts) for facts in zip(*places, *bounds, strict=True)]


def decode_frame(magic: int, frame: bytes, source: str) -> Cursor:
    """Verify a frame, decompress its body if necessary, and return a cursor at the start of the body."""
    if len(frame) < SHORTEST_FRAME:
        raise DamagedCheckpointError(f"{source} is damaged: {len(frame)} bytes are too few for an OCDBT frame")
    (start,) = HEAD.unpack_from(frame)
    if start != magic:
        raise DamagedCheckpointError(f"{source} is damaged: expected it to begin with {magic:08x}, found {start:08x}")
    (length,) = LENGTH.unpack_from(frame, HEAD.size)
    if length != len(frame):
        raise DamagedCheckpointError(f"{source} is damaged: expected {length} bytes, found {len(frame)}")
    (stored,) = CHECKSUM.unpack_from(frame, length - CHECKSUM.size)
    content = frame[: -CHECKSUM.size]
    computed = crc32c(content)
    if stored != computed:
        raise DamagedCheckpointError(
            f"{source} is damaged: expected the checksum {stored:08x}, computed {computed:08x} from its bytes"
        )
    cursor = Cursor(content, source)
    cursor.position = HEAD.size + LENGTH.size
    version, compression = cursor.varint(), cursor.varint()
    if version:
        raise FormatVersionError(f"{source} has OCDBT version {version}; this version of holdfast reads version 0")
    if compression == 0:
        return cursor
    if compression != 1:
        raise FormatVersionError(f"{source} is compressed with OCDBT method {compression}; known are 0 and 1 (zstd)")
    try:
        body = decompress(cursor.take(cursor.remaining), _BODY_LIMIT)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{source} is damaged: {error}") from error
    return Cursor(body, source)


class DataFile(NamedTuple):
    """A file in a node's file table. If the file contains nodes, the paths in those nodes are relative to ``base``."""

    path: str
    base: bytes


def decode_files(cursor: Cursor, base: bytes) -> list[DataFile]:
    count = cursor.varint(_FILES_LIMIT)
    if not count:
        return []
    prefixes = [0, *cursor.varints(count - 1, PATH_LIMIT).tolist()]
    suffixes = cursor.varints(count, PATH_LIMIT).tolist()
    bases = cursor.varints(count, PATH_LIMIT).tolist()
    files: list[DataFile] = []
    previous, previous_base, total = b"", b"", 0
    for i in range(count):
        if prefixes[i] > len(previous):
            cursor.fail(f"path {i} of its file table shares {prefixes[i]} bytes with one of {len(previous)}")
        path = previous[: prefixes[i]] + cursor.take(suffixes[i])
        total += len(path)
        if len(base) + len(path) > PATH_LIMIT or total > _TABLE_LIMIT:
            cursor.fail("the paths of its file table are too long")
        if bases[i] > len(path):
            cursor.fail(f"path {i} of its file table is shorter than its base path")
        path_base = path[: bases[i]]
        if prefixes[i] > min(bases[i], len(previous_base)) and path_base != previous_base:
            cursor.fail(f"path {i} of its file table does not share the base path it announces")
        try:
            text = (base + path).decode()
        except UnicodeDecodeError:
            cursor.fail(f"the path {base + path!r} in its file table is not UTF-8")
        if text and not is_inside(text):  # in an empty database, the missing root has an empty path
            cursor.fail(f"the path {text!r} in its file table leads out of the directory")
        files.append(DataFile(text, base + path_base))
        previous, previous_base = path, path_base
    return files


def decode_keys(
    cursor: Cursor, prefix_lengths: NDArray[np.int64], suffix_lengths: NDArray[np.int64], prefix: bytes, limit: int
) -> list[bytes]:
    """Rebuild each key from the prefix that it shares with the previous key and the suffix stored in the node."""
    lengths = suffix_lengths.copy()
    lengths[1:] += prefix_lengths
    if (prefix_lengths > lengths[:-1]).any():
        cursor.fail("a key shares more bytes with the key before it than that one has")
    if len(prefix) + int(lengths.max()) > KEY_LIMIT:
        cursor.fail(f"a key has more than {KEY_LIMIT} bytes")
    if int(lengths.sum()) + len(prefix) * len(lengths) > limit:
        cursor.fail(f"its keys take more than {limit} bytes")
    data = cursor.take(int(suffix_lengths.sum()))
    ends = np.cumsum(suffix_lengths)
    shared = [len(prefix), *(prefix_lengths + len(prefix)).tolist()]
    key = prefix
    spans = zip(shared, (ends - suffix_lengths).tolist(), ends.tolist(), strict=True)
    keys = [key := key[:size] + data[start:end] for size, start, end in spans]
    if not all(map(lt, keys, islice(keys, 1, None))):
        cursor.fail("its keys are not strictly increasing")
    return keys
