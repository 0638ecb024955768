"""Memory for direct I/O."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from holdfast.engine.storage import Buffer, aligned_empty
from holdfast.engine.storage.buffers import HUGE_PAGE, PAGE, BlockPool, round_up


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


def test_a_pool_lends_each_block_to_one_at_a_time() -> None:
    pool = BlockPool(1 << 20, spare=2)
    with pool.block() as first, pool.block() as second, pool.block() as third:
        lent = {block.ctypes.data for block in (first, second, third)}
        assert {block.size for block in (first, second, third)} == {1 << 20}
    assert len(lent) == 3
    with pool.block() as again, pool.block() as other:
        assert {again.ctypes.data, other.ctypes.data} <= lent
        assert again.ctypes.data != other.ctypes.data


def test_a_pool_gets_its_block_back_after_an_error() -> None:
    pool = BlockPool(4096, spare=1)
    addresses = []

    def fail() -> None:
        with pool.block() as block:
            addresses.append(block.ctypes.data)
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
    assert len(set(addresses)) == 1


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_round_up(size: int, expected: int) -> None:
    assert round_up(size) == expected
