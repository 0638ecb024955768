"""The header of a safetensors file: read, checked and written. Pure: bytes in, bytes out.

A file is the length of the header (8 bytes, little endian), the header (a JSON object), and the tensors' bytes, little
endian and in C order, without gaps (https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from ..errors import DamagedCheckpointError, UnsupportedLeafError

LENGTH_BYTES = 8
HEADER_LIMIT = 100_000_000  # bytes; the limit of the reference implementation
METADATA = "__metadata__"
_ALIGNMENT = 8  # bytes: where the reference implementation lets the tensors begin
_LARGEST_SIZE = 1 << 62

_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Two numbers in a byte. Neither numpy nor torch computes with them; torch's name for a byte of them is this.
_PACKED = {"F4": "float4_e2m1fn_x2"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        name: Its name.
        dtype: Of its elements, in this machine's byte order.
        shape: Its shape.
        offset: Its first byte, counted from the beginning of the file.
        length: Its bytes.
        torch_dtype: Torch's name for elements that numpy has no dtype for; they are bytes here.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    length: int
    torch_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of a file says.

    Attributes:
        tensors: The tensors, in the order of the header.
        metadata: Text by name, whatever the writer wanted to note.
    """

    tensors: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]


def header_length(prefix: bytes, file_size: int) -> int:
    """Returns the length of the header in bytes.

    Args:
        prefix: The first 8 bytes of the file.
        file_size: Length of the file.

    Raises:
        DamagedCheckpointError: There can be no header of that length.
    """
    if len(prefix) != LENGTH_BYTES:
        raise DamagedCheckpointError(f"a safetensors file has at least {LENGTH_BYTES} bytes, this has {file_size}")
    length: int = struct.unpack("<Q", prefix)[0]
    if length > HEADER_LIMIT:
        raise DamagedCheckpointError(f"the header is said to have {length} bytes, more than the {HEADER_LIMIT} allowed")
    if length > file_size - LENGTH_BYTES:
        raise DamagedCheckpointError(f"the header is said to have {length} bytes, the whole file has {file_size}")
    return length


def decode_header(content: bytes, file_size: int) -> Header:
    """Reads a header.

    Args:
        content: The header, as long as :func:`header_length` says.
        file_size: Length of the file in bytes.

    Raises:
        DamagedCheckpointError: It is no header, or its tensors overlap, leave gaps or lie outside the file.
    """
    try:
        document = json.loads(content, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"the header is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise DamagedCheckpointError("the header is no JSON object")
    metadata = document.pop(METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedCheckpointError(f"{METADATA} of the header is not text by name")
    begin = LENGTH_BYTES + len(content)
    tensors = tuple(_entry(name, facts, begin) for name, facts in document.items())
    end = begin
    for tensor in sorted(tensors, key=lambda one: (one.offset, one.length)):
        if tensor.offset != end:
            what = "overlaps the one before" if tensor.offset < end else "leaves a gap before it"
            raise DamagedCheckpointError(f"tensor {tensor.name!r:.200} {what}: it begins at byte {tensor.offset}")
        end += tensor.length
    if end != file_size:
        raise DamagedCheckpointError(f"the tensors end at byte {end}, the file has {file_size} bytes")
    return Header(tensors, metadata)


def encode_header(
    tensors: Iterable[tuple[str, np.dtype[Any], tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """Writes a header.

    Args:
        tensors: Name, dtype and shape of every tensor, in the order in which their bytes follow.
        metadata: Text to note by name.

    Returns:
        The beginning of the file up to the first tensor, and for each tensor the length of its bytes.

    Raises:
        UnsupportedLeafError: A dtype has no name in the format, or the header would be too long.
    """
    document: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    position, lengths = 0, []
    for name, dtype, shape in tensors:
        if name == METADATA:
            raise UnsupportedLeafError(f"a tensor of a safetensors file cannot be called {name!r}")
        length = math.prod(shape) * dtype.itemsize
        document[name] = {
            "dtype": dtype_name(dtype),
            "shape": list(shape),
            "data_offsets": [position, position + length],
        }
        lengths.append(length)
        position += length
    content = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    content += b" " * (-(LENGTH_BYTES + len(content)) % _ALIGNMENT)
    if len(content) > HEADER_LIMIT:
        raise UnsupportedLeafError(
            f"the header of the safetensors file would have {len(content)} bytes, more than the {HEADER_LIMIT} allowed"
        )
    return struct.pack("<Q", len(content)) + content, lengths


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Names a dtype as the format does.

    Raises:
        UnsupportedLeafError: It has no name there.
    """
    name = _NAMES.get(dtype.newbyteorder("="))
    if name is None:
        raise UnsupportedLeafError(f"safetensors has no {dtype}")
    return name


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _entry(name: str, facts: Any, begin: int) -> TensorEntry:
    where = f"tensor {name!r:.200}"
    if not isinstance(facts, dict):
        raise DamagedCheckpointError(f"{where}: the header does not describe it")
    shape, offsets, kind = facts.get("shape"), facts.get("data_offsets"), facts.get("dtype")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2 or len(shape) > 64:
        raise DamagedCheckpointError(f"{where}: the header has no shape or no offsets for it")
    torch_dtype = _PACKED.get(kind) if isinstance(kind, str) else None
    dtype = _DTYPES.get(kind) if isinstance(kind, str) else None
    if torch_dtype is not None:
        dtype = np.dtype(np.uint8)
        if not shape or shape[-1] % 2:
            raise DamagedCheckpointError(f"{where}: {kind} of shape {shape} does not fill whole bytes")
        shape = [*shape[:-1], shape[-1] // 2]
    if dtype is None:
        raise DamagedCheckpointError(f"{where} has the dtype {kind!r:.80}, which holdfast does not read")
    length = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != length or length > _LARGEST_SIZE:
        raise DamagedCheckpointError(
            f"{where}: {dtype}{shape} takes {length} bytes, the header gives it those from {offsets[0]} to {offsets[1]}"
        )
    return TensorEntry(name, dtype, tuple(shape), begin + offsets[0], length, torch_dtype)


def _sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _LARGEST_SIZE for item in value)
