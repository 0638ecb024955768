"""Memory for bulk transfers: page-aligned, private, and backed by huge pages where available.

The first access to new memory costs one page fault per page. With 4 KiB pages, that takes about a second per gigabyte,
several times as long as the disk needs; with huge pages, it takes less than a tenth of that time.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PAGE = 4096  # alignment in bytes that direct I/O requires for memory, offsets and lengths

HUGE_PAGE = 2 << 20  # bytes; size of a huge page on common 64-bit systems, elsewhere just an alignment

_SMALLEST_MAPPING = 256 << 10


def round_up(size: int, multiple: int = PAGE) -> int:
    """Return the smallest multiple of ``multiple`` that is not less than ``size``."""
    return -(-size // multiple) * multiple


def aligned_empty(nbytes: int) -> NDArray[np.uint8]:
    """Return new writable, page-aligned memory; large memory is freed for the system along with its last view."""
    import numpy as np  # imported lazily: listing checkpoints imports this module but needs no arrays

    if nbytes < _SMALLEST_MAPPING:
        memory = np.empty(nbytes + PAGE, np.uint8)
        start = -memory.ctypes.data % PAGE
        return memory[start : start + nbytes]
    # An almost empty last huge page would cost more than the few small pages that it replaces.
    huge = (nbytes + HUGE_PAGE // 4) // HUGE_PAGE * HUGE_PAGE
    # The start is moved to a huge-page boundary: skipped memory is never touched and costs nothing.
    length = max(round_up(nbytes), huge) + HUGE_PAGE
    mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapping, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # A kernel without huge pages: slower, but correct.
            mapping.madvise(mmap.MADV_HUGEPAGE, start, huge)
    return memory[start : start + nbytes]


class Buffer:
    """An aligned buffer for repeated use by one thread at a time."""

    def __init__(self, nbytes: int = 0) -> None:
        self._memory = aligned_empty(nbytes)

    def view(self, nbytes: int) -> NDArray[np.uint8]:
        """Return the first ``nbytes`` bytes; all views share the same memory."""
        if nbytes > self._memory.size:
            self._memory = aligned_empty(nbytes)
        return self._memory[:nbytes]


class BlockPool:
    """A pool of aligned transfer buffers, reused because allocation is slow if a hypervisor reclaims memory."""

    def __init__(self, nbytes: int, spare: int) -> None:
        self._nbytes = nbytes
        self._spare = spare
        self._blocks: list[NDArray[np.uint8]] = []

    @contextlib.contextmanager
    def block(self) -> Iterator[NDArray[np.uint8]]:
        """Yield a block with arbitrary content, which returns to the pool when the context ends."""
        try:
            block = self._blocks.pop()  # atomic, so other threads may do the same concurrently
        except IndexError:
            block = aligned_empty(self._nbytes)
        try:
            yield block
        finally:
            if len(self._blocks) < self._spare:
                self._blocks.append(block)
