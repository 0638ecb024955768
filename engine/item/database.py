"""A folder of named arrays: an OCDBT database that holds zarr v3 arrays, as holdfast and TensorStore write it.

Where an array lies in one chunk, what is returned is the memory that was read; nothing is copied. The checksum of
every chunk is verified on the way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..digests import read_checked
from ..errors import DamagedCheckpointError, FormatVersionError, ObjectNotFoundError
from ..format import (
    METADATA_LIMIT,
    ArrayMetadata,
    decode_array_metadata,
    decode_database,
    decode_fill_value,
)
from ..record import FileRecord
from ..storage import DataReader, Location
from ..tree import Box
from .assembly import Assembly
from .chunks import Chunks, plausible
from .extents import Extent, read_chunks
from .index import Index, Place, Search
from .sources import Bytes

MANIFEST = "manifest.ocdbt"
_SMALL_FILE_LIMIT = 512 << 20  # bytes of a file that is read in one piece


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

    Attributes:
        bytes_read: How many bytes have been read so far, of all files, those between two chunks included.
    """

    def __init__(self, location: Location, files: Mapping[str, FileRecord] | None = None) -> None:
        self._location = location
        self._files = files
        self._metadata: dict[str, ArrayMetadata | None] = {}
        self.bytes_read = 0
        manifest = self.read_file(MANIFEST)
        with naming(location):
            self._index = Index(decode_database(manifest, self._read_node))

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
        content = read_checked(self._location / path, known, limit=_SMALL_FILE_LIMIT)
        self.bytes_read += len(content)
        return content

    @property
    def names(self) -> list[str]:
        """Returns the names of the arrays, in the order of the index; an array that is alone may have the name "".

        Raises:
            DamagedCheckpointError: A name is no text.
        """
        with naming(self._location):
            return self._index.names

    def add(self, arrays: Mapping[str, tuple[ArrayMetadata, bytes]]) -> None:
        """Adds arrays whose content is at hand, each as one chunk.

        Args:
            arrays: For every name how it would be stored, and its bytes.
        """
        self._index.add(arrays)
        self._metadata.update({name: form for name, (form, _) in arrays.items()})

    def metadata(self, names: Sequence[str]) -> list[ArrayMetadata | None]:
        """Returns how arrays are stored; None in the place of those that there are not.

        Args:
            names: The arrays' names.

        Raises:
            DamagedCheckpointError: The metadata of one cannot be read.
            FormatVersionError: One uses a codec that holdfast does not read.
        """
        known = self._metadata
        missing = [name for name in names if name not in known]
        decoded: dict[bytes, ArrayMetadata] = {}
        for name, found in zip(missing, self._index.metadata(missing), strict=True):
            if found is None:
                known[name] = None
                continue
            text = self._text(name, found)
            metadata = decoded.get(text)
            if metadata is None:
                try:
                    metadata = decoded[text] = decode_array_metadata(text)
                except (DamagedCheckpointError, FormatVersionError) as error:
                    raise type(error)(f"{self._location}: array {name!r}: {error}") from error
            known[name] = metadata
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

    def read_boxes(
        self, names: Sequence[str], boxes: Sequence[Sequence[Box] | None]
    ) -> tuple[list[NDArray[Any] | None], list[Problem]]:
        """Reads parts of arrays: only the chunks that hold something of them.

        Args:
            names: Names of arrays that are in the database.
            boxes: For each array the boxes that are wanted, inside its shape; None is all of it.

        Returns:
            As :meth:`read`, with an array for every box, in their order.
        """
        assembly = Assembly(self._known(names), boxes, keep=True)
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

    def _text(self, name: str, found: bytes | Place) -> bytes:
        """Returns the metadata of an array that is in the index or in the place that the index gives."""
        if not isinstance(found, Place):
            return found
        if found.length > METADATA_LIMIT:
            raise DamagedCheckpointError(f"{self._location}: the metadata of array {name!r} takes {found.length} bytes")
        return self._read_node(*found)

    def _read_node(self, path: str, offset: int, length: int) -> bytes:
        with self._open(path) as file, self._missing(path):
            self.bytes_read += length
            return file.read(offset, length).tobytes()

    def _open(self, path: str) -> DataReader:
        known = None if self._files is None else self._files.get(path)
        with self._missing(path):
            return (self._location / path).open_data(size=None if known is None else known.size)

    @contextlib.contextmanager
    def _missing(self, path: str) -> Iterator[None]:
        try:
            yield
        except ObjectNotFoundError as error:  # from a disk when it is opened, from an object store when it is read
            raise DamagedCheckpointError(self._is_missing(path)) from error

    def _is_missing(self, path: str) -> str:
        return f"{self._location / path} is missing: the checkpoint is not whole"

    def _fetch(self, names: Sequence[str], assembly: Assembly) -> list[Problem]:
        """Reads the chunks of arrays and hands them over; returns what is wrong."""
        problems: list[Problem] = []
        lock = threading.Lock()

        def report(file: str, array: int, what: str) -> None:
            with lock:
                assembly.give_up(array)
                problems.append(Problem(file or MANIFEST, names[array], what))

        def accept(array: int, chunk: int, content: Bytes) -> None:
            what = assembly.accept(array, chunk, content)
            if what:
                report(MANIFEST, array, what)

        def fill(array: int) -> None:
            (found,) = self._index.metadata([names[array]])
            with naming(self._location):
                assembly.fill(array, decode_fill_value(self._text(names[array], found or b"")))

        found = self._index.find(names, assembly, Search(report, accept, fill), sparse=self._files is None)

        def failed(table: Chunks, row: int, error: object) -> None:
            file = table.file(row)
            what = self._is_missing(file) if isinstance(error, ObjectNotFoundError) else str(error)
            report(file, int(table.arrays[row]), what)

        def use(extent: Extent, data: Bytes) -> None:
            rows = range(extent.first, extent.stop)
            for row, what in assembly.accept_many(chunks, rows, extent.offset, data, extent.kept):
                failed(chunks, row, what)

        with contextlib.ExitStack() as stack:
            files: dict[str, DataReader] = {}
            for number in np.unique(found.file_ids).tolist():
                path = found.files[number]
                try:
                    files[path] = stack.enter_context(self._open(path))
                except DamagedCheckpointError as error:
                    for row in np.flatnonzero(found.file_ids == number).tolist():
                        failed(found, row, error)
            sizes = {path: self._size(path, file) for path, file in files.items()}
            chunks = plausible(found, sizes, partial(failed, found))
            self.bytes_read += read_chunks(
                files, chunks, use, partial(failed, chunks), remote=not self._location.is_local
            )
        return sorted(set(problems))

    def _size(self, path: str, file: DataReader) -> int:
        """Returns the size of a data file, as far as it is known without reading all of it."""
        known = None if self._files is None else self._files.get(path)
        if self._location.is_local:
            return file.size
        return (1 << 63) - 1 if known is None else known.size
