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
    from numpy.typing import NDArray

    from .ocdbt_entries import Entries

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


def encode_leaves(entries: Entries, node_limit: int) -> tuple[list[bytes], Nodes]:
    """Encodes all entries as leaf nodes.

    Args:
        entries: What to store, checked, with at least one key.
        node_limit: Bytes that a node should not pass; a node with one entry may.

    Returns:
        The encoded nodes, and what their parents say of them; offsets begin at 0.
    """
    shared = shared_prefixes(entries.keys)
    outside = np.array([value is None for value in entries.inline], bool)
    sizes = np.array([0 if value is None else len(value) for value in entries.inline], np.int64)
    lengths = np.where(outside, entries.lengths, sizes)
    new_file = outside.copy()  # an upper bound: where the file is another one than that of the value before
    changes = np.flatnonzero(outside)
    new_file[changes[1:]] = np.diff(entries.file_ids[changes]) != 0
    path_sizes = np.array([len(path.encode()) + 8 for path in entries.files] or [0], np.int64)
    costs = varint_sizes(lengths) + 1 + sizes
    costs += np.where(outside, varint_sizes(entries.file_ids) + varint_sizes(entries.offsets), 0)
    costs += np.where(new_file, path_sizes[np.where(outside, entries.file_ids, 0)], 0)
    extra = int(path_sizes.max())  # the file of a node's first value may have been used before
    bodies = []
    bounds = _split(entries.keys, shared, costs, node_limit - extra, 1)
    for start, stop in bounds:
        mask = outside[start:stop]
        used, ids = np.unique(entries.file_ids[start:stop][mask], return_inverse=True)
        bodies.append(
            b"".join(
                (
                    b"\0",
                    encode_files([entries.files[i] for i in used.tolist()]),
                    *_encode_keys(entries.keys, shared, start, stop),
                    encode_varints(lengths[start:stop]),
                    mask.astype(np.uint8).tobytes(),
                    encode_varints(ids),
                    encode_varints(entries.offsets[start:stop][mask]),
                    *(value for value in entries.inline[start:stop] if value is not None),
                )
            )
        )
    totals = np.cumsum(np.where(outside, lengths, 0))
    frames = [encode_frame(NODE_MAGIC, body) for body in bodies]
    sizes = np.array([len(frame) for frame in frames], np.int64)
    ends = np.array([stop for _, stop in bounds], np.int64) - 1
    return frames, Nodes(
        height=0,
        keys=[entries.keys[start] for start, _ in bounds],
        offsets=np.cumsum(sizes) - sizes,
        lengths=sizes,
        key_counts=np.diff(ends, prepend=-1),
        tree_bytes=sizes,
        value_bytes=np.diff(totals[ends], prepend=0),
    )


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
