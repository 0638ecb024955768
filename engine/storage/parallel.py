"""The one way in which the engine shares work among threads: requests, transfers, copies and compression."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

# How many small requests, or reads of ranges, run at a time over a network: a thread that waits costs little.
REQUESTS = 16
UPLOADS = 8  # how many data files are uploaded at a time; each of them is in memory meanwhile


class Helper(threading.Thread):
    """A thread whose end an interrupt does not hide.

    ``Thread.join`` of Python 3.11, when interrupted, takes a thread that is running for one that has ended.
    """

    def __init__(self, work: Callable[[], None], name: str, *, daemon: bool = False) -> None:
        super().__init__(target=work, name=name, daemon=daemon)
        self._process: int | None = None  # that it runs in; it does not run in a forked one
        self._ended = threading.Event()

    def run(self) -> None:
        self._process = os.getpid()
        try:
            super().run()
        finally:
            self._ended.set()

    def is_alive(self) -> bool:
        return super().is_alive() or (self._process == os.getpid() and not self._ended.is_set())

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive() and (threading.current_thread() is self or self._ended.wait(timeout)):
            super().join(timeout)

    def finish(self, interrupted: Callable[[BaseException], None]) -> None:
        """Wait until the thread has ended; give ``interrupted`` each interrupt meanwhile."""
        while self.is_alive():
            try:
                self.join()
            except BaseException as error:
                interrupted(error)


def parallel_map(
    work: Callable[[T], R],
    items: Sequence[T],
    max_concurrency: int,
    *,
    name: str = "holdfast-request",
    stop: threading.Event | None = None,
) -> list[R]:
    """Call ``work`` for every item, in the calling thread and helper threads; return the results in order.

    The first exception of any thread, an interrupt included, is raised once all helpers have ended. No thread takes
    another item after it. ``stop`` is set then, so that long work can end early. Helpers are named ``name``-1, -2, ...
    """
    count = min(max_concurrency, len(items))
    if count <= 1:
        return list(map(work, items))
    stopped = threading.Event() if stop is None else stop
    results: list[Any] = [None] * len(items)
    errors: list[BaseException] = []
    pending = iter(range(len(items)))
    lock = threading.Lock()

    def fail(error: BaseException) -> None:
        errors.append(error)
        stopped.set()

    def run() -> None:
        try:
            while not stopped.is_set():
                with lock:
                    number = next(pending, None)
                if number is None:
                    return
                results[number] = work(items[number])
        except BaseException as error:  # raised by the calling thread, below
            fail(error)

    # Plain threads: an executor refuses work once the main thread has ended, and saves continue after that.
    helpers = [Helper(run, f"{name}-{number}", daemon=True) for number in range(1, count)]
    try:
        for helper in helpers:
            helper.start()
        run()
    except BaseException as error:  # an interrupt, or a thread that could not be started
        fail(error)
    for helper in helpers:
        helper.finish(fail)
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # the error's frames refer to this list: a cycle would keep what they hold alive
    return results
