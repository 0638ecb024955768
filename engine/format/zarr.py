"""Zarr version 3 arrays: their metadata and the keys of their chunks.

https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, NoReturn

import numpy as np

from ..errors import DamagedCheckpointError, FormatVersionError
from .dtypes import zarr_dtype

METADATA_LIMIT = 1 << 20  # bytes of the longest ``zarr.json`` that is read

_CACHED_LIMIT = 2048
_MEMBERS = (
    {"zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding"}
    | {"fill_value", "codecs", "attributes", "dimension_names"}
)  # fmt: skip
_RANK_LIMIT = 65
_BYTES_LIMIT = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ArrayMetadata:
    shape: tuple[int, ...]  # the shape of the array, in elements
    data_type: str  # the name of the zarr data type
    chunk_shape: tuple[int, ...]  # the shape of a chunk; chunks at the end are stored whole, too
    # The zstd level of chunks that are compressed, whose sizes only the index has; None for chunks that are not.
    compression: int | None = None

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of chunks along each axis."""
        return tuple(-(-size // chunk) for size, chunk in zip(self.shape, self.chunk_shape, strict=True))

    @property
    def chunk_count(self) -> int:
        return math.prod(self.grid)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype of stored elements, which are little endian."""
        dtype = zarr_dtype(self.data_type)
        assert dtype is not None  # decode_array_metadata has checked it
        return dtype


@lru_cache(maxsize=4096)
def encode_array_metadata(
    shape: tuple[int, ...], data_type: str, chunk_shape: tuple[int, ...], compression: int | None = None
) -> bytes:
    """Encode the ``zarr.json`` of an array whose chunks are little endian and followed by their checksum."""
    if len(shape) != len(chunk_shape) or min(chunk_shape, default=1) < 1 or min(shape, default=0) < 0:
        raise ValueError(f"an array of shape {shape} cannot have chunks of shape {chunk_shape}")
    if data_type == "bool":
        fill: object = False
    elif data_type.startswith("complex"):
        fill = [0.0, 0.0]
    else:
        fill = 0
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if compression is not None:
        codecs.append({"name": "zstd", "configuration": {"level": compression, "checksum": False}})
    codecs.append({"name": "crc32c"})
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [int(size) for size in shape],
            "data_type": data_type,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [int(size) for size in chunk_shape]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": fill,
            "codecs": codecs,
            "attributes": {},
        },
        separators=(",", ":"),
    ).encode("ascii")


def decode_array_metadata(data: bytes) -> ArrayMetadata:
    if len(data) > METADATA_LIMIT:
        _damaged(f"it has {len(data)} bytes; the limit is {METADATA_LIMIT}")
    # Many arrays of a tree share one text; long ones are not worth the memory.
    return _decode_cached(data) if len(data) <= _CACHED_LIMIT else _decode(data)


def _decode(data: bytes) -> ArrayMetadata:
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"zarr.json is damaged: it is not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("zarr_format") != 3 or document.get("node_type") != "array":
        _damaged("it does not describe a zarr version 3 array")
    _check_extensions(document)
    shape = _sizes(document.get("shape"), "shape", 0)
    grid, grid_options = _named(document.get("chunk_grid"), "chunk_grid")
    if grid != "regular":
        _unsupported("chunk grid", grid)
    chunk_shape = _sizes(grid_options.get("chunk_shape"), "chunk_shape", 1)
    if len(shape) != len(chunk_shape):
        _damaged(f"its chunks have {len(chunk_shape)} axes, the array has {len(shape)}")
    encoding, encoding_options = _named(document.get("chunk_key_encoding"), "chunk_key_encoding")
    separator = encoding_options.get("separator", "/")
    if encoding != "default" or separator != "/":
        _unsupported("chunk key encoding", f"{encoding} with separator {separator!r}")
    data_type = document.get("data_type")
    if not isinstance(data_type, str):
        if not isinstance(data_type, dict):
            _damaged("it has no data_type")
        data_type = _named(data_type, "data_type")[0]
    dtype = zarr_dtype(data_type)
    if dtype is None:
        _unsupported("data type", data_type)
    if max(math.prod(shape), math.prod(chunk_shape)) > _BYTES_LIMIT // dtype.itemsize:
        _damaged(f"an array of shape {shape} in chunks of shape {chunk_shape} is larger than any file")
    return ArrayMetadata(shape, data_type, chunk_shape, _compression(document.get("codecs"), dtype.itemsize))


_decode_cached = lru_cache(maxsize=4096)(_decode)


def metadata_key(name: str) -> bytes:
    """Return the key of the ``zarr.json`` of an array; the array at the root has the empty name."""
    return f"{name}/zarr.json".encode() if name else b"zarr.json"


def chunk_keys(name: str, grid: tuple[int, ...]) -> list[bytes]:
    prefix = f"{name}/c".encode() if name else b"c"
    if grid.count(1) == len(grid):
        return [prefix + b"/0" * len(grid)]
    return [prefix + ("/" + "/".join(map(str, indices))).encode() for indices in product(*map(range, grid))]


def _compression(codecs: object, itemsize: int) -> int | None:
    """Return the zstd level of chunks; they are little endian, perhaps compressed, and end with their checksum."""
    if not isinstance(codecs, list) or not codecs:
        _damaged("it has no codecs")
    named = [_named(codec, "codecs") for codec in codecs]
    names = [name for name, _ in named]
    foreign = [name for name in names if name not in ("bytes", "zstd", "crc32c")]
    if foreign:
        _unsupported("codec", foreign[0])
    compressed = "zstd" in names
    if names != ["bytes", *["zstd"] * compressed, "crc32c"]:
        _unsupported("codecs", " then ".join(names))
    endian = named[0][1].get("endian")
    if endian == "big":
        _unsupported("byte order", endian)
    if endian != "little" and (endian is not None or itemsize > 1):
        _damaged(f"its byte order is {endian!r}")
    level = named[1][1].get("level", 0) if compressed else None
    if level is not None and type(level) is not int:
        _damaged(f"its level of compression is {level!r:.80}")
    return level


def _check_extensions(document: dict[str, Any]) -> None:
    for name, value in document.items():
        if name in _MEMBERS or (name == "storage_transformers" and value == []):
            continue
        if not (isinstance(value, dict) and value.get("must_understand") is False):
            _unsupported("extension", name)


def _named(value: object, what: str) -> tuple[str, dict[str, Any]]:
    """Return a name and its configuration; zarr 3.1 allows a bare name."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, dict):
        name, configuration = value.get("name"), value.get("configuration", {})
        if isinstance(name, str) and isinstance(configuration, dict):
            return name, configuration
    return _damaged(f"its {what} has no name")


def _sizes(value: object, what: str, smallest: int) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _RANK_LIMIT:
        _damaged(f"its {what} is not a list of up to {_RANK_LIMIT} sizes")
    for size in value:
        if type(size) is not int or not smallest <= size <= _BYTES_LIMIT:
            _damaged(f"its {what} holds {size!r}")
    return tuple(value)


def _damaged(what: str) -> NoReturn:
    raise DamagedCheckpointError(f"zarr.json is damaged: {what}")


def _unsupported(what: str, name: object) -> NoReturn:
    raise FormatVersionError(f"holdfast does not read zarr arrays with the {what} {name}; open it with TensorStore")
