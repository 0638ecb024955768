"""Columns that hold sorted keys: each key without the prefix that it shares with the one before.

https://google.github.io/tensorstore/kvstore/ocdbt/index.html#b-tree-node-format
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .ocdbt_entries import KEY_LIMIT, is_increasing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .cursor import Cursor


def shared_prefixes(keys: list[bytes]) -> NDArray[np.int64]:
    """Counts the bytes that each key shares with the key before it.

    Args:
        keys: The keys.

    Returns:
        A number for each key; 0 for the first.
    """
    shared = np.zeros(len(keys), np.int64)
    if len(keys) < 2:
        return shared
    lengths = np.array([len(key) for key in keys], np.int64)
    starts = np.cumsum(lengths) - lengths
    # Eight bytes at a time, at any offset: a strided view of the joined keys as overlapping 64-bit words.
    joined = b"".join((*keys, bytes(8)))
    words: NDArray[np.uint64] = np.ndarray((len(joined) - 7,), "<u8", joined, strides=(1,))
    limits = np.minimum(lengths[1:], lengths[:-1])
    pairs = np.flatnonzero(limits)
    done = 0
    while pairs.size:
        differ = words[starts[pairs] + done] ^ words[starts[pairs + 1] + done]
        lowest = differ & (~differ + np.uint64(1))  # only the lowest bit that differs
        equal = np.where(differ == 0, 8, np.searchsorted(_LOWEST_BITS, lowest, "right") - 1)
        found = np.minimum(done + equal, limits[pairs])
        shared[pairs + 1] = found
        done += 8
        pairs = pairs[found >= done]
    return shared


_LOWEST_BITS = np.uint64(1) << np.arange(0, 64, 8, dtype=np.uint64)


def decode_keys(
    cursor: Cursor, prefix_lengths: NDArray[np.int64], suffix_lengths: NDArray[np.int64], prefix: bytes, limit: int
) -> list[bytes]:
    """Puts keys together from the suffixes that follow in a node.

    Args:
        cursor: Where the suffixes start.
        prefix_lengths: Bytes that each key but the first shares with the one before.
        suffix_lengths: Bytes of each key that follow the shared ones.
        prefix: What all keys of the node begin with.
        limit: Bytes that the keys may take together.

    Returns:
        The keys, strictly increasing.

    Raises:
        DamagedCheckpointError: The lengths contradict each other or exceed the limits, or the keys are not sorted.
    """
    lengths = suffix_lengths.copy()
    lengths[1:] += prefix_lengths
    if (prefix_lengths > lengths[:-1]).any():
        cursor.fail("a key shares more bytes with the key before it than that one has")
    if len(prefix) + int(lengths.max()) > KEY_LIMIT:
        cursor.fail(f"a key has more than {KEY_LIMIT} bytes")
    if int(lengths.sum()) + len(prefix) * len(lengths) > limit:
        cursor.fail(f"its keys take more than {limit} bytes")
    data = cursor.take(int(suffix_lengths.sum()))
    keys: list[bytes] = []
    key, start, common = prefix, 0, len(prefix)
    for shared, size in zip([0, *prefix_lengths.tolist()], suffix_lengths.tolist(), strict=True):
        key = key[: common + shared] + data[start : start + size]
        start += size
        keys.append(key)
    if not is_increasing(keys):
        cursor.fail("its keys are not strictly increasing")
    return keys
