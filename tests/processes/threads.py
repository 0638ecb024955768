"""Threads of this process that play the processes of one program."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from holdfast.engine.coordination import Coordinator
from holdfast.engine.coordination.memory import memory_coordinators


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
