"""Data files of compressed chunks: several files from several threads, and failures to read or write."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast.engine.arrays.encode import ChunkToCompress, Source, Sources, write_compressed
from holdfast.engine.arrays.grid import ArraySpec
from holdfast.engine.arrays.plan import Layout
from holdfast.engine.format import crc32c, decompress
from holdfast.engine.pytree import Piece
from holdfast.engine.storage import PAGE, Segment

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
def test_every_chunk_lies_where_the_result_says(group: int) -> None:
    files = Files()
    placed, sizes = write_compressed(CHUNKS, SOURCES, LAYOUT, 7, files.write, group_chunks=group)
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


def test_a_file_that_cannot_be_written() -> None:
    before = set(threading.enumerate())
    with pytest.raises(hf.errors.StorageError, match="full"):
        write_compressed(CHUNKS, SOURCES, LAYOUT, 0, Files(fail_at=1).write)
    assert not [one for one in threading.enumerate() if one.name.startswith("holdfast") and one not in before]


def test_a_chunk_that_cannot_be_read() -> None:
    broken = replace(SOURCES, pieces=[*SOURCES.pieces[:2], [], SOURCES.pieces[3]])
    with pytest.raises(hf.errors.StateError, match=r"this process must write (1000|999) elements"):
        write_compressed(CHUNKS, broken, LAYOUT, 0, Files().write)


def test_files_keep_to_their_size_before_compression() -> None:
    layout = Layout(chunk_bytes=8192, segment_bytes=4096, data_file_bytes=10_000)
    _, sizes = write_compressed(CHUNKS[:10], SOURCES, layout, 0, Files().write)
    assert len(sizes) == 10  # of 8 kB each


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
