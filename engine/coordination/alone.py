"""A program of one process: nothing to wait for."""

from __future__ import annotations


class Alone:
    """The coordinator of a single process; it needs no initialization."""

    process_index = 0
    process_count = 1

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        """Stores a value."""
        self._values[key] = value

    def get(self, key: str, timeout: float) -> bytes:
        """Returns a value. Raises TimeoutError at once if there is none, as nobody else could store it."""
        if key not in self._values:
            raise TimeoutError(f"{key} was not stored, and there is no other process")
        return self._values[key]

    def try_get(self, key: str) -> bytes | None:
        """Returns a value if there is one."""
        return self._values.get(key)

    def delete(self, key: str) -> None:
        """Forgets a value."""
        self._values.pop(key, None)
