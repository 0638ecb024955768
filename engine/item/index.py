"""The index of a folder of arrays: where the metadata and the chunks of each array are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError
from ..format import ArrayMetadata, Entries, chunk_keys, metadata_key
from .assembly import Assembly
from .chunks import Chunks
from .sources import Bytes

_METADATA_SUFFIX = b"/zarr.json"
# What chunks that are not stored, as they hold nothing but their array's fill value, may come to all together.
_FILLED_CHUNKS = 1 << 20
_FILLED_BYTES = 4 << 30


class Place(NamedTuple):
    """Where a value lies: a data file's path, the first byte, the number of bytes."""

    file: str
    offset: int
    length: int


class Search(NamedTuple):
    """What the search for chunks calls when it finds something besides places in data files.

    Attributes:
        report: Takes a file (or "" for the index), an array, and what is wrong with it.
        inline: Takes an array, a chunk's number and the chunk's bytes, which lie in the index itself.
        fill: Takes an array of which a chunk is not stored.
    """

    report: Callable[[str, int, str], None]
    inline: Callable[[int, int, Bytes], None]
    fill: Callable[[int], None]


class Index:
    """The entries of a database of arrays, by their keys.

    Args:
        entries: What the database holds.
    """

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._rows = dict(zip(entries.keys, range(len(entries)), strict=True))
        self._added: dict[bytes, bytes] = {}

    @property
    def names(self) -> list[str]:
        """Returns the names of the arrays, in the order of the index; an array that is alone may have the name "".

        Raises:
            DamagedCheckpointError: A name is no text.
        """
        end = len(_METADATA_SUFFIX)
        keys = [key[:-end] for key in self._entries.keys if key.endswith(_METADATA_SUFFIX)]
        if metadata_key("") in self._rows:
            keys.append(b"")
        try:
            return [key.decode() for key in keys]
        except UnicodeDecodeError as error:
            raise DamagedCheckpointError(f"the index holds a name that is no text: {error}") from error

    def add(self, arrays: Mapping[str, tuple[ArrayMetadata, bytes]]) -> None:
        """Adds arrays whose content is at hand, each as one chunk."""
        for name, (form, content) in arrays.items():
            for key in chunk_keys(name, form.grid):
                self._added[key] = content

    def metadata(self, names: Sequence[str]) -> list[bytes | Place | None]:
        """Returns the metadata of arrays, or the places where it lies; None for those that there are not."""
        get, inline = self._rows.get, self._entries.inline
        rows = [get(name.encode() + _METADATA_SUFFIX if name else metadata_key("")) for name in names]
        return [None if row is None else self._place(row) if inline[row] is None else inline[row] for row in rows]

    def find(self, names: Sequence[str], assembly: Assembly, search: Search, *, sparse: bool) -> Chunks:
        """Finds the chunks that are wanted of arrays.

        Args:
            names: The arrays' names.
            assembly: What is wanted of each of them.
            search: Takes what is found elsewhere than in data files.
            sparse: Whether chunks may be missing.

        Returns:
            Those that lie in data files, sorted.
        """
        lone, others = self._lone(names, assembly)
        rows: list[tuple[int, int, int, int]] = []
        # All chunks that the arrays should have are counted before a hostile shape makes us do so for ever.
        left = len(self._rows) + len(self._added) + (_FILLED_CHUNKS if sparse else 0) - len(lone)
        filled = _FILLED_BYTES
        for array in others:
            form = assembly.forms[array]
            if form.chunk_count > left:
                what = f"it should have {form.chunk_count} chunks; the whole index has {len(self._rows)} entries"
                search.report("", array, what)
                continue
            left -= form.chunk_count
            keys = chunk_keys(names[array], form.grid)
            wanted = assembly.wanted_chunks(array)
            stored = [number for number in wanted if keys[number] in self._rows or keys[number] in self._added]
            if len(stored) < len(wanted):
                filled -= form.nbytes
                if not sparse or filled < 0:
                    missing = min(set(wanted).difference(stored))
                    search.report("", array, f"chunk {missing} is not in the index")
                    continue
                search.fill(array)
            rows += self._located(keys, stored, array, assembly, search)
        return self._table(np.concatenate([lone, np.array(rows, np.int64).reshape(-1, 4)])).sorted()

    def _lone(self, names: Sequence[str], assembly: Assembly) -> tuple[NDArray[np.int64], list[int]]:
        """Finds the chunks of those arrays that have one, of the right size and in a data file: all in a few steps.

        Returns:
            For each its row, array, number, and whether it is kept; and the arrays that it is none of.
        """
        get, forms = self._rows.get, assembly.forms
        able = [
            form.lone and bool(name) and assembly.is_whole(array)
            for array, (name, form) in enumerate(zip(names, forms, strict=True))
        ]
        arrays = [array for array, one in enumerate(able) if one]
        found = [get(names[array].encode() + forms[array].key, -1) for array in arrays]
        table = np.zeros((len(arrays), 4), np.int64)
        table[:, 0], table[:, 1] = found, arrays
        table[:, 3] = [forms[array].adopted for array in arrays] if assembly.keep else 0
        sizes = np.array([forms[array].stored_bytes for array in arrays], np.int64)
        good = table[:, 0] >= 0
        good[good] = self._entries.lengths[table[good, 0]] == sizes[good]  # an inline value has length 0 there
        others = [array for array, one in enumerate(able) if not one] + table[~good, 1].tolist()
        return table[good], sorted(others)

    def _located(
        self, keys: Sequence[bytes], numbers: Sequence[int], array: int, assembly: Assembly, search: Search
    ) -> list[tuple[int, int, int, int]]:
        """Returns the chunks of one array that lie in data files; hands over those that lie in the index."""
        form, entries = assembly.forms[array], self._entries
        located = []
        for number in numbers:
            row = self._rows.get(keys[number])
            content = self._added[keys[number]] if row is None else entries.inline[row]
            if content is not None:
                search.inline(array, number, np.frombuffer(content, np.uint8))
                continue
            assert row is not None
            what = form.why_not(int(entries.lengths[row]))
            if what:
                search.report(entries.files[entries.file_ids[row]], array, f"chunk {number} {what}")
            else:
                located.append((row, array, number, int(assembly.keeps(array, number))))
        return located

    def _table(self, table: NDArray[np.int64]) -> Chunks:
        rows, entries = table[:, 0], self._entries
        return Chunks(
            files=entries.files,
            file_ids=entries.file_ids[rows],
            offsets=entries.offsets[rows],
            lengths=entries.lengths[rows],
            arrays=table[:, 1],
            numbers=table[:, 2],
            kept=table[:, 3] != 0,
        )

    def _place(self, row: int) -> Place:
        entries = self._entries
        return Place(entries.files[entries.file_ids[row]], int(entries.offsets[row]), int(entries.lengths[row]))
