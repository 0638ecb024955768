"""Reads named arrays from folders that holdfast has written: OCDBT databases of zarr v3 arrays.

The checksum of every chunk is verified. Large single-chunk arrays are returned as views of their read buffers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import add

import numpy as np

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
from .digests import INDEX, MANIFEST, Bytes, FileCheck, Integers, is_missing, read_checked, required
from .extents import ChunkReader, ChunkTable, Destinations, Extent, plan_reads, plausible
from .source import Problem

_WHOLE = 2 * NODE_LIMIT  # maximum size, in bytes, of an index that is always read as a whole
_MANY = 8  # after 1/8 of the index has been read in parts, the whole index is read
_READS = 16  # number of nodes to read concurrently from an object store
_INDEX_LIMIT = 8 << 30  # maximum size of the index in bytes; the index of ten million chunks takes about 200 MB


@contextlib.contextmanager
def naming(location: Location, about: str = "") -> Iterator[None]:
    """Prefix damage and version errors with location and ``about``; if ``about`` is "", do not repeat the location."""
    try:
        yield
    except (DamagedCheckpointError, FormatVersionError) as error:
        if not about and location.url in str(error):
            raise
        raise type(error)(f"{location}{about}: {error}") from error


class ArrayDatabase:
    """A folder of named arrays, opened for reading. Each document except the index may have at most ``limit`` bytes."""

    def __init__(
        self, location: Location, files: Mapping[str, FileRecord] | None = None, *, limit: int = 512 << 20
    ) -> None:
        self._location = location
        self._files = files
        self._limit = limit
        self.bytes_read = 0  # total bytes read from all files, including gaps between chunks
        self.unreadable = False  # True once a read has failed with a disk error
        self._lock = Lock()
        self._complete = False  # True once the whole index has been decoded
        self._parts_read = 0  # bytes of the index read in parts so far
        manifest = self.read_file(MANIFEST)
        with naming(location):
            self._index = Database(manifest)

    def read_file(self, path: str, limit: int | None = None) -> bytes:
        """Read a file in the folder and verify it against the commit record."""
        content = read_checked(self._location / path, self._record(path), limit=self._limit if limit is None else limit)
        self.bytes_read += len(content)
        return content

    def _record(self, path: str) -> FileRecord | None:
        return None if self._files is None else self._files.get(path)

    def file_checks(self) -> dict[str, FileCheck]:
        """Return the known sizes and checksums of the files in the commit record, keyed by path."""
        entries, files = self._all_entries(), self._files or {}
        outside = np.flatnonzero(entries.lengths)
        order = outside[np.lexsort((entries.offsets[outside], entries.file_ids[outside]))]
        bounds = np.searchsorted(entries.file_ids[order], np.arange(len(entries.files) + 1))
        checks = {path: FileCheck(record) for path, record in files.items()}
        for number, path in enumerate(entries.files):
            rows = order[bounds[number] : bounds[number + 1]]
            if path not in files:
                raise self._unrecorded(path)
            checks[path] = FileCheck(files[path], entries.offsets[rows], entries.lengths[rows], entries.checksums[rows])
        return checks

    def metadata(self, names: Sequence[str]) -> list[ArrayMetadata | None]:
        """Return the metadata of each array (None if missing). Arrays with equal metadata usually share one object."""
        keys = metadata_keys(names)
        entries = self._entries(len(names), lambda: [(key, key + b"\0") for key in keys])
        inline = entries.inline
        texts = [None if row < 0 else inline[row] for row in entries.find(keys)]
        decoded: dict[bytes | None, ArrayMetadata | None] = {None: None}
        for text in dict.fromkeys(texts):
            if text is not None:
                with naming(self._location, f": array {names[texts.index(text)]!r}"):
                    decoded[text] = decode_array_metadata(text)
        return list(map(decoded.__getitem__, texts))

    def _entries(self, count: int, ranges: Callable[[], list[KeyRange]]) -> Entries:
        """Return the index entries in the given key ranges. If the index is large, read only nodes in these ranges."""
        record = self._record(INDEX)
        if self._complete or not count:
            return self._index.entries
        read_already = _MANY * self._parts_read
        if record is None or not max(_WHOLE, NODE_LIMIT * count, read_already) < record.size <= _INDEX_LIMIT:
            return self._all_entries()
        with self._lock, naming(self._location), self._open(INDEX) as file:
            size, is_early = record.size, False
            if self._location.is_local and file.size != size:
                raise DamagedCheckpointError(
                    f"{self._location / INDEX} is not what was saved: expected {size} bytes, found {file.size}"
                )

            def read(node: NodePlace) -> bytes:
                if node.file != INDEX:
                    return self._read_node(node)
                with required(self._location / INDEX):
                    length = min(node.length, max(0, size - node.offset))
                    self.bytes_read += length
                    self._parts_read += length
                    return file.read(node.offset, length).tobytes()

            if not self._index.entries:  # earlier versions wrote the checksums of all values at the end of the index
                end = len(CHECKSUMS_MAGIC)
                is_early = read(NodePlace(INDEX, size - end, end)) == CHECKSUMS_MAGIC
            if not is_early:
                at_once = _READS if self._location.is_remote else 1
                self._index.decode(lambda nodes: parallel_map(read, nodes, at_once), ranges())
                return self._index.entries
        return self._all_entries()

    def _all_entries(self) -> Entries:
        """Return all index entries, after reading the whole index and verifying it against the commit record."""
        with self._lock, naming(self._location):
            if self._complete:
                return self._index.entries
            index = self.read_file(INDEX, _INDEX_LIMIT) if self._files and INDEX in self._files else b""

            def read(nodes: Sequence[NodePlace]) -> Iterator[bytes]:
                for node in nodes:
                    inside = index and node.file == INDEX
                    yield index[node.offset : node.offset + node.length] if inside else self._read_node(node)

            self._index.decode(read)
            add_early_checksums(index, self._index.entries, INDEX)
            self._complete = True
            return self._index.entries

    def _read_node(self, node: NodePlace) -> bytes:
        """Read a node from a file whose digest is unknown, or from a folder that has no commit record."""
        path, offset, length = node
        with self._open(path) as file, required(self._location / path):
            length = min(length, max(0, file.size - offset))
            self.bytes_read += length
            return file.read(offset, length).tobytes()

    def _open(self, path: str, *, cached: bool | None = False) -> DataReader:
        record = self._record(path)
        if self._files and record is None:
            raise self._unrecorded(path)
        with required(self._location / path):
            return (self._location / path).open_data(size=None if record is None else record.size, cached=cached)

    def _unrecorded(self, path: str) -> DamagedCheckpointError:
        file = self._location / path
        return DamagedCheckpointError(f"{file}: the index names this file, and the commit record does not")

    def read(
        self, names: Sequence[str], assembly: Assembly, advance: Callable[[int], None] = NULL.advance
    ) -> list[Problem]:
        """Read the chunks that an assembly needs; return the problems found."""
        problems: list[Problem] = []
        lock = threading.Lock()

        def report(file: str, array: int, problem: str) -> None:
            with lock:
                assembly.give_up(array)
                problems.append(Problem(file or MANIFEST, names[array], problem))

        indexed = self._find(names, assembly, report)

        def failed(table: ChunkTable, row: int, error: object) -> None:
            file = table.file(row)
            self.unreadable |= is_unreadable(error)
            problem = is_missing(self._location / file) if isinstance(error, ObjectNotFoundError) else str(error)
            report(file, int(table.arrays[row]), problem)

        def use(extent: Extent, data: Bytes) -> None:
            rows = range(extent.first, extent.stop)
            for row, problem in assembly.accept_many(chunks, rows, extent.offset, data, extent.kept):
                failed(chunks, row, problem)
            advance(len(data))

        def memory_for(row: int) -> Bytes | None:
            return assembly.memory_for(int(chunks.arrays[row]), int(chunks.numbers[row]), int(chunks.lengths[row]))

        def filled(row: int, values: Bytes, rest: Bytes) -> None:
            decoder = assembly.decoders[chunks.arrays[row]]
            if problem := decoder.checksum_problem(values, rest, int(chunks.checksums[row])):
                failed(chunks, row, f"chunk {chunks.numbers[row]} {problem}")

        nbytes = np.bincount(indexed.file_ids, indexed.lengths)
        with contextlib.ExitStack() as stack:
            files: dict[str, DataReader] = {}
            for number in np.flatnonzero(np.bincount(indexed.file_ids)).tolist():
                path = indexed.files[number]
                try:
                    files[path] = stack.enter_context(self._open(path, cached=_is_cached(assembly, nbytes[number])))
                except DamagedCheckpointError as error:
                    for row in np.flatnonzero(indexed.file_ids == number).tolist():
                        failed(indexed, row, error)
            sizes = {path: self._size(path, file) for path, file in files.items()}
            chunks = plausible(indexed, sizes, partial(failed, indexed))
            is_local = self._location.is_local
            destinations = None if is_local else Destinations(memory_for, filled)
            reader = ChunkReader(files, chunks, use, partial(failed, chunks), destinations)
            self.bytes_read += sum(
                parallel_map(reader.read, *plan_reads(chunks, remote=not is_local), name="holdfast-read")
            )
        return sorted(set(problems))

    def _size(self, path: str, file: DataReader) -> int:
        """Return the size of a data file, or an upper bound in object stores, which report sizes only during reads."""
        if self._location.is_local:
            return file.size
        return (1 << 63) - 1 if (record := self._record(path)) is None else record.size

    def _find(self, names: Sequence[str], assembly: Assembly, report: Callable[[str, int, str], None]) -> ChunkTable:
        """Return a table of the chunks that an assembly needs, sorted by file and offset; report missing chunks."""
        entries = self._entries(len(names), lambda: list(map(_keys_of, names)))
        lone, others = _lone_chunks(entries, names, assembly)
        rows: list[tuple[int, int, int, int]] = []
        # Count the expected chunks before listing them, because a forged shape could make listing take forever.
        left = self._index.key_count - len(lone)
        for array in others:
            decoder = assembly.decoders[array]
            count = decoder.spec.chunks
            if count > left:
                report("", array, f"expected {count} chunks; the whole index has {self._index.key_count} entries")
                continue
            left -= count
            keys = chunk_keys(names[array], decoder.spec.grid)
            numbers = assembly.wanted_chunks(array)
            for number, row in zip(numbers, entries.find([keys[number] for number in numbers]), strict=True):
                if row < 0 or entries.inline[row] is not None:
                    report("", array, f"chunk {number} is not in the index")
                    break
                if problem := decoder.length_problem(int(entries.lengths[row])):
                    report(entries.files[entries.file_ids[row]], array, f"chunk {number} {problem}")
                else:
                    rows.append((row, array, number, int(assembly.keeps(array, number))))
        table = np.concatenate([lone, np.array(rows, np.int64).reshape(-1, 4)])
        table = table[np.lexsort((entries.offsets[table[:, 0]], entries.file_ids[table[:, 0]]))]
        keys, arrays, numbers, kept = table.T
        of_files = (entries.file_ids[keys], entries.offsets[keys], entries.lengths[keys])
        return ChunkTable(entries.files, *of_files, arrays, numbers, kept != 0, entries.checksums[keys])


def _is_cached(assembly: Assembly, nbytes: float) -> bool | None:
    """Return whether to read ``nbytes`` of a file through the page cache; None if that depends on other readers."""
    if assembly.keep and nbytes < PAGE:
        return True  # direct I/O would read a whole page, but remains necessary if data is only verified
    # If several processes on this machine read all arrays, caching lets all of them share a single read from disk.
    # None lets the reader detect other readers that are not connected to this process.
    return (shares_machine() or None) if assembly.wants_everything else False


def _lone_chunks(entries: Entries, names: Sequence[str], assembly: Assembly) -> tuple[Integers, list[int]]:
    """Look up single-chunk arrays in bulk; return table rows for valid chunks and the indices of all other arrays."""
    lone = assembly.column(lambda decoder: decoder.lone, bool) & assembly.are_whole
    if "" in names:  # the root array's keys have no name prefix
        lone[names.index("")] = False
    arrays = np.flatnonzero(lone)
    table: Integers = np.zeros((len(arrays), 4), np.int64)
    keys = map(add, encode_names(names), assembly.column(lambda decoder: decoder.key, object))
    table[:, 0] = entries.find(list(compress(keys, lone.tolist())))
    table[:, 1] = arrays
    table[:, 3] = assembly.column(lambda decoder: decoder.adopted and assembly.keep, bool)[arrays]
    sizes = assembly.column(lambda decoder: decoder.stored_bytes)[arrays]
    good = table[:, 0] >= 0
    good[good] = entries.lengths[table[good, 0]] == sizes[good]  # excludes inline values, which have length 0
    lone[:] = False
    lone[arrays[good]] = True
    return table[good], np.flatnonzero(~lone).tolist()


def _keys_of(name: str) -> KeyRange:
    """Return the range of keys that begin with an array's name and a slash (``0`` follows ``/`` in ASCII)."""
    return (f"{name}/".encode(), f"{name}0".encode()) if name else (b"", b"\xff")
