"""Processes that are threads of one program: for tests, and for trying things out."""

from __future__ import annotations

import threading


class MemoryCoordinator:
    """One of several threads that act as processes; made by `memory_coordinators`."""

    def __init__(self, hub: _Hub, index: int, count: int) -> None:
        self.process_index = index
        self.process_count = count
        self._hub = hub

    def put(self, key: str, value: bytes) -> None:
        """Stores a value."""
        with self._hub.changed:
            self._hub.values[key] = value
            self._hub.changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        """Waits for a value. Raises TimeoutError when nobody has stored it in that time."""
        with self._hub.changed:
            if not self._hub.changed.wait_for(lambda: key in self._hub.values, timeout):
                raise TimeoutError(f"nobody stored {key} within {timeout:g} s")
            return self._hub.values[key]

    def try_get(self, key: str) -> bytes | None:
        """Returns a value if there is one."""
        with self._hub.changed:
            return self._hub.values.get(key)

    def delete(self, key: str) -> None:
        """Forgets a value."""
        with self._hub.changed:
            self._hub.values.pop(key, None)

    def keys(self) -> list[str]:
        """Returns all keys that are stored, in order."""
        with self._hub.changed:
            return sorted(self._hub.values)


class _Hub:
    """The store that the coordinators of one program share."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()


def memory_coordinators(count: int) -> list[MemoryCoordinator]:
    """Makes the coordinators of a program whose processes are threads of this one.

    Args:
        count: How many processes it has.

    Returns:
        One for each process, in order.
    """
    hub = _Hub()
    return [MemoryCoordinator(hub, index, count) for index in range(count)]
