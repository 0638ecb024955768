"""Encode arrays in host memory as the bytes of data files.

Chunks and checksums are produced in pieces that are small enough to stay in the CPU cache. Compressed chunks are laid
out after compression, because their sizes are not known until then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import StateError, UnsupportedLeafError
from ..format import ContentDigest, checksums_of, compress_chunks, content_digest, extend
from ..pytree import Box, CastProblem, Piece, cast_checked, format_path
from ..storage import CORES, Segment, parallel_map, round_up
from .digests import CHECKSUM_BYTES, Bytes, Integers, checksum_after
from .grid import ArraySpec
from .plan import Layout, PlannedSegment, batches

_STEP = 1 << 20  # bytes of small chunks to join into one piece
_PIECE = 256 << 10  # bytes per piece, few enough to stay in the L2 cache after the piece has been copied
_SMALL = 64 << 10  # maximum size, in bytes, of chunks that are joined into larger pieces
_FILE_BYTES = 128 << 20  # total size, in bytes before compression, of the chunks in a compressed data file
_FILES = 2  # number of compressed data files to prepare, hold in memory and write at a time
_GROUP_BYTES = 16 << 20  # maximum number of bytes that a thread compresses per call
_GROUP_CHUNKS = 4096  # maximum number of chunks that a thread compresses per call
_THREADS = 16

# Chunk digests, keyed by array number and chunk number. A value of None requests a digest, which the writer fills in.
Digests = dict[tuple[int, int], bytes | None]


class Source(NamedTuple):
    spec: ArraySpec
    dtype: np.dtype[np.generic]  # stored dtype, little endian
    # Host arrays that together cover exactly the elements that this process writes; cast to `dtype` if necessary.
    pieces: Sequence[Piece]
    name: str = ""  # the leaf's name, for error messages


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """The sources of all arrays, stored as one list per field (indexed by array number) to support many arrays."""

    specs: Sequence[ArraySpec]
    dtypes: Sequence[np.dtype[np.generic]]
    pieces: Sequence[Sequence[Piece]]
    names: Sequence[str]

    def __getitem__(self, array: int) -> Source:
        return Source(self.specs[array], self.dtypes[array], self.pieces[array], self.names[array])


def segment_parts(
    segment: PlannedSegment, sources: Sources, checksums: NDArray[np.uint32], digests: Digests
) -> Iterator[Bytes]:
    """Yield the bytes of a segment (chunks, checksums and padding); fill in checksums and the requested digests."""
    # Each chunk is followed by its checksum and by zero padding up to the next chunk.
    ends = np.append(segment.offsets[1:], segment.offset + segment.size)
    sizes = segment.lengths - CHECKSUM_BYTES
    tails = (ends - segment.offsets - sizes).tolist()
    large = [*np.flatnonzero(sizes > _SMALL).tolist(), len(tails)]
    first = 0
    for position in large:
        while first < position:
            # Join small chunks to let the caller process many at once.
            stop = int(np.searchsorted(segment.offsets, segment.offsets[first] + _STEP))
            some = slice(first, min(stop, position))
            contents = _small_chunks(segment.arrays[some], segment.numbers[some], sources)
            computed = checksums_of(contents)
            checksums[segment.first + some.start : segment.first + some.stop] = computed
            follow = [checksum.to_bytes(size, "little") for checksum, size in zip(computed, tails[some], strict=True)]
            yield _join(chain.from_iterable(zip(contents, follow, strict=True)))
            first = some.stop
        if position < len(tails):
            chunk = int(segment.arrays[position]), int(segment.numbers[position])
            checksum = yield from _large_chunk(sources[chunk[0]], chunk, digests)
            checksums[segment.first + position] = checksum
            yield _join([checksum.to_bytes(tails[position], "little")])
            first = position + 1


def _small_chunks(arrays: Integers, numbers: Integers, sources: Sources) -> list[bytes]:
    """Return the bytes of small chunks; single-chunk arrays take a fast path, as there may be thousands of them."""
    contents = []
    specs, dtypes, pieces = sources.specs, sources.dtypes, sources.pieces
    for array, number in zip(arrays.tolist(), numbers.tolist(), strict=True):
        spec = specs[array]
        if spec.chunks == len(pieces[array]) == 1:
            values = pieces[array][0].array
            if values.dtype == dtypes[array] and values.shape == spec.chunk_shape:
                contents.append(values.tobytes())
                continue
        contents.append(chunk_bytes(sources[array], number).tobytes().ljust(spec.chunk_nbytes, b"\0"))
    return contents


def _large_chunk(source: Source, chunk: tuple[int, int], digests: Digests) -> Generator[Bytes, None, int]:
    """Yield the bytes of a chunk, and return its checksum; store its digest if requested."""
    data, full = chunk_bytes(source, chunk[1]), source.spec.chunk_nbytes
    data.flags.writeable = False  # otherwise, the checksum function would create a read-only view of each piece
    digest = ContentDigest() if chunk in digests else None
    checksum = 0
    for start in range(0, len(data), _PIECE):
        part = data[start : start + _PIECE]
        yield part
        # The caller has just copied the piece, so the piece is still in the cache.
        checksum = extend(checksum, part)
        if digest is not None:
            digest.update(part)
    if digest is not None:
        digests[chunk] = digest.digest()
    for start in range(len(data), full, _PIECE):
        part = np.zeros(min(_PIECE, full - start), np.uint8)
        checksum = extend(checksum, part)
        yield part
    return checksum


def _join(parts: Iterable[bytes]) -> Bytes:
    return np.frombuffer(b"".join(parts), np.uint8)


def chunk_bytes(source: Source, number: int) -> Bytes:
    """Return the bytes of a chunk. At the end of an axis, the chunk may lack the padding to its full size."""
    data = chunk_view(source, number)
    return _gather(source, source.spec.chunk_box(number)) if data is None else data


def chunk_view(source: Source, number: int) -> Bytes | None:
    """Return a view of a chunk if it is contiguous in memory and has the stored dtype; None otherwise."""
    spec, box = source.spec, source.spec.chunk_box(number)
    if not spec.contiguous and box.shape != spec.chunk_shape:
        return None
    for piece in source.pieces:
        if piece.array.dtype == source.dtype and box.common(piece.box) == box:
            index: Any = (*box.within(piece.box), ...)  # the ellipsis makes the result an array even in the 0-d case
            part: NDArray[Any] = piece.array[index]
            if part.flags.c_contiguous:
                return part.reshape(-1).view(np.uint8)
    return None


def _gather(source: Source, box: Box) -> Bytes:
    """Assemble a chunk from all pieces that overlap it."""
    chunk = np.zeros(source.spec.chunk_shape, source.dtype)
    missing = box.size
    for piece in source.pieces:
        common = box.common(piece.box)
        if common is not None:
            index: Any = (*common.within(box), ...)  # the ellipsis makes `chunk[index]` a view even if it is 0-d
            try:
                cast_checked(piece.array[common.within(piece.box)], source.dtype, chunk[index])
            except CastProblem as problem:
                raise UnsupportedLeafError(f"{format_path(source.name)}: {problem}") from None
            missing -= common.size
    if missing:
        raise StateError(
            f"{format_path(source.name)}: this process must write {box.size} elements from {list(box.start)} of shape "
            f"{list(source.spec.shape)}, but lacks {missing} of them, which its sharding assigns to it. "
            "Hand over the module, optimizer or arrays, not an object with them in a state that each process saves"
        )
    return chunk.reshape(-1).view(np.uint8)


class ChunkToCompress(NamedTuple):
    """A chunk to compress, identified by array number and chunk number, and the compression level."""

    array: int
    number: int
    level: int


def write_compressed(
    chunks: Sequence[ChunkToCompress],
    sources: Sources,
    layout: Layout,
    first_file: int,
    write: Callable[[int, int, Sequence[Segment]], None],
    digests: Digests,
    awaited: threading.Event | None = None,
) -> tuple[Integers, list[int]]:
    """Compress and write chunks on several threads; return a table (see `chunk_table`) and the file sizes."""
    limit = min(_FILE_BYTES, layout.data_file_bytes)
    files_of = list(batches(chunks, lambda chunk: sources.specs[chunk.array].chunk_nbytes, limit))

    def write_batch(number: int) -> tuple[list[tuple[int, ...]], int]:
        stored = _compressed(files_of[number], sources, digests, awaited)
        segments, offsets, size = _lay_out(stored, layout.segment_bytes)
        file = first_file + number
        write(file, size, segments)
        rows: list[tuple[int, ...]] = [
            (chunk.array, chunk.number, file, offset, len(data), checksum_after(data))
            for chunk, offset, data in zip(files_of[number], offsets, stored, strict=True)
        ]
        return rows, size

    files = parallel_map(
        write_batch, range(len(files_of)), _FILES, beside=1, awaited=awaited, name="holdfast-compressed-file"
    )
    table = np.array([row for rows, _ in files for row in rows], np.int64).reshape(-1, 6)
    return table, [size for _, size in files]


def _compressed(
    batch: Sequence[ChunkToCompress], sources: Sources, digests: Digests, awaited: threading.Event | None
) -> list[bytes]:
    """Compress chunks, grouped by size and level; return the compressed chunks in the order of the batch."""

    def size_and_level(position: int) -> tuple[int, int]:
        return sources.specs[batch[position].array].chunk_nbytes, batch[position].level

    groups: list[list[int]] = []
    for (nbytes, _), positions in groupby(sorted(range(len(batch)), key=size_and_level), size_and_level):
        count = max(1, min(_GROUP_BYTES // max(1, nbytes), _GROUP_CHUNKS))
        groups += batches(positions, lambda _: 1, count)

    def compress(group: Sequence[int]) -> list[bytes]:
        whole = []
        for chunk in [batch[position] for position in group]:
            data = chunk_bytes(sources[chunk.array], chunk.number)
            if chunk[:2] in digests:
                digests[chunk[:2]] = content_digest(data)
            missing = sources[chunk.array].spec.chunk_nbytes - len(data)
            whole.append(np.pad(data, (0, missing)) if missing else data)
        return compress_chunks(whole, batch[group[0]].level)

    threads = min(_THREADS, CORES)
    compressed = parallel_map(
        compress, groups, threads, beside=max(1, CORES // 2), awaited=awaited, name="holdfast-compress"
    )
    stored = dict(zip(chain.from_iterable(groups), chain.from_iterable(compressed), strict=True))
    return [stored[position] for position in range(len(batch))]


def _lay_out(stored: Sequence[bytes], segment_bytes: int) -> tuple[list[Segment], list[int], int]:
    """Lay out compressed chunks one after the other; return the segments, the chunk offsets and the total size."""
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
    joined = _join(members)
    for start in range(0, len(joined), _STEP):
        yield joined[start : start + _STEP]
