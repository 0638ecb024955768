"""Encoding of the nodes of an OCDBT B+tree.

https://google.github.io/tensorstore/kvstore/ocdbt/index.html#b-tree-node-format
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .ocdbt_columns import shared_prefixes
from .ocdbt_files import encode_files
from .ocdbt_frames import NODE_MAGIC, encode_frame
from .varint import encode_varint, encode_varints, varint_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .ocdbt_rows import Rows

_FIXED = 64
"""Bytes of a node that do not depend on its entries, at most."""
_ARITY_LIMIT = 1 << 20
"""Entries of a node that TensorStore accepts, at most."""


@dataclass(slots=True)
class Nodes:
    """The nodes of one level, lowest keys first; one element per node.

    Attributes:
        height: 0 for leaves.
        keys: The first key below each node.
        offsets: Where each node starts in the node file, in bytes.
        lengths: Size of each node, in bytes.
        key_counts: Keys below each node.
        tree_bytes: Size of each node and of all nodes below it.
        value_bytes: Size of all values that lie in data files.
    """

    height: int
    keys: list[bytes]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    key_counts: NDArray[np.int64]
    tree_bytes: NDArray[np.int64]
    value_bytes: NDArray[np.int64]


def encode_leaves(rows: Rows, node_limit: int, offset: int = 0) -> tuple[list[bytes], Nodes]:
    """Encodes rows as leaf nodes.

    Args:
        rows: What to store; at least one.
        node_limit: Bytes that a node should not pass; a node with one row may.
        offset: Where the nodes will lie in the node file, in bytes.

    Returns:
        The encoded nodes, and what their parents say of them.
    """
    suffix_sizes = np.diff(rows.suffix_ends, prepend=0)
    inline_ends = np.cumsum(~rows.outside)  # inline values up to and including each row
    inline_sizes = np.where(rows.outside, 0, rows.lengths)
    costs = varint_sizes(rows.shared) + varint_sizes(suffix_sizes) + suffix_sizes
    costs += varint_sizes(rows.lengths) + 1 + inline_sizes
    costs += np.where(rows.outside, len(encode_varint(len(rows.files))) + varint_sizes(rows.offsets), 0)
    ends = np.cumsum(costs)
    frames: list[bytes] = []
    keys: list[bytes] = []
    bounds = [0]
    while bounds[-1] < len(rows):
        start = bounds[-1]
        key = rows.key(start)
        stop, table, file_ids = _leaf_end(rows, ends, start, node_limit - _FIXED - int(rows.shared[start]))
        outside = rows.outside[start:stop]
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
            encode_varints(rows.lengths[start:stop]),
            outside.astype(np.uint8).tobytes(),
            encode_varints(file_ids),
            encode_varints(rows.offsets[start:stop][outside]),
            *rows.inline[first_inline : int(inline_ends[stop - 1])],
        )
        frames.append(encode_frame(NODE_MAGIC, b"".join(body)))
        keys.append(key)
        bounds.append(stop)
    sizes = np.array([len(frame) for frame in frames], np.int64)
    return frames, Nodes(
        height=0,
        keys=keys,
        offsets=offset + np.cumsum(sizes) - sizes,
        lengths=sizes,
        key_counts=np.diff(bounds),
        tree_bytes=sizes,
        value_bytes=np.add.reduceat(np.where(rows.outside, rows.lengths, 0), bounds[:-1]),
    )


def _leaf_end(rows: Rows, ends: NDArray[np.int64], start: int, room: int) -> tuple[int, bytes, NDArray[np.int64]]:
    """Decides where the leaf node ends that begins with row `start`.

    Args:
        rows: All rows.
        ends: Encoded bytes of all rows up to and including each.
        start: The first row.
        room: Bytes that the node should take at most, with its table of files.

    Returns:
        The row after the last one, the table of files, and the index into that of each value outside.
    """
    spent = int(ends[start - 1]) if start else 0
    reserve = 0  # for the table, which is only known once the rows are
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


def join_levels(levels: Sequence[Nodes]) -> Nodes:
    """Joins stretches of one level, lowest keys first; at least one."""
    if len(levels) == 1:
        return levels[0]
    columns = zip(
        *((n.offsets, n.lengths, n.key_counts, n.tree_bytes, n.value_bytes) for n in levels),
        strict=True,
    )
    return Nodes(levels[0].height, [key for level in levels for key in level.keys], *map(np.concatenate, columns))


def encode_parents(below: Nodes, node_file: str, node_limit: int) -> tuple[list[bytes], Nodes]:
    """Encodes the level of interior nodes above another level.

    Args:
        below: The level of the children.
        node_file: The file that holds all nodes.
        node_limit: Bytes that a node should not pass; a node with two children may.

    Returns:
        The encoded nodes, which belong right after the nodes of `below`, and what their parents say of them.
    """
    shared = shared_prefixes(below.keys)
    columns = (below.offsets, below.lengths, below.key_counts, below.tree_bytes, below.value_bytes)
    costs = sum((varint_sizes(column) for column in columns), np.full(len(below.keys), 2, np.int64))
    table = encode_files([node_file])
    bounds = _split(below.keys, shared, costs, node_limit - len(table), 2)
    frames = []
    for start, stop in bounds:
        count = stop - start
        counts, prefixes, suffixes, text = _encode_keys(below.keys, shared, start, stop)
        body = (bytes([below.height + 1]), table, counts, prefixes, suffixes, bytes(count), text, bytes(count))
        frames.append(encode_frame(NODE_MAGIC, b"".join((*body, *(encode_varints(c[start:stop]) for c in columns)))))
    sizes = np.array([len(frame) for frame in frames], np.int64)
    starts = [start for start, _ in bounds]
    return frames, Nodes(
        height=below.height + 1,
        keys=[below.keys[start] for start in starts],
        offsets=below.offsets[-1] + below.lengths[-1] + np.cumsum(sizes) - sizes,
        lengths=sizes,
        key_counts=np.add.reduceat(below.key_counts, starts),
        tree_bytes=np.add.reduceat(below.tree_bytes, starts) + sizes,
        value_bytes=np.add.reduceat(below.value_bytes, starts),
    )


def _encode_keys(keys: list[bytes], shared: NDArray[np.int64], start: int, stop: int) -> tuple[bytes, ...]:
    """Returns the columns count, prefix lengths, suffix lengths and suffixes of the keys of one node."""
    prefixes = shared[start:stop].copy()
    prefixes[0] = 0
    suffixes = [key[size:] for key, size in zip(keys[start:stop], prefixes.tolist(), strict=True)]
    sizes = np.array([len(suffix) for suffix in suffixes], np.int64)
    return encode_varint(stop - start), encode_varints(prefixes[1:]), encode_varints(sizes), b"".join(suffixes)


def _split(
    keys: list[bytes], shared: NDArray[np.int64], costs: NDArray[Any], limit: int, fewest: int
) -> list[tuple[int, int]]:
    """Divides a level into nodes: (start, stop) of each, with at least `fewest` entries in all but a last one.

    Args:
        keys: The keys of the entries.
        shared: Bytes that each key shares with the one before.
        costs: Encoded size of each entry without its key.
        limit: Bytes that the entries of one node should take at most.
        fewest: Entries that a node has at least, whatever their size.
    """
    lengths = np.array([len(key) for key in keys], np.int64)
    ends = np.cumsum(costs + varint_sizes(lengths) * 2 + lengths - shared)
    bounds = []
    start, count = 0, len(keys)
    while start < count:
        spent = int(ends[start - 1]) if start else 0
        room = limit - _FIXED - int(shared[start])
        stop = int(np.searchsorted(ends, spent + room, "right"))
        stop = min(max(stop, start + fewest), start + _ARITY_LIMIT, count)
        bounds.append((start, stop))
        start = stop
    return bounds
