"""Zarr version 3 arrays: dtype names, array metadata and chunk keys.

https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..errors import DamagedCheckpointError, FormatVersionError

DType: TypeAlias = "np.dtype[Any]"


class Stored(NamedTuple):
    """How an array's elements are stored."""

    data_type: str  # name of the zarr data type
    numpy: DType  # the same type as a little-endian numpy dtype
    # Size of an additional trailing axis that holds the bytes of each element; None if elements are stored unchanged.
    extra: int | None


_ML_NAMES = (
    ("bfloat16", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz")
    + ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
    + ("int1", "int2", "int4", "uint1", "uint2", "uint4")
)
_PLAIN_TYPES: tuple[type[np.generic], ...] = (
    (np.bool_, np.float16, np.float32, np.float64, np.complex64, np.complex128)
    + (np.int8, np.int16, np.int32, np.int64)
    + (np.uint8, np.uint16, np.uint32, np.uint64)
)
_PLAIN: dict[str, DType] = {np.dtype(scalar).name: np.dtype(scalar) for scalar in _PLAIN_TYPES}
# Types that https://google.github.io/tensorstore/driver/zarr3/index.html does not list; they are stored as bytes.
_NOT_IN_ZARR = frozenset({"int1", "uint1", "uint2", "uint4", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"})
_LONG = int(np.finfo(np.longdouble).nmant)
_LONG_NAME = r"([<>]?)(c?longdouble)([0-9]{1,3})"
# A unit with a multiplier of zero does not match, because numpy would divide by zero, which crashes the process.
_UNITS = r"(?:\[(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
_NUMPY_NAME = rf"(?:datetime64|timedelta64){_UNITS}|[<>][iufc][0-9]{{1,2}}|[<>][mM]8{_UNITS}|[<>|][SUV][0-9]{{1,10}}"


def _plain_or_ml(name: str) -> DType | None:
    """Return the bool or number dtype of numpy or ml_dtypes with this name, or None."""
    if name not in _ML_NAMES:
        return _PLAIN.get(name)
    import ml_dtypes  # imported lazily because inspecting and verifying checkpoints rarely requires it

    scalar = getattr(ml_dtypes, name, None)  # older versions of ml_dtypes lack some dtypes
    return None if scalar is None else np.dtype(scalar)


@lru_cache(maxsize=1024)
def dtype_name(dtype: DType) -> str:
    """Return a name from which `dtype_from_name` can restore the dtype, including its byte order."""
    name = dtype.name
    if (named := _plain_or_ml(name)) is not None and named == dtype:
        return name
    if dtype.hasobject or dtype.kind in "OT" or dtype.fields is not None or dtype.subdtype is not None:
        raise TypeError(f"the elements of dtype {dtype} are not plain bytes")
    if dtype.type in (np.longdouble, np.clongdouble):
        order = "" if dtype.isnative else dtype.str[0]
        return f"{order}{'c' if dtype.kind == 'c' else ''}longdouble{_LONG}"
    if dtype.isnative and dtype.kind not in "SUV":
        return name
    if dtype.type.__module__ != "numpy":
        raise TypeError(f"the dtype {dtype} of {dtype.type.__module__} is not known")
    return dtype.str


def dtype_from_name(name: str) -> DType:
    """Return the dtype for a name returned by `dtype_name`."""
    return _parse(name) if isinstance(name, str) else _unknown(name)


@lru_cache(maxsize=1024)
def _parse(name: str) -> DType:
    dtype = _plain_or_ml(name)
    if dtype is not None:
        return dtype
    if name in _ML_NAMES:
        import ml_dtypes

        raise FormatVersionError(f"the dtype {name} needs a newer version of ml_dtypes than {ml_dtypes.__version__}")
    if long := re.fullmatch(_LONG_NAME, name):
        if int(long[3]) != _LONG:
            raise FormatVersionError(
                f"the dtype {name} is the long double of another kind of machine; its mantissa has {long[3]} bits, "
                f"on this machine {_LONG}"
            )
        dtype = np.dtype(long[2])
        if long[1]:
            dtype = dtype.newbyteorder(">" if long[1] == ">" else "<")
    elif re.fullmatch(_NUMPY_NAME, name):
        try:
            dtype = np.dtype(name)
        except (TypeError, ValueError):
            return _unknown(name)
    if dtype is None or dtype_name(dtype) != name:
        return _unknown(name)
    return dtype


def _unknown(name: object) -> DType:
    raise DamagedCheckpointError(f"{str(name)[:100]!r} is not the name of a dtype that holdfast stores")


def zarr_dtype(data_type: str) -> DType | None:
    """Return the little-endian numpy dtype for a zarr data type, or None for an unknown type."""
    dtype = None if data_type in _NOT_IN_ZARR else _plain_or_ml(data_type)
    return None if dtype is None else dtype.newbyteorder("<")


@lru_cache(maxsize=1024)
def storage_dtype(dtype: DType) -> Stored:
    dtype_name(dtype)  # raises an error for a dtype that has no name
    little = zarr_dtype(dtype.name)
    if little is not None and dtype.newbyteorder("<") == little:
        return Stored(dtype.name, little, None)
    return Stored("uint8", np.dtype(np.uint8), dtype.itemsize)


_CACHED_LIMIT = 2048
_RANK_LIMIT = 65
_BYTES_LIMIT = (1 << 63) - 1


class ArrayMetadata(NamedTuple):
    shape: tuple[int, ...]  # array shape, in elements
    data_type: str  # name of the zarr data type
    chunk_shape: tuple[int, ...]  # chunk shape in elements; chunks at the edges are padded to this shape
    # zstd level; None if chunks are not compressed. The stored sizes of compressed chunks are only in the index.
    compression: int | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The little-endian numpy dtype of the stored elements."""
        dtype = zarr_dtype(self.data_type)
        assert dtype is not None  # checked by decode_array_metadata
        return dtype


@lru_cache(maxsize=4096)
def encode_array_metadata(
    shape: tuple[int, ...], data_type: str, chunk_shape: tuple[int, ...], compression: int | None = None
) -> bytes:
    """Encode the ``zarr.json`` of an array with little-endian chunks, each followed by its checksum."""
    if len(shape) != len(chunk_shape) or min(chunk_shape, default=1) < 1 or min(shape, default=0) < 0:
        raise ValueError(f"an array of shape {shape} cannot have chunks of shape {chunk_shape}")
    fill: object = [0.0, 0.0] if data_type.startswith("complex") else False if data_type == "bool" else 0
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
    """Decode a ``zarr.json`` written by `encode_array_metadata`; raise an error for any other document."""
    # Many arrays in a tree have identical metadata, so short texts are cached. Caching long texts would waste memory.
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


def metadata_keys(names: Sequence[str]) -> list[bytes]:
    """Return the key of each array's ``zarr.json``. The name of the root array is empty."""
    keys = encode_names(names, "/zarr.json")
    if "" in names:
        keys[names.index("")] = b"zarr.json"
    return keys


def encode_names(names: Sequence[str], end: str = "") -> list[bytes]:
    """Encode array names, each followed by ``end``, as bytes. This is fast for thousands of names."""
    encoded = (f"{end}\n".join(names) + end).encode().split(b"\n")
    return encoded if len(encoded) == len(names) else [f"{name}{end}".encode() for name in names]


def chunk_keys(name: str, grid: tuple[int, ...]) -> list[bytes]:
    prefix = f"{name}/c".encode() if name else b"c"
    if grid.count(1) == len(grid):
        return [prefix + b"/0" * len(grid)]
    return [prefix + ("/" + "/".join(map(str, indices))).encode() for indices in product(*map(range, grid))]


def _sizes(sizes: list[Any], smallest: int) -> tuple[int, ...]:
    if len(sizes) > _RANK_LIMIT or not all(type(size) is int and smallest <= size <= _BYTES_LIMIT for size in sizes):
        raise ValueError(f"the sizes {sizes!r:.80}")
    return tuple(sizes)
