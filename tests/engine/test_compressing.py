"""Files of compressed chunks: several of them, from several threads, and what happens when one cannot be written."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.engine.format import crc32c, decompress_chunk
from holdfast.engine.item import compressing
from holdfast.engine.item.compressing import ChunkToCompress, write_compressed
from holdfast.engine.item.plan import SEGMENT_ALIGNMENT, ArraySpec, Layout
from holdfast.engine.item.sources import Source
from holdfast.engine.storage import Segment
from holdfast.engine.tree import Piece

LAYOUT = Layout(chunk_bytes=8192, segment_bytes=4096, data_file_bytes=40_000)


def source(size: int, chunk: int) -> Source:
    values = np.arange(size, dtype=np.int32) % 700
    return Source(ArraySpec((size,), (chunk,), 4), np.dtype("<i4"), [Piece((0,), values)])


SOURCES = [source(20_000, 2000), source(3, 3), source(9999, 1000), source(5000, 5000)]
SHARE = [
    ChunkToCompress(array, number, level)
    for level, (array, one) in enumerate(enumerate(SOURCES), 1)
    for number in range(one.spec.chunks)
]


class Files:
    """Keeps what is written, and stops at a file if asked to."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.contents: dict[int, bytes] = {}
        self._fail_at = fail_at

    def write(self, number: int, size: int, segments: Sequence[Segment]) -> None:
        if number == self._fail_at:
            raise hf.StorageError("full")
        content = bytearray(size)
        for segment in segments:
            assert segment.offset % SEGMENT_ALIGNMENT == 0
            data = b"".join(part.tobytes() for part in segment.parts())
            assert len(data) == segment.size
            content[segment.offset : segment.offset + segment.size] = data
        self.contents[number] = bytes(content)


@pytest.mark.parametrize("group", [1, 3, 4096])
def test_every_chunk_is_where_it_is_said_to_be(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressing, "_GROUP_CHUNKS", group)
    files = Files()
    placed, sizes = write_compressed(SHARE, SOURCES, LAYOUT, 7, files.write)
    assert [(chunk.array, chunk.number) for chunk in placed] == [(chunk.array, chunk.number) for chunk in SHARE]
    assert len(sizes) > 2
    assert {7 + number: size for number, size in enumerate(sizes)} == {n: len(c) for n, c in files.contents.items()}
    ends: dict[int, int] = {}
    for chunk in placed:
        assert chunk.offset >= ends.get(chunk.file, 0)
        ends[chunk.file] = chunk.offset + chunk.length
        stored = files.contents[chunk.file][chunk.offset : ends[chunk.file]]
        assert int.from_bytes(stored[-4:], "little") == crc32c(stored[:-4])
        spec, values = SOURCES[chunk.array].spec, SOURCES[chunk.array].pieces[0].array
        out = np.empty(spec.chunk_nbytes, np.uint8)
        decompress_chunk(stored[:-4], out)
        start = chunk.number * spec.chunk_shape[0]
        expected = np.zeros(spec.chunk_shape, np.int32)
        expected[: len(values[start : start + spec.chunk_shape[0]])] = values[start : start + spec.chunk_shape[0]]
        np.testing.assert_array_equal(out.view("<i4"), expected)


def test_a_file_that_cannot_be_written() -> None:
    with pytest.raises(hf.StorageError, match="full"):
        write_compressed(SHARE, SOURCES, LAYOUT, 0, Files(fail_at=1).write)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-compress")]


def test_a_chunk_that_cannot_be_read() -> None:
    broken: list[Any] = [*SOURCES[:2], SOURCES[2]._replace(pieces=[]), SOURCES[3]]
    with pytest.raises(hf.StateError, match="not held by this process"):
        write_compressed(SHARE, broken, LAYOUT, 0, Files().write)


def test_files_keep_to_their_size_before_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressing, "_FILE_BYTES", 10_000)
    _, sizes = write_compressed(SHARE[:10], SOURCES, LAYOUT, 0, Files().write)
    assert len(sizes) == 10  # of 8 kB each
