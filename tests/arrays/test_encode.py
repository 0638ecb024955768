"""From arrays in memory to the bytes of segments, compressed or not, and failures to read or write them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.engine.arrays import encode
from holdfast.engine.arrays.digests import CHECKSUM_BYTES
from holdfast.engine.arrays.encode import ChunkToCompress, Source, Sources, segment_parts, write_compressed
from holdfast.engine.arrays.grid import ArraySpec
from holdfast.engine.arrays.plan import Layout, chunk_shape, plan_files
from holdfast.engine.format import crc32c, decompress
from holdfast.engine.pytree import Piece
from holdfast.engine.storage import PAGE, Segment


def parts_of(shape: tuple[int, ...], count: int = 1, limit: int = 4096) -> list[Any]:
    """The parts of which a segment is written that has all chunks of so many arrays, in uint8; with their copies."""
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    source = Source(ArraySpec(shape, chunk_shape(shape, 1, limit), 1), array.dtype, [Piece((0,) * array.ndim, array)])
    chunks = source.spec.chunks
    ids = np.repeat(np.arange(count), chunks), np.tile(np.arange(chunks), count)
    [file] = plan_files(np.full(count, source.spec.chunk_nbytes + CHECKSUM_BYTES), hf.Layout(), ids)
    [segment] = file.segments
    sources = Sources(*zip(*[source] * count, strict=True))
    parts = segment_parts(segment, sources, np.zeros(count * chunks, np.uint32), {})
    return [(np.shares_memory(part, array), part.tobytes()) for part in parts if len(part)]


def test_the_parts_of_a_segment() -> None:
    """Large chunks come in parts that stay in the cache, without copies; small ones are joined."""
    large = parts_of((5 << 20,), limit=8 << 20)
    assert max(len(content) for _, content in large) <= 1 << 20
    assert large[0][0], "no copies"
    assert len(parts_of((256,), 5000)) < 10
    content = b"".join(content for _, content in parts_of((4097,)))
    assert content[:-CHECKSUM_BYTES].endswith(bytes([*range(250, 256), 0, 0])), "the second of two chunks is padded"


LAYOUT = Layout(chunk_bytes=8192, segment_bytes=4096, data_file_bytes=40_000)


def source(size: int, chunk: int) -> Source:
    values = np.arange(size, dtype=np.int32) % 700
    return Source(ArraySpec((size,), (chunk,), 4), np.dtype("<i4"), [Piece((0,), values)])


ALL = [source(20_000, 2000), source(3, 3), source(9999, 1000), source(5000, 5000)]
SOURCES = Sources(*zip(*ALL, strict=True))
CHUNKS = [
    ChunkToCompress(array, number, level)
    for level, (array, one) in enumerate(enumerate(ALL), 1)
    for number in range(one.spec.chunks)
]


class Files:
    """Keeps what is written, and stops at a file if asked to."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.contents: dict[int, bytes] = {}
        self._fail_at = fail_at

    def write(self, number: int, size: int, segments: Sequence[Segment]) -> None:
        if number == self._fail_at:
            raise hf.errors.StorageError("full")
        content = bytearray(size)
        for segment in segments:
            assert segment.offset % PAGE == 0
            data = b"".join(part.tobytes() for part in segment.parts())
            assert len(data) == segment.size
            content[segment.offset : segment.offset + segment.size] = data
        self.contents[number] = bytes(content)


@pytest.mark.parametrize("group", [1, 3, 4096])
def test_every_chunk_lies_where_the_result_says(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "_GROUP_CHUNKS", group)
    files = Files()
    placed, sizes = write_compressed(CHUNKS, SOURCES, LAYOUT, 7, files.write, {})
    assert placed[:, :2].tolist() == [[chunk.array, chunk.number] for chunk in CHUNKS]
    assert len(sizes) > 2
    assert {7 + number: size for number, size in enumerate(sizes)} == {n: len(c) for n, c in files.contents.items()}
    ends: dict[int, int] = {}
    for array, number, file, offset, length, checksum in placed.tolist():
        assert offset >= ends.get(file, 0)
        ends[file] = offset + length
        stored = files.contents[file][offset : ends[file]]
        assert int.from_bytes(stored[-4:], "little") == crc32c(stored[:-4]) == checksum
        spec, values = SOURCES[array].spec, SOURCES[array].pieces[0].array
        content = decompress(stored[:-4], spec.chunk_nbytes)
        start = number * spec.chunk_shape[0]
        expected = np.zeros(spec.chunk_shape, np.int32)
        expected[: len(values[start : start + spec.chunk_shape[0]])] = values[start : start + spec.chunk_shape[0]]
        np.testing.assert_array_equal(np.frombuffer(content, "<i4"), expected)


def test_files_that_cannot_be_written_and_chunks_that_cannot_be_read() -> None:
    layout = Layout(chunk_bytes=8192, segment_bytes=4096, data_file_bytes=10_000)
    _, sizes = write_compressed(CHUNKS[:10], SOURCES, layout, 0, Files().write, {})
    assert len(sizes) == 10, "files keep to their size before compression: each chunk has 8 kB"
    before = set(threading.enumerate())
    with pytest.raises(hf.errors.StorageError, match="full"):
        write_compressed(CHUNKS, SOURCES, LAYOUT, 0, Files(fail_at=1).write, {})
    broken = replace(SOURCES, pieces=[*SOURCES.pieces[:2], [], SOURCES.pieces[3]])
    with pytest.raises(hf.errors.StateError, match=r"this process must write (1000|999) elements"):
        write_compressed(CHUNKS, broken, LAYOUT, 0, Files().write, {})
    assert not [one for one in threading.enumerate() if one.name.startswith("holdfast") and one not in before]


PROGRAM = """
import sys, threading
import numpy as np
import holdfast as hf
from holdfast.engine.checkpoint.save import Save

handler = hf.PyTreeCheckpointHandler(layout=hf.Layout(compression=1, data_file_bytes=1 << 20))
manager = hf.CheckpointManager(sys.argv[1], hf.AsyncCheckpointer(handler))
ended = threading.Event()
threading._register_atexit(ended.set)  # before the interpreter waits for other threads

def write(self, awaited, write=Save.write):
    ended.wait()
    return write(self, awaited)

Save.write = write
manager.save(1, {str(number): np.full(1 << 17, number) for number in range(20)})
"""


def test_a_program_that_ends_during_a_compressed_save(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True)
    with hf.CheckpointManager(tmp_path) as manager:
        assert set(manager.restore(1)["7"]) == {7}
