"""The disk itself: the same number of bytes through O_DIRECT, without any format."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from .base import Peer, Tree

if TYPE_CHECKING:
    from pathlib import Path

    from ..workloads import Array, Shape

SECTOR = 4096
MIB = 1 << 20
# threads and bytes a request; the best pair for writing and for reading is settled before a run
SETTINGS = ((1, 16 * MIB), (2, 4 * MIB), (2, 16 * MIB), (4, 4 * MIB), (4, 16 * MIB), (8, 2 * MIB))
WRITE_SETTING, READ_SETTING = "BENCHMARKS_RAW_WRITE", "BENCHMARKS_RAW_READ"

Transfer = Callable[[int, list[memoryview], int], int]


class RawDisk(Peer):
    """Writes from and reads into warm memory that is used again for every block."""

    verified = False

    @override
    def hold(self, arrays: Mapping[str, Array]) -> Tree:
        return {"nbytes": sum(array.nbytes for array in arrays.values())}

    @override
    def save(self, path: Path, tree: Tree) -> None:
        write(path, tree["nbytes"], *_setting(WRITE_SETTING))

    @override
    def load_numpy(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        read(path, *_setting(READ_SETTING))
        return {}


def setting_text(threads: int, block: int) -> str:
    """A setting as the environment carries it to the measuring process."""
    return f"{threads}x{block}"


def _setting(name: str) -> tuple[int, int]:
    threads, block = os.environ.get(name, setting_text(*SETTINGS[1])).split("x")
    return int(threads), int(block)


def write(path: Path, nbytes: int, threads: int, block: int) -> None:
    """Writes and fsyncs a file of at least ``nbytes`` bytes, and its directory."""
    size = -(-nbytes // SECTOR) * SECTOR
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, size)
        _transfer(descriptor, size, threads, block, os.pwritev)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read(path: Path, threads: int, block: int) -> None:
    """Reads a whole file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        _transfer(descriptor, os.fstat(descriptor).st_size, threads, block, os.preadv)
    finally:
        os.close(descriptor)


def _transfer(descriptor: int, size: int, threads: int, block: int, call: Transfer) -> None:
    starts, lock, failures = iter(range(0, size, block)), threading.Lock(), list[OSError]()

    def work(buffer: memoryview) -> None:
        try:
            while True:
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                wanted = min(block, size - start)
                moved = call(descriptor, [buffer[:wanted]], start)
                if moved != wanted:
                    raise OSError(f"moved {moved} of {wanted} bytes at {start}")
        except OSError as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(buffer,)) for buffer in _buffers(threads, block)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]


@cache
def _buffers(threads: int, block: int) -> tuple[memoryview, ...]:
    """Warm page-aligned memory in huge pages, full of noise: a disk may be quick with zeros."""
    noise = np.random.default_rng(0).bytes(block)
    buffers = []
    for _ in range(threads):
        memory = mmap.mmap(-1, block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory[:] = noise
        buffers.append(memoryview(memory))
    return tuple(buffers)
