"""Read array files: HDF5, Keras 3 weights (``.weights.h5`` and ``.keras``), and ``numpy.savez`` archives.

HDF5 groups and datasets, read with h5py, become dictionaries and arrays. Groups whose keys are 0, 1, ... become lists,
because Keras numbers the variables of a layer, as in ``layers/dense/vars/0``. A ``.keras`` file is a zip archive of an
HDF5 file and JSON files that describe the model (https://keras.io/api/models/model_saving_apis). External links are
not followed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ...engine.errors import DamagedCheckpointError, HoldfastError, OptionError
from ...engine.format import ITEM
from ...engine.installed import install_command
from ...engine.pytree import MAX_DEPTH, Box, whole
from ...engine.sources import JSON, CheckpointSource, FetchedArray, FetchedTree, SingleTree, first_bytes, read_json
from ...engine.storage import Location
from .torch.files import ZIP_MAGIC, opened

_MAGIC = b"\x89HDF\r\n\x1a\n"
_WEIGHTS = "model.weights.h5"  # archive member of a ``.keras`` file that holds the weights
_DOCUMENTS = {"config": "config.json", "metadata": "metadata.json"}  # archive member for each JSON item
_DOCUMENT_LIMIT = 64 << 20  # maximum size, in bytes, of a JSON document
_NODES = 1_000_000  # maximum number of datasets and links in a file
_RATIO = 2048  # maximum compression ratio of an HDF5 file
_UNSTORED = 64 << 20  # allowance, in bytes, for arrays that are not stored because they contain only the fill value


def recognise(location: Location, names: frozenset[str]) -> CheckpointSource | None:
    if names or location.is_directory():
        return None
    begin = first_bytes(location, len(_MAGIC))
    if begin == _MAGIC:
        tree = HDF5Tree(location)
        keras = any(part == "vars" or part == "model_weights" for array in tree.arrays for part in array.path)
        return SingleTree("Keras" if keras else "HDF5", location, tree, tree.stored)
    if not begin.startswith(ZIP_MAGIC):
        return None
    with archive_of(location) as archive:
        members = archive.namelist()
        if _WEIGHTS in members:
            return KerasFile(location, members)
        arrays = [_described(archive, member) for member in archive.infolist() if member.filename.endswith(_MEMBER)]
        nbytes = sum(member.compress_size for member in archive.infolist())
    return SingleTree("NumPy", location, NumpyTree(location, arrays), nbytes) if arrays else None


class KerasFile(SingleTree):
    """A model in a ``.keras`` file, with its weights as a tree and its configuration as JSON items."""

    def __init__(self, location: Location, members: list[str]) -> None:
        tree = HDF5Tree(location, inside=True)
        super().__init__("Keras", location, tree, tree.stored)
        self.items = {**self.items, **{item: JSON for item, name in _DOCUMENTS.items() if name in members}}

    def value(self, item: str) -> Any:
        with archive_of(self.location) as archive:
            info = archive.getinfo(_DOCUMENTS[item])
            if info.file_size > _DOCUMENT_LIMIT:
                raise DamagedCheckpointError(f"{self.location}: {info.filename} has {info.file_size} bytes")
            return read_json(self.location / info.filename, archive.read(info))

    def items_to_load(self) -> list[str]:
        return [ITEM]  # load only the weights by default


class HDF5Tree(FetchedTree):
    """The datasets of an HDF5 file or, if ``inside`` is set, of the HDF5 file inside a ``.keras`` file."""

    def __init__(self, location: Location, *, inside: bool = False) -> None:
        self.location = location
        self._inside = inside
        try:
            self._h5py: Any = importlib.import_module("h5py")
        except ImportError as error:
            needed = f"reading it needs h5py: {install_command('keras')}"
            raise OptionError(f"{location} is a Keras file or another HDF5 file; {needed}") from error
        self.stored = 0
        self.arrays: list[FetchedArray] = []
        self._paths: dict[int, str] = {}  # paths of visited groups and datasets, keyed by file address
        with self._file() as file:
            self._walk(file, ())
        readable = [array for array in self.arrays if not array.obstacle]
        if sum(array.nbytes for array in readable) > self.stored * _RATIO + _UNSTORED:
            largest = max(readable, key=lambda array: array.nbytes)
            raise DamagedCheckpointError(
                f"{location}: {largest.name[1:]} claims {largest.nbytes} bytes, but all {len(readable)} arrays have "
                f"{self.stored}"
            )
        super().__init__(location, self.arrays)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[str, Box | None], NDArray[Any]]]:
        with self._file() as file:
            yield lambda name, box: file[name][() if box is None else box.within(whole(box.shape))]

    @contextlib.contextmanager
    def _file(self) -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            content: Any
            if self._inside:
                content = io.BytesIO(stack.enter_context(archive_of(self.location)).read(_WEIGHTS))
            else:
                reader = stack.enter_context(self.location.open_data())
                content = opened(reader, 0, reader.size)
            try:
                yield stack.enter_context(self._h5py.File(content, "r"))
            except (OSError, KeyError, RuntimeError, ValueError, TypeError, OverflowError) as error:
                if isinstance(error, HoldfastError):
                    raise
                raise DamagedCheckpointError(f"{self.location} is damaged: {error}") from error

    def _walk(self, group: Any, path: tuple[str, ...]) -> None:
        h5py = self._h5py
        self._paths[h5py.h5o.get_info(group.id).addr] = "/".join(path)
        if len(path) >= MAX_DEPTH or len(self.arrays) > _NODES:
            raise DamagedCheckpointError(f"{self.location}: its groups are nested too deeply, or form a cycle")
        for key in group:
            here = (*path, key)
            if not isinstance(group.get(key, getlink=True), h5py.HardLink):
                self._add(here, np.dtype("V1"), (), "a link, perhaps to another file")
                continue
            child = group[key]
            address = h5py.h5o.get_info(child.id).addr
            if isinstance(child, h5py.Dataset):
                self._dataset(here, child)
                self.stored += child.id.get_storage_size() if address not in self._paths else 0
                self._paths[address] = "/".join(here)
            elif address in self._paths:  # visit once: a shared group can have exponentially many paths
                self._add(here, np.dtype("V1"), (), f"another name for {self._paths[address] or 'the file'}")
            elif isinstance(child, h5py.Group):
                self._walk(child, here)

    def _dataset(self, path: tuple[str, ...], data: Any) -> None:
        dtype, shape = data.dtype, data.shape
        if dtype.kind == "V" and dtype.itemsize == 2 and data.attrs.get("dtype") == "bfloat16":
            dtype = np.dtype(ml_dtypes.bfloat16)
        if data.external or data.is_virtual:
            self._add(path, np.dtype("V1"), (), "data in another file")
        elif shape is None or dtype.hasobject or not (dtype.kind in "biufc" or dtype == ml_dtypes.bfloat16):
            self._add(path, np.dtype("V1"), (), f"elements of type {data.dtype}")
        else:
            self._add(path, dtype.newbyteorder("="), tuple(shape))

    def _add(self, path: tuple[str, ...], dtype: Any, shape: tuple[int, ...], obstacle: str = "") -> None:
        numbered = tuple(int(key) if key.isdecimal() and key == str(int(key)) else key for key in path)
        self.arrays.append(FetchedArray(numbered, "/" + "/".join(path), dtype, shape, obstacle))


# ---- zip archives, including those written by ``numpy.savez``
#
# A numpy.savez archive has one member ``<name>.npy`` per array:
# https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html. Slashes in a name separate the keys of a path.
# Object arrays are pickled, so they are listed but not read.

_MEMBER = ".npy"
_END = 22  # size, in bytes, of the end-of-central-directory record without the archive comment
_HEADERS: dict[tuple[int, int], Callable[[Any], tuple[tuple[int, ...], bool, np.dtype[Any]]]] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}
_KINDS = "biufcSU"  # numpy dtype kinds of plain data
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, ValueError, EOFError, KeyError, NotImplementedError, RuntimeError),
    tokenize.TokenError,  # raised if numpy cannot parse a header as a Python literal
)


class NumpyTree(FetchedTree):
    """The arrays of one ``numpy.savez`` file, keyed by name."""

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[str, Box | None], NDArray[Any]]]:
        with archive_of(self.location) as archive:

            def fetch(name: str, box: Box | None) -> NDArray[Any]:
                with archive.open(name) as member:
                    array: NDArray[Any] = npy.read_array(member, allow_pickle=False)
                    member.read()  # reading to the end verifies the checksum
                return array if box is None else array[box.within(whole(array.shape))]

            yield fetch


@contextlib.contextmanager
def archive_of(location: Location) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive; raise a DamagedCheckpointError that names the file if the archive is invalid."""
    with location.open_data() as reader:
        try:
            file = opened(reader, 0, reader.size)
            with zipfile.ZipFile(file) as archive:
                _check_directory(archive, file)
                yield archive
        except _DAMAGE as error:
            if isinstance(error, HoldfastError):
                raise
            raise DamagedCheckpointError(f"{location} is not a complete zip archive: {error}") from error


