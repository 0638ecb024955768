"""What the ``.metadata`` of a torch.distributed.checkpoint folder says, as plain records.

The file is a pickle of dataclasses of ``torch.distributed.checkpoint.metadata`` and ``.filesystem``; their names and
attributes are all that is taken from it, nothing is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import DamagedCheckpointError
from .pickled import Inert, shown
from .torch_objects import BUILDERS, Form, form_of
from .unpickling import unpickle

Path = tuple[str | int, ...]
Ints = tuple[int, ...]

_LARGEST = 1 << 62


@dataclass(frozen=True, slots=True)
class Place:
    """Where one object lies.

    Attributes:
        file: The name of its file.
        offset: Its first byte.
        length: Its bytes.
    """

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor.

    Attributes:
        start: Index of its first element.
        shape: How many elements it has along each axis.
        place: Where it lies.
    """

    start: Ints
    shape: Ints
    place: Place


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor.

    Attributes:
        form: Its elements.
        shape: Of all of it.
        chunks: Its parts.
    """

    form: Form
    shape: Ints
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class DcpEntry:
    """One entry of a state dict.

    Attributes:
        name: Its whole name, such as ``optimizer.state.0.step``.
        path: The keys that lead to it; an int is a place in a list.
        content: A tensor, or where another object lies.
    """

    name: str
    path: Path
    content: DcpTensor | Place


def read_metadata(content: bytes) -> list[DcpEntry]:
    """Reads ``.metadata``.

    Args:
        content: The file.

    Raises:
        DamagedCheckpointError: It is not what torch.distributed.checkpoint writes.
    """
    metadata = unpickle(content, BUILDERS)
    entries = _dict(_attribute(metadata, "Metadata", "state_dict_metadata"), "entries")
    places = _places(_dict(_attribute(metadata, "Metadata", "storage_data"), "places"))
    planned = _attributes(metadata, "Metadata").get("planner_data")
    paths = planned if isinstance(planned, dict) else {}
    found = []
    for name, entry in entries.items():
        if type(name) is not str:
            raise DamagedCheckpointError(f"{shown(name)} is no name of an entry")
        kind = entry.name.attribute if isinstance(entry, Inert) else ""
        content_: DcpTensor | Place
        if kind == "TensorStorageMetadata":
            content_ = _tensor(name, _attributes(entry, kind), places)
        elif kind == "BytesStorageMetadata":
            content_ = _place(places, name, None)
        else:
            raise DamagedCheckpointError(f"entry {shown(name)} is of a kind that is not known: {kind:.100}")
        found.append(DcpEntry(name, _path(name, paths.get(name)), content_))
    return found


def _tensor(name: str, facts: Mapping[str, Any], places: Mapping[Any, Place]) -> DcpTensor:
    shape = _ints(facts.get("size"))
    properties = facts.get("properties")
    state = properties.state if isinstance(properties, Inert) else None
    dtype = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    chunks = facts.get("chunks")
    if not isinstance(chunks, list):
        raise DamagedCheckpointError(f"entry {shown(name)} does not say what parts it has")
    parts = []
    for chunk in chunks:
        described = _attributes(chunk, "ChunkStorageMetadata")
        start, size = _ints(described.get("offsets")), _ints(described.get("sizes"))
        if len(start) != len(shape) or len(size) != len(shape):
            raise DamagedCheckpointError(f"a part of entry {shown(name)} does not go with its shape {shape}")
        parts.append(Chunk(start, size, _place(places, name, start)))
    return DcpTensor(form_of(dtype), shape, tuple(parts))


def _places(data: Mapping[Any, Any]) -> dict[tuple[str, Ints | None], Place]:
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
            raise DamagedCheckpointError(f"entry {shown(name)} lies in {shown(file)}, which is no file of its folder")
        if type(begin) is not int or type(length) is not int or not 0 <= begin <= _LARGEST or length < 0:
            raise DamagedCheckpointError(f"entry {shown(name)} lies at no place of {file}")
        found[shown(name) if type(name) is not str else name, None if offset is None else _ints(offset)] = Place(
            file, begin, length
        )
    return found


def _place(places: Mapping[Any, Place], name: str, start: Ints | None) -> Place:
    found = places.get((name, start))
    if found is None:
        at = "" if start is None else f" at {start}"
        raise DamagedCheckpointError(f"nothing says where entry {shown(name)}{at} lies")
    return found


def _path(name: str, planned: Any) -> Path:
    if planned is None:
        return (name,)
    if (
        not isinstance(planned, tuple)
        or not planned
        or not all(type(key) is str or (type(key) is int and 0 <= key <= _LARGEST) for key in planned)
    ):
        raise DamagedCheckpointError(f"{shown(planned)} is no path of an entry")
    return planned


def _attributes(value: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(value, Inert) or value.name.attribute != kind or not isinstance(value.state, dict):
        raise DamagedCheckpointError(f"it holds no {kind} where one is due")
    return value.state


def _attribute(value: Any, kind: str, name: str) -> Any:
    return _attributes(value, kind).get(name)


def _dict(value: Any, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"it has no {what}")
    return value


def _ints(value: Any) -> Ints:
    if not isinstance(value, tuple | list) or any(type(one) is not int or not 0 <= one <= _LARGEST for one in value):
        raise DamagedCheckpointError(f"{shown(value)} is no shape or place")
    return tuple(value)
