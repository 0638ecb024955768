"""Read torch.distributed.checkpoint folders (``.metadata`` and ``*.distcp``) without torch, and write them with torch.

``.metadata`` is a pickle of dataclasses from ``torch.distributed.checkpoint.metadata`` and ``.filesystem``. Only class
names and attributes are read; nothing is imported. The default planner also writes the path of each entry, and the
nested containers are rebuilt from these paths. Without paths, the full name of an entry is a single key.

If processes save without a common plan (``use_collectives=False``), each process writes a file ``__<rank>.metadata``
and its own copies of replicated entries. The tree combines the shards from all processes; copies must be equal.
"""

from __future__ import annotations

import inspect
import io
import itertools
import re
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....engine.arrays import PartialTree, TreeSource, leaf_values, load_tree, naming
from ....engine.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    ObjectNotFoundError,
    OptionError,
    UnsupportedLeafError,
    itemized,
)
from ....engine.format import decompress
from ....engine.pytree import Flattened, TorchDType, TreeDocument
from ....engine.sources import (
    Bytes,
    Path,
    SingleTree,
    StoredArray,
    StoredPart,
    StoredTree,
    Unreadable,
    entry_size,
    nested,
    replacing,
)
from ....engine.storage import DataReader, Location, os_errors
from ..safetensors import read_header
from .files import NoArchive, TorchArchive, opened, plain, read_object, templates, without_objects
from .objects import BUILDERS, named_dtype, sizes
from .pickles import Inert, shown, unpickle

METADATA = ".metadata"
_DATA = ".distcp"
_OF_RANK = re.compile(r"__([0-9]{1,9})\.metadata")
_METADATA_LIMIT = 1 << 30  # maximum size, in bytes, of a metadata file or a decompressed object
_OPEN_FILES = 32
_LARGEST = 1 << 62
# Matches any 1.x version of torch's ZStandard extension.
_ZSTD = re.compile(r"stream\.zstd/1(\..*)?", re.DOTALL)
_FRAMES = 8  # maximum number of zstd frames per entry (flushing adds empty frames)
_RATIO = 1 << 16  # maximum compression ratio
_ARCHIVE = 1 << 20  # maximum overhead, in bytes, of an archive that contains one tensor

Ints = tuple[int, ...]


class Extent(NamedTuple):
    """The byte range of one object in a file."""

    file: str
    offset: int
    length: int
    is_compressed: bool


# Maps an entry name and a part's start index to the part's extent. For objects other than tensors, the index is None.
Places = Mapping[tuple[str, Ints | None], Extent]


class _Tensor(NamedTuple):
    """The description of a tensor in a metadata file."""

    shape: Ints
    dtype: TorchDType
    parts: Mapping[tuple[Ints, Ints], Extent]  # keyed by start index and shape


def recognise(location: Location, names: frozenset[str]) -> SingleTree | None:
    files = [METADATA] if METADATA in names else _files_of_ranks(location, names)
    if not files and not any(name.endswith(_DATA) for name in names):
        return None
    if not files:
        raise CheckpointNotFoundError(
            f"{location}: torch.distributed.checkpoint did not finish saving this checkpoint, or its {METADATA}, "
            "which describes the other files, was lost; load another checkpoint"
        )
    contents = {file: (location / file).read_bytes(limit=_METADATA_LIMIT) for file in files}
    if not all(b"torch.distributed.checkpoint" in content[:4096] for content in contents.values()):
        return None
    nbytes = sum(entry_size(location, entry) for entry in location.entries())
    folder = _Folder(location)
    tree = folder.tree(contents)
    source = StoredTree.of(location, tree, nbytes * _RATIO if folder.is_compressed else nbytes)
    source.files_read = [location / name for name in names if name in files or name.endswith(_DATA)]
    return SingleTree("torch.distributed.checkpoint", location, source, nbytes)


