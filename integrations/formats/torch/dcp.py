"""Folders of torch.distributed.checkpoint: ``.metadata`` and the ``*.distcp`` files beside it, read without torch.

``.metadata`` is a pickle of dataclasses of ``torch.distributed.checkpoint.metadata`` and ``.filesystem``; only their
names and attributes are read, nothing is imported. Nested keys come back where the metadata has their paths, as those
of the default planner; elsewhere an entry's whole name is one key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ....engine.arrays import naming
from ....engine.errors import DamagedCheckpointError, ObjectNotFoundError
from ....engine.sources import Path, SingleTree, StoredArray, StoredPart, StoredTree, entry_size, nested
from ....engine.storage import DataReader, Location
from ..safetensors import read_header
from .files import NoArchive, TorchArchive, read_object, without_objects
from .objects import BUILDERS, TorchDType, sizes, torch_dtype
from .pickles import Inert, shown, unpickle

Ints = tuple[int, ...]

_LARGEST = 1 << 62


class Stretch(NamedTuple):
    """The stretch of a file that holds one object."""

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A part of a tensor: the index of its first element, its shape, and the stretch that holds it."""

    start: Ints
    shape: Ints
    place: Stretch


class DcpTensor(NamedTuple):
    elements: TorchDType
    shape: Ints
    chunks: tuple[Chunk, ...]


class DcpEntry(NamedTuple):
    """One entry of a state dict."""

    name: str  # its whole name, such as ``optimizer.state.0.step``
    path: Path  # its keys; an int is a place in a list
    content: DcpTensor | Stretch  # a tensor, or the stretch that holds another object


def read_metadata(content: bytes) -> list[DcpEntry]:
    metadata = _attributes(unpickle(content, BUILDERS), "Metadata")
    entries = _dict(metadata.get("state_dict_metadata"), "entries")
    places = _places(_dict(metadata.get("storage_data"), "places"))
    planned = metadata.get("planner_data")
    paths = planned if isinstance(planned, dict) else {}
    found = []
    for name, entry in entries.items():
        if type(name) is not str:
            raise DamagedCheckpointError(f"{shown(name)} is not the name of an entry")
        kind = entry.name.attribute if isinstance(entry, Inert) else ""
        content_: DcpTensor | Stretch
        if kind == "TensorStorageMetadata":
            content_ = _tensor(name, _attributes(entry, kind), places)
        elif kind == "BytesStorageMetadata":
            content_ = _place(places, name, None)
        else:
            raise DamagedCheckpointError(f"entry {shown(name)} is of the unknown kind {kind:.100}")
        found.append(DcpEntry(name, _path(name, paths.get(name)), content_))
    return found


def _tensor(name: str, facts: Mapping[str, Any], places: Mapping[Any, Stretch]) -> DcpTensor:
    shape = sizes(facts.get("size"))
    properties = facts.get("properties")
    state = properties.state if isinstance(properties, Inert) else None
    dtype = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    chunks = facts.get("chunks")
    if not isinstance(chunks, list):
        raise DamagedCheckpointError(f"entry {shown(name)} has no list of parts")
    parts: dict[Ints, Chunk] = {}
    for chunk in chunks:
        described = _attributes(chunk, "ChunkStorageMetadata")
        start, size = sizes(described.get("offsets")), sizes(described.get("sizes"))
        if len(start) != len(shape) or len(size) != len(shape):
            raise DamagedCheckpointError(f"a part of entry {shown(name)} does not fit its shape {shape}")
        if 0 in size:
            continue  # Processes without elements of the tensor may all name the same place.
        if start in parts:  # A pickle repeats a part in two bytes, and each would be looked up in its file.
            raise DamagedCheckpointError(f"entry {shown(name)} has two parts at {start}")
        parts[start] = Chunk(start, size, _place(places, name, start))
    return DcpTensor(torch_dtype(dtype), shape, tuple(parts.values()))


def _places(data: Mapping[Any, Any]) -> dict[tuple[str, Ints | None], Stretch]:
    found = {}
    for index, info in data.items():
        key, facts = _attributes(index, "MetadataIndex"), _attributes(info, "_StorageInfo")
        name, offset = key.get("fqn"), key.get("offset")
        file, begin, length = facts.get("relative_path"), facts.get("offset"), facts.get("length")
        if facts.get("transform_descriptors"):
            raise DamagedCheckpointError(
                f"entry {shown(name)} is transformed by an extension, which holdfast does "
                "not undo; load it with torch.distributed.checkpoint and save it without extensions"
            )
        if type(file) is not str or file in ("", ".", "..") or any(mark in file for mark in "/\\\0"):
            raise DamagedCheckpointError(f"entry {shown(name)} is in {shown(file)}, which is not a file of its folder")
        if type(begin) is not int or type(length) is not int or not 0 <= begin <= _LARGEST or length < 0:
            raise DamagedCheckpointError(f"entry {shown(name)} has an offset or size that {file} cannot have")
        found[shown(name) if type(name) is not str else name, None if offset is None else sizes(offset)] = Stretch(
            file, begin, length
        )
    return found


