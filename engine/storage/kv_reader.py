"""One object of a store, open for reading."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from ..errors import DamagedCheckpointError, ObjectNotFoundError
from .buffers import Buffer, aligned_empty
from .bulk import check_extent

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

_LONGEST = 1 << 50
"""Bytes; ranges that end behind it are refused without asking, as no store has objects of that size."""


class RangeSource(Protocol):
    """What serves ranges of objects."""

    def url(self, key: str) -> str:
        """Returns the URL of a key."""

    def read_range(self, key: str, byte_range: slice | None) -> bytes:
        """Returns a range of an object, or all of it."""


class KvDataReader:
    """One object, read by ranges; as a whole, once, where the store does not serve ranges.

    Args:
        backend: Where it is.
        key: Its name.
        known: Its length as a record says it, or None. What a range behind that holds is not asked for.
    """

    def __init__(self, backend: RangeSource, key: str, known: int | None = None) -> None:
        self._backend = backend
        self._key = key
        self._known = known
        self._lock = threading.Lock()
        self._whole: bytes | None = None
        self._missing: ObjectNotFoundError | None = None

    @property
    def size(self) -> int:
        """Length of the object in bytes. TensorStore does not tell, so the first look reads all of it."""
        return len(self._read_whole())

    def read(self, offset: int, length: int, buffer: Buffer | None = None) -> NDArray[np.uint8]:
        """Reads exactly ``length`` bytes; see ``DataReader.read``."""
        value = self._fetch(offset, length)
        memory = aligned_empty(length) if buffer is None else buffer.view(length)
        memory[:] = np.frombuffer(value, np.uint8)
        return memory

    def close(self) -> None:
        """Forgets the object; arrays that were read stay valid."""
        self._whole = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fetch(self, offset: int, length: int) -> bytes | memoryview:
        if self._missing is not None:  # asking once is enough: what is read after that is read for nothing
            raise self._missing
        if self._known is not None:
            check_extent(self._backend.url(self._key), self._known, offset, length)
        end = offset + length
        try:
            if self._whole is None and 0 <= offset < end <= _LONGEST:
                with contextlib.suppress(DamagedCheckpointError):
                    value = self._backend.read_range(self._key, slice(offset, end))
                    if len(value) == length:
                        return value
                # The object ends before the range does, or a server calls the range everything that there is.
            whole = self._read_whole()
        except ObjectNotFoundError as error:
            self._missing = error
            raise
        check_extent(self._backend.url(self._key), len(whole), offset, length)
        return memoryview(whole)[offset:end]

    def _read_whole(self) -> bytes:
        with self._lock:
            if self._whole is None:
                self._whole = self._backend.read_range(self._key, None)
            return self._whole
