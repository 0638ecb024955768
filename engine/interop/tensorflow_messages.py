"""What the index file of a TensorFlow checkpoint says: its header, and where each tensor lies. Pure.

The messages are ``BundleHeaderProto`` and ``BundleEntryProto`` of ``tensorflow/core/protobuf/tensor_bundle.proto``, and
those of ``tensor_shape.proto``, ``tensor_slice.proto`` and ``versions.proto`` in ``tensorflow/core/framework``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ..errors import DamagedCheckpointError, FormatVersionError
from ..format.dtypes import DType
from .tensorflow_wire import content, fields, signed, unsigned

STRING, VARIANT = 7, 21
_VERSION = 1  # of the format, as the header counts
_LARGEST = 1 << 62
_ESCAPES = {0: b"\0\xff", 0xFF: b"\xff\0"}
_MOST_AXES = 32  # of arrays of numpy 1; TensorFlow's tensors may have up to 254

_PLAIN = {
    1: np.float32,
    2: np.float64,
    3: np.int32,
    4: np.uint8,
    5: np.int16,
    6: np.int8,
    8: np.complex64,
    9: np.int64,
    10: np.bool_,
    11: np.int8,  # 11 to 16 but for 14 are quantised: numbers whose scale lies elsewhere
    12: np.uint8,
    13: np.int32,
    15: np.int16,
    16: np.uint16,
    17: np.uint16,
    18: np.complex128,
    19: np.float16,
    22: np.uint32,
    23: np.uint64,
}
_OF_ML_DTYPES = {
    14: "bfloat16",
    24: "float8_e5m2",
    25: "float8_e4m3fn",
    26: "float8_e4m3fnuz",
    27: "float8_e4m3b11fnuz",
    28: "float8_e5m2fnuz",
    29: "int4",  # these and the following have a byte for each element
    30: "uint4",
    31: "int2",
    32: "uint2",
    33: "float4_e2m1fn",
}
_DTYPES: dict[int, DType] = {number: np.dtype(scalar) for number, scalar in _PLAIN.items()} | {
    number: np.dtype(getattr(ml_dtypes, name)) for number, name in _OF_ML_DTYPES.items() if hasattr(ml_dtypes, name)
}


@dataclass(frozen=True, slots=True)
class BundleHeader:
    """What holds for all tensors.

    Attributes:
        shards: How many data files there are.
        big_endian: Whether numbers in the data files begin with their highest byte.
    """

    shards: int
    big_endian: bool


@dataclass(frozen=True, slots=True)
class BundleSlice:
    """A part of a tensor.

    Attributes:
        extents: For each axis the first index and how many there are; None is all of the axis.
    """

    extents: tuple[tuple[int, int] | None, ...]

    def box(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns where it begins in a tensor of a shape, and its own shape.

        Raises:
            DamagedCheckpointError: It does not lie inside.
        """
        if len(self.extents) != len(shape):
            raise DamagedCheckpointError(f"a slice has {len(self.extents)} axes, its tensor {len(shape)}")
        found = [(0, size) if extent is None else extent for extent, size in zip(self.extents, shape, strict=True)]
        for (first, length), size in zip(found, shape, strict=True):
            if first < 0 or length < 0 or first + length > size:
                raise DamagedCheckpointError(f"a slice begins at {first} and has {length} of {size}")
        return tuple(first for first, _ in found), tuple(length for _, length in found)


@dataclass(frozen=True, slots=True)
class BundleEntry:
    """One tensor, or one slice of a tensor.

    Attributes:
        kind: TensorFlow's number of the type of its elements.
        shape: Its shape.
        shard: The number of the data file.
        offset: Its first byte there.
        size: How many bytes it takes there.
        checksum: The masked CRC-32C of its bytes.
        slices: Where the tensor itself is not stored, but slices of it: those.
    """

    kind: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    slices: tuple[BundleSlice, ...]

    @property
    def dtype(self) -> DType | None:
        """The type of its elements; None if these are no numbers, or not known."""
        return _DTYPES.get(self.kind)

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


