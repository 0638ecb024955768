"""Threads of this process that play the processes of one program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.engine.distributed import Coordinator


def together(count: int, work: Callable[[Coordinator], Any], *, timeout: float = 30.0) -> list[Any]:
    """Runs work in as many threads as there are processes; returns what came of it, errors among it, in their order."""
    results: list[Any] = [None] * count

    def run(coordinator: Coordinator) -> None:
        try:
            results[coordinator.process_index] = work(coordinator)
        except BaseException as error:  # handed to the test
            results[coordinator.process_index] = error

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in memory_coordinators(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    assert not any(thread.is_alive() for thread in threads), "a process hangs"
    return results


def unwrap(results: list[Any]) -> list[Any]:
    """Raise the first error among results, or return them."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class MemoryCoordinator:
    """A thread that acts as a process; made by `memory_coordinators`."""

    def __init__(self, hub: _Hub, index: int, count: int) -> None:
        self.process_index = index
        self.process_count = count
        self._hub = hub

    def put(self, key: str, value: bytes) -> None:
        with self._hub.changed:
            self._hub.values[key] = value
            self._hub.changed.notify_all()

    def get(self, key: str, timeout: float, *, waited: float = 0.0) -> bytes:
        with self._hub.changed:
            if not self._hub.changed.wait_for(lambda: key in self._hub.values, timeout):
                raise TimeoutError(f"no process stored {key} within {timeout:g} s")
            return self._hub.values[key]

    def try_get(self, key: str) -> bytes | None:
        with self._hub.changed:
            return self._hub.values.get(key)

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        with self._hub.changed:
            found = [self._hub.values.get(key) for key in keys]
        return [value for value in found if value is not None] if None not in found else None

    def delete(self, key: str) -> None:
        with self._hub.changed:
            self._hub.values.pop(key, None)

    def give_up(self, key: str) -> None:
        pass

    def keys(self) -> list[str]:
        with self._hub.changed:
            return sorted(self._hub.values)


class _Hub:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()


def memory_coordinators(count: int) -> list[MemoryCoordinator]:
    """Make the coordinators of a program whose processes are threads of this process."""
    hub = _Hub()
    return [MemoryCoordinator(hub, index, count) for index in range(count)]
