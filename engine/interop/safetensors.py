"""Reads safetensors: single files, and folders whose index says which tensor is in which file.

A tensor's name becomes a path, cut at its dots: ``layers.0.weight`` is the leaf ``layers/0/weight``, every key of it
text. Where the names do not fit into one tree (``a`` beside ``a.b``, or ``a..b``), the tree is one dictionary of whole
names. A file that holdfast has exported notes its containers, and values that are no tensors, so that all of it comes
back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import DamagedCheckpointError, ObjectNotFoundError
from ..item import SavedLeaf
from ..storage import DataReader, Location
from ..tree import Saved, from_document, split
from .containers import nested_skeleton, storage_name
from .safetensors_header import LENGTH_BYTES, Header, TensorEntry, decode_header, header_length
from .source import SingleTree, StepDirectories
from .stored import StoredTree
from .stored_array import StoredArray, StoredPart

FORMAT = "safetensors"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
TREE_NOTE = "holdfast.tree"
"""The name under which an exported file notes its tree."""
BARE_LEAF = "value"
"""What the tensor of a tree that is one bare leaf is called."""
_INDEX_LIMIT = 100_000_000  # bytes

Tensors = Mapping[str, StoredArray]


def recognise(location: Location, names: frozenset[str]) -> SingleTree | None:
    """Opens a file, or a folder with an index or with a single file; see `source.Format`."""
    if not names:
        if not location.exists() or location.is_directory() or not _looks_right(location):
            return None
        return _single(location, {"": location})
    indexes = sorted(name for name in names if name.endswith(INDEX_SUFFIX))
    if indexes:
        return _folder(location, indexes[0])
    files = [name for name in names if name.endswith(SUFFIX)]
    return _single(location, {files[0]: location / files[0]}) if len(files) == 1 else None


def recognise_steps(_location: Location, _names: frozenset[str]) -> StepDirectories | None:
    """There are no directories of steps in this format."""
    return None


def tensor_name(leaf_name: str) -> str:
    """Returns what the tensor of a leaf is called: the keys of its path, joined by dots."""
    return ".".join(split(leaf_name)) if leaf_name else BARE_LEAF


def _folder(location: Location, index: str) -> SingleTree:
    where = location / index
    try:
        weight_map = json.loads(where.read_bytes(limit=_INDEX_LIMIT))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{where} is not the index of a safetensors folder: {error}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise DamagedCheckpointError(f"{where} does not say which tensor is in which file")
    files = {}
    for file in sorted(set(weight_map.values())):
        if "/" in file or "\\" in file or file in ("", ".", "..") or not file.endswith(SUFFIX):
            raise DamagedCheckpointError(f"{where} names the file {file!r:.200}, which is none of its folder")
        files[file] = location / file
    return _single(location, files, weight_map)


def _single(
    location: Location, files: Mapping[str, Location], weight_map: Mapping[str, str] | None = None
) -> SingleTree:
    tensors: dict[str, StoredArray] = {}
    note, nbytes = None, 0
    for path, file in files.items():
        header, size = _header(file)
        nbytes += size
        note = header.metadata.get(TREE_NOTE)
        for entry in header.tensors:
            if weight_map is None or weight_map.get(entry.name) == path:
                tensors[entry.name] = _stored(entry, path)
    missing = sorted(weight_map.keys() - tensors.keys()) if weight_map is not None else []
    if missing:
        assert weight_map is not None
        raise DamagedCheckpointError(
            f"{location}: the index promises {missing[0]!r:.200} in {weight_map[missing[0]]}, which has it not"
            + (f"; and {len(missing) - 1} more" if len(missing) > 1 else "")
        )
    if weight_map is not None:
        tensors = {name: tensors[name] for name in weight_map}
    tree = (_noted(location, note, tensors, nbytes) if note is not None and len(files) == 1 else None) or _cut(
        location, tensors, nbytes
    )
    return SingleTree(format=FORMAT, location=location, source=tree, nbytes=nbytes)


def _looks_right(file: Location) -> bool:
    """Whether a file may be one of this format, as far as its name or its first bytes tell."""
    if file.name.endswith(SUFFIX):
        return True
    with file.open_data() as reader:
        if reader.size <= LENGTH_BYTES:
            return False
        begin = reader.read(0, LENGTH_BYTES + 1).tobytes()
        try:
            header_length(begin[:LENGTH_BYTES], reader.size)
        except DamagedCheckpointError:
            return False
        return begin.endswith(b"{")


def _header(file: Location) -> tuple[Header, int]:
    try:
        with file.open_data() as reader:
            return read_header(reader), reader.size
    except ObjectNotFoundError as error:
        raise DamagedCheckpointError(f"{file} is missing: the index of its folder names it") from error
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{file} is no whole safetensors file: {error}") from error


def read_header(reader: DataReader) -> Header:
    """Reads the header of a file.

    Raises:
        DamagedCheckpointError: It is no safetensors file, or damaged.
    """
    prefix = reader.read(0, min(LENGTH_BYTES, reader.size)).tobytes()
    length = header_length(prefix, reader.size)
    return decode_header(reader.read(LENGTH_BYTES, length).tobytes(), reader.size)


def _stored(entry: TensorEntry, path: str) -> StoredArray:
    details: dict[str, Any] = {"kind": "numpy"}
    if entry.torch_dtype is not None:
        details = {"kind": "torch", "torch_dtype": entry.torch_dtype}
    start = (0,) * len(entry.shape)
    dtype = entry.dtype.newbyteorder("<")
    part = StoredPart(start, entry.shape, path, entry.offset, entry.length, dtype)
    return StoredArray(entry.dtype, entry.shape, details, lambda: [part])


def _cut(location: Location, tensors: Tensors, nbytes: int) -> StoredTree:
    """Makes a tree of the names alone."""
    paths: list[tuple[str | int, ...]] = [tuple(name.split(".")) for name in tensors]
    try:
        if not all(all(path) for path in paths):
            raise DamagedCheckpointError("an empty key")
        skeleton, order = nested_skeleton(paths)
    except DamagedCheckpointError:
        paths = [(name,) for name in tensors]
        skeleton, order = nested_skeleton(paths)
    arrays = list(tensors.values())
    values = {storage_name(paths[index]): arrays[index] for index in order}
    leaves = [SavedLeaf(name, Saved(array.details, array.dtype, array.shape)) for name, array in values.items()]
    return StoredTree(location, skeleton, leaves, values, nbytes)


def _noted(location: Location, note: str, tensors: Tensors, nbytes: int) -> StoredTree | None:
    """Makes the tree that an exported file notes; None if it is not one of these tensors any more."""
    try:
        document = json.loads(note, parse_constant=_refuse)
        names, details, skeleton = from_document(document)
    except (ValueError, RecursionError, AttributeError, DamagedCheckpointError):
        return None
    found = list(_noted_leaves(names, details, tensors))
    if any(stored is None and saved.dtype is None and not _is_value(saved) for saved, stored in found):
        return None
    if {tensor_name(name) for name, (_, stored) in zip(names, found, strict=True) if stored is not None} != set(
        tensors
    ):
        return None
    leaves = [SavedLeaf(name, saved) for name, (saved, _) in zip(names, found, strict=True)]
    values = {name: stored for name, (_, stored) in zip(names, found, strict=True)}
    return StoredTree(location, skeleton, leaves, values, nbytes)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _noted_leaves(
    names: list[str], details: list[dict[str, Any]], tensors: Tensors
) -> Iterator[tuple[Saved, StoredArray | None]]:
    for name, facts in zip(names, details, strict=True):
        stored = None if _is_value(Saved(facts)) else tensors.get(tensor_name(name))
        yield (Saved(facts) if stored is None else Saved(facts, stored.dtype, stored.shape)), stored


def _is_value(saved: Saved) -> bool:
    return "value" in saved.details or "base64" in saved.details or saved.kind == "none"
