"""Read and write safetensors files, and folders of such files with an index that maps each tensor to its file.

A file consists of the header length (8 bytes, little endian), the header (a JSON object), and the tensor data in
little-endian C order, without gaps (https://huggingface.co/docs/safetensors, "Format").

A tensor name is split at its dots into a path: ``layers.0.weight`` is the leaf ``layers/0/weight``, with string keys.
If the names do not form a tree (for example ``a`` and ``a.b``, or ``a..b``), the tree is a single dictionary keyed by
full names. In files exported by holdfast, the metadata describes the containers and stores values that are not tensors.

``HuggingFaceStorageWriter`` in torch.distributed.checkpoint writes separate files for each process, without an index.
The metadata of each file gives the offset of each shard in the full tensor (torch/distributed/checkpoint/_hf_utils.py).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...engine.arrays import SavedLeaf, TreeSource, batches, naming
from ...engine.errors import DamagedCheckpointError, ObjectNotFoundError, UnsupportedLeafError
from ...engine.pytree import Saved, format_path, from_document, split, to_document
from ...engine.sources import (
    SingleTree,
    StoredArray,
    StoredPart,
    StoredTree,
    check_destination,
    left_by_download,
    nested,
    read_object,
    refuse_leaves,
    replacing,
)
from ...engine.storage import DataReader, Location, Segment

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
TREE_NOTE = "holdfast.tree"  # metadata key of the tree description in an exported file
BARE_LEAF = "value"  # tensor name if the tree is a single bare leaf
_BATCH = 64 << 20  # bytes of leaf data read per batch
_STEP = 1 << 20  # bytes per write
_LENGTH_BYTES = 8
_HEADER_LIMIT = 100_000_000  # maximum header size, in bytes, as in the reference implementation
_METADATA = "__metadata__"
_ALIGNMENT = 8  # alignment of tensor data, in bytes, as in the reference implementation
_LARGEST_SIZE = 1 << 62
# In a folder without an index, file names consist of the shard (process), model name, file number, and file count.
_NUMBERED = re.compile(r"(?:shard-([0-9]{5,18})-)?(.+)-([0-9]{5,18})-of-([0-9]{5,18})\.safetensors")
_SHARDING = "DCP_SHARDING_INFO"  # metadata key of the shard offsets
_OFFSETS = "saved_offsets"

_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"{letter}{8 * size}": np.dtype(f"{letter.lower()}{size}") for letter in "UI" for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "C64": np.dtype(np.complex64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Maps packed dtypes (two elements per byte) to their torch names. Neither numpy nor torch can compute with them.
_PACKED = {"F4": "float4_e2m1fn_x2"}


Tensors = Mapping[str, StoredArray]


def read_header(reader: DataReader, file: str, begin: int = 0) -> tuple[dict[str, StoredArray], Mapping[str, str]]:
    """Read the header at offset ``begin`` of a file; return the tensors, in header order, and the metadata."""
    size = reader.size - begin
    length = _header_length(reader.read(begin, min(_LENGTH_BYTES, size)).tobytes(), size)
    content = reader.read(begin + _LENGTH_BYTES, length).tobytes()

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            raise ValueError("a name occurs twice")
        return members

    try:
        document = json.loads(content, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"the header is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise DamagedCheckpointError("the header is not a JSON object")
    metadata = document.pop(_METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedCheckpointError(f"{_METADATA} of the header does not map names to text")
    end = begin + _LENGTH_BYTES + length
    tensors = {name: _tensor(name, facts, file, end) for name, facts in document.items()}
    parts = [(tensor.whole(), name) for name, tensor in tensors.items()]
    for part, name in sorted(parts, key=lambda pair: (pair[0].offset, pair[0].length)):
        if part.offset != end:
            problem = "overlaps the one before" if part.offset < end else "leaves a gap before it"
            raise DamagedCheckpointError(f"tensor {name!r:.200} {problem}: it begins at byte {part.offset}")
        end += part.length
    if end != reader.size:
        raise DamagedCheckpointError(f"the tensors end at byte {end}, but the file has {reader.size} bytes")
    return tensors, metadata


def _header_length(prefix: bytes, file_size: int) -> int:
    if len(prefix) != _LENGTH_BYTES:
        raise DamagedCheckpointError(f"a safetensors file has at least {_LENGTH_BYTES} bytes, this one has {file_size}")
    length: int = struct.unpack("<Q", prefix)[0]
    if length > _HEADER_LIMIT:
        raise DamagedCheckpointError(f"the header claims {length} bytes, more than the {_HEADER_LIMIT} allowed")
    if length > file_size - _LENGTH_BYTES:
        raise DamagedCheckpointError(f"the header claims {length} bytes, but the whole file has {file_size}")
    return length


def _tensor(name: str, facts: Any, file: str, begin: int) -> StoredArray:
    where = f"tensor {name!r:.200}"
    if not isinstance(facts, dict):
        raise DamagedCheckpointError(f"{where}: the header does not describe it")
    shape, offsets, code = facts.get("shape"), facts.get("data_offsets"), facts.get("dtype")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2 or len(shape) > 64:
        raise DamagedCheckpointError(f"{where}: the header has no shape or no offsets for it")
    torch_dtype = _PACKED.get(code) if isinstance(code, str) else None
    dtype = _DTYPES.get(code) if isinstance(code, str) else None
    if torch_dtype is not None:
        dtype = np.dtype(np.uint8)
        if not shape or shape[-1] % 2:
            raise DamagedCheckpointError(f"{where}: {code} of shape {shape} does not fill whole bytes")
        shape = [*shape[:-1], shape[-1] // 2]
    if dtype is None:
        raise DamagedCheckpointError(f"{where} has the dtype {code!r:.80}, which holdfast does not read")
    length = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != length or length > _LARGEST_SIZE:
        raise DamagedCheckpointError(
            f"{where}: {dtype}{shape} takes {length} bytes, but the header assigns bytes {offsets[0]} to {offsets[1]}"
        )
    details = {"kind": "numpy"} if torch_dtype is None else {"kind": "torch", "torch_dtype": torch_dtype}
    part = StoredPart((0,) * len(shape), tuple(shape), file, begin + offsets[0], length, dtype.newbyteorder("<"))
    return StoredArray(dtype, part.shape, details, lambda: [part])


def _sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _LARGEST_SIZE for item in value)


def recognise(location: Location, names: frozenset[str]) -> SingleTree | None:
    if not names:
        if not location.exists() or location.is_directory() or not _looks_right(location):
            return None
        return _open(location, {"": location})
    if indexes := sorted(name for name in names if name.endswith(INDEX_SUFFIX)):
        return _open(location, *_indexed(location, indexes[0]))
    files = sorted(name for name in names if name.endswith(SUFFIX))
    if _are_numbered(location, files) or len(files) == 1:
        return _open(location, {file: location / file for file in files})
    return None


def _open(location: Location, files: Mapping[str, Location], weight_map: Mapping[str, str] | None = None) -> SingleTree:
    parts: dict[str, list[StoredArray]] = {}
    note, nbytes = None, 0
    for path, file in files.items():
        try:
            with naming(file, " is not a complete safetensors file"), file.open_data() as reader:
                if download := left_by_download(reader):
                    raise DamagedCheckpointError(f"it is {download}")
                in_file, metadata = read_header(reader, path)
                nbytes += reader.size
        except ObjectNotFoundError as error:
            raise DamagedCheckpointError(f"{file} is missing, although the index of its folder names it") from error
        note = metadata.get(TREE_NOTE)
        if path and weight_map is None:  # Numbered files may contain shards.
            in_file = _placed(file, in_file, metadata.get(_SHARDING, "{}"))
        for name, tensor in in_file.items():
            if weight_map is None or weight_map.get(name) == path:
                parts.setdefault(name, []).append(tensor)
    tensors = {name: _joined(location, name, in_files) for name, in_files in parts.items()}
    if weight_map is not None:
        if missing := sorted(weight_map.keys() - tensors.keys()):
            more = f"; and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise DamagedCheckpointError(
                f"{location}: the index names {missing[0]!r:.200} in {weight_map[missing[0]]}, which does not "
                f"hold it{more}"
            )
        tensors = {name: tensors[name] for name in weight_map}
    noted = _noted(location, note, tensors, nbytes) if note is not None and len(files) == 1 else None
    tree = noted or _cut(location, tensors, nbytes)
    tree.files_read = list(files.values())
    return SingleTree("safetensors", location, tree, nbytes)


def _are_numbered(location: Location, files: Collection[str]) -> bool:
    """True if these are the numbered files of a single model; raise DamagedCheckpointError if a file is missing."""
    matches = [match for name in files if (match := _NUMBERED.fullmatch(name)) is not None]
    if not matches or len(matches) < len(files) or len({match.group(2, 4) for match in matches}) > 1:
        return False
    count = int(matches[0][4])
    missing = _first_missing({int(match[3]) for match in matches})
    lost = f"number {missing} of {count}" if missing <= count else ""
    processes = {int(match[1]) for match in matches if match[1]}
    missing = _first_missing(processes)
    if missing <= max(processes, default=0):
        lost = f"every file of shard {missing}"
    if lost:
        raise DamagedCheckpointError(
            f"{location} has {len(files)} numbered safetensors files and no {INDEX_SUFFIX[1:]}, but "
            f"{lost} is missing: the save did not finish, or files were lost. Copy the missing ones here, load another "
            "checkpoint, or give the path of a file to load what it holds"
        )
    return True


def _first_missing(numbers: Collection[int]) -> int:
    return next(number for number in itertools.count(1) if number not in numbers)


def _placed(file: Location, tensors: Tensors, noted: str) -> dict[str, StoredArray]:
    """Return the tensors in a file. Tensors for which the metadata gives an offset become shards at this offset."""
    with naming(file, ": the positions of its tensors cannot be read"):
        try:
            places = json.loads(noted)
            if not isinstance(places, dict):
                raise ValueError("not an object")
            return {key: _at(part, places[key][_OFFSETS]) if key in places else part for key, part in tensors.items()}
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise DamagedCheckpointError(f"{_SHARDING} in its header: {error}") from error


def _at(tensor: StoredArray, start: Any) -> StoredArray:
    if not _sizes(start) or len(start) != len(tensor.shape):
        raise ValueError(f"{start!r:.200} is not an index into a tensor of shape {tensor.shape}")
    part = replace(tensor.whole(), start=tuple(start))
    return StoredArray(tensor.dtype, tensor.shape, tensor.details, lambda: [part])


def _joined(location: Location, name: str, tensors: Sequence[StoredArray]) -> StoredArray:
    """Join the shards of a tensor. Its shape is inferred from the offsets and shapes of the shards."""
    first = tensors[0]
    parts = [tensor.whole() for tensor in tensors]
    odds = [tensor for tensor in tensors if tensor.dtype != first.dtype or len(tensor.shape) != len(first.shape)]
    for odd in odds:
        raise DamagedCheckpointError(
            f"{location}: the parts of tensor {name!r:.200} do not fit together: {parts[0].file} has "
            f"{first.dtype}{list(first.shape)}, {odd.whole().file} has {odd.dtype}{list(odd.shape)}"
        )
    ends = [[begin + size for begin, size in zip(part.start, part.shape, strict=True)] for part in parts]
    shape = tuple(map(max, zip(*ends, strict=True)))
    count = sum(math.prod(part.shape) for part in parts)
    if count != math.prod(shape):
        raise DamagedCheckpointError(
            f"{location}: tensor {name!r:.200} is incomplete: its {len(parts)} parts, the first in {parts[0].file}, "
            f"have {count} elements for shape {list(shape)}: files were lost, or belong to another save. Copy the "
            "missing ones here, or load another checkpoint"
        )
    return StoredArray(first.dtype, shape, first.details, lambda: parts)


def tensor_name(leaf_name: str) -> str:
    """Return the tensor name of a leaf: the keys of its path, joined by dots."""
    return ".".join(split(leaf_name)) if leaf_name else BARE_LEAF


def _indexed(location: Location, index: str) -> tuple[dict[str, Location], dict[str, str]]:
    """Read the index of a folder; return the files, keyed by name, and a map from tensor names to file names."""
    index_file = location / index
    weight_map = read_object(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise DamagedCheckpointError(f"{index_file} does not give the file of every tensor")
    files = {}
    for file in sorted(set(weight_map.values())):
        if "/" in file or "\\" in file or file in ("", ".", "..") or not file.endswith(SUFFIX):
            raise DamagedCheckpointError(f"{index_file} names {file!r:.200}, which is not a file in its folder")
        files[file] = location / file
    return files, weight_map


def _looks_right(file: Location) -> bool:
    """True if a file appears to be a safetensors file, based on its name or first bytes."""
    if file.name.endswith(SUFFIX):
        return True
    with file.open_data() as reader, contextlib.suppress(DamagedCheckpointError):
        begin = reader.read(0, min(_LENGTH_BYTES + 1, reader.size)).tobytes()
        _header_length(begin[:_LENGTH_BYTES], reader.size)
        return begin.endswith(b"{")
    return False


def _cut(location: Location, tensors: Tensors, nbytes: int) -> StoredTree:
    """Build a tree by splitting the tensor names at their dots."""
    paths = [tuple(name.split(".")) for name in tensors]
    try:
        if not all(map(all, paths)):
            raise DamagedCheckpointError("an empty key")
        tree = nested(zip(paths, tensors.values(), strict=True))
    except DamagedCheckpointError:
        tree = dict(tensors)
    return StoredTree.of(location, tree, nbytes)


def _noted(location: Location, note: str, tensors: Tensors, nbytes: int) -> StoredTree | None:
    """Build the tree that an exported file describes; return None if the description does not match the tensors."""
    try:
        names, details, tree = from_document(json.loads(note, parse_constant=_refuse))
    except (ValueError, RecursionError, AttributeError, DamagedCheckpointError):
        return None
    leaves: list[SavedLeaf] = []
    values: dict[str, StoredArray | None] = {}
    for name, facts in zip(names, details, strict=True):
        saved, stored = Saved(facts), None
        if "value" not in facts and "base64" not in facts and saved.kind != "none":
            stored = tensors.get(tensor_name(name))
            if stored is None:
                return None
            saved = Saved(facts, stored.dtype, stored.shape)
        leaves.append(SavedLeaf(name, saved))
        values[name] = stored
    if {tensor_name(name) for name, stored in values.items() if stored is not None} != set(tensors):
        return None
    return StoredTree(location, tree, leaves, values, nbytes)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def export_safetensors(source: TreeSource, destination: Location, *, overwrite: bool = False) -> None:
    """Write a tree to a safetensors file, atomically and durably. Leaves are read in batches to limit memory usage.

    Python numbers become scalar tensors. Text, bytes, None, and the containers are stored in metadata that only
    holdfast reads.
    """
    check_destination(destination, overwrite=overwrite)
    arrays = [leaf for leaf in source.leaves if leaf.saved.dtype is not None]
    refuse_leaves(source, "a safetensors file", _obstacles(arrays))
    note = to_document(source.tree.structure, [leaf.saved.details for leaf in source.leaves])
    metadata = {TREE_NOTE: json.dumps(note, separators=(",", ":"))}

    def contents() -> Iterator[NDArray[Any]]:
        for batch in batches(arrays, lambda leaf: leaf.nbytes, _BATCH):
            for array in source.read_leaves(batch):
                assert array is not None
                yield array

    tensors = [(tensor_name(leaf.name), leaf.saved.dtype, leaf.saved.shape or ()) for leaf in arrays]
    write_tensors(destination, tensors, metadata, contents)


def write_tensors(
    destination: Location,
    tensors: Iterable[tuple[str, Any, tuple[int, ...]]],
    metadata: Mapping[str, str],
    contents: Callable[[], Iterable[NDArray[Any]]],
) -> None:
    """Write tensors to a file. ``tensors`` lists names, dtypes and shapes; ``contents`` returns the data in order."""
    header, size = _encode_header(tensors, {"format": "pt", **metadata})  # other libraries expect this format tag

    def parts() -> Iterator[NDArray[np.uint8]]:
        yield np.frombuffer(header, np.uint8)
        for array in contents():
            flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
            for start in range(0, len(flat), _STEP):
                yield flat[start : start + _STEP]

    with replacing(destination) as partial:
        partial.write_data(len(header) + size, [Segment(0, len(header) + size, parts)])


def _encode_header(
    tensors: Iterable[tuple[str, Any, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, int]:
    """Return the encoded header with its length prefix, and the total size of the tensors in bytes."""
    document: dict[str, Any] = {_METADATA: metadata}
    end = 0
    for name, dtype, shape in tensors:
        code = _NAMES.get(dtype.newbyteorder("="))
        if name == _METADATA or code is None:
            problem = f"a tensor in a safetensors file cannot be named {name!r}"
            raise UnsupportedLeafError(problem if code else f"safetensors has no {dtype}")
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        document[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    content = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    content += b" " * (-(_LENGTH_BYTES + len(content)) % _ALIGNMENT)
    if len(content) > _HEADER_LIMIT:
        raise UnsupportedLeafError(
            f"the header of the safetensors file would have {len(content)} bytes, more than the {_HEADER_LIMIT} allowed"
        )
    return struct.pack("<Q", len(content)) + content, end


def _obstacles(leaves: Sequence[SavedLeaf]) -> list[str]:
    """Return an error message for each leaf that a safetensors file cannot store."""
    problems = []
    taken: dict[str, str] = {}
    for leaf in leaves:
        name, dtype = tensor_name(leaf.name), leaf.saved.dtype
        other = taken.setdefault(name, leaf.name)
        if other != leaf.name:
            taken_by = format_path(other)
            problems.append(f"{format_path(leaf.name)}: its tensor would have the same name as {taken_by}, {name!r}")
        variant = leaf.saved.details.get("torch_dtype")
        if variant is not None or dtype is None or dtype.newbyteorder("=") not in _NAMES:
            problems.append(f"{format_path(leaf.name)}: safetensors has no {variant or dtype}")
    return problems
