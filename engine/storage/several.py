"""Several requests at a time: over a network most time is spent waiting, and a thread that waits costs little."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
R = TypeVar("R")

REQUESTS = 16
"""How many small requests, or ranges that are read, are under way at a time."""
UPLOADS = 8
"""How many data files are uploaded at a time; each of them is in memory meanwhile."""


def several(work: Callable[[T], R], items: Sequence[T], at_once: int) -> list[R]:
    """Calls a function for every item, in several threads.

    Args:
        work: What to do.
        items: What to do it with.
        at_once: How many threads at most, this one among them.

    Returns:
        What the calls have returned, in the order of the items.

    Raises:
        BaseException: The first that a call has raised; no further ones were begun, and those under way have ended.
    """
    results: dict[int, R] = {}
    errors: list[BaseException] = []
    pending = iter(range(len(items)))
    lock = threading.Lock()

    def run() -> None:
        while not errors:
            with lock:
                number = next(pending, None)
            if number is None:
                return
            try:
                results[number] = work(items[number])
            except BaseException as error:  # handed to the thread that waits below
                errors.append(error)

    # Plain threads: an executor takes nothing any more once the main thread has ended, and saves go on after that.
    count = min(at_once, len(items))
    threads = [threading.Thread(target=run, name=f"holdfast-store-{i}", daemon=True) for i in range(count - 1)]
    for thread in threads:
        thread.start()
    run()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(items))]