def _place(places: Mapping[Any, Stretch], name: str, start: Ints | None) -> Stretch:
    found = places.get((name, start))
    if found is None:
        at = "" if start is None else f" at {start}"
        raise DamagedCheckpointError(f"the metadata has no location of entry {shown(name)}{at}")
    return found


def _path(name: str, planned: Any) -> Path:
    if planned is None:
        return (name,)
    if (
        not isinstance(planned, tuple)
        or not planned
        or not all(type(key) is str or (type(key) is int and 0 <= key <= _LARGEST) for key in planned)
    ):
        raise DamagedCheckpointError(f"{shown(planned)} is not the path of an entry")
    return planned


def _attributes(value: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(value, Inert) or value.name.attribute != kind or not isinstance(value.state, dict):
        raise DamagedCheckpointError(f"expected a {kind}, found another object")
    return value.state


def _dict(value: Any, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"it has no {what}")
    return value


METADATA = ".metadata"
_METADATA_LIMIT = 1 << 30  # bytes
_OPEN_FILES = 32


def recognise(location: Location, names: frozenset[str]) -> SingleTree | None:
    if METADATA not in names:
        return None
    content = (location / METADATA).read_bytes(limit=_METADATA_LIMIT)
    if b"torch.distributed.checkpoint" not in content[:4096]:
        return None
    try:
        entries = read_metadata(content)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{location / METADATA} cannot be read: {error}") from error
    nbytes = sum(entry_size(location, entry) for entry in location.entries())
    source = StoredTree.of(location, _Folder(location).tree(entries), nbytes)
    return SingleTree("torch.distributed.checkpoint", location, source, nbytes)


class _Folder:
    """The data files of a folder, some of them open."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._open: OrderedDict[str, DataReader] = OrderedDict()
        self._headers: dict[tuple[str, int], dict[str, StoredArray]] = {}

    def tree(self, entries: Sequence[DcpEntry]) -> Any:
        with naming(self._location):
            return nested(((entry.path, self._value(entry)) for entry in entries), root_is_dict=True)

    def _value(self, entry: DcpEntry) -> Any:
        if isinstance(entry.content, DcpTensor):
            return self._tensor(entry.name, entry.content)
        try:
            value, pickle_bytes = self._load(entry.content)
            return without_objects(value, [], pickle_bytes)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{self._location}: entry {entry.name!r:.200}: {error}") from error

    def _tensor(self, name: str, tensor: DcpTensor) -> StoredArray:
        extra = (2,) if tensor.elements.paired else ()
        return StoredArray(
            tensor.elements.dtype,
            tensor.shape + extra,
            tensor.elements.details,
            lambda: [self._part(name, tensor, chunk, extra) for chunk in tensor.chunks],
        )

    def _part(self, name: str, tensor: DcpTensor, chunk: Chunk, extra: tuple[int, ...]) -> StoredPart:
        part = self._stored(name, chunk.place)
        if part.shape != chunk.shape + extra or part.dtype.newbyteorder("=") != tensor.elements.dtype:
            raise DamagedCheckpointError(
                f"{chunk.place.file}: expected {tensor.elements.dtype}{list(chunk.shape)}, found {part.dtype}"
                f"{list(part.shape)}"
            )
        return replace(part, start=chunk.start + (0,) * len(extra))

    def _stored(self, name: str, place: Stretch) -> StoredPart:
        """Find a tensor in the file that begins at a place: an archive, or a safetensors file that several share."""
        stored = None
        tensors = self._headers.get((place.file, place.offset))
        if tensors is None:
            try:
                stored, _ = self._load(place)
            except NoArchive:
                tensors = read_header(self._reader(place.file), place.file, place.offset).tensors
                self._headers[place.file, place.offset] = tensors
        if tensors is not None:
            stored = tensors.get(name)
        if not isinstance(stored, StoredArray):
            raise DamagedCheckpointError(f"{place.file} does not hold the tensor {name!r:.200}")
        return stored.whole()

    def _load(self, place: Stretch) -> tuple[Any, int]:
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
