"""Reading of an OCDBT B+tree, from its root down.

https://google.github.io/tensorstore/kvstore/ocdbt/index.html#b-tree-node-format
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DamagedCheckpointError
from .cursor import INT64_MAX, Cursor
from .ocdbt_columns import decode_keys
from .ocdbt_entries import INLINE_LIMIT, KEY_LIMIT, Entries, is_increasing
from .ocdbt_files import DataFile, decode_files
from .ocdbt_frames import FRAME_LIMIT, NODE_MAGIC, decode_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .ocdbt_manifest import Root

_ENTRY_BYTES = 100
"""Roughly what one entry takes in memory besides its key and value."""
_GROWTH = 32
"""Bytes a database may take for each byte of its nodes, besides the limit; in a large one, entries have some 15."""
_NODE_BYTES = 4096
"""What reading a node counts besides its size; it bounds how many tiny nodes, and so how much time, a tree can take."""


@dataclass(frozen=True, slots=True)
class _Reference:
    """A node that is still to be read, and what its parent says of it."""

    height: int
    file: str
    base: bytes
    offset: int
    length: int
    prefix: bytes  # what all keys below begin with
    first: bytes  # the keys below are not smaller than this,
    end: bytes | None  # and smaller than this; None: no bound


class TreeReader:
    """Collects the entries of a tree.

    A hostile tree can refer to one node many times, so that a small file describes a huge database: everything that
    is read is counted against one limit, which only nodes that lie apart from all others raise.

    Args:
        read_node: Reads bytes: (file, offset, length) -> exactly `length` bytes.
        memory_limit: Bytes that nodes and entries may take together, besides what grows with the size of the file; a
            node counts for 4 KiB more than its size.
    """

    def __init__(self, read_node: Callable[[str, int, int], bytes], memory_limit: int) -> None:
        self._read_node = read_node
        self._memory_limit = memory_limit
        self._left = memory_limit
        self._keys: list[bytes] = []
        self._inline: list[bytes | None] = []
        self._known: dict[bytes, bytes] = {}  # inline values: most arrays of a tree have the same metadata
        self._files: dict[str, int] = {}
        self._read_parts: dict[str, list[tuple[int, int]]] = {}
        self._columns: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []

    def read(self, root: Root) -> Entries:
        """Reads all entries below a root.

        Args:
            root: The root.

        Returns:
            The entries.

        Raises:
            DamagedCheckpointError: A node does not pass its checks, or the tree exceeds the memory limit.
        """
        pending = [_Reference(root.height, root.file, root.base, root.offset, root.length, b"", b"", None)]
        while pending:
            node = pending.pop()
            if node.length > FRAME_LIMIT:
                raise DamagedCheckpointError(
                    f"the database is damaged: a node in {node.file} has {node.length} bytes, "
                    f"more than the limit of {FRAME_LIMIT}"
                )
            self._spend(node.length + _NODE_BYTES, node.file)
            data = self._read_node(node.file, node.offset, node.length)
            cursor = decode_frame(NODE_MAGIC, data, f"the node at offset {node.offset} of {node.file}")
            self._grow(node)
            pending.extend(reversed(self._decode_node(cursor, node)))
        if not is_increasing(self._keys) or len(self._keys) != root.key_count:
            raise DamagedCheckpointError(
                f"the database is damaged: expected {root.key_count} sorted keys, found {len(self._keys)}"
            )
        file_ids, offsets, lengths = (np.concatenate(column) for column in zip(*self._columns, strict=True))
        return Entries(self._keys, self._inline, list(self._files), file_ids, offsets, lengths)

    def _spend(self, size: int, source: str) -> None:
        self._left -= size
        if self._left < 0:
            raise DamagedCheckpointError(f"{source} describes a database of more than {self._memory_limit} bytes")

    def _grow(self, node: _Reference) -> None:
        """Raises the limit by what a node may take that shares no bytes with those before."""
        parts = self._read_parts.setdefault(node.file, [])
        start, end = node.offset, node.offset + node.length
        position = bisect(parts, (start, end))
        if (position and parts[position - 1][1] > start) or (position < len(parts) and parts[position][0] < end):
            return
        parts.insert(position, (start, end))
        self._left += _GROWTH * node.length
        self._memory_limit += _GROWTH * node.length

    def _decode_node(self, cursor: Cursor, node: _Reference) -> list[_Reference]:
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
        self._spend(sum(map(len, keys)), cursor.source)
        if keys[0] < node.first or (node.end is not None and keys[-1] >= node.end):
            cursor.fail("its keys lie outside the range that its parent gives")
        if common is None:
            self._decode_values(cursor, keys, files)
            return []
        return self._decode_children(cursor, node, keys, common, files)

    def _decode_values(self, cursor: Cursor, keys: list[bytes], files: list[DataFile]) -> None:
        count = len(keys)
        lengths = cursor.varints(count)
        kinds = cursor.column(count)
        if kinds.max() > 1:
            cursor.fail(f"the value kind {kinds.max()} is not one of 0 (inline) and 1 (in a data file)")
        places = np.flatnonzero(kinds)
        local = cursor.varints(len(places), len(files) - 1)
        file_ids, offsets = np.zeros(count, np.int64), np.zeros(count, np.int64)
        offsets[places] = cursor.varints(len(places))
        if (offsets > INT64_MAX - lengths).any():
            cursor.fail("a value lies where no file reaches")
        if len(places):
            used = np.unique(local)
            ids = np.zeros(len(files), np.int64)
            ids[used] = [self._files.setdefault(files[i].path, len(self._files)) for i in used.tolist()]
            file_ids[places] = ids[local]
        sizes = lengths[kinds == 0]
        if sizes.size and int(sizes.max()) > INLINE_LIMIT:
            cursor.fail(f"an inline value has {sizes.max()} bytes; the limit is {INLINE_LIMIT}")
        data = cursor.take(int(sizes.sum()))
        cursor.finish()
        self._spend(len(data), cursor.source)
        values: list[bytes | None] = [None] * count
        start = 0
        known = self._known
        for i, size in zip(np.flatnonzero(kinds == 0).tolist(), sizes.tolist(), strict=True):
            value = data[start : start + size]
            values[i] = known.setdefault(value, value)
            start += size
        self._keys += keys
        self._inline += values
        self._columns.append((file_ids, offsets, np.where(kinds, lengths, 0)))

    def _decode_children(
        self, cursor: Cursor, node: _Reference, keys: list[bytes], common: NDArray[np.int64], files: list[DataFile]
    ) -> list[_Reference]:
        count = len(keys)
        if (common + len(node.prefix) > [len(key) for key in keys]).any():
            cursor.fail("the prefix of a child is longer than its key")
        file_ids = cursor.varints(count, len(files) - 1).tolist()
        offsets, lengths = cursor.varints(count), cursor.varints(count)
        for _ in range(3):  # numbers of keys, bytes of the tree, bytes of values
            cursor.wide_varints(count)
        cursor.finish()
        if (offsets > INT64_MAX - lengths).any():
            cursor.fail("a child lies where no file reaches")
        return [
            _Reference(
                node.height - 1,
                files[file].path,
                files[file].base,
                offset,
                length,
                prefix=key[: len(node.prefix) + shared],
                first=key,
                end=end,
            )
            for key, end, shared, file, offset, length in zip(
                keys,
                [*keys[1:], node.end],
                common.tolist(),
                file_ids,
                offsets.tolist(),
                lengths.tolist(),
                strict=True,
            )
        ]
