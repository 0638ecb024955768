"""Memory for bulk transfers: page-aligned, private, and backed by huge pages if available.

The first access to each page of new memory causes a page fault. With 4 KiB pages, the faults take about a second per
gigabyte, several times as long as the disk transfer. Huge pages reduce this time to less than a tenth.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PAGE = 4096  # alignment in bytes that direct I/O requires for memory, offsets and lengths

HUGE_PAGE = 2 << 20  # size of a huge page in bytes on common 64-bit systems; elsewhere, used only as an alignment

_SMALLEST_MAPPING = 256 << 10


def round_up(size: int, multiple: int = PAGE) -> int:
    """Return the smallest multiple of ``multiple`` that is not less than ``size``."""
    return -(-size // multiple) * multiple


def aligned_empty(nbytes: int) -> NDArray[np.uint8]:
    """Return new page-aligned, writable memory. Large blocks are freed when their last view is deleted."""
    import numpy as np  # imported lazily because listing checkpoints needs this module, but not numpy

    if nbytes < _SMALLEST_MAPPING:
        memory = np.empty(nbytes + PAGE, np.uint8)
        start = -memory.ctypes.data % PAGE
        return memory[start : start + nbytes]
    # An almost empty huge page at the end would cost more than the few small pages that it would replace.
    huge = (nbytes + HUGE_PAGE // 4) // HUGE_PAGE * HUGE_PAGE
    # The array starts at a huge-page boundary. The memory before the array is never touched, so it costs nothing.
    length = max(round_up(nbytes), huge) + HUGE_PAGE
    mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapping, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # transfers also work without huge pages, but are slower
            mapping.madvise(mmap.MADV_HUGEPAGE, start, huge)
    return memory[start : start + nbytes]


class Buffer:
    """A reusable aligned buffer. Only one thread may use it at a time."""

    def __init__(self, nbytes: int = 0) -> None:
        self._memory = aligned_empty(nbytes)

    def view(self, nbytes: int) -> NDArray[np.uint8]:
        """Return a view of ``nbytes`` bytes of the buffer. Later calls may return the same memory."""
        if nbytes > self._memory.size:
            self._memory = aligned_empty(nbytes)
        return self._memory[:nbytes]
