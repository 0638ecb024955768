"""Files of ``numpy.savez``: zip archives of arrays, one member ``<name>.npy`` for each.

https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html describes the members. A name with slashes is a
path. Arrays of Python objects are pickles, which are listed and not read.
"""

from __future__ import annotations

import contextlib
import io
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ...engine.errors import DamagedCheckpointError, HoldfastError
from ...engine.pytree import Box, whole
from ...engine.sources import FetchedArray, FetchedTree, SingleTree, first_bytes
from ...engine.storage import Location
from .torch.files import ZIP_MAGIC, opened

_MEMBER = ".npy"
_END = 22  # bytes of the record at the end of an archive, before its comment
_HEADERS: dict[tuple[int, int], Callable[[Any], tuple[tuple[int, ...], bool, np.dtype[Any]]]] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}
_KINDS = "biufcSU"  # kinds of dtypes that are plain data
DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, ValueError, EOFError, KeyError, NotImplementedError, RuntimeError),
    tokenize.TokenError,  # numpy tokenizes the header of an array that is no literal of Python
)


def recognise(location: Location, names: frozenset[str]) -> SingleTree | None:
    if names or location.is_directory() or first_bytes(location, len(ZIP_MAGIC)) != ZIP_MAGIC:
        return None
    with archive_of(location) as archive:
        arrays = [_described(archive, one) for one in archive.infolist() if one.filename.endswith(_MEMBER)]
        nbytes = sum(one.compress_size for one in archive.infolist())
    return SingleTree("NumPy", location, NumpyTree(location, arrays), nbytes) if arrays else None


class NumpyTree(FetchedTree):
    """The arrays of one file, by name."""

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[str, Box | None], NDArray[Any]]]:
        with archive_of(self.location) as archive:

            def fetch(name: str, box: Box | None) -> NDArray[Any]:
                with archive.open(name) as member:
                    found: NDArray[Any] = npy.read_array(member, allow_pickle=False)
                    member.read()  # Reading to the end compares the member with its checksum.
                return found if box is None else found[box.within(whole(found.shape))]

            yield fetch


@contextlib.contextmanager
def archive_of(location: Location) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive; what is wrong with it is an error that names the file."""
    with location.open_data() as reader:
        try:
            file = opened(reader, 0, reader.size)
            with zipfile.ZipFile(file) as archive:
                _check_directory(archive, file)
                yield archive
        except DAMAGE as error:
            if isinstance(error, HoldfastError):
                raise
            raise DamagedCheckpointError(f"{location} is not a whole zip archive: {error}") from error


def _check_directory(archive: zipfile.ZipFile, file: BinaryIO) -> None:
    """Raise BadZipFile unless the directory at the end of the file, which no checksum covers, is whole.

    A flipped bit there can hide a member: in a name, or in a length that makes one entry swallow the next.
    """
    file.seek(-_END - len(archive.comment), io.SEEK_END)
    (count,) = struct.unpack("<H", file.read(_END)[10:12])
    found = archive.infolist()
    if count not in (len(found), 0xFFFF):
        raise zipfile.BadZipFile(f"its directory has {len(found)} entries, expected {count}")
    for one in found:
        if one.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise zipfile.BadZipFile(f"{one.filename!r:.80} is compressed by the unknown method {one.compress_type}")
        archive.open(one).close()  # Opening compares its name with that in its local header.


def _described(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> FetchedArray:
    path = tuple(info.filename.removesuffix(_MEMBER).split("/"))
    with archive.open(info) as member:
        version = npy.read_magic(member)
        if version not in _HEADERS:  # Version 3 is for structured arrays, as it has names of fields in UTF-8.
            return FetchedArray(path, info.filename, np.dtype("V1"), (), "an array of structures")
        shape, _, dtype = _HEADERS[version](member)
    if dtype.hasobject:
        return FetchedArray(path, info.filename, dtype, shape, "pickled Python objects")
    if dtype.kind not in _KINDS or not dtype.itemsize:
        return FetchedArray(path, info.filename, dtype, shape, f"elements of type {dtype}")
    array = FetchedArray(path, info.filename, dtype.newbyteorder("="), shape)
    if array.nbytes > info.file_size:
        raise DamagedCheckpointError(f"{info.filename!r:.80} claims {array.nbytes} bytes, and has {info.file_size}")
    return array
