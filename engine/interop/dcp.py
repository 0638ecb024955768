"""Reads folders of torch.distributed.checkpoint: ``.metadata`` and the ``*.distcp`` files beside it, without torch.

Nested keys come back where the checkpoint says how they were flattened, as its default planner does; elsewhere an
entry's whole name is one key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import DamagedCheckpointError, ObjectNotFoundError
from ..storage import DataReader, Entry, Location
from ..tree.structure import MAX_DEPTH
from .dcp_metadata import Chunk, DcpEntry, DcpTensor, Place, read_metadata
from .safetensors_header import LENGTH_BYTES, TensorEntry, decode_header, header_length
from .source import SingleTree, StepDirectories
from .stored import StoredTree
from .stored_array import StoredArray, StoredPart
from .torch_archive import NoArchive, TorchArchive
from .torch_files import read_object, without_objects

FORMAT = "torch.distributed.checkpoint"
METADATA = ".metadata"
_METADATA_LIMIT = 1 << 30  # bytes
_OPEN_FILES = 32


def recognise(location: Location, names: frozenset[str]) -> SingleTree | None:
    """Opens a folder; see `source.Format`."""
    if METADATA not in names:
        return None
    content = (location / METADATA).read_bytes(limit=_METADATA_LIMIT)
    if b"torch.distributed.checkpoint" not in content[:4096]:
        return None
    try:
        entries = read_metadata(content)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{location / METADATA} cannot be read: {error}") from error
    nbytes = sum(_size(location, entry) for entry in location.entries())
    tree = _Folder(location).tree(entries)
    return SingleTree(format=FORMAT, location=location, source=StoredTree.of(location, tree, nbytes), nbytes=nbytes)


def recognise_steps(_location: Location, _names: frozenset[str]) -> StepDirectories | None:
    """There are no directories of steps in this format."""
    return None


def _size(location: Location, entry: Entry) -> int:
    if entry.is_directory or entry.size is not None:
        return entry.size or 0
    with (location / entry.name).open_data() as reader:  # object stores do not always tell
        return reader.size


class _Folder:
    """The data files of a folder, some of them open."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._open: OrderedDict[str, DataReader] = OrderedDict()
        self._headers: dict[tuple[str, int], dict[str, TensorEntry]] = {}

    def tree(self, entries: Sequence[DcpEntry]) -> Any:
        """Returns the nested containers of all entries."""
        root: dict[str | int, Any] = {}
        for entry in entries:
            content = entry.content
            value = (
                self._tensor(entry.name, content)
                if isinstance(content, DcpTensor)
                else self._object(entry.name, content)
            )
            _insert(root, entry, value)
        return _with_lists(root)

    def _tensor(self, name: str, tensor: DcpTensor) -> StoredArray:
        extra = (2,) if tensor.form.paired else ()
        return StoredArray(
            tensor.form.dtype,
            tensor.shape + extra,
            tensor.form.details,
            lambda: [self._part(name, tensor, chunk, extra) for chunk in tensor.chunks],
        )

    def _part(self, name: str, tensor: DcpTensor, chunk: Chunk, extra: tuple[int, ...]) -> StoredPart:
        part = self._safetensor(name, chunk.place) or self._archived(name, chunk.place)
        if part.shape != chunk.shape + extra or part.dtype.newbyteorder("=") != tensor.form.dtype:
            raise DamagedCheckpointError(
                f"{chunk.place.file} holds {part.dtype}{list(part.shape)}, not {tensor.form.dtype}{list(chunk.shape)}"
            )
        return replace(part, start=chunk.start + (0,) * len(extra))

    def _archived(self, name: str, place: Place) -> StoredPart:
        try:
            stored, _ = self._load(place)
        except NoArchive:
            self._read_header(place)
            found = self._safetensor(name, place)
            assert found is not None
            return found
        if not isinstance(stored, StoredArray):
            raise DamagedCheckpointError(f"{place.file} does not hold a tensor")
        return stored.whole()

    def _read_header(self, place: Place) -> None:
        """Reads the header of the safetensors file that begins at a place; all of its tensors are said to be there."""
        reader = self._reader(place.file)
        size = reader.size - place.offset
        length = header_length(reader.read(place.offset, min(LENGTH_BYTES, size)).tobytes(), size)
        header = decode_header(reader.read(place.offset + LENGTH_BYTES, length).tobytes(), size)
        self._headers[place.file, place.offset] = {entry.name: entry for entry in header.tensors}

    def _safetensor(self, name: str, place: Place) -> StoredPart | None:
        """Finds a tensor where the file is one of safetensors from the place on, as far as that is known."""
        entries = self._headers.get((place.file, place.offset))
        if entries is None:
            return None
        if name not in entries:
            raise DamagedCheckpointError(f"{place.file} does not hold {name!r:.200}")
        entry = entries[name]
        start, dtype = (0,) * len(entry.shape), entry.dtype.newbyteorder("<")
        return StoredPart(start, entry.shape, place.file, place.offset + entry.offset, entry.length, dtype)

    def _object(self, name: str, place: Place) -> Any:
        try:
            value, pickle_bytes = self._load(place)
            return without_objects(value, [], pickle_bytes)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{self._location}: entry {name!r:.200}: {error}") from error

    def _load(self, place: Place) -> tuple[Any, int]:
        reader = self._reader(place.file)
        if place.offset + place.length > reader.size:
            raise DamagedCheckpointError(
                f"{place.file} is cut off: expected {place.length} bytes at offset {place.offset}, found {reader.size}"
            )
        archive = TorchArchive(reader, place.offset, place.length)
        return read_object(archive, place.file), len(archive.pickle)

    def _reader(self, file: str) -> DataReader:
        reader = self._open.pop(file, None)
        if reader is None:
            try:
                reader = (self._location / file).open_data()
            except ObjectNotFoundError as error:
                raise DamagedCheckpointError(f"{self._location / file} is missing") from error
        self._open[file] = reader
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return reader


def _insert(root: dict[str | int, Any], entry: DcpEntry, value: Any) -> None:
    branch = root
    if len(entry.path) >= MAX_DEPTH:
        raise DamagedCheckpointError(f"entry {entry.name!r:.200} is nested deeper than {MAX_DEPTH} levels")
    for key in entry.path[:-1]:
        branch = branch.setdefault(key, _Branch())
        if not isinstance(branch, _Branch):
            raise DamagedCheckpointError(f"entry {entry.name!r:.200} leads through another one")
    if entry.path[-1] in branch:
        raise DamagedCheckpointError(f"entry {entry.name!r:.200} is there twice")
    branch[entry.path[-1]] = value


class _Branch(dict[str | int, Any]):
    """A container of the tree, not yet known to be a list."""


def _with_lists(branch: dict[str | int, Any]) -> Any:
    found = {key: _with_lists(value) if isinstance(value, _Branch) else value for key, value in branch.items()}
    if isinstance(branch, _Branch) and all(type(key) is int for key in found) and set(found) == set(range(len(found))):
        return [found[index] for index in range(len(found))]
    return found
