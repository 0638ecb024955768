"""A folder of named arrays: an OCDBT database that holds zarr v3 arrays, as holdfast and TensorStore write it.

Where an array lies in one chunk, what is returned is the memory that was read; nothing is copied. The checksum of
every chunk is verified on the way.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import DamagedCheckpointError, ObjectNotFoundError
from .extents import Range, read_ranges
from .format import (
    ArrayMetadata,
    Entries,
    chunk_keys,
    crc32c,
    decode_array_metadata,
    decode_database,
    metadata_key,
)
from .plan import CHECKSUM_BYTES
from .record import FileRecord
from .sources import Bytes
from .storage import DataReader, Location, aligned_empty

MANIFEST = "manifest.ocdbt"
_METADATA_SUFFIX = b"/zarr.json"
_COPY = 256 << 10  # arrays below this are copied out, so that a small one never keeps a whole extent in memory


class Problem(NamedTuple):
    """One thing that is wrong: in which file, in which leaf (or ``""``), and what it is."""

    file: str
    leaf: str
    what: str


class _Place(NamedTuple):
    """Where one chunk belongs: the wanted array's position and the chunk's number in its grid."""

    array: int
    chunk: int


class ArrayDatabase:
    """Named arrays in a folder, opened for reading.

    Args:
        location: The folder that holds ``manifest.ocdbt``.
        files: What a commit record says about the folder's files, or None where there is none to compare with.

    Raises:
        DamagedCheckpointError: The manifest or the index is missing or does not verify.
    """

    def __init__(self, location: Location, files: Mapping[str, FileRecord] | None = None) -> None:
        self._location = location
        self._files = files
        self._metadata: dict[str, ArrayMetadata] = {}
        self._entries: Entries = decode_database(self.read_file(MANIFEST), self._read_node)
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
        try:
            content = place.read_bytes(limit=None if known is None else known.size)
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
        """Returns the names of the arrays, in the order of the index."""
        end = len(_METADATA_SUFFIX)
        return [key[:-end].decode() for key in self._entries.keys if key.endswith(_METADATA_SUFFIX)]

    def metadata(self, name: str) -> ArrayMetadata | None:
        """Returns how an array is stored, or None where there is no array of this name.

        Args:
            name: The array's name.

        Raises:
            DamagedCheckpointError: Its metadata cannot be read.
            FormatVersionError: It uses a codec that holdfast does not read.
        """
        known = self._metadata.get(name)
        if known is not None:
            return known
        row = self._rows.get(metadata_key(name))
        if row is None:
            return None
        content = self._entries.inline[row]
        if content is None:
            file, offset, length = self._place(row)
            content = self._read_node(file, offset, length)
        return self._metadata.setdefault(name, decode_array_metadata(content))

    def read(self, names: Sequence[str]) -> tuple[list[NDArray[Any] | None], list[Problem]]:
        """Reads whole arrays.

        Args:
            names: Names of arrays that are in the database.

        Returns:
            The arrays in the order of the names, writable and the caller's own, with None where one is damaged;
            and what is wrong.
        """
        reading = _Reading([self._known(name) for name in names], keep=True)
        return reading.arrays, self._fetch(names, reading)

    def verify(self, names: Sequence[str]) -> list[Problem]:
        """Reads arrays, checks every chunk and keeps nothing.

        Args:
            names: Names of arrays that are in the database.

        Returns:
            What is wrong; empty when all is whole.
        """
        return self._fetch(names, _Reading([self._known(name) for name in names], keep=False))

    def _known(self, name: str) -> ArrayMetadata:
        metadata = self.metadata(name)
        if metadata is None:
            raise DamagedCheckpointError(f"{self._location}: the index holds no array {name!r}")
        return metadata

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

    def _fetch(self, names: Sequence[str], reading: _Reading) -> list[Problem]:
        problems: list[Problem] = []
        lock = threading.Lock()
        places: list[_Place] = []
        ranges: list[Range] = []
        inline: list[tuple[_Place, bytes]] = []

        def report(file: str, array: int, what: str) -> None:
            with lock:
                reading.arrays[array] = None
                problems.append(Problem(file, names[array], what))

        for array, name in enumerate(names):
            form = reading.forms[array]
            if form.chunk_count > len(self._rows):  # before a hostile shape makes us count, or allocate, for ever
                what = f"it should have {form.chunk_count} chunks; the whole index has {len(self._rows)} entries"
                report(MANIFEST, array, what)
                continue
            reading.prepare(array)
            for chunk, key in enumerate(chunk_keys(name, form.grid)):
                row = self._rows.get(key)
                if row is None:
                    report(MANIFEST, array, f"chunk {chunk} is not in the index")
                    continue
                content = self._entries.inline[row]
                if content is not None:
                    inline.append((_Place(array, chunk), content))
                    continue
                file, offset, length = self._place(row)
                if length != form.stored_bytes:
                    what = f"chunk {chunk} should take {form.stored_bytes} bytes and takes {length}"
                    report(file, array, what)
                    continue
                ranges.append(Range(file, offset, length, len(places), reading.keep and not form.copied))
                places.append(_Place(array, chunk))

        def use(place: _Place, data: Bytes, file: str) -> None:
            what = reading.accept(place, data)
            if what:
                report(file, place.array, what)

        def failed(wanted: Range, error: Exception) -> None:
            report(wanted.file, places[wanted.tag].array, str(error))

        for place, content in inline:
            use(place, np.frombuffer(content, np.uint8), MANIFEST)
        files: dict[str, DataReader] = {}
        try:
            for path in {wanted.file for wanted in ranges}:
                try:
                    files[path] = self._open(path)
                except DamagedCheckpointError as error:
                    for wanted in ranges:
                        if wanted.file == path:
                            failed(wanted, error)
            usable = [wanted for wanted in ranges if wanted.file in files]
            read_ranges(files, usable, lambda wanted, data: use(places[wanted.tag], data, wanted.file), failed)
        finally:
            for reader in files.values():
                reader.close()
        return sorted(set(problems))


class _Form:
    """How the arrays of one shape and element type are read."""

    __slots__ = ("chunk_count", "copied", "data_bytes", "dtype", "grid", "metadata", "stored_bytes", "whole")

    def __init__(self, metadata: ArrayMetadata) -> None:
        self.metadata = metadata
        self.dtype = metadata.dtype
        self.grid = metadata.grid
        self.chunk_count = metadata.chunk_count
        self.data_bytes = math.prod(metadata.chunk_shape) * metadata.dtype.itemsize
        self.stored_bytes = self.data_bytes + (CHECKSUM_BYTES if metadata.checksummed else 0)
        # An array of one chunk is a view of what was read, unless it is so small that copying is cheaper than keeping.
        self.whole = metadata.chunk_shape == metadata.shape
        self.copied = not self.whole or self.data_bytes < _COPY


class _Reading:
    """Arrays that are being put together from chunks as these arrive."""

    def __init__(self, metadata: Sequence[ArrayMetadata], *, keep: bool) -> None:
        forms: dict[ArrayMetadata, _Form] = {}
        self.forms = [forms.get(one) or forms.setdefault(one, _Form(one)) for one in metadata]
        self.keep = keep
        self.arrays: list[NDArray[Any] | None] = [None] * len(metadata)

    def prepare(self, array: int) -> None:
        """Sets memory aside for an array that is put together from several chunks."""
        form = self.forms[array]
        if self.keep and not form.whole:
            self.arrays[array] = _empty(form.metadata.shape, form.dtype)

    def accept(self, place: _Place, data: Bytes) -> str:
        """Checks a chunk and puts it where it belongs; returns what is wrong with it, or nothing."""
        form = self.forms[place.array]
        size = form.data_bytes
        if len(data) != form.stored_bytes:
            return f"chunk {place.chunk} should take {form.stored_bytes} bytes and takes {len(data)}"
        values = data[:size]
        if size != form.stored_bytes:
            expected = int.from_bytes(data[size:].tobytes(), "little")
            found = crc32c(values)
            if found != expected:
                return f"chunk {place.chunk} has crc32c {found:08x} where {expected:08x} was written"
        if not self.keep:
            return ""
        view = values.view(form.dtype)
        if form.whole:
            if form.copied or not view.flags.aligned:
                view = view.copy()
            self.arrays[place.array] = view.reshape(form.metadata.shape)
            return ""
        array = self.arrays[place.array]
        if array is not None:  # None once another chunk of it has turned out to be damaged
            _insert(array, view.reshape(form.metadata.chunk_shape), place.chunk, form.metadata)
        return ""


def _insert(array: NDArray[Any], chunk: NDArray[Any], index: int, metadata: ArrayMetadata) -> None:
    """Copies a chunk into its array, without what lies beyond the array's end."""
    position = np.unravel_index(index, metadata.grid) if metadata.grid else ()
    starts = [int(i) * size for i, size in zip(position, metadata.chunk_shape, strict=True)]
    target = array[tuple(slice(start, start + size) for start, size in zip(starts, metadata.chunk_shape, strict=True))]
    target[...] = chunk[tuple(slice(0, size) for size in target.shape)]


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    return aligned_empty(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
