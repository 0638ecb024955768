"""Turns host arrays into the bytes of chunks, with their checksums, in pieces small enough to stay in the cache."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import StateError, UnsupportedLeafError
from ..format import crc32c, extend
from ..tree import CastProblem, Piece, cast_checked, display
from .plan import CHECKSUM_BYTES, ArraySpec, PlannedSegment

Bytes = NDArray[np.uint8]

_STEP = 1 << 20  # a piece this large is still in the second-level cache when it is copied after its checksum was taken
_SMALL = 64 << 10  # chunks up to this size are joined before they are handed on, to save a step for each


class Source(NamedTuple):
    """Where the values of one array come from.

    Attributes:
        spec: The array as it is stored.
        dtype: Its element type as it is stored, little endian.
        pieces: Host arrays that together cover once what this process is to write of it; those of another element
            type are cast chunk by chunk.
        name: The leaf's name, for errors.
    """

    spec: ArraySpec
    dtype: np.dtype[np.generic]
    pieces: Sequence[Piece]
    name: str = ""


def segment_parts(segment: PlannedSegment, sources: Sequence[Source]) -> Iterator[Bytes]:
    """Generates the bytes of one segment: chunks, checksums and the gaps between them.

    Args:
        segment: What to produce.
        sources: The arrays, in the order in which they were planned.

    Yields:
        One-dimensional uint8 arrays of ``segment.size`` bytes in all. The memory behind each may change or vanish
        as soon as the next is asked for.
    """
    position = segment.offset
    joined: list[bytes] = []
    waiting = 0
    for chunk in segment.chunks:
        source = sources[chunk.array]
        gap = chunk.offset - position
        data = _chunk_bytes(source, chunk.number)
        full = source.spec.chunk_nbytes
        position = chunk.offset + full + CHECKSUM_BYTES
        if full <= _SMALL:
            raw = data.tobytes() if len(data) == full else data.tobytes().ljust(full, b"\0")
            joined += (bytes(gap), raw, struct.pack("<I", crc32c(raw)))
            waiting += gap + full + CHECKSUM_BYTES
            if waiting < _STEP:
                continue
            yield _join(joined)
            joined, waiting = [], 0
            continue
        yield _join([*joined, bytes(gap)])
        joined, waiting = [], 0
        checksum = 0
        for start in range(0, len(data), _STEP):
            part = data[start : start + _STEP]
            checksum = extend(checksum, part)
            yield part
        for start in range(len(data), full, _STEP):
            part = np.zeros(min(_STEP, full - start), np.uint8)
            checksum = extend(checksum, part)
            yield part
        yield _join([struct.pack("<I", checksum)])
    if joined:
        yield _join(joined)


def _join(parts: list[bytes]) -> Bytes:
    return np.frombuffer(b"".join(parts), np.uint8)


def chunk_bytes(source: Source, number: int) -> Bytes:
    """Returns a chunk's bytes at its full size.

    Args:
        source: The array.
        number: The chunk's number in the array's grid.

    Returns:
        A view of the array's memory where that is possible.
    """
    data = _chunk_bytes(source, number)
    if len(data) == source.spec.chunk_nbytes:
        return data
    whole = np.zeros(source.spec.chunk_nbytes, np.uint8)
    whole[: len(data)] = data
    return whole


def _chunk_bytes(source: Source, number: int) -> Bytes:
    """Returns a chunk's bytes; a chunk at the end of its axis may come short of its full size."""
    spec = source.spec
    pieces = source.pieces
    if len(pieces) == 1:
        array = pieces[0].array
        if array.dtype == source.dtype and array.flags.c_contiguous and array.shape == spec.shape:
            if spec.chunks == 1:
                return array.reshape(-1).view(np.uint8)
            if spec.contiguous:
                starts = spec.place(number)
                first = int(np.ravel_multi_index(starts, spec.shape)) * spec.itemsize
                flat = array.reshape(-1).view(np.uint8)
                return flat[first : first + math.prod(spec.extent(starts)) * spec.itemsize]
    starts = spec.place(number)
    extent = spec.extent(starts)
    for piece in pieces:
        data = _view(piece, source, starts, extent)
        if data is not None:
            return data
    return _gather(source, starts, extent)


def _view(piece: Piece, source: Source, starts: Sequence[int], extent: Sequence[int]) -> Bytes | None:
    """Returns a chunk's bytes as a view of a piece; None where they are not all there, or not in one run."""
    array = piece.array
    if array.dtype != source.dtype or tuple(extent) != source.spec.chunk_shape:
        return None
    inside = []
    for start, size, begin, length in zip(starts, extent, piece.start, array.shape, strict=True):
        if not begin <= start <= start + size <= begin + length:
            return None
        inside.append(slice(start - begin, start - begin + size))
    part = array[tuple(inside)]
    return part.reshape(-1).view(np.uint8) if part.flags.c_contiguous else None


def _gather(source: Source, starts: Sequence[int], extent: Sequence[int]) -> Bytes:
    """Copies one chunk together from every piece that has a part of it."""
    shape = source.spec.chunk_shape
    chunk = np.zeros(shape, source.dtype)
    missing = math.prod(extent)
    for piece in source.pieces:
        here, there = [], []
        for start, size, begin, length in zip(starts, extent, piece.start, piece.array.shape, strict=True):
            low, high = max(start, begin), min(start + size, begin + length)
            if low >= high:
                break
            here.append(slice(low - start, high - start))
            there.append(slice(low - begin, high - begin))
        else:
            part = piece.array[tuple(there)]
            place: Any = (*here, ...)  # a view, also of an array without axes
            try:
                cast_checked(part, source.dtype, chunk[place])
            except CastProblem as problem:
                raise UnsupportedLeafError(f"{display(source.name)}: {problem}") from None
            missing -= part.size
    if missing:
        raise StateError(
            f"{display(source.name)}: {missing} of the {math.prod(extent)} elements from {list(starts)} of an array of "
            f"shape {list(source.spec.shape)} are not held by this process, which is to write them; its sharding says "
            "otherwise"
        )
    return chunk.reshape(-1).view(np.uint8)
