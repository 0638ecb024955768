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
Memory = Callable[[int, int, int], memoryview]  # of a worker, for a position in the file and a number of bytes


class RawDisk(Peer):
    """Writes from and reads into warm memory that is used again for every block."""

    verified = False

    @override
    def hold(self, arrays: Mapping[str, Array]) -> Tree:
        return {"nbytes": sum(array.nbytes for array in arrays.values())}

    @override
    def save(self, path: Path, tree: Tree) -> None:
        write(path, tree["nbytes"], *setting(WRITE_SETTING))

    @override
    def load_numpy(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        read(path, *setting(READ_SETTING))
        return {}


class RawDiskNewMemory(RawDisk):
    """Reads into memory that is new to the process and all kept: the least that any load does."""

    @override
    def load_numpy(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        memory = huge_pages(path.stat().st_size)
        read(path, *setting(READ_SETTING), memory=lambda _, start, count: memory[start : start + count])
        return {"memory": memory}


def setting_text(threads: int, block: int) -> str:
    """A setting as the environment carries it to the measuring process."""
    return f"{threads}x{block}"


def setting(name: str) -> tuple[int, int]:
    """Return the threads and bytes a request that were settled for writing or reading."""
    threads, block = os.environ.get(name, setting_text(*SETTINGS[1])).split("x")
    return int(threads), int(block)


def write(path: Path, nbytes: int, threads: int, block: int) -> None:
    """Write and fsync a file of at least ``nbytes`` bytes, and its directory."""
    size = -(-nbytes // SECTOR) * SECTOR
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, size)
        _transfer(descriptor, size, threads, block, os.pwritev, _reused(threads, block))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read(path: Path, threads: int, block: int, memory: Memory | None = None) -> None:
    """Read a whole file, into one reused buffer unless other memory is given."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        size = os.fstat(descriptor).st_size
        _transfer(descriptor, size, threads, block, os.preadv, memory or _reused(threads, block))
    finally:
        os.close(descriptor)


def _transfer(descriptor: int, size: int, threads: int, block: int, call: Transfer, memory: Memory) -> None:
    starts, lock, failures = iter(range(0, size, block)), threading.Lock(), list[OSError]()

    def work(worker: int) -> None:
        try:
            while True:
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                wanted = min(block, size - start)
                moved = call(descriptor, [memory(worker, start, wanted)], start)
                if moved != wanted:
                    raise OSError(f"moved {moved} of {wanted} bytes at {start}")
        except OSError as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(worker,)) for worker in range(threads)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    if failures:
        raise failures[0]


@cache
def _reused(threads: int, block: int) -> Memory:
    """Warm memory, one block a worker, full of noise: a disk may be quick with zeros."""
    noise = np.random.default_rng(0).bytes(block)
    buffers = [huge_pages(block) for _ in range(threads)]
    for buffer in buffers:
        buffer[:] = noise
    return lambda worker, _, count: buffers[worker][:count]


def huge_pages(nbytes: int) -> memoryview:
    """Page-aligned memory in huge pages, where the machine has them."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
