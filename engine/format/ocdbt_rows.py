"""Sorted keys and values as columns: what the leaf nodes of an OCDBT B+tree are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .ocdbt_columns import shared_prefixes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from .ocdbt_entries import Entries


@dataclass(slots=True, eq=False)
class Rows:
    """A stretch of a database, one element per key in every array.

    Attributes:
        key: Gives the key of a row.
        shared: Bytes that each key shares with the one before; 0 for the first.
        suffix_ends: Where the bytes of each key that follow the shared ones end in `text`.
        text: Those bytes of all keys, joined.
        outside: Whether the value lies in a data file.
        lengths: Bytes of the value, wherever it lies.
        file_ids: Index into `files`; any where the value is inline.
        offsets: Where the value starts in its file, in bytes; any where it is inline.
        inline: The values that are inline, in order.
        files: Paths of the data files, relative to the directory of the database.
    """

    key: Callable[[int], bytes]
    shared: NDArray[np.integer]
    suffix_ends: NDArray[np.int64]
    text: bytes
    outside: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    file_ids: NDArray[np.integer]
    offsets: NDArray[np.int64]
    inline: Sequence[bytes]
    files: Sequence[str]

    def __len__(self) -> int:
        return len(self.shared)


def rows_of(entries: Entries) -> Rows:
    """Turns entries into columns.

    Args:
        entries: The entries, checked.

    Returns:
        The rows of all of them.
    """
    keys = entries.keys
    shared = shared_prefixes(keys)
    suffixes = [key[size:] for key, size in zip(keys, shared.tolist(), strict=True)]
    inline = [value for value in entries.inline if value is not None]
    outside = np.array([value is None for value in entries.inline], bool)
    lengths = entries.lengths.astype(np.int64)
    lengths[~outside] = [len(value) for value in inline]
    return Rows(
        key=keys.__getitem__,
        shared=shared,
        suffix_ends=np.cumsum([len(suffix) for suffix in suffixes], dtype=np.int64),
        text=b"".join(suffixes),
        outside=outside,
        lengths=lengths,
        file_ids=entries.file_ids,
        offsets=entries.offsets,
        inline=inline,
        files=entries.files,
    )
