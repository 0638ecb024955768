"""Tables of chunks: where in the data files they lie, and which array's they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks in data files, one element of every column for each.

    Attributes:
        files: Paths of data files.
        file_ids: Index into ``files``.
        offsets: First byte in the file.
        lengths: Number of bytes.
        arrays: The wanted array that each belongs to, as the caller counts them.
        numbers: The chunk's number in its array's grid.
        kept: Whether the caller keeps views of the bytes, so that they need memory of their own.
    """

    files: Sequence[str]
    file_ids: Column
    offsets: Column
    lengths: Column
    arrays: Column
    numbers: Column
    kept: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.offsets)

    def file(self, row: int) -> str:
        """Returns the path of the file that a chunk lies in."""
        return self.files[int(self.file_ids[row])]

    def take(self, rows: NDArray[Any]) -> Chunks:
        """Returns some of the chunks.

        Args:
            rows: Their positions, or for every chunk whether it is one of them.
        """
        return Chunks(
            files=self.files,
            file_ids=self.file_ids[rows],
            offsets=self.offsets[rows],
            lengths=self.lengths[rows],
            arrays=self.arrays[rows],
            numbers=self.numbers[rows],
            kept=self.kept[rows],
        )

    def sorted(self) -> Chunks:
        """Returns the chunks file by file, in the order in which they lie there."""
        return self.take(np.lexsort((self.offsets, self.file_ids)))


def plausible(chunks: Chunks, sizes: Mapping[str, int], failed: Callable[[int, str], None]) -> Chunks:
    """Returns the chunks that lie in their files and share no byte with another one.

    So an index cannot make us read more than there is, nor take memory for it.

    Args:
        chunks: Sorted chunks.
        sizes: Bytes of every file, less than 2**63; chunks of files that are not here are left out without a word.
        failed: Called for every other chunk that is left out, with its position and what is wrong.
    """
    limits = np.array([sizes.get(path, -1) for path in chunks.files] or [0], np.int64)[chunks.file_ids]
    ends = chunks.offsets + chunks.lengths
    fits = ends <= limits
    overlaps = (chunks.file_ids[1:] == chunks.file_ids[:-1]) & (chunks.offsets[1:] < ends[:-1])
    if fits.all() and not overlaps.any():
        return chunks
    good = []
    file, reached = -1, 0
    for row in np.flatnonzero(limits >= 0).tolist():
        if chunks.file_ids[row] != file:
            file, reached = int(chunks.file_ids[row]), 0
        if chunks.offsets[row] < reached:
            failed(row, "a chunk shares bytes with another one")
            continue
        reached = int(ends[row])
        if fits[row]:
            good.append(row)
        else:
            size = int(limits[row])
            failed(row, f"it is truncated or the index is wrong: a chunk ends at {reached}, the file has {size} bytes")
    return chunks.take(np.array(good, np.int64))
