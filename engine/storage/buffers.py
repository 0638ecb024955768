"""Memory for bulk transfers: page-aligned, private, and backed by huge pages where available.

The first touch of fresh memory costs one page fault per page. With pages of 4 KiB that takes about a second for a
gigabyte, several times as long as the disk needs; with huge pages it takes less than a tenth of it.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PAGE = 4096  # alignment that direct I/O requires of memory, offsets and lengths, in bytes

HUGE_PAGE = 2 << 20  # size of a huge page on the usual 64-bit systems, in bytes; elsewhere merely an alignment

_SMALLEST_MAPPING = 256 << 10


def round_up(size: int, multiple: int = PAGE) -> int:
    """Return the smallest multiple of ``multiple`` that is not less than ``size``."""
    return -(-size // multiple) * multiple


def aligned_empty(nbytes: int) -> NDArray[np.uint8]:
    """Return fresh writable memory on a page boundary; the system gets large memory back with its last view."""
    import numpy as np  # imported lazily: a listing of checkpoints imports this module, and needs no arrays

    if nbytes < _SMALLEST_MAPPING:
        memory = np.empty(nbytes + PAGE, np.uint8)
        start = -memory.ctypes.data % PAGE
        return memory[start : start + nbytes]
    # An almost empty last huge page would cost more than its few small pages.
    huge = (nbytes + HUGE_PAGE // 4) // HUGE_PAGE * HUGE_PAGE
    # The start is moved to a huge-page boundary: the untouched memory before it costs nothing.
    length = max(round_up(nbytes), huge) + HUGE_PAGE
    mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapping, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # A kernel built without huge pages: slower, not wrong.
            mapping.madvise(mmap.MADV_HUGEPAGE, start, huge)
    return memory[start : start + nbytes]


class Buffer:
    """Aligned memory for repeated use by one thread at a time."""

    def __init__(self, nbytes: int = 0) -> None:
        self._memory = aligned_empty(nbytes)

    def view(self, nbytes: int) -> NDArray[np.uint8]:
        """Return the first ``nbytes`` bytes; all views share their memory."""
        if nbytes > self._memory.size:
            self._memory = aligned_empty(nbytes)
        return self._memory[:nbytes]


class BlockPool:
    """Blocks of aligned memory for transfers, kept because fresh memory is expensive if a hypervisor reclaims it."""

    def __init__(self, nbytes: int, spare: int) -> None:
        self._nbytes = nbytes
        self._spare = spare
        self._blocks: list[NDArray[np.uint8]] = []

    @contextlib.contextmanager
    def block(self) -> Iterator[NDArray[np.uint8]]:
        """Lend a block of arbitrary content until the context ends."""
        try:
            block = self._blocks.pop()  # atomic: other threads may do the same
        except IndexError:
            block = aligned_empty(self._nbytes)
        try:
            yield block
        finally:
            if len(self._blocks) < self._spare:
                self._blocks.append(block)
