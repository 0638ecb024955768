"""Memory for bulk transfers: page-aligned, private, and backed by huge pages where the system has them.

The first touch of fresh memory costs a page fault for every page. With pages of 4 KiB that is about a second for a
gigabyte, several times what the disk needs; with huge pages it is less than a tenth of it.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

PAGE = 4096
"""Alignment in bytes that direct I/O asks for: of memory, of offsets and of lengths."""

HUGE_PAGE = 2 << 20
"""Size in bytes of a huge page on the usual 64-bit systems; elsewhere it is merely an alignment."""

_SMALLEST_MAPPING = 256 << 10


def round_up(size: int, multiple: int = PAGE) -> int:
    """Returns the smallest multiple of ``multiple`` that is not less than ``size``."""
    return -(-size // multiple) * multiple


def aligned_empty(nbytes: int) -> NDArray[np.uint8]:
    """Returns fresh writable memory that starts on a page boundary.

    Large requests are private anonymous mappings that ask for huge pages and start on a huge-page boundary; they go
    back to the system as soon as the last view of them is gone.

    Args:
        nbytes: Length in bytes.

    Returns:
        A one-dimensional uint8 array of that length with arbitrary content.
    """
    if nbytes < _SMALLEST_MAPPING:
        memory = np.empty(nbytes + PAGE, np.uint8)
        start = -memory.ctypes.data % PAGE
        return memory[start : start + nbytes]
    # A last huge page that would stay almost empty costs more than its few small pages.
    huge = (nbytes + HUGE_PAGE // 4) // HUGE_PAGE * HUGE_PAGE
    # Room to move the start to a huge-page boundary: memory that is never touched costs nothing.
    length = max(round_up(nbytes), huge) + HUGE_PAGE
    mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapping, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # A kernel built without huge pages: slower, not wrong.
            mapping.madvise(mmap.MADV_HUGEPAGE, start, huge)
    return memory[start : start + nbytes]


class Buffer:
    """Aligned memory that is used again and again, by one thread at a time.

    Args:
        nbytes: Length in bytes to start with; it grows as needed.
    """

    __slots__ = ("_memory",)

    def __init__(self, nbytes: int = 0) -> None:
        self._memory = aligned_empty(nbytes)

    def view(self, nbytes: int) -> NDArray[np.uint8]:
        """Returns the first ``nbytes`` bytes; an earlier view is overwritten by whoever writes into this one."""
        if nbytes > self._memory.size:
            self._memory = aligned_empty(nbytes)
        return self._memory[:nbytes]


class BlockPool:
    """Blocks of aligned memory that wait for the next transfer instead of going back to the system.

    Fresh memory is dear even with huge pages where a hypervisor takes free memory away after a few seconds and has to
    find it again: a hundredth of a second for a few MiB, on every save.

    Args:
        nbytes: Length of a block in bytes.
        spare: How many blocks to keep while nobody uses them.
    """

    def __init__(self, nbytes: int, spare: int) -> None:
        self._nbytes = nbytes
        self._spare = spare
        self._blocks: list[NDArray[np.uint8]] = []

    @contextlib.contextmanager
    def block(self) -> Iterator[NDArray[np.uint8]]:
        """Lends a block, whose content is arbitrary; nobody may touch it afterwards."""
        try:
            block = self._blocks.pop()  # One step: other threads may do the same.
        except IndexError:
            block = aligned_empty(self._nbytes)
        try:
            yield block
        finally:
            if len(self._blocks) < self._spare:
                self._blocks.append(block)
