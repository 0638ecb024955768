"""From arrays in memory to the bytes of segments, and compressed saves at the end of a program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.engine.arrays.digests import CHECKSUM_BYTES
from holdfast.engine.arrays.encode import Source, Sources, segment_parts
from holdfast.engine.arrays.grid import ArraySpec
from holdfast.engine.arrays.plan import chunk_shape, plan_files
from holdfast.engine.pytree import Piece


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
