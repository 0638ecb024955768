"""What an OCDBT database holds: sorted keys, each with a value or with the place of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from operator import lt
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEY_LIMIT = 65535
"""Bytes of the longest key."""
INLINE_LIMIT = 1 << 20
"""Bytes of the longest value that can lie inside a node."""
PATH_LIMIT = 65535
"""Bytes of the longest path of a data file."""


def _nothing() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class Entries:
    """The content of a database, one element per key in every list and array but `files`.

    Attributes:
        keys: The keys, strictly increasing.
        inline: The value itself, or None where the value lies in a data file.
        files: Paths of the data files, relative to the directory of the database. A decoded database lists those
            that hold a value, in the order of their first one.
        file_ids: Index into `files`; 0 where the value is inline.
        offsets: Where the value starts in its file, in bytes; 0 where it is inline.
        lengths: Size of the value in its file, in bytes; 0 where it is inline.
    """

    keys: list[bytes] = field(default_factory=list)
    inline: list[bytes | None] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    file_ids: NDArray[np.int64] = field(default_factory=_nothing)
    offsets: NDArray[np.int64] = field(default_factory=_nothing)
    lengths: NDArray[np.int64] = field(default_factory=_nothing)

    def __len__(self) -> int:
        return len(self.keys)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Entries):
            return NotImplemented
        return (
            self.keys == other.keys
            and self.inline == other.inline
            and self.files == other.files
            and np.array_equal(self.file_ids, other.file_ids)
            and np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self.lengths, other.lengths)
        )

    def check(self) -> None:
        """Raises ValueError where the entries cannot be stored."""
        count = len(self.keys)
        sizes = (len(self.inline), len(self.file_ids), len(self.offsets), len(self.lengths))
        if any(size != count for size in sizes):
            raise ValueError(f"{count} keys need as many values, file ids, offsets and lengths, not {sizes}")
        if not is_increasing(self.keys):
            raise ValueError("the keys of a database must be strictly increasing")
        longest = max(map(len, self.keys), default=0)
        if longest > KEY_LIMIT:
            raise ValueError(f"a key has {longest} bytes; the limit is {KEY_LIMIT}")
        largest = max((len(value) for value in self.inline if value is not None), default=0)
        if largest > INLINE_LIMIT:
            raise ValueError(f"an inline value has {largest} bytes; the limit is {INLINE_LIMIT}")
        for path in self.files:
            if not is_inside(path):
                raise ValueError(f"the path {path!r} of a data file leads out of the directory of the database")
        outside = np.array([value is None for value in self.inline], bool)
        if not outside.any():
            return
        file_ids, offsets, lengths = self.file_ids[outside], self.offsets[outside], self.lengths[outside]
        if file_ids.min() < 0 or file_ids.max() >= len(self.files):
            raise ValueError(f"a file id is not between 0 and {len(self.files) - 1}")
        if offsets.min() < 0 or lengths.min() < 0 or (offsets > np.iinfo(np.int64).max - lengths).any():
            raise ValueError("an offset or a length is negative or too large")


def is_inside(path: str) -> bool:
    """Whether a path is relative, and stays below the directory that it is relative to."""
    return not ("\\" in path or "\0" in path or any(part in ("", ".", "..") for part in path.split("/")))


def is_increasing(keys: list[bytes]) -> bool:
    """Whether each key is greater than the one before."""
    return all(map(lt, keys, islice(keys, 1, None)))
