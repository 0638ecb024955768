"""From arrays in host memory to the bytes of data files.

Chunks and their checksums come in pieces small enough to stay in the processor's cache. Where compressed chunks lie is
known only after compression.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import StateError, UnsupportedLeafError
from ..format import ContentDigest, compress_chunks, content_digest, crc32c, extend
from ..pytree import Box, CastProblem, Piece, cast_checked, format_path
from ..storage import CORES, Segment, parallel_map, round_up
from .plan import CHECKSUM_BYTES, ArraySpec, Bytes, Layout, PlannedSegment, batches, checksum_after

_STEP = 1 << 20  # a piece this large is still in the second-level cache when it is copied after its checksum was taken
_SMALL = 64 << 10  # chunks up to this size are joined before they are handed on, to save a step for each
_FILE_BYTES = 128 << 20  # content of one data file of compressed chunks, before compression
_FILES = 2  # number of such files that are compressed or written, and thus in memory, at a time
_GROUP_BYTES = 16 << 20
_THREADS = 16

# The digests of chunks by the numbers of their array and their own. Writing fills in the requested ones, which are
# None.
Digests = dict[tuple[int, int], bytes | None]


class Source(NamedTuple):
    spec: ArraySpec
    dtype: np.dtype[np.generic]  # element type as it is stored, little endian
    # Host arrays that cover once what this process writes; those of another dtype are cast chunk by chunk.
    pieces: Sequence[Piece]
    name: str = ""  # the leaf's name, for errors


def segment_parts(
    segment: PlannedSegment,
    sources: Sequence[Source],
    checksums: NDArray[np.uint32],
    digests: Digests | None = None,
) -> Iterator[Bytes]:
    """Generate the bytes of a segment: chunks, checksums and the gaps between them; note checksums and digests."""
    position = segment.offset
    joined: list[bytes] = []
    waiting = 0
    for place, chunk in enumerate(segment.chunks, segment.first):
        source = sources[chunk.array]
        gap = chunk.offset - position
        data = chunk_bytes(source, chunk.number)
        full = source.spec.chunk_nbytes
        position = chunk.offset + full + CHECKSUM_BYTES
        if full <= _SMALL:
            raw = data.tobytes() if len(data) == full else data.tobytes().ljust(full, b"\0")
            checksum = checksums[place] = crc32c(raw)
            joined += (bytes(gap), raw, struct.pack("<I", checksum))
            waiting += gap + full + CHECKSUM_BYTES
            if waiting < _STEP:
                continue
            yield _join(joined)
            joined, waiting = [], 0
            continue
        yield _join([*joined, bytes(gap)])
        joined, waiting = [], 0
        checksum = 0
        noted = digests is not None and chunk[:2] in digests
        digest = ContentDigest() if noted else None
        for start in range(0, len(data), _STEP):
            part = data[start : start + _STEP]
            checksum = extend(checksum, part)
            if digest is not None:
                digest.update(part)
            yield part
        if digests is not None and digest is not None:
            digests[chunk[:2]] = digest.digest()
        for start in range(len(data), full, _STEP):
            part = np.zeros(min(_STEP, full - start), np.uint8)
            checksum = extend(checksum, part)
            yield part
        checksums[place] = checksum
        yield _join([struct.pack("<I", checksum)])
    if joined:
        yield _join(joined)


def _join(parts: list[bytes]) -> Bytes:
    return np.frombuffer(b"".join(parts), np.uint8)


def chunk_bytes(source: Source, number: int) -> Bytes:
    """Return a chunk's bytes; a chunk at the end of an axis may be shorter than its full size."""
    data = chunk_view(source, number)
    return _gather(source, source.spec.chunk_box(number)) if data is None else data


def chunk_view(source: Source, number: int) -> Bytes | None:
    """Return a chunk's bytes where they lie in memory in one run, as they are stored; None if they do not."""
    spec = source.spec
    pieces = source.pieces
    if len(pieces) == 1:
        array = pieces[0].array
        if array.dtype == source.dtype and array.flags.c_contiguous and array.shape == spec.shape:
            flat = array.reshape(-1).view(np.uint8)
            if spec.chunks == 1:
                return flat
            if spec.contiguous:
                box = spec.chunk_box(number)
                first = int(np.ravel_multi_index(box.start, spec.shape)) * spec.itemsize
                return flat[first : first + box.size * spec.itemsize]
    box = spec.chunk_box(number)
    for piece in pieces:
        own = Box.at(piece.start, piece.array.shape)
        if piece.array.dtype == source.dtype and box.shape == spec.chunk_shape and box.common(own) == box:
            part = piece.array[box.within(own)]
            if part.flags.c_contiguous:
                return part.reshape(-1).view(np.uint8)
    return None