def decode_header(message: bytes) -> BundleHeader:
    """Reads the header.

    Raises:
        DamagedCheckpointError: It is none.
        FormatVersionError: It is of a version that is not known.
    """
    shards, big_endian = 0, 0
    for number, value in fields(message):
        if number == 1:
            shards = signed(value)
        elif number == 2:
            big_endian = unsigned(value)
        elif number == 3:
            _check_version(content(value))
    if shards < 0 or big_endian not in (0, 1):
        raise DamagedCheckpointError(f"its header claims {shards} data files of byte order {big_endian}")
    return BundleHeader(shards, big_endian == 1)


def decode_entry(message: bytes, header: BundleHeader) -> BundleEntry:
    """Reads where a tensor lies.

    Args:
        message: The message.
        header: The header.

    Raises:
        DamagedCheckpointError: It does not say that, or not of a tensor that can be.
    """
    numbers = dict.fromkeys((1, 3, 4, 5, 6), 0)
    shape: tuple[int, ...] = ()
    slices = []
    for number, value in fields(message):
        if number in numbers:
            numbers[number] = signed(value)
        elif number == 2:
            shape = _shape(content(value))
        elif number == 7:
            slices.append(BundleSlice(tuple(map(_extent, _messages(content(value), 1)))))
    kind, shard, offset, size, checksum = numbers.values()
    entry = BundleEntry(kind, shape, shard, offset, size, checksum, tuple(slices))
    if not (0 <= shard < max(header.shards, 1) and 0 <= offset <= _LARGEST and 0 <= size <= _LARGEST):
        raise DamagedCheckpointError(f"it lies at byte {offset} of file {shard} of {header.shards}, {size} bytes of it")
    dtype = entry.dtype
    if dtype is not None and not slices and size != entry.count * dtype.itemsize:
        raise DamagedCheckpointError(f"{dtype} of shape {list(shape)} does not take the {size} bytes that it is given")
    return entry


def slice_key(name: bytes, extents: BundleSlice) -> bytes:
    """Returns the key under which a slice is stored, in the encoding of ``core/lib/strings/ordered_code.cc``.

    Args:
        name: The tensor's name.
        extents: The slice.

    >>> slice_key(b"w", BundleSlice(((64, 2), None))).hex()
    '007700010102c04082807f'
    """
    key = b"\0" + b"".join(_ESCAPES.get(byte, bytes([byte])) for byte in name) + b"\0\1"
    rank = len(extents.extents)
    key += bytes([1, rank]) if rank else b"\0"
    for extent in extents.extents:
        first, length = (0, -1) if extent is None else extent
        key += ordered(first) + ordered(length)
    return key


def ordered(number: int) -> bytes:
    """Returns a number with a sign in the encoding of slices' keys: in order as bytes, shorter for small ones."""
    bits = (~number if number < 0 else number).bit_length()
    length = bits // 7 + 1
    marks = ((1 << length) - 1) << (7 * length)  # as many ones as there are bytes, at the upper end
    return ((number & ((1 << 8 * length) - 1)) ^ marks).to_bytes(length, "big")


def _check_version(message: bytes) -> None:
    needed, bad = 0, []
    for number, value in fields(message):
        if number == 2:
            needed = signed(value)
        elif number == 3:
            bad += [signed(value)] if isinstance(value, int) else list(value)
    if needed > _VERSION or _VERSION in bad:
        raise FormatVersionError(
            f"it needs version {needed} of the format of TensorFlow's checkpoints; this version of holdfast reads "
            f"{_VERSION}: update holdfast, or write it anew with an older TensorFlow"
        )


def _shape(message: bytes) -> tuple[int, ...]:
    sizes = []
    for number, value in fields(message):
        if number == 2:
            sizes.append(signed(dict(fields(content(value))).get(1, 0)))
        elif number == 3 and unsigned(value):
            raise DamagedCheckpointError("its shape is not known")
    if len(sizes) > _MOST_AXES or min(sizes, default=0) < 0 or math.prod(size or 1 for size in sizes) > _LARGEST >> 4:
        raise DamagedCheckpointError(f"{sizes[:_MOST_AXES]} is not the shape of an array")
    return tuple(sizes)


def _messages(message: bytes, wanted: int) -> list[bytes]:
    return [content(value) for number, value in fields(message) if number == wanted]


def _extent(message: bytes) -> tuple[int, int] | None:
    parts = dict(fields(message))
    return (signed(parts.get(1, 0)), signed(parts[2])) if 2 in parts else None
