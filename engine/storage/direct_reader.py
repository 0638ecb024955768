"""Reads bulk data files past the page cache, straight into the memory that the caller gets."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Self

from .buffers import PAGE, Buffer, aligned_empty, round_up
from .bulk import check_extent, truncated
from .direct import make_buffered, open_direct, regular_size
from .statuses import os_errors

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray


class LocalDataReader:
    """One data file on a local file system.

    Direct I/O moves whole pages between the disk and page-aligned memory, so a read covers the pages around what was
    asked for and returns a view of the middle. An offset that is a multiple of 64 stays one in memory.

    Args:
        path: The file.

    Raises:
        ObjectNotFoundError: There is none.
        DamagedCheckpointError: It is not a regular file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = -1
        self._lock = threading.Lock()
        with os_errors(path, "open"):
            # Opening a pipe would wait for its other end for ever.
            descriptor = open_direct(path, os.O_RDONLY | os.O_NONBLOCK)
            self._size = regular_size(descriptor, path)
        self._descriptor = descriptor

    @property
    def size(self) -> int:
        """Length of the file in bytes when it was opened."""
        return self._size

    def read(self, offset: int, length: int, buffer: Buffer | None = None) -> NDArray[np.uint8]:
        """Reads exactly ``length`` bytes; see ``DataReader.read``."""
        check_extent(self._path, self._size, offset, length)
        first = offset - offset % PAGE
        lead = offset - first
        span = round_up(lead + length)
        memory = aligned_empty(span) if buffer is None else buffer.view(span)
        with os_errors(self._path, "read"):
            found = self._fill(memory, first, lead + length)
        if found < lead + length:
            raise truncated(self._path, first + found, offset, length)
        return memory[lead : lead + length]

    def close(self) -> None:
        """Closes the file; arrays that were read stay valid."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _fill(self, memory: NDArray[np.uint8], first: int, needed: int) -> int:
        """Reads into ``memory`` from a page boundary on until ``needed`` bytes are there or the file ends."""
        found, refused = 0, False
        while found < needed:
            try:
                count = os.preadv(self._descriptor, [memory[found:].data], first + found)
            except OSError as error:
                if error.errno != errno.EINVAL or refused:
                    raise
                make_buffered(self._descriptor)
                refused = True
                continue
            if not count:
                break
            found += count
        return found