def _check_directory(archive: zipfile.ZipFile, file: BinaryIO) -> None:
    """Raise BadZipFile if the archive's central directory, which is not protected by a checksum, is damaged."""
    # A flipped bit could hide a member by changing its name, or by making the previous entry cover the member's entry.
    file.seek(-_END - len(archive.comment), io.SEEK_END)
    (count,) = struct.unpack("<H", file.read(_END)[10:12])
    members = archive.infolist()
    if count not in (len(members), 0xFFFF):
        raise zipfile.BadZipFile(f"its directory has {len(members)} entries, expected {count}")
    for info in members:
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise zipfile.BadZipFile(f"{info.filename!r:.80} is compressed with unknown method {info.compress_type}")
        archive.open(info).close()  # open() compares the name with the local header


def _described(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> FetchedArray:
    path = tuple(info.filename.removesuffix(_MEMBER).split("/"))
    with archive.open(info) as member:
        version = npy.read_magic(member)
        if version not in _HEADERS:  # version 3 is only for structured arrays with UTF-8 field names
            return FetchedArray(path, info.filename, np.dtype("V1"), (), "a structured array")
        shape, _, dtype = _HEADERS[version](member)
    if dtype.hasobject:
        return FetchedArray(path, info.filename, dtype, shape, "pickled Python objects")
    if dtype.kind not in _KINDS or not dtype.itemsize:
        return FetchedArray(path, info.filename, dtype, shape, f"elements of type {dtype}")
    array = FetchedArray(path, info.filename, dtype.newbyteorder("="), shape)
    if array.nbytes > info.file_size:
        raise DamagedCheckpointError(f"{info.filename!r:.80} claims {array.nbytes} bytes, but has {info.file_size}")
    return array
