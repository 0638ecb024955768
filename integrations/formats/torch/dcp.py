"""Folders of torch.distributed.checkpoint: ``.metadata`` and the ``*.distcp`` files beside it, read without torch.

``.metadata`` is a pickle of dataclasses of ``torch.distributed.checkpoint.metadata`` and ``.filesystem``; only their
names and attributes are read, nothing is imported. Nested keys are restored where the metadata has their paths, as the
default planner writes them; elsewhere an entry's whole name is one key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ....engine.arrays import naming
from ....engine.errors import DamagedCheckpointError, ObjectNotFoundError
from ....engine.sources import Path, SingleTree, StoredArray, StoredPart, StoredTree, entry_size, nested
from ....engine.storage import DataReader, Location
from ..safetensors import read_header
from .files import NoArchive, TorchArchive, read_object, without_objects
from .objects import BUILDERS, sizes, torch_dtype
from .pickles import Inert, shown, unpickle

METADATA = ".metadata"
_METADATA_LIMIT = 1 << 30  # bytes
_OPEN_FILES = 32
_LARGEST = 1 << 62

Ints = tuple[int, ...]


class Extent(NamedTuple):
    """The bytes of a file that hold one object."""

    file: str
    offset: int
    length: int


# By the name of an entry and the index of the first element of a part; None for an object that is no tensor.
Places = Mapping[tuple[str, Ints | None], Extent]


def recognise(location: Location, names: frozenset[str]) -> SingleTree | None:
    if METADATA not in names:
        return None
    content = (location / METADATA).read_bytes(limit=_METADATA_LIMIT)
    if b"torch.distributed.checkpoint" not in content[:4096]:
        return None
    nbytes = sum(entry_size(location, entry) for entry in location.entries())
    source = StoredTree.of(location, _Folder(location).tree(content), nbytes)
    return SingleTree("torch.distributed.checkpoint", location, source, nbytes)


class _Folder:
    """The data files of a folder, some of them open."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._open: OrderedDict[str, DataReader] = OrderedDict()
        self._headers: dict[tuple[str, int], dict[str, StoredArray]] = {}

    def tree(self, metadata: bytes) -> Any:
        with naming(self._location / METADATA, " cannot be read"):
            entries = self._read_metadata(metadata)
        with naming(self._location):
            leaves = ((path, self._value(name, content)) for name, path, content in entries)
            return nested(leaves, root_is_dict=True)

    def _read_metadata(self, content: bytes) -> list[tuple[str, Path, StoredArray | Extent]]:
        """Return for every entry its name, its path, and its tensor, or the extent of another object."""
        metadata = _attributes(unpickle(content, BUILDERS), "Metadata")
        entries = _dict(metadata.get("state_dict_metadata"), "entries")
        places = _places(_dict(metadata.get("storage_data"), "places"))
        planned = metadata.get("planner_data")
        paths = planned if isinstance(planned, dict) else {}
        found: list[tuple[str, Path, StoredArray | Extent]] = []
        for name, entry in entries.items():
            if type(name) is not str:
                raise DamagedCheckpointError(f"{shown(name)} is not the name of an entry")
            kind = entry.name.attribute if isinstance(entry, Inert) else ""
            if kind not in ("TensorStorageMetadata", "BytesStorageMetadata"):
                raise DamagedCheckpointError(f"entry {shown(name)} is of the unknown kind {kind:.100}")
            is_tensor = kind == "TensorStorageMetadata"
            value = self._tensor(name, _attributes(entry, kind), places) if is_tensor else _place(places, name, None)
            found.append((name, _path(name, paths.get(name)), value))
        return found

    def _tensor(self, name: str, facts: Mapping[str, Any], places: Places) -> StoredArray:
        shape = sizes(facts.get("size"))
        properties, chunks = facts.get("properties"), facts.get("chunks")
        state = properties.state if isinstance(properties, Inert) else None
        dtype = (
            state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
        )
        if not isinstance(chunks, list):
            raise DamagedCheckpointError(f"entry {shown(name)} has no list of parts")
        parts: dict[Ints, tuple[Ints, Extent]] = {}  # by the first index: the shape and the extent
        for chunk in chunks:
            described = _attributes(chunk, "ChunkStorageMetadata")
            start, size = sizes(described.get("offsets")), sizes(described.get("sizes"))
            if len(start) != len(shape) or len(size) != len(shape):
                raise DamagedCheckpointError(f"a part of entry {shown(name)} does not fit its shape {shape}")
            if 0 in size:
                continue  # Processes without elements of the tensor may all name the same place.
            if start in parts:  # A pickle repeats a part in two bytes, and each would be looked up in its file.
                raise DamagedCheckpointError(f"entry {shown(name)} has two parts at {start}")
            parts[start] = size, _place(places, name, start)
        elements = torch_dtype(dtype)
        pair = (2,) if elements.paired else ()

        def stored() -> list[StoredPart]:
            return [
                replace(self._part(name, place, elements.dtype, size + pair), start=start + (0,) * len(pair))
                for start, (size, place) in parts.items()
            ]

        return StoredArray(elements.dtype, shape + pair, elements.details, stored)

    def _value(self, name: str, content: StoredArray | Extent) -> Any:
        if isinstance(content, StoredArray):
            return content
        with naming(self._location, f": entry {name!r:.200}"):
            value, pickle_bytes = self._load(content)
            return without_objects(value, [], pickle_bytes)

    def _part(self, name: str, place: Extent, dtype: Any, shape: Ints) -> StoredPart:
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
        part = stored.whole()
        if part.shape != shape or part.dtype.newbyteorder("=") != dtype:
            raise DamagedCheckpointError(
                f"{place.file}: expected {dtype}{list(shape)}, found {part.dtype}{list(part.shape)}"
            )
        return part

    def _load(self, place: Extent) -> tuple[Any, int]:
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


def _places(data: Mapping[Any, Any]) -> Places:
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
        found[shown(name) if type(name) is not str else name, None if offset is None else sizes(offset)] = Extent(
            file, begin, length
        )
    return found


def _place(places: Places, name: str, start: Ints | None) -> Extent:
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
