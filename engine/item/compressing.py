"""Data files of compressed chunks, which lie one after the other as they come: their sizes show only then."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from ..format import compress_chunks
from ..storage import Segment
from .plan import SEGMENT_ALIGNMENT, Layout
from .sources import Bytes, Source, chunk_bytes

_FILE_BYTES = 128 << 20
"""Content of one data file before it is compressed; two such files are in memory at a time."""
_GROUP_BYTES = 16 << 20
_GROUP_CHUNKS = 4096
_STEP = 1 << 20
_THREADS = 4


class CompressedChunk(NamedTuple):
    """Where one compressed chunk was written.

    Attributes:
        array: The number of its array.
        number: Its number in the array's grid.
        file: The number of its data file.
        offset: Where it starts in the file, in bytes.
        length: What it takes, in bytes, with its checksum.
    """

    array: int
    number: int
    file: int
    offset: int
    length: int


class ChunkToCompress(NamedTuple):
    """A chunk, as its array's number and its own, and the level to compress it with."""

    array: int
    number: int
    level: int


def write_compressed(
    share: Sequence[ChunkToCompress],
    sources: Sequence[Source],
    layout: Layout,
    first_file: int,
    write: Callable[[int, int, Sequence[Segment]], None],
) -> tuple[list[CompressedChunk], list[int]]:
    """Compresses chunks with several threads, and writes one file while the chunks of the next are compressed.

    Args:
        share: What to write, in the order in which it is to lie.
        sources: The arrays by their numbers.
        layout: Sizes of segments and data files.
        first_file: The number of the first data file.
        write: Writes a data file: its number, its size in bytes, and its segments.

    Returns:
        Where every chunk lies, and the sizes of the files.
    """
    placed: list[CompressedChunk] = []
    sizes: list[int] = []
    waiting: deque[list[tuple[ChunkToCompress, Future[list[bytes]], int]]] = deque()

    def write_next() -> None:
        chunks: list[ChunkToCompress] = []
        stored: list[bytes] = []
        for chunk, future, position in waiting.popleft():
            chunks.append(chunk)
            stored.append(future.result()[position])
        segments, offsets, size = _lay_out(stored, layout.segment_bytes)
        file = first_file + len(sizes)
        write(file, size, segments)
        sizes.append(size)
        placed.extend(
            CompressedChunk(chunk.array, chunk.number, file, offset, len(data))
            for chunk, offset, data in zip(chunks, offsets, stored, strict=True)
        )

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "holdfast-compress") as pool:
        try:
            for batch in _batches(share, sources, min(_FILE_BYTES, layout.data_file_bytes)):
                waiting.append(_submit(pool, batch, sources))
                if len(waiting) > 1:
                    write_next()
            while waiting:
                write_next()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return placed, sizes


def _batches(
    share: Sequence[ChunkToCompress], sources: Sequence[Source], limit: int
) -> Iterator[list[ChunkToCompress]]:
    """Divides chunks into those of one file each."""
    batch: list[ChunkToCompress] = []
    total = 0
    for chunk in share:
        nbytes = sources[chunk.array].spec.chunk_nbytes
        if batch and total + nbytes > limit:
            yield batch
            batch, total = [], 0
        batch.append(chunk)
        total += nbytes
    if batch:
        yield batch


def _submit(
    pool: ThreadPoolExecutor, batch: Sequence[ChunkToCompress], sources: Sequence[Source]
) -> list[tuple[ChunkToCompress, Future[list[bytes]], int]]:
    """Starts to compress a batch; returns for each chunk where its bytes will be found."""
    groups: dict[tuple[int, int], list[ChunkToCompress]] = {}
    found: dict[ChunkToCompress, tuple[Future[list[bytes]], int]] = {}

    def start(nbytes: int, level: int) -> None:
        chunks = groups.pop((nbytes, level))
        future = pool.submit(_compress, chunks, sources, level)
        found.update((chunk, (future, position)) for position, chunk in enumerate(chunks))

    for chunk in batch:  # those of one size go together
        nbytes = sources[chunk.array].spec.chunk_nbytes
        group = groups.setdefault((nbytes, chunk.level), [])
        group.append(chunk)
        if len(group) == _GROUP_CHUNKS or (len(group) + 1) * nbytes > _GROUP_BYTES:
            start(nbytes, chunk.level)
    for nbytes, level in list(groups):
        start(nbytes, level)
    return [(chunk, *found[chunk]) for chunk in batch]


def _compress(chunks: Sequence[ChunkToCompress], sources: Sequence[Source], level: int) -> list[bytes]:
    return compress_chunks([chunk_bytes(sources[chunk.array], chunk.number) for chunk in chunks], level)


def _lay_out(stored: Sequence[bytes], segment_bytes: int) -> tuple[list[Segment], list[int], int]:
    """Places the bytes of chunks one after the other; returns segments, the offset of each chunk, and the total."""
    segments: list[Segment] = []
    offsets: list[int] = []
    members: list[bytes] = []
    start = end = 0

    def close() -> None:
        nonlocal members, start, end
        if members:
            segments.append(_segment(start, members))
            members = []
        start = end = -(-end // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT

    for data in stored:
        if members and end + len(data) - start > segment_bytes:
            close()
        offsets.append(end)
        members.append(data)
        end += len(data)
    size = end
    close()
    return segments, offsets, size


def _segment(offset: int, members: Sequence[bytes]) -> Segment:
    def parts() -> Iterator[Bytes]:
        joined = np.frombuffer(b"".join(members), np.uint8)
        for start in range(0, len(joined), _STEP):
            yield joined[start : start + _STEP]

    return Segment(offset, sum(map(len, members)), parts)
