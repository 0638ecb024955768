"""The index over the chunks of many zarr arrays, encoded from columns.

An index of ten million chunks has as many keys; none of them becomes a Python object here. Arrays of the same grid have
the same keys after their names, so that keys are laid out once for each grid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .ocdbt_read import INLINE_LIMIT, KEY_LIMIT
from .ocdbt_write import Rows, encode_database, shared_prefixes
from .zarr import chunk_keys, metadata_key

Grid = tuple[int, ...]

_BATCH = 1 << 20  # keys that are laid out in memory at a time, unless a single array has more


def key_order(names: Sequence[str]) -> list[int]:
    """Return the positions of arrays in the order of their keys."""
    return sorted(range(len(names)), key=[_prefix(name) for name in names].__getitem__)


@dataclass(frozen=True, slots=True, eq=False)
class ArrayIndex:
    """Where the chunks of arrays lie: sequences with an element for each array, columns with one for each chunk."""

    names: Sequence[str]  # the names of the arrays in the order of `key_order`; all are different
    grids: Sequence[Grid]  # how many chunks each has along each axis
    metadata: Sequence[bytes]  # the ``zarr.json`` of each
    files: Sequence[str]  # paths of the data files, relative to the directory of the database
    # Index into `files`. Chunks are in the order of the arrays, those of one array in C order.
    file_ids: NDArray[np.integer]
    offsets: NDArray[np.int64]  # where the chunk starts in its file, in bytes
    lengths: NDArray[np.int64]  # size of the chunk in its file, in bytes
    checksums: NDArray[np.uint32]  # CRC-32C of the chunk in its file, without the checksum that follows it there
    # The number of the first chunk of each array, and the number of all chunks.
    starts: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        counts = {grid: int(np.prod(grid, dtype=np.int64)) for grid in set(self.grids)}
        starts = np.zeros(len(self.grids) + 1, np.int64)
        np.cumsum([counts[grid] for grid in self.grids], out=starts[1:])
        object.__setattr__(self, "starts", starts)
        if {len(self.file_ids), len(self.offsets), len(self.lengths), len(self.checksums)} != {int(starts[-1])}:
            raise ValueError(f"the arrays have {starts[-1]} chunks, but the columns have other lengths")

    def encode(
        self, *, node_file: str, database_id: bytes, created_ns: int, node_limit: int = 1 << 20
    ) -> tuple[bytes, bytes]:
        """Encode the index as an OCDBT database; return its manifest and its node file."""
        return encode_database(
            self._batches(), node_file=node_file, database_id=database_id, created_ns=created_ns, node_limit=node_limit
        )

    def _batches(self) -> Iterator[Rows]:
        templates: dict[Grid, _Template] = {}
        first = 0
        while first < len(self.names):
            # At least one array; an array has one key more than it has chunks.
            ends = self.starts[first + 1 :] - self.starts[first] + np.arange(1, len(self.names) - first + 1)
            last = first + max(1, int(np.searchsorted(ends, _BATCH, "right")))
            grids = set(self.grids[first:last])
            templates = {grid: templates.get(grid) or _Template(grid) for grid in grids}
            yield self._rows(first, last, templates)
            first = last

    def _rows(self, first: int, last: int, templates: dict[Grid, _Template]) -> Rows:
        """Lay out the keys of some arrays: those of the chunks, sorted as text, then the key of the metadata."""
        grids, metadata = self.grids[first:last], self.metadata[first:last]
        prefixes = [_prefix(name) for name in self.names[first:last]]
        prefix_sizes = np.array([len(prefix) for prefix in prefixes], np.int64)
        common = shared_prefixes(prefixes)  # no prefix begins with another one
        bases = self.starts[first:last]
        begins = bases - bases[0] + np.arange(last - first)
        total = int(self.starts[last] - bases[0]) + last - first
        shared, sizes = np.empty(total, np.int32), np.empty(total, np.int64)
        file_ids, offsets, lengths = np.zeros(total, np.int32), np.zeros(total, np.int64), np.empty(total, np.int64)
        checksums = np.zeros(total, np.uint32)
        outside = np.ones(total, bool)
        groups: dict[Grid, list[int]] = {}
        for position, grid in enumerate(grids):
            groups.setdefault(grid, []).append(position)
        for grid, positions in groups.items():
            template = templates[grid]
            members = np.array(positions)
            rows = begins[members][:, None] + np.arange(len(template.keys))
            chunks = bases[members][:, None] + template.order
            shared[rows] = template.shared + prefix_sizes[members][:, None]
            sizes[rows] = template.sizes
            for column, source in (
                (file_ids, self.file_ids),
                (offsets, self.offsets),
                (lengths, self.lengths),
                (checksums, self.checksums),
            ):
                column[rows[:, :-1]] = source[chunks]
            if template.longest + int(prefix_sizes[members].max()) > KEY_LIMIT:
                raise ValueError(f"a key has more than {KEY_LIMIT} bytes")
        shared[begins] = common
        sizes[begins] += prefix_sizes - common
        ends = np.append(begins[1:], total) - 1
        outside[ends] = False
        lengths[ends] = [len(text) for text in metadata]
        if max(map(len, metadata)) > INLINE_LIMIT:
            raise ValueError(f"the metadata of an array has more than {INLINE_LIMIT} bytes")

        def key(row: int) -> bytes:
            position = int(np.searchsorted(begins, row, "right")) - 1
            return prefixes[position] + templates[grids[position]].keys[row - int(begins[position])]

        texts: list[bytes] = []
        for prefix, size, grid in zip(prefixes, common.tolist(), grids, strict=True):
            texts += (prefix[size:], templates[grid].text)
        return Rows(
            key=key,
            shared=shared,
            suffix_ends=np.cumsum(sizes),
            text=b"".join(texts),
            outside=outside,
            lengths=lengths,
            file_ids=file_ids,
            offsets=offsets,
            checksums=checksums,
            inline=metadata,
            files=self.files,
        )


class _Template:
    """The keys of an array with a certain grid, without the array's name."""

    def __init__(self, grid: tuple[int, ...]) -> None:
        keys = chunk_keys("", grid)
        order = sorted(range(len(keys)), key=keys.__getitem__)
        self.keys = [*(keys[number] for number in order), metadata_key("")]
        self.longest = max(map(len, self.keys))
        self.order: NDArray[Any] = np.array(order, np.int64)  # the chunk of each key but the last
        self.shared = shared_prefixes(self.keys)
        suffixes = [key[size:] for key, size in zip(self.keys, self.shared.tolist(), strict=True)]
        self.sizes = np.array([len(suffix) for suffix in suffixes], np.int64)
        self.text = b"".join(suffixes)


def _prefix(name: str) -> bytes:
    return f"{name}/".encode() if name else b""