def _gather(source: Source, box: Box) -> Bytes:
    """Copy a chunk together from all pieces that hold a part of it."""
    chunk = np.zeros(source.spec.chunk_shape, source.dtype)
    missing = box.size
    for piece in source.pieces:
        own = Box.at(piece.start, piece.array.shape)
        common = box.common(own)
        if common is not None:
            place: Any = (*common.within(box), ...)  # a view, also of an array without axes
            try:
                cast_checked(piece.array[common.within(own)], source.dtype, chunk[place])
            except CastProblem as problem:
                raise UnsupportedLeafError(f"{format_path(source.name)}: {problem}") from None
            missing -= common.size
    if missing:
        raise StateError(
            f"{format_path(source.name)}: this process must write {box.size} elements from {list(box.start)} of shape "
            f"{list(source.spec.shape)} and lacks {missing} of them, which it should hold by its sharding"
        )
    return chunk.reshape(-1).view(np.uint8)


class CompressedChunk(NamedTuple):
    """Where a compressed chunk was written; its length in bytes includes its checksum."""

    array: int
    number: int
    file: int
    offset: int
    length: int
    checksum: int


class ChunkToCompress(NamedTuple):
    """A chunk, by the numbers of its array and its own, and its level of compression."""

    array: int
    number: int
    level: int


def write_compressed(
    chunks: Sequence[ChunkToCompress],
    sources: Sequence[Source],
    layout: Layout,
    first_file: int,
    write: Callable[[int, int, Sequence[Segment]], None],
    digests: Digests | None = None,
    awaited: threading.Event | None = None,
    *,
    group_chunks: int = 4096,  # that a thread takes at a time, at most
) -> tuple[list[CompressedChunk], list[int]]:
    """Compress chunks with several threads; write one file while the chunks of another are compressed."""

    def size(chunk: ChunkToCompress) -> int:
        return sources[chunk.array].spec.chunk_nbytes

    files_of = list(batches(chunks, size, min(_FILE_BYTES, layout.data_file_bytes)))

    def write_batch(number: int) -> tuple[list[CompressedChunk], int]:
        stored = _compressed(files_of[number], sources, digests, awaited, group_chunks)
        segments, offsets, size = _lay_out(stored, layout.segment_bytes)
        file = first_file + number
        write(file, size, segments)
        rows = [
            CompressedChunk(chunk.array, chunk.number, file, offset, len(data), checksum_after(data))
            for chunk, offset, data in zip(files_of[number], offsets, stored, strict=True)
        ]
        return rows, size

    files = parallel_map(
        write_batch, range(len(files_of)), _FILES, beside=1, awaited=awaited, name="holdfast-compressed-file"
    )
    return [row for rows, _ in files for row in rows], [size for _, size in files]


def _compressed(
    batch: Sequence[ChunkToCompress],
    sources: Sequence[Source],
    digests: Digests | None,
    awaited: threading.Event | None,
    group_chunks: int,
) -> list[bytes]:
    """Compress chunks in groups of one size and level; return their bytes in the order of the batch."""
    groups: list[list[int]] = []
    current: dict[tuple[int, int], list[int]] = {}
    for position, chunk in enumerate(batch):
        nbytes = sources[chunk.array].spec.chunk_nbytes
        group = current.get((nbytes, chunk.level))
        if group is None or len(group) == group_chunks or (len(group) + 1) * nbytes > _GROUP_BYTES:
            group = current[nbytes, chunk.level] = []
            groups.append(group)
        group.append(position)

    def compress(group: Sequence[int]) -> list[bytes]:
        whole = []
        for chunk in [batch[position] for position in group]:
            data = chunk_bytes(sources[chunk.array], chunk.number)
            if digests is not None and chunk[:2] in digests:
                digests[chunk[:2]] = content_digest(data)
            missing = sources[chunk.array].spec.chunk_nbytes - len(data)
            whole.append(np.pad(data, (0, missing)) if missing else data)
        return compress_chunks(whole, batch[group[0]].level)

    found: dict[int, bytes] = {}
    threads = min(_THREADS, CORES)
    compressed = parallel_map(
        compress, groups, threads, beside=max(1, CORES // 2), awaited=awaited, name="holdfast-compress"
    )
    for group, stored in zip(groups, compressed, strict=True):
        found.update(zip(group, stored, strict=True))
    return [found[position] for position in range(len(batch))]


def _lay_out(stored: Sequence[bytes], segment_bytes: int) -> tuple[list[Segment], list[int], int]:
    """Place the bytes of chunks one after the other; return segments, the offset of each chunk, and the total."""
    segments: list[Segment] = []
    offsets: list[int] = []
    end = 0
    for members in batches(stored, len, segment_bytes):
        start = end = round_up(end)
        for data in members:
            offsets.append(end)
            end += len(data)
        segments.append(Segment(start, end - start, partial(_pieces, members), lasting=True))
    return segments, offsets, end


def _pieces(members: Sequence[bytes]) -> Iterator[Bytes]:
    joined = np.frombuffer(b"".join(members), np.uint8)
    for start in range(0, len(joined), _STEP):
        yield joined[start : start + _STEP]
