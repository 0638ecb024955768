"""Threads that the engine uses for requests, transfers, copies and compression."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..forks import Lock

T = TypeVar("T")
R = TypeVar("R")

# Maximum number of concurrent small requests or range reads over a network. Waiting threads cost little.
REQUESTS = 16
UPLOADS = 8  # maximum number of concurrent uploads of data files; low because some files are copied to memory first

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

_LONGEST_WAIT = 0.5  # maximum duration of one wait for a lock, in seconds


class Helper(threading.Thread):
    """A thread that can be joined reliably even if an interrupt arrives.

    In Python 3.11, an interrupted ``Thread.join`` marks the thread as ended although it is still running.
    """

    def __init__(self, work: Callable[[], object], name: str, *, daemon: bool = False) -> None:
        super().__init__(target=work, name=name, daemon=daemon)
        self._process: int | None = None  # PID of the process that runs the thread; a forked child does not run it
        self._is_done = False
        # Released when the work is done. An Event is not used, because an interrupt could leave its lock acquired.
        self._under_way = Lock()
        self._under_way.acquire()

    def run(self) -> None:
        self._process = os.getpid()
        try:
            super().run()
        finally:
            self._is_done = True
            self._under_way.release()

    def is_alive(self) -> bool:
        return super().is_alive() or (self._process == os.getpid() and not self._is_done)

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive() and (threading.current_thread() is self or self._is_done_within(timeout)):
            super().join(timeout)

    def _is_done_within(self, timeout: float | None) -> bool:
        end = math.inf if timeout is None else time.monotonic() + timeout
        # A signal that arrives just before a wait is handled only after the wait, so each wait is short.
        while not self._is_done and (remaining := end - time.monotonic()) > 0:
            if self._under_way.acquire(timeout=min(_LONGEST_WAIT, remaining)):
                self._under_way.release()
        return self._is_done

    def finish(self, interrupted: Callable[[BaseException], None]) -> None:
        """Wait until the thread has ended. Pass each interrupt that arrives in the meantime to ``interrupted``."""
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
    beside: int | None = None,
    awaited: threading.Event | None = None,
    name: str = "holdfast-request",
    stop: threading.Event | None = None,
) -> list[R]:
    """Call ``work`` for every item, in the calling thread and in helper threads; return the results in order.

    If a training loop runs during this call, ``awaited`` is set when the loop starts to wait for the call. Until then,
    at most ``beside`` threads work; afterwards, more helpers start. If ``awaited`` is None, no training loop runs.
    After the first exception in any thread, including an interrupt, no further items are processed, and ``stop`` is set
    so that long-running work can end early. The exception is raised once all helpers have ended. Helpers are named
    ``name``-1, ``name``-2 and so on.
    """
    most = min(max_concurrency, len(items))
    if most <= 1:
        return list(map(work, items))
    at_first = most if beside is None or awaited is None else min(beside, most)
    shared = _SharedWork(work, items, most, at_first, awaited, name, stop or threading.Event())
    shared.run()
    for helper in shared.helpers:  # helpers may start more helpers in the meantime
        helper.finish(shared.fail)
    shared.helpers.clear()  # breaks the reference cycle with a helper that could not be started
    if shared.errors:
        try:
            raise shared.errors[0]
        finally:
            shared.errors.clear()  # breaks the reference cycle with the traceback, which would keep objects alive
    return shared.results


@dataclass
class _SharedWork(Generic[T, R]):
    """The state of one :func:`parallel_map` call, shared by all its threads."""

    work: Callable[[T], R]
    items: Sequence[T]
    most: int  # maximum number of threads once the call is awaited
    at_first: int  # maximum number of threads before the call is awaited
    awaited: threading.Event | None
    name: str
    stopped: threading.Event

    def __post_init__(self) -> None:
        self._pending = iter(range(len(self.items)))
        self._lock = threading.Lock()
        self.results: list[Any] = [None] * len(self.items)
        self.errors: list[BaseException] = []
        self.helpers: list[Helper] = []

    def run(self) -> None:
        """Process items one after the other until none is left. Every thread runs this method."""
        try:
            while not self.stopped.is_set():
                with self._lock:
                    number = next(self._pending, None)
                    if number is None:
                        return
                    self._start_helpers()
                self.results[number] = self.work(self.items[number])
        except BaseException as error:  # parallel_map raises the error again in the calling thread
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)
        self.stopped.set()

    def _start_helpers(self) -> None:
        is_awaited = self.awaited is not None and self.awaited.is_set()
        while len(self.helpers) + 1 < (self.most if is_awaited else self.at_first):
            # Executors are not used: they refuse work once the main thread has ended, but a save may still be running.
            name = f"{self.name}-{len(self.helpers) + 1}"
            self.helpers.append(Helper(self.run, name, daemon=True))
            self.helpers[-1].start()
