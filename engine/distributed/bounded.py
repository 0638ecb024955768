"""Deadlines for the calls of a coordinator: a frozen process that keeps the store holds up no other one for ever."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from .coordinators import Coordinator

T = TypeVar("T")

_SECOND_CHANCE = 1.0  # seconds that a store gets which did not answer the call before

_silent: weakref.WeakSet[Coordinator] = weakref.WeakSet()  # those that did not answer the last call


class BoundedCoordinator:
    """A coordinator whose calls raise ConnectionError when its store does not answer for ``limit`` seconds.

    A store that is gone closes its connections, but one whose process is stopped, or whose machine has vanished, only
    keeps silent, and clients such as torch's wait for its answer without a deadline of their own. So each call runs in
    a thread that is left behind then. After the first such call, others wait for a second only, until one is answered.
    """

    def __init__(self, coordinator: Coordinator, limit: float) -> None:
        self.unbounded = coordinator
        self.process_index = coordinator.process_index
        self.process_count = coordinator.process_count
        self._limit = limit

    def put(self, key: str, value: bytes) -> None:
        self.run(lambda store: store.put(key, value))

    def get(self, key: str, timeout: float) -> bytes:
        return self.run(lambda store: store.get(key, timeout), timeout)

    def try_get(self, key: str) -> bytes | None:
        return self.run(lambda store: store.try_get(key))

    def delete(self, key: str) -> None:
        self.run(lambda store: store.delete(key))

    def run(self, work: Callable[[Coordinator], T], waits: float = 0.0) -> T:
        """Make several calls with one deadline; ``waits`` are the seconds that they may wait for other processes."""
        if self.process_count == 1:
            return work(self.unbounded)
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def call() -> None:
            try:
                answers.put((work(self.unbounded), None))
            except BaseException as error:  # raised in the thread that waits
                answers.put((None, error))

        limit = min(self._limit, _SECOND_CHANCE) if self.unbounded in _silent else self._limit
        threading.Thread(target=call, name="holdfast-store", daemon=True).start()
        try:
            answer, error = answers.get(timeout=waits + limit)
        except queue.Empty:
            _silent.add(self.unbounded)
            raise ConnectionError(
                f"it has not answered for {limit:g} s: its process is stopped, or its machine is unreachable"
            ) from None
        _silent.discard(self.unbounded)
        if error is not None:
            raise error
        value: T = answer
        return value
