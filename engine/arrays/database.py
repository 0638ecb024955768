"""A folder of named arrays: an OCDBT database that holds zarr v3 arrays, as holdfast writes it.

An array of one chunk is returned in the memory that was read, without a copy. The checksum of every chunk is verified.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import add

import numpy as np
from numpy.typing import NDArray

from ..distributed import shares_machine
from ..errors import DamagedCheckpointError, FormatVersionError, ObjectNotFoundError
from ..forks import Lock
from ..format import (
    CHECKSUMS_MAGIC,
    NODE_LIMIT,
    ArrayMetadata,
    Database,
    Entries,
    FileRecord,
    KeyRange,
    NodePlace,
    add_early_checksums,
    chunk_keys,
    decode_array_metadata,
    encode_names,
    metadata_keys,
)
from ..progress import NULL
from ..storage import PAGE, DataReader, Location, is_unreadable, parallel_map
from .assemble import Assembly
from .digests import INDEX, MANIFEST, Bytes, FileCheck, is_missing, read_checked, required
from .extents import ChunkTable, Extent, Places, plausible, read_chunks
from .source import Problem

Report = Callable[[str, int, str], None]  # takes a file ("" for the index), the number of an array, what is wrong

_WHOLE = 2 * NODE_LIMIT  # bytes of an index that is always read in one piece
_MANY = 8  # one of so many parts of the index, read bit by bit, after which all of it is read
_READS = 16  # nodes that are read at a time from an object store
_INDEX_LIMIT = 8 << 30  # bytes of an index; one over ten million chunks takes some 200 MB


@contextlib.contextmanager
def naming(location: Location, about: str = "") -> Iterator[None]:
    """Put a location and a text in front of errors about content; without a text, only where they lack the location."""
    try:
        yield
    except (DamagedCheckpointError, FormatVersionError) as error:
        if not about and location.url in str(error):
            raise
        raise type(error)(f"{location}{about}: {error}") from error


class ArrayDatabase:
    """Named arrays in a folder, opened for reading; ``files`` are those that the commit record lists.

    ``limit`` is the most bytes of a document, which is read in one piece; it is not that of the index.
    """

    def __init__(
        self, location: Location, files: Mapping[str, FileRecord] | None = None, *, limit: int = 512 << 20
    ) -> None:
        self._location = location
        self._files = files
        self._limit = limit
        self.bytes_read = 0  # bytes read so far from all files, gaps between chunks included
        self.unreadable = False  # whether the disk failed to read some of the data
        self._lock = Lock()
        self._complete = False  # whether all of the index is known
        self._parts_read = 0  # bytes of the index that were read in parts
        manifest = self.read_file(MANIFEST)
        with naming(location):
            self._index = Database(manifest)

    def read_file(self, path: str, limit: int | None = None) -> bytes:
        """Read a file of the folder and compare it with the commit record."""
        known = None if self._files is None else self._files.get(path)
        content = read_checked(self._location / path, known, limit=self._limit if limit is None else limit)
        self.bytes_read += len(content)
        return content

    def file_checks(self) -> dict[str, FileCheck]:
        """Return the known sizes and checksums of the files in the commit record, by their paths."""
        entries, files = self._know_all(), self._files or {}
        outside = np.flatnonzero(entries.lengths)
        order = outside[np.lexsort((entries.offsets[outside], entries.file_ids[outside]))]
        bounds = np.searchsorted(entries.file_ids[order], np.arange(len(entries.files) + 1))
        found = {path: FileCheck(known) for path, known in files.items()}
        for number, path in enumerate(entries.files):
            rows = order[bounds[number] : bounds[number + 1]]
            if path not in files:
                raise DamagedCheckpointError(
                    f"{self._location / path}: the index names this file, and the commit record does not"
                )
            found[path] = FileCheck(files[path], entries.offsets[rows], entries.lengths[rows], entries.checksums[rows])
        return found

    def metadata(self, names: Sequence[str]) -> list[ArrayMetadata | None]:
        """Return the metadata of arrays, None where there is none; equal ones are mostly one object."""
        keys = metadata_keys(names)
        entries = self._know(len(names), lambda: [(key, key + b"\0") for key in keys])
        inline = entries.inline
        texts = [None if row < 0 else inline[row] for row in entries.find(keys)]
        decoded: dict[bytes | None, ArrayMetadata | None] = {None: None}
        for text in dict.fromkeys(texts):
            if text is not None:
                try:
                    decoded[text] = decode_array_metadata(text)
                except (DamagedCheckpointError, FormatVersionError) as error:
                    raise type(error)(f"{self._location}: array {names[texts.index(text)]!r}: {error}") from error
        return list(map(decoded.__getitem__, texts))

    def _know(self, count: int, ranges: Callable[[], list[KeyRange]]) -> Entries:
        """Return entries with the keys in some ranges: from the nodes that may hold them, or all of a small index."""
        known = None if self._files is None else self._files.get(INDEX)
        if self._complete or not count:
            return self._index.entries
        read_already = _MANY * self._parts_read
        if known is None or not max(_WHOLE, NODE_LIMIT * count, read_already) < known.size <= _INDEX_LIMIT:
            return self._know_all()
        with self._lock, naming(self._location), self._open(INDEX) as file:
            size, is_early = known.size, False
            if self._location.is_local and file.size != size:
                raise DamagedCheckpointError(
                    f"{self._location / INDEX} is not what was saved: expected {size} bytes, found {file.size}"
                )

            def read(place: NodePlace) -> bytes:
                if place.file != INDEX:
                    return self._read_node(place)
                with required(self._location / INDEX):
                    length = min(place.length, max(0, size - place.offset))
                    self.bytes_read += length
                    self._parts_read += length
                    return file.read(place.offset, length).tobytes()

            if not self._index.entries:  # earlier versions wrote the checksums of all values at the end
                end = len(CHECKSUMS_MAGIC)
                is_early = read(NodePlace(INDEX, size - end, end)) == CHECKSUMS_MAGIC
            if not is_early:
                many = _READS if self._location.is_remote else 1
                self._index.decode(lambda places: parallel_map(read, places, many), ranges())
                return self._index.entries
        return self._know_all()

    def _know_all(self) -> Entries:
        """Return all entries; the whole index is compared with the commit record, which the manifest does not do."""
        with self._lock, naming(self._location):
            if self._complete:
                return self._index.entries
            index = self.read_file(INDEX, _INDEX_LIMIT) if self._files and INDEX in self._files else b""

            def read(places: Sequence[NodePlace]) -> Iterator[bytes]:
                for place in places:
                    inside = index and place.file == INDEX
                    yield index[place.offset : place.offset + place.length] if inside else self._read_node(place)

            self._index.decode(read)
            add_early_checksums(index, self._index.entries, INDEX)
            self._complete = True
            return self._index.entries

    def _read_node(self, place: NodePlace) -> bytes:
        """Read a node of a file that the commit record does not have a digest of, or of a folder without a record."""
        path, offset, length = place
        with self._open(path) as file, required(self._location / path):
            length = min(length, max(0, file.size - offset))
            self.bytes_read += length
            return file.read(offset, length).tobytes()

    def _open(self, path: str, *, cached: bool | None = False) -> DataReader:
        known = None if self._files is None else self._files.get(path)
        if self._files and known is None:
            raise DamagedCheckpointError(
                f"{self._location / path}: the index names this file, and the commit record does not"
            )
        with required(self._location / path):
            return (self._location / path).open_data(size=None if known is None else known.size, cached=cached)

    def read(
        self, names: Sequence[str], assembly: Assembly, advance: Callable[[int], None] = NULL.advance
    ) -> list[Problem]:
        """Read the chunks that an assembly of these arrays needs; return what is wrong with them."""
        problems: list[Problem] = []
        lock = threading.Lock()

        def report(file: str, array: int, what: str) -> None:
            with lock:
                assembly.give_up(array)
                problems.append(Problem(file or MANIFEST, names[array], what))

        found = self._find(names, assembly, report)

        def failed(table: ChunkTable, row: int, error: object) -> None:
            file = table.file(row)
            self.unreadable |= is_unreadable(error)
            what = is_missing(self._location / file) if isinstance(error, ObjectNotFoundError) else str(error)
            report(file, int(table.arrays[row]), what)

        def use(extent: Extent, data: Bytes) -> None:
            rows = range(extent.first, extent.stop)
            for row, what in assembly.accept_many(chunks, rows, extent.offset, data, extent.kept):
                failed(chunks, row, what)
            advance(len(data))

        def place(row: int) -> Bytes | None:
            return assembly.place(int(chunks.arrays[row]), int(chunks.numbers[row]), int(chunks.lengths[row]))

        def filled(row: int, values: Bytes, rest: Bytes) -> None:
            array, chunk, indexed = int(chunks.arrays[row]), int(chunks.numbers[row]), int(chunks.checksums[row])
            if what := assembly.decoders[array].check(values, rest, indexed):
                failed(chunks, row, f"chunk {chunk} {what}")

        wanted = np.bincount(found.file_ids, found.lengths)
        with contextlib.ExitStack() as stack:
            files: dict[str, DataReader] = {}
            for number in np.flatnonzero(np.bincount(found.file_ids)).tolist():
                path = found.files[number]
                try:
                    files[path] = stack.enter_context(self._open(path, cached=_is_cached(assembly, wanted[number])))
                except DamagedCheckpointError as error:
                    for row in np.flatnonzero(found.file_ids == number).tolist():
                        failed(found, row, error)
            sizes = {path: self._size(path, file) for path, file in files.items()}
            chunks = plausible(found, sizes, partial(failed, found))
            remote = not self._location.is_local
            places = Places(place, filled) if remote else None
            self.bytes_read += read_chunks(files, chunks, use, partial(failed, chunks), remote=remote, places=places)
        return sorted(set(problems))

    def _size(self, path: str, file: DataReader) -> int:
        """Return the size of a data file, or an upper bound: object stores tell it only when a file is read."""
        known = None if self._files is None else self._files.get(path)
        if self._location.is_local:
            return file.size
        return (1 << 63) - 1 if known is None else known.size

    def _find(self, names: Sequence[str], assembly: Assembly, report: Report) -> ChunkTable:
        """Find the chunks that arrays need, sorted by their place in the data files; report missing ones."""
        entries = self._know(len(names), lambda: list(map(_keys_of, names)))
        lone, others = _lone_chunks(entries, names, assembly)
        rows: list[tuple[int, int, int, int]] = []
        # The expected chunks are counted first: a hostile shape could make listing them take forever.
        left = self._index.key_count - len(lone)
        for array in others:
            decoder = assembly.decoders[array]
            if decoder.chunk_count > left:
                what = f"expected {decoder.chunk_count} chunks; the whole index has {self._index.key_count} entries"
                report("", array, what)
                continue
            left -= decoder.chunk_count
            keys = chunk_keys(names[array], decoder.spec.grid)
            numbers = assembly.wanted_chunks(array)
            for number, row in zip(numbers, entries.find([keys[number] for number in numbers]), strict=True):
                if row < 0 or entries.inline[row] is not None:
                    report("", array, f"chunk {number} is not in the index")
                    break
                what = decoder.why_not(int(entries.lengths[row]))
                if what:
                    report(entries.files[entries.file_ids[row]], array, f"chunk {number} {what}")
                else:
                    rows.append((row, array, number, int(assembly.keeps(array, number))))
        table = np.concatenate([lone, np.array(rows, np.int64).reshape(-1, 4)])
        places = table[:, 0]
        of_files = (entries.file_ids[places], entries.offsets[places], entries.lengths[places])
        of_arrays = (table[:, 1], table[:, 2], table[:, 3] != 0)
        return ChunkTable(entries.files, *of_files, *of_arrays, entries.checksums[places]).sorted()


def _is_cached(assembly: Assembly, nbytes: float) -> bool | None:
    """Return whether so many bytes of a file are read through the page cache; None if its other readers decide."""
    if assembly.keep and nbytes < PAGE:
        return True  # direct I/O would read all of the page each time; a verification reads from the disk nevertheless
    # Other processes of this machine read whole arrays, too, and the disk reads them once. Processes that are not
    # connected find each other while they read.
    return (shares_machine() or None) if assembly.wants_everything else False


def _lone_chunks(entries: Entries, names: Sequence[str], assembly: Assembly) -> tuple[NDArray[np.int64], list[int]]:
    """Find the only chunks of arrays, in data files and of the right size: thousands in a few steps."""
    lone = assembly.column(lambda decoder: decoder.lone, bool) & assembly.are_whole
    if "" in names:  # the keys of the root have no name before them
        lone[names.index("")] = False
    arrays = np.flatnonzero(lone)
    table = np.zeros((len(arrays), 4), np.int64)
    keys = map(add, encode_names(names), assembly.column(lambda decoder: decoder.key, object))
    table[:, 0] = entries.find(list(compress(keys, lone.tolist())))
    table[:, 1] = arrays
    table[:, 3] = assembly.column(lambda decoder: decoder.adopted and assembly.keep, bool)[arrays]
    sizes = assembly.column(lambda decoder: decoder.stored_bytes)[arrays]
    good = table[:, 0] >= 0
    good[good] = entries.lengths[table[good, 0]] == sizes[good]  # an inline value has length 0 there
    lone[:] = False
    lone[arrays[good]] = True
    return table[good], np.flatnonzero(~lone).tolist()


def _keys_of(name: str) -> KeyRange:
    """Return the range of the keys of an array: those that begin with its name and a slash, which 0 follows."""
    return (f"{name}/".encode(), f"{name}0".encode()) if name else (b"", b"\xff")
