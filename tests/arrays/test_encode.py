"""From arrays in memory to the bytes of segments, compressed or not, and failures to read or write them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.engine.arrays import encode
from holdfast.engine.arrays.digests import CHECKSUM_BYTES
from holdfast.engine.arrays.encode import ChunkToCompress, Source, Sources, segment_parts, write_compressed
from holdfast.engine.arrays.grid import ArraySpec
from holdfast.engine.arrays.plan import Layout, PlannedFile, PlannedSegment, chunk_shape, plan_files
from holdfast.engine.format import crc32c, decompress
from holdfast.engine.pytree import Piece
from holdfast.engine.storage import PAGE, Segment


def source_of(array: Any, limit: int, pieces: list[Piece] | None = None) -> Source:
    dtype = array.dtype.newbyteorder("<")
    spec = ArraySpec(array.shape, chunk_shape(array.shape, dtype.itemsize, limit), dtype.itemsize)
    return Source(spec, dtype, pieces or [Piece((0,) * array.ndim, array)])


def plan(sources: list[Source], layout: hf.Layout) -> list[PlannedFile]:
    counts = [source.spec.chunks for source in sources]
    arrays = np.repeat(np.arange(len(sources)), counts)
    numbers = np.concatenate([np.arange(count) for count in counts])
    lengths = np.array([source.spec.chunk_nbytes + CHECKSUM_BYTES for source in sources])
    return plan_files(lengths, layout, (arrays, numbers))


def parts_of(segment: PlannedSegment, sources: list[Source], checksums: Any) -> Iterator[Any]:
    return segment_parts(segment, Sources(*zip(*sources, strict=True)), checksums, {})


def files_of(sources: list[Source], layout: hf.Layout) -> list[bytes]:
    contents = []
    files = plan(sources, layout)
    checksums = np.zeros(sum(source.spec.chunks for source in sources), np.uint32)
    for file in files:
        content = bytearray(file.size)
        for segment in file.segments:
            parts = []
            for part in parts_of(segment, sources, checksums):
                assert part.dtype == np.uint8
                assert part.ndim == 1
                parts.append(part.tobytes())  # before the next one is generated
            data = b"".join(parts)
            assert len(data) == segment.size
            content[segment.offset : segment.offset + segment.size] = data
        contents.append(bytes(content))
    noted = iter(checksums.tolist())
    for whole, file in zip(contents, files, strict=True):
        for segment in file.segments:
            for offset, length in zip(segment.offsets.tolist(), segment.lengths.tolist(), strict=True):
                assert crc32c(whole[offset : offset + length - CHECKSUM_BYTES]) == next(noted)
    return contents


def arrays_of(sources: list[Source], layout: hf.Layout) -> list[Any]:
    """Reads the arrays back out of the files, chunk by chunk, and checks every checksum."""
    contents = files_of(sources, layout)
    arrays = [np.zeros(source.spec.shape, source.dtype) for source in sources]
    for file, content in zip(plan(sources, layout), contents, strict=True):
        for segment in file.segments:
            columns = (segment.arrays, segment.numbers, segment.offsets)
            for number, chunk, offset in zip(*(column.tolist() for column in columns), strict=True):
                spec, array = sources[number].spec, arrays[number]
                end = offset + spec.chunk_nbytes
                data = content[offset:end]
                assert int.from_bytes(content[end : end + 4], "little") == crc32c(data)
                values = np.frombuffer(data, sources[number].dtype).reshape(spec.chunk_shape)
                start = np.array(np.unravel_index(chunk, spec.grid) if spec.grid else ()) * spec.chunk_shape
                part = tuple(slice(int(i), int(i) + n) for i, n in zip(start, spec.chunk_shape, strict=True))
                inside = tuple(slice(0, n) for n in array[part].shape)
                array[part] = values[inside]
                outside = np.ones(spec.chunk_shape, bool)
                outside[inside] = False
                assert not values[outside].any()  # padding is zero
    return arrays


BASE = np.arange(1, 90_001, dtype=np.float32)
ARRAYS: dict[str, Any] = {
    "contiguous": BASE.reshape(300, 300),
    "one_chunk": BASE[:100],
    "uneven": BASE[:89_999],
    "fortran": np.asfortranarray(BASE.reshape(300, 300)),
    "strided": BASE[::7],
    "reversed": BASE.reshape(300, 300)[::-1, ::-1],
    "big_endian": BASE.astype(">f4"),
    "scalar": np.asarray(np.float32(2)),
    "empty": BASE[:0].reshape(3, 0),
    "bytes": np.arange(70_000).astype(np.uint8),
    "booleans": BASE[:5000] > 100,
    "read_only": np.frombuffer(BASE.tobytes(), np.float32),
}


@pytest.mark.parametrize("chunk_bytes", [4096, 100_000, 1 << 20])
@pytest.mark.parametrize("name", ARRAYS)
def test_any_array(name: str, chunk_bytes: int) -> None:
    array = ARRAYS[name]
    (found,) = arrays_of([source_of(array, chunk_bytes)], hf.Layout(chunk_bytes=chunk_bytes, segment_bytes=70_000))
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype.newbyteorder("=")


def test_large_chunks_come_in_parts_that_stay_in_the_cache() -> None:
    array = np.arange(5 << 20, dtype=np.uint8)
    source = source_of(array, 8 << 20)
    (file,) = plan([source], hf.Layout())
    (segment,) = file.segments
    parts = [part for part in parts_of(segment, [source], np.zeros(1, np.uint32)) if len(part)]
    assert max(map(len, parts)) <= 1 << 20
    assert np.shares_memory(parts[0], array)  # no copies


def test_small_chunks_are_joined() -> None:
    sources = [source_of(BASE[:256], 4096)] * 5000
    (file,) = plan(sources, hf.Layout())
    (segment,) = file.segments
    assert len(list(parts_of(segment, sources, np.zeros(5000, np.uint32)))) < 10


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    order=st.randoms(use_true_random=False),
)
def test_pieces_in_any_arrangement(shape: list[int], cuts: list[int], order: Any) -> None:
    array = np.arange(1, np.prod(shape) + 1, dtype=np.float64).reshape(shape)
    bounds = [sorted({0, size, *(size * i // cut for i in range(cut))}) for size, cut in zip(shape, cuts, strict=False)]
    starts = np.stack(np.meshgrid(*(np.array(b[:-1]) for b in bounds), indexing="ij"), -1).reshape(-1, len(shape))
    pieces = []
    for start in starts.tolist():
        ends = [b[b.index(at) + 1] for at, b in zip(start, bounds, strict=True)]
        part = array[tuple(slice(i, j) for i, j in zip(start, ends, strict=True))]
        pieces.append(Piece(tuple(start), np.asfortranarray(part)))
    order.shuffle(pieces)
    (found,) = arrays_of([source_of(array, 4096, pieces)], hf.Layout(segment_bytes=4096))
    np.testing.assert_array_equal(found, array)


def test_arrays_of_many_sizes_lie_beside_each_other() -> None:
    arrays = [BASE[:size] for size in (1, 20_000, 16, 17, 0, 90_000, 3)]
    layout = hf.Layout(chunk_bytes=70_000, segment_bytes=100_000, data_file_bytes=200_000)
    for found, array in zip(arrays_of([source_of(array, 70_000) for array in arrays], layout), arrays, strict=True):
        np.testing.assert_array_equal(found, array)


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


def test_a_file_that_cannot_be_written() -> None:
    before = set(threading.enumerate())
    with pytest.raises(hf.errors.StorageError, match="full"):
        write_compressed(CHUNKS, SOURCES, LAYOUT, 0, Files(fail_at=1).write, {})
    assert not [one for one in threading.enumerate() if one.name.startswith("holdfast") and one not in before]


def test_a_chunk_that_cannot_be_read() -> None:
    broken = replace(SOURCES, pieces=[*SOURCES.pieces[:2], [], SOURCES.pieces[3]])
    with pytest.raises(hf.errors.StateError, match=r"this process must write (1000|999) elements"):
        write_compressed(CHUNKS, broken, LAYOUT, 0, Files().write, {})


def test_files_keep_to_their_size_before_compression() -> None:
    layout = Layout(chunk_bytes=8192, segment_bytes=4096, data_file_bytes=10_000)
    _, sizes = write_compressed(CHUNKS[:10], SOURCES, layout, 0, Files().write, {})
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
