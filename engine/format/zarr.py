"""Zarr version 3 arrays: their metadata and the keys of their chunks.

https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from ..errors import DamagedCheckpointError, FormatVersionError
from .dtypes import zarr_dtype

_CACHED_LIMIT = 2048
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
    """Decode the ``zarr.json`` that `encode_array_metadata` wrote; refuse that of any other array."""
    # Many arrays of a tree share one text; long ones are not worth the memory.
    return _decode_cached(data) if len(data) <= _CACHED_LIMIT else _decode(data)


def _decode(data: bytes) -> ArrayMetadata:
    try:
        document = json.loads(data.decode("utf-8"))
        shape = _sizes(document["shape"], 0)
        chunk_shape = _sizes(document["chunk_grid"]["configuration"]["chunk_shape"], 1)
        level = next((codec["configuration"]["level"] for codec in document["codecs"] if codec["name"] == "zstd"), None)
        data_type = document["data_type"]
        dtype = zarr_dtype(data_type)
        if level is not None and type(level) is not int:
            raise ValueError(f"its level of compression is {level!r:.80}")
        if max(math.prod(shape), math.prod(chunk_shape)) > _BYTES_LIMIT // (1 if dtype is None else dtype.itemsize):
            raise ValueError(f"an array of shape {shape} in chunks of shape {chunk_shape} is larger than any file")
        expected = json.loads(encode_array_metadata(shape, data_type, chunk_shape, level))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"zarr.json is damaged: it does not describe an array ({error!r:.200})") from error
    expected["data_type"] = None if dtype is None else data_type
    for member in {**expected, **document}:
        if document.get(member) != expected.get(member):
            raise FormatVersionError(
                f"holdfast does not read zarr arrays with the {member} {document.get(member)!r:.200}; open it with "
                "TensorStore"
            )
    return ArrayMetadata(shape, data_type, chunk_shape, level)


_decode_cached = lru_cache(maxsize=4096)(_decode)


def metadata_key(name: str) -> bytes:
    """Return the key of the ``zarr.json`` of an array; the array at the root has the empty name."""
    return f"{name}/zarr.json".encode() if name else b"zarr.json"


def chunk_keys(name: str, grid: tuple[int, ...]) -> list[bytes]:
    prefix = f"{name}/c".encode() if name else b"c"
    if grid.count(1) == len(grid):
        return [prefix + b"/0" * len(grid)]
    return [prefix + ("/" + "/".join(map(str, indices))).encode() for indices in product(*map(range, grid))]


def _sizes(sizes: list[Any], smallest: int) -> tuple[int, ...]:
    if len(sizes) > _RANK_LIMIT or not all(type(size) is int and smallest <= size <= _BYTES_LIMIT for size in sizes):
        raise ValueError(f"the sizes {sizes!r:.80}")
    return tuple(sizes)
