"""Processes that ``torch.distributed`` has connected."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

_SHORTEST_WAIT = 0.001
_LONGEST_WAIT = 0.25


class TorchCoordinator:
    """The processes of a torch program, and the store through which they found each other.

    The store answers from a thread of process 0, or from the launcher (torchrun): when that one dies, the others get
    an error at once. When any other dies, nobody is told.

    Args:
        store: A ``torch.distributed.Store`` that nobody else uses: a client of one store is busy while one of its
            callers waits.
        index: Which process this is.
        count: How many there are.
    """

    def __init__(self, store: Any, index: int, count: int) -> None:
        self.process_index = index
        self.process_count = count
        self._store = store

    def put(self, key: str, value: bytes) -> None:
        """Stores a value."""
        with _translated():
            self._store.set(key, value)

    def get(self, key: str, timeout: float) -> bytes:
        """Waits for a value. Raises TimeoutError when nobody has stored it in that time."""
        # Asking again and again, at intervals in proportion to how long it takes: Store.wait would keep other threads
        # from using the store, and a TCPStore prints a warning whenever a wait comes to its end.
        begin = time.monotonic()
        while (value := self.try_get(key)) is None:
            waited = time.monotonic() - begin
            if waited >= timeout:
                raise TimeoutError(f"nobody stored {key} within {timeout:g} s")
            pause = min(max(waited / 16, _SHORTEST_WAIT), _LONGEST_WAIT)
            time.sleep(min(pause, timeout - waited))
        return value

    def try_get(self, key: str) -> bytes | None:
        """Returns a value if there is one."""
        with _translated():
            if not self._store.check([key]):
                return None
            value: bytes = self._store.get(key)
        return value

    def delete(self, key: str) -> None:
        """Forgets a value."""
        with _translated():
            self._store.delete_key(key)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"torch.distributed's store: {error}") from error
