"""Memory for direct I/O."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from holdfast.engine.storage import Buffer, aligned_empty
from holdfast.engine.storage.buffers import HUGE_PAGE, PAGE, round_up


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 255 << 10, 256 << 10, 1 << 20, 2 << 20, (5 << 20) + 3], ids=str)
def test_aligned_empty(nbytes: int) -> None:
    memory = aligned_empty(nbytes)
    assert memory.shape == (nbytes,)
    assert memory.dtype == np.uint8
    assert memory.flags.writeable
    assert nbytes == 0 or memory.ctypes.data % (HUGE_PAGE if nbytes >= HUGE_PAGE else PAGE) == 0
    memory[:] = 7
    assert int(memory.sum(dtype=np.int64)) == 7 * nbytes


def test_views_keep_the_memory_alive() -> None:
    view = aligned_empty(4 << 20)[1 << 20 : 1 << 21].view(np.int64)
    view[:] = 3
    gc.collect()
    others = [aligned_empty(4 << 20) for _ in range(4)]
    for other in others:
        other[:] = 255
    assert np.all(view == 3)


def test_a_buffer_grows_and_is_reused() -> None:
    buffer = Buffer(100)
    first = buffer.view(100)
    assert buffer.view(50).ctypes.data == first.ctypes.data
    grown = buffer.view(3 << 20)
    assert grown.size == 3 << 20
    assert buffer.view(100).ctypes.data == grown.ctypes.data
    assert buffer.view(0).size == 0


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_round_up(size: int, expected: int) -> None:
    assert round_up(size) == expected
