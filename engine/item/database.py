"""A folder of named arrays: an OCDBT database that holds zarr v3 arrays, as holdfast and TensorStore write it.

Where an array lies in one chunk, what is returned is the memory that was read; nothing is copied. The checksum of
every chunk is verified on the way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError, FormatVersionError, ObjectNotFoundError
from ..format import (
    METADATA_LIMIT,
    ArrayMetadata,
    Entries,
    chunk_keys,
    crc32c,
    decode_array_metadata,
    decode_database,
    decode_fill_value,
    metadata_key,
)
from ..record import FileRecord
from ..storage import DataReader, Location
from .assembly import Assembly
from .extents import Range, read_ranges
from .sources import Bytes

MANIFEST = "manifest.ocdbt"
_METADATA_SUFFIX = b"/zarr.json"
_SMALL_FILE_LIMIT = 512 << 20  # bytes of a file that is read in one piece
# What chunks that are not stored, as they hold nothing but their array's fill value, may come to all together.
_FILLED_CHUNKS = 1 << 20
_FILLED_BYTES = 4 << 30


class Problem(NamedTuple):
    """One thing that is wrong: in which file, in which leaf (or ``""``), and what it is."""

    file: str
    leaf: str
    what: str


@contextlib.contextmanager
def naming(location: Location) -> Iterator[None]:
    """Adds to errors about content where the content is, unless they say so."""
    try:
        yield
    except (DamagedCheckpointError, FormatVersionError) as error:
        if location.url in str(error):
            raise
        raise type(error)(f"{location}: {error}") from error


class ArrayDatabase:
    """Named arrays in a folder, opened for reading.

    A folder that belongs to a checkpoint holds every chunk. Other writers leave out chunks that hold nothing but the
    array's fill value; so in a folder of theirs, and only there, a missing chunk stands for that.

    Args:
        location: The folder that holds ``manifest.ocdbt``.
        files: What a commit record says about the folder's files, or None where there is none to compare with.

    Raises:
        DamagedCheckpointError: The manifest or the index is missing or does not verify.
    """

    def __init__(self, location: Location, files: Mapping[str, FileRecord] | None = None) -> None:
        self._location = location
        self._files = files
        self._metadata: dict[str, ArrayMetadata | None] = {}
        manifest = self.read_file(MANIFEST)
        with naming(location):
            self._entries: Entries = decode_database(manifest, self._read_node)
        self._rows = {key: row for row, key in enumerate(self._entries.keys)}
        self._places = list(
            zip(
                self._entries.file_ids.tolist(),
                self._entries.offsets.tolist(),
                self._entries.lengths.tolist(),
                strict=True,
            )
        )

    def read_file(self, path: str) -> bytes:
        """Reads a small file of the folder and compares it with the commit record.

        Args:
            path: The file's path inside the folder.

        Returns:
            Its content.

        Raises:
            DamagedCheckpointError: It is missing or not what was saved.
        """
        known = None if self._files is None else self._files.get(path)
        place = self._location / path
        limit = _SMALL_FILE_LIMIT if known is None else min(_SMALL_FILE_LIMIT, known.size)
        try:
            content = place.read_bytes(limit=limit)
        except ObjectNotFoundError as error:
            raise DamagedCheckpointError(f"{place} is missing: the checkpoint is not whole") from error
        if known is not None:
            found = crc32c(content)
            if len(content) != known.size or (known.crc32c is not None and found != known.crc32c):
                raise DamagedCheckpointError(
                    f"{place} is not what was saved: expected {known.size} bytes with crc32c {known.crc32c or 0:08x}, "
                    f"found {len(content)} bytes with {found:08x}"
                )
        return content

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
            raise DamagedCheckpointError(
                f"{self._location}: the index holds a name that is no text: {error}"
            ) from error

    def add(self, arrays: Mapping[str, tuple[ArrayMetadata, bytes]]) -> None:
        """Adds arrays whose content is at hand, each as one chunk.

        Args:
            arrays: For every name how it would be stored, and its bytes.
        """
        for name, (form, content) in arrays.items():
            self._metadata[name] = form
            for key in chunk_keys(name, form.grid):
                self._rows[key] = len(self._entries.inline)
                self._entries.inline.append(content)
                self._places.append((0, 0, 0))

    def metadata(self, names: Sequence[str]) -> list[ArrayMetadata | None]:
        """Returns how arrays are stored; None in the place of those that there are not.

        Args:
            names: The arrays' names.

        Raises:
            DamagedCheckpointError: The metadata of one cannot be read.
            FormatVersionError: One uses a codec that holdfast does not read.
        """
        known = self._metadata
        for name in names:
            if name not in known:
                content = self._metadata_text(name)
                try:
                    known[name] = None if content is None else decode_array_metadata(content)
                except (DamagedCheckpointError, FormatVersionError) as error:
                    raise type(error)(f"{self._location}: array {name!r}: {error}") from error
        return [known[name] for name in names]

    def read(self, names: Sequence[str]) -> tuple[list[NDArray[Any] | None], list[Problem]]:
        """Reads whole arrays.

        Args:
            names: Names of arrays that are in the database.

        Returns:
            The arrays in the order of the names, writable and the caller's own, with None where one is damaged;
            and what is wrong.
        """
        assembly = Assembly(self._known(names), keep=True)
        problems = self._fetch(names, assembly)
        return assembly.finish(), problems

    def verify(self, names: Sequence[str]) -> list[Problem]:
        """Reads arrays, checks every chunk and keeps nothing.

        Args:
            names: Names of arrays that are in the database.

        Returns:
            What is wrong; empty when all is whole.
        """
        return self._fetch(names, Assembly(self._known(names), keep=False))

    def _known(self, names: Sequence[str]) -> list[ArrayMetadata]:
        found = []
        for name, metadata in zip(names, self.metadata(names), strict=True):
            if metadata is None:
                raise DamagedCheckpointError(f"{self._location}: the index holds no array {name!r}")
            found.append(metadata)
        return found

    def _metadata_text(self, name: str) -> bytes | None:
        row = self._rows.get(metadata_key(name))
        if row is None:
            return None
        content = self._entries.inline[row]
        if content is not None:
            return content
        file, offset, length = self._place(row)
        if length > METADATA_LIMIT:
            raise DamagedCheckpointError(f"{self._location}: the metadata of array {name!r} takes {length} bytes")
        return self._read_node(file, offset, length)

    def _place(self, row: int) -> tuple[str, int, int]:
        file, offset, length = self._places[row]
        return self._entries.files[file], offset, length

    def _read_node(self, path: str, offset: int, length: int) -> bytes:
        with self._open(path) as file:
            return file.read(offset, length).tobytes()

    def _open(self, path: str) -> DataReader:
        try:
            return (self._location / path).open_data()
        except ObjectNotFoundError as error:
            raise DamagedCheckpointError(f"{self._location / path} is missing: the checkpoint is not whole") from error

    def _fetch(self, names: Sequence[str], assembly: Assembly) -> list[Problem]:
        """Reads the chunks of arrays and hands them over; returns what is wrong."""
        problems: list[Problem] = []
        lock = threading.Lock()

        def report(file: str, array: int, what: str) -> None:
            with lock:
                assembly.give_up(array)
                problems.append(Problem(file, names[array], what))

        ranges = self._ranges(names, assembly, report)

        def use(wanted: Range, data: Bytes) -> None:
            what = assembly.accept(wanted.array, wanted.chunk, data)
            if what:
                report(wanted.file, wanted.array, what)

        def failed(wanted: Range, error: Exception) -> None:
            report(wanted.file, wanted.array, str(error))

        with contextlib.ExitStack() as stack:
            files: dict[str, DataReader] = {}
            for path in {wanted.file for wanted in ranges}:
                try:
                    files[path] = stack.enter_context(self._open(path))
                except DamagedCheckpointError as error:
                    for wanted in ranges:
                        if wanted.file == path:
                            failed(wanted, error)
            read_ranges(files, list(self._plausible(ranges, files, failed)), use, failed)
        return sorted(set(problems))

    def _ranges(self, names: Sequence[str], assembly: Assembly, report: Callable[[str, int, str], None]) -> list[Range]:
        """Returns where every chunk lies that is in a data file; hands over those that are in the index itself."""
        ranges: list[Range] = []
        files, places, inline = self._entries.files, self._places, self._entries.inline
        # All chunks that the arrays should have are counted before a hostile shape makes us do so for ever.
        left = len(self._rows) + (_FILLED_CHUNKS if self._files is None else 0)
        filled = _FILLED_BYTES
        for array, name in enumerate(names):
            form = assembly.forms[array]
            if form.chunk_count > left:
                what = f"it should have {form.chunk_count} chunks; the whole index has {len(self._rows)} entries"
                report(MANIFEST, array, what)
                continue
            left -= form.chunk_count
            rows = [self._rows.get(key) for key in chunk_keys(name, form.grid)]
            if None in rows:
                filled -= form.nbytes
                if self._files is not None or filled < 0:
                    report(MANIFEST, array, f"chunk {rows.index(None)} is not in the index")
                    continue
                with naming(self._location):
                    assembly.fill(array, decode_fill_value(self._metadata_text(name) or b""))
            keep = assembly.keep and not form.copied
            for chunk, row in enumerate(rows):
                if row is None:
                    continue
                content = inline[row]
                if content is not None:
                    what = assembly.accept(array, chunk, np.frombuffer(content, np.uint8))
                    if what:
                        report(MANIFEST, array, what)
                    continue
                file, offset, length = places[row]
                if length == form.stored_bytes:
                    ranges.append(Range(files[file], offset, length, array, chunk, keep))
                else:
                    report(files[file], array, f"chunk {chunk} should take {form.stored_bytes} bytes, not {length}")
        return ranges

    def _plausible(
        self, ranges: Sequence[Range], files: Mapping[str, DataReader], failed: Callable[[Range, Exception], None]
    ) -> Iterator[Range]:
        """Generates the ranges that lie in their files and share no byte with another one.

        So an index cannot make us read more than there is, nor take memory for it.
        """
        path, end, size = "", 0, 0
        for wanted in sorted(ranges):
            if wanted.file not in files:
                continue
            if wanted.file != path:
                path, end, size = wanted.file, 0, self._size(wanted.file, files[wanted.file])
            if wanted.offset < end:
                failed(wanted, DamagedCheckpointError("a chunk shares bytes with another one"))
                continue
            end = wanted.offset + wanted.length
            if end > size:
                what = f"it is truncated or the index is wrong: a chunk ends at {end}, the file has {size} bytes"
                failed(wanted, DamagedCheckpointError(what))
                continue
            yield wanted

    def _size(self, path: str, file: DataReader) -> int:
        """Returns the size of a data file, as far as it is known without reading all of it."""
        known = None if self._files is None else self._files.get(path)
        if self._location.is_local:
            return file.size
        return 1 << 63 if known is None else known.size