def _files_of_ranks(location: Location, names: frozenset[str]) -> list[str]:
    """Return the metadata file of each rank, in rank order; raise DamagedCheckpointError if a file is missing."""
    ranks = {int(match[1]): name for name in names if (match := _OF_RANK.fullmatch(name)) is not None}
    missing = next(rank for rank in itertools.count() if rank not in ranks)
    if missing < len(ranks):
        raise DamagedCheckpointError(
            f"{location}: each of several processes saved its own metadata here, and __{missing}{METADATA} is missing: "
            "the save did not finish, or files were lost; copy them here, or load another checkpoint"
        )
    return [ranks[rank] for rank in range(missing)]


class _Folder:
    """The data files of a folder, with a cache of open files."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._open: OrderedDict[str, DataReader] = OrderedDict()
        self._headers: dict[tuple[str, int], dict[str, StoredArray]] = {}
        self.is_compressed = False

    def tree(self, contents: Mapping[str, bytes]) -> Any:
        """Build the tree that the metadata files describe."""
        paths: dict[str, Path] = {}
        entries: dict[str, list[_Tensor | Extent]] = {}
        for file, content in contents.items():
            with naming(self._location / file, " cannot be read"):
                for name, path, entry in _read_metadata(content):
                    paths.setdefault(name, path)
                    entries.setdefault(name, []).append(entry)
                    places = entry.parts.values() if isinstance(entry, _Tensor) else [entry]
                    self.is_compressed |= any(extent.is_compressed for extent in places)
        with naming(self._location):
            leaves = ((paths[name], self._value(name, copies)) for name, copies in entries.items())
            return nested(leaves, root_is_dict=True)

    def _value(self, name: str, entries: Sequence[_Tensor | Extent]) -> Any:
        """Return the value of an entry. Tensors are returned lazily; other objects are read immediately."""
        tensors = [entry for entry in entries if isinstance(entry, _Tensor)]
        objects = [entry for entry in entries if not isinstance(entry, _Tensor)]
        if tensors and not objects and all(entry[:2] == tensors[0][:2] for entry in tensors):
            return self._tensor(name, tensors)
        with naming(self._location, f": entry {name!r:.200}"):
            if tensors or any(self._checksums(entry) != self._checksums(objects[0]) for entry in objects[1:]):
                return Unreadable(f"a value that differs among the {len(entries)} processes that saved it")
            return self._object(objects[0])

    def _tensor(self, name: str, tensors: Sequence[_Tensor]) -> StoredArray:
        copies: dict[tuple[Ints, Ints], list[Extent]] = {}
        for tensor in tensors:
            for box, extent in tensor.parts.items():
                copies.setdefault(box, []).append(extent)
        shape, elements, _ = tensors[0]
        pair = (2,) if elements.paired else ()

        def stored() -> list[StoredPart]:
            parts = []
            for (start, size), (extent, *others) in copies.items():
                part = self._part(name, extent, elements.dtype, size + pair)
                parts.append(replace(part, start=start + (0,) * len(pair)))
                for other in others:
                    self._part(name, other, elements.dtype, size + pair)
                    if self._checksums(other) != self._checksums(extent):
                        raise UnsupportedLeafError(
                            f"{self._location}: tensor {name!r:.200} in {other.file} differs from that in "
                            f"{extent.file}: each process saved its own, and holdfast cannot tell which one is meant; "
                            "load the others with select=, or this one with torch.distributed.checkpoint in as many "
                            "processes"
                        )
            return parts

        return StoredArray(elements.dtype, shape + pair, elements.details, stored)

    def _part(self, name: str, extent: Extent, dtype: np.dtype[Any], shape: Ints) -> StoredPart:
        """Locate a tensor in an extent, which is either a torch archive or a safetensors file with several tensors."""
        if extent.is_compressed:
            return self._compressed_part(name, extent, dtype, shape)
        tensors = self._headers.get((extent.file, extent.offset))
        if tensors is None:
            try:
                return _checked(name, read_object(self._archive(extent), extent.file), extent, dtype, shape)
            except NoArchive:
                tensors, _ = read_header(self._reader(extent.file), extent.file, extent.offset)
                self._headers[extent.file, extent.offset] = tensors
        return _checked(name, tensors.get(name), extent, dtype, shape)

    def _compressed_part(self, name: str, extent: Extent, dtype: np.dtype[Any], shape: Ints) -> StoredPart:
        limit = int(np.prod(shape, dtype=object)) * dtype.itemsize + _ARCHIVE

        def decode(data: Bytes) -> NDArray[Any]:
            content = decompress(data, limit, frames=_FRAMES)
            part = _checked(name, read_object(TorchArchive(io.BytesIO(content))), extent, dtype, shape)
            return part.array(_bytes_of(part, content))

        return StoredPart((0,) * len(shape), shape, extent.file, extent.offset, extent.length, dtype, decode=decode)

    def _object(self, extent: Extent) -> Any:
        if not extent.is_compressed:
            archive = self._archive(extent)
            return without_objects(read_object(archive, extent.file), [], len(archive.pickle))
        content = decompress(self._bytes(extent), _METADATA_LIMIT, frames=_FRAMES)
        archive = TorchArchive(io.BytesIO(content))
        return _in_memory(without_objects(read_object(archive), [], len(archive.pickle)), content)

    def _archive(self, extent: Extent) -> TorchArchive:
        return TorchArchive(opened(self._whole(extent), extent.offset, extent.length), extent.offset)

    def _bytes(self, extent: Extent) -> Bytes:
        return self._whole(extent).read(extent.offset, extent.length)

    def _checksums(self, extent: Extent) -> Any:
        """Return checksums of the contents of an extent, for comparing copies of an entry."""
        if not extent.is_compressed and (extent.file, extent.offset) not in self._headers:
            records = self._archive(extent).records
            data = {name: record[1:] for name, record in records.items() if name.startswith("data")}
            if all(checksum is not None for _, checksum in data.values()):
                return data
        return zlib.crc32(self._bytes(extent).data)

    def _whole(self, extent: Extent) -> DataReader:
        """Open the file that contains an extent; raise DamagedCheckpointError if it is truncated."""
        reader = self._reader(extent.file)
        if extent.offset + extent.length > reader.size:
            raise DamagedCheckpointError(
                f"{extent.file} is cut off: expected {extent.length} bytes at offset {extent.offset}, found "
                f"{reader.size}"
            )
        return reader

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


def _read_metadata(content: bytes) -> list[tuple[str, Path, _Tensor | Extent]]:
    """Return the name and path of each entry, and its description (for tensors) or its extent (for other objects)."""
    metadata = _attributes(unpickle(content, BUILDERS), "Metadata")
    entries = _dict(metadata.get("state_dict_metadata"), "entries")
    places = _places(_dict(metadata.get("storage_data"), "places"))
    planned = metadata.get("planner_data")
    paths = planned if isinstance(planned, dict) else {}
    described: list[tuple[str, Path, _Tensor | Extent]] = []
    for name, entry in entries.items():
        if type(name) is not str:
            raise DamagedCheckpointError(f"{shown(name)} is not the name of an entry")
        class_name = entry.name.attribute if isinstance(entry, Inert) else ""
        if class_name not in ("TensorStorageMetadata", "BytesStorageMetadata"):
            raise DamagedCheckpointError(f"entry {shown(name)} is of the unknown kind {class_name:.100}")
        is_tensor = class_name == "TensorStorageMetadata"
        value = _read_tensor(name, _attributes(entry, class_name), places) if is_tensor else _place(places, name, None)
        described.append((name, _path(name, paths.get(name)), value))
    return described


def _read_tensor(name: str, facts: Mapping[str, Any], places: Places) -> _Tensor:
    shape = sizes(facts.get("size"))
    properties, chunks = facts.get("properties"), facts.get("chunks")
    state = properties.state if isinstance(properties, Inert) else None
    dtype = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    if not isinstance(chunks, list):
        raise DamagedCheckpointError(f"entry {shown(name)} has no list of parts")
    parts: dict[Ints, tuple[Ints, Extent]] = {}  # maps start index to shape and extent
    for chunk in chunks:
        described = _attributes(chunk, "ChunkStorageMetadata")
        start, size = sizes(described.get("offsets")), sizes(described.get("sizes"))
        if len(start) != len(shape) or len(size) != len(shape):
            raise DamagedCheckpointError(f"a part of entry {shown(name)} does not fit its shape {shape}")
        if 0 in size:
            continue  # the empty shards of all processes may refer to the same extent
        if start in parts:  # a small pickle could repeat a part many times, and each copy would be read
            raise DamagedCheckpointError(f"entry {shown(name)} has two parts at {start}")
        parts[start] = size, _place(places, name, start)
    return _Tensor(shape, named_dtype(dtype), {(start, size): extent for start, (size, extent) in parts.items()})


def _checked(name: str, stored: Any, extent: Extent, dtype: np.dtype[Any], shape: Ints) -> StoredPart:
    """Return the stored part of a tensor, checking that its dtype and shape match the metadata."""
    if not isinstance(stored, StoredArray):
        raise DamagedCheckpointError(f"{extent.file} does not hold the tensor {name!r:.200}")
    part = stored.whole()
    if part.shape != shape or part.dtype.newbyteorder("=") != dtype:
        raise DamagedCheckpointError(
            f"{extent.file}: expected {dtype}{list(shape)}, found {part.dtype}{list(part.shape)}"
        )
    return part


def _bytes_of(part: StoredPart, content: bytes) -> Bytes:
    return np.frombuffer(content, np.uint8, part.length, part.offset)


def _in_memory(value: Any, content: bytes) -> Any:
    """Replace the lazy tensors in an object with arrays that are views of the decompressed data."""
    if isinstance(value, StoredArray):
        part = value.whole()
        return part.array(_bytes_of(part, content))
    if isinstance(value, dict):
        return type(value)((key, _in_memory(item, content)) for key, item in value.items())
    return type(value)([_in_memory(item, content) for item in value]) if type(value) in (list, tuple) else value


def _places(data: Mapping[Any, Any]) -> Places:
    places = {}
    for index, info in data.items():
        key, facts = _attributes(index, "MetadataIndex"), _attributes(info, "_StorageInfo")
        name, offset = key.get("fqn"), key.get("offset")
        file, begin, length = facts.get("relative_path"), facts.get("offset"), facts.get("length")
        transformed = facts.get("transform_descriptors") or []
        is_one = isinstance(transformed, list) and len(transformed) == 1 and isinstance(transformed[0], str)
        is_compressed = is_one and _ZSTD.fullmatch(transformed[0]) is not None
        if transformed and not is_compressed:
            raise DamagedCheckpointError(
                f"entry {shown(name)} is transformed by {shown(transformed)}, which holdfast cannot undo; load it "
                "with torch.distributed.checkpoint and save it without extensions"
            )
        if type(file) is not str or file in ("", ".", "..") or any(mark in file for mark in "/\\\0"):
            raise DamagedCheckpointError(f"entry {shown(name)} is in {shown(file)}, which is not a file in its folder")
        if type(begin) is not int or type(length) is not int or not 0 <= begin <= _LARGEST or length < 0:
            raise DamagedCheckpointError(f"entry {shown(name)} has an offset or size that {file} cannot have")
        start = None if offset is None else sizes(offset)
        places[name if type(name) is str else shown(name), start] = Extent(file, begin, length, is_compressed)
    return places


def _place(places: Places, name: str, start: Ints | None) -> Extent:
    extent = places.get((name, start))
    if extent is None:
        at = "" if start is None else f" at {start}"
        raise DamagedCheckpointError(f"the metadata has no location for entry {shown(name)}{at}")
    return extent


def _path(name: str, planned: Any) -> Path:
    if planned is None:
        return (name,)
    keys = planned if isinstance(planned, tuple) else ()
    if not keys or not all(type(key) is str or (type(key) is int and 0 <= key <= _LARGEST) for key in keys):
        raise DamagedCheckpointError(f"{shown(planned)} is not the path of an entry")
    return keys


def _attributes(value: Any, class_name: str) -> Mapping[str, Any]:
    if not isinstance(value, Inert) or value.name.attribute != class_name or not isinstance(value.state, dict):
        raise DamagedCheckpointError(f"expected a {class_name}, found another object")
    return value.state


def _dict(value: Any, label: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"it has no {label}")
    return value


# ---- writing folders with torch, and verifying them
#
# The save plan contains meta tensors; the planner reads an array only when torch needs its data. Torch holds all arrays
# of a file in memory until it has written the file, so only a small tree is written as a single file. In a large tree,
# each array gets its own file, so that at most two arrays are in memory at a time.

_ONE_FILE = 256 << 20  # maximum size, in bytes, of a tree that is written as a single file


def export_dcp(source: TreeSource, destination: Location) -> None:
    """Write a tree atomically with ``torch.distributed.checkpoint.save``, using only this process, and verify it."""
    if destination.exists():
        raise CheckpointExistsError(f"{destination} exists already; choose another destination")
    if not destination.is_local:
        raise OptionError(f"{destination}: torch writes its checkpoints to local directories only; copy it from there")
    try:
        import torch
        import torch.distributed.checkpoint
    except ImportError as error:
        raise OptionError("exporting for torch.distributed.checkpoint needs torch: pip install torch") from error
    library: Any = torch.distributed.checkpoint
    options = {}
    if "no_dist" in inspect.signature(library.save).parameters:
        options["no_dist"] = True
    elif torch.distributed.is_initialized():
        raise OptionError("this version of torch would wait for all processes: export with the holdfast command")
    structure = source.tree.structure
    if structure is None or structure.keys is None:
        raise UnsupportedLeafError(f"{source.location}: torch.distributed.checkpoint stores dictionaries only")
    values = templates(source)
    leaves = {id(value): leaf for value, leaf in zip(values, source.leaves, strict=True) if value is not ...}
    plain_leaves = [leaf for value, leaf in zip(values, source.leaves, strict=True) if value is ...]
    others = iter(leaf_values(source, plain_leaves))
    tree = plain(torch, source.tree.build([next(others) if value is ... else value for value in values]))

    class Planner(library.DefaultSavePlanner):  # type: ignore[misc]  # the module does not list its names
        def lookup_object(self, index: Any) -> Any:
            template = super().lookup_object(index)
            leaf = leaves.get(id(template))
            if leaf is None:
                return template
            like = Flattened([leaf.name], [template], None)
            return load_tree(PartialTree(source, {leaf.name: leaf}, TreeDocument(None)), like=like)

    with replacing(destination) as partial, os_errors(str(destination), "write"):
        is_small = sum(leaf.nbytes for leaf in source.leaves) <= _ONE_FILE
        writer = library.FileSystemWriter(partial.path, single_file_per_rank=is_small, per_thread_copy_ahead=0)
        try:
            with warnings.catch_warnings(action="ignore"):  # torch warns about single-process saves
                library.save(tree, storage_writer=writer, planner=Planner(), **options)
        except library.CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            # Raise the original I/O error, which is masked by an error from closing torch's archive.
            raise (cause.__context__ if isinstance(cause.__context__, OSError) else cause) from error
        written = recognise(partial, frozenset(entry.name for entry in partial.entries()))
        problems = ["it is not recognised"] if written is None else list(map(str, written.source.verify()))
        if problems:
            raise DamagedCheckpointError(itemized(f"{destination} does not read back as written:", problems))
        partial.sync_directory()
