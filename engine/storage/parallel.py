"""The one mechanism by which the engine divides work among threads: requests, transfers, copies and compression."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

# How many small requests, or reads of ranges, run at a time over a network: a thread that waits costs little.
REQUESTS = 16
UPLOADS = 8  # how many data files are uploaded at a time; where TensorStore sends them, each is in memory meanwhile

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_KEPT = 1.0  # seconds; starting a thread takes longer than all else that a loop waits for in a small save
_LONGEST_WAIT = 0.5  # seconds
_IDLE = "kept for holdfast"  # the name of a thread without work


class _KeptThread(threading.Thread):
    """Does the work of one helper after the other, and ends when it has had none for a while."""

    def __init__(self, first: Helper) -> None:
        super().__init__(name=first.name, daemon=first.daemon)
        self.given: SimpleQueue[Helper | None] = SimpleQueue()
        self.given.put(first)

    def run(self) -> None:
        while True:
            try:
                helper = self.given.get(timeout=_KEPT)
            except Empty:
                with contextlib.suppress(ValueError):  # it was taken from the list, and gets work
                    _idle[_kind(self.daemon)].remove(self)
                    return
                if _ends:  # an interrupt has come before it got the work
                    return
                continue
            if helper is None:
                return
            try:
                contextvars.Context().run(helper.run)  # as in a new thread: no work sees variables of the one before
                self.name = _IDLE
            except BaseException:
                helper.end()
                raise
            if is_kept := not _ends:
                _idle[_kind(self.daemon)].append(self)
            if helper.is_current():  # otherwise its caller has given it up
                helper.end()
            del helper
            if not is_kept:
                return


def _kind(daemon: bool) -> tuple[bool, int]:
    """Return what the idle threads of one list share: threads inherit their priority, and work may lower it."""
    return daemon, os.getpriority(os.PRIO_PROCESS, 0)


_idle: defaultdict[tuple[bool, int], list[_KeptThread]] = defaultdict(list)  # the last ones worked most recently
_ends = False  # whether the main thread has ended


def _end_idle() -> None:
    """End the threads without work, and wait until they have ended."""
    for threads in list(_idle.values()):
        while threads:
            with contextlib.suppress(IndexError):
                thread = threads.pop()
                thread.given.put(None)
                thread.join()


def _at_exit() -> None:
    """Run when the main thread has ended: the interpreter waits for threads that are no daemons."""
    global _ends
    _ends = True
    _end_idle()


# Python warns of a fork beside other threads. A forked process has no thread but the one that forked.
os.register_at_fork(before=_end_idle, after_in_child=_idle.clear)

# `concurrent.futures` does the same. Without this function, the interpreter waits until they end by themselves.
getattr(threading, "_register_atexit", atexit.register)(_at_exit)


class Helper:
    """Work on a thread of its own, perhaps one that has done other work before.

    The interpreter waits for it at the exit unless it is a daemon. Interrupts of the caller do not hide whether it is
    under way.
    """

    def __init__(self, work: Callable[[], object], name: str, *, daemon: bool = False) -> None:
        self.name = name
        self.daemon = daemon
        self._work = work
        self._is_done = False
        # Released when the work is done. An interrupt could leave the lock within an Event locked for ever.
        self._under_way = threading.Lock()
        self._under_way.acquire()
        self._claim = threading.Lock()  # held for good by the thread that does the work, or by one that gave it up
        self._process: int | None = None  # PID of the process in which it runs; it does not run in a forked child
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; raise RuntimeError if the system has no more threads, or the interpreter ends."""
        try:
            self._process = os.getpid()
            try:
                thread = _idle[_kind(self.daemon)].pop()  # atomic: other threads may do the same
            except IndexError:
                _KeptThread(self).start()
            else:
                thread.name = self.name
                thread.given.put(self)  # the caller goes on at once: the thread runs when the interpreter is free
        except BaseException:  # among them interrupts, after which a thread may have it, or not
            if self._claim.acquire(blocking=False):
                self.end()
            raise

    def run(self) -> None:
        """Do the work, on the thread that it was given to."""
        if self._claim.acquire(blocking=False):
            self._thread = threading.current_thread()
            work = self._work
            del self._work  # it may refer to arrays, and the caller may keep this object
            work()

    def end(self) -> None:
        """Let the others know that the work is done; called once, by the thread that has claimed it."""
        self._is_done = True
        self._under_way.release()

    def is_alive(self) -> bool:
        return self._process == os.getpid() and not self._is_done

    def join(self, timeout: float | None = None) -> None:
        """Wait until the work is done, at most ``timeout`` seconds."""
        if self.is_alive():
            if self.is_current():
                raise RuntimeError("a thread cannot wait for itself")
            end = math.inf if timeout is None else time.monotonic() + timeout
            # Python notices a signal that arrives right before a wait only after it: no wait is long.
            while not self._is_done and (remaining := end - time.monotonic()) > 0:
                if self._under_way.acquire(timeout=min(_LONGEST_WAIT, remaining)):
                    self._under_way.release()

    def is_current(self) -> bool:
        """Whether this thread does the work."""
        return self._thread is threading.current_thread()

    def finish(self, interrupted: Callable[[BaseException], None]) -> None:
        """Wait until the work is done; give ``interrupted`` each interrupt meanwhile."""
        while self.is_alive():
            try:
                self.join()
            except BaseException as error:
                interrupted(error)


class Started:
    """Work on a thread of its own, from :meth:`start` on; :meth:`finish` waits for it.

    An interrupt of :meth:`start` may come when the work has begun, so the caller keeps the object before.
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = Helper(self._run, name, daemon=True)

    def start(self) -> None:
        """Begin the work, in this thread where none can start."""
        try:
            self._thread.start()
        except RuntimeError:  # The system has no more threads, or the interpreter ends.
            self._run()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised by `finish`
            self._error = error

    def wait(self) -> None:
        """Wait until it has ended."""
        self._thread.join()

    def finish(self) -> None:
        """Wait until it is done; raise its error. Any number of threads may call this, any number of times."""
        self.wait()
        if self._error is not None:
            raise self._error


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
    """Call ``work`` for every item, in the calling thread and helper threads; return the results in order.

    ``awaited`` is set when a training loop that runs beside this call begins to wait for it. Until then, ``beside`` is
    the concurrency; afterwards, more helpers join in. Without ``awaited``, no loop runs beside the call. The first
    exception of any thread, an interrupt included, is raised once all helpers have ended. No thread takes another item
    after it. ``stop`` is set then, so that long work can end early. Helpers are named ``name``-1, -2, ...
    """
    if min(max_concurrency, len(items)) <= 1:
        return list(map(work, items))
    stopped = threading.Event() if stop is None else stop
    shared = _SharedWork(work, items, max_concurrency, beside, awaited, name, stopped)
    shared.run()
    for helper in shared.helpers:  # one of them may start another
        helper.finish(shared.fail)
    shared.helpers.clear()  # one that could not be started refers to the work, and the work to it
    if shared.errors:
        try:
            raise shared.errors[0]
        finally:
            shared.errors.clear()  # the error's frames refer to this list: a cycle would keep what they hold alive
    return shared.results


class _SharedWork(Generic[T, R]):
    """The state of one :func:`parallel_map`, for all of its threads."""

    def __init__(
        self,
        work: Callable[[T], R],
        items: Sequence[T],
        max_concurrency: int,
        beside: int | None,
        awaited: threading.Event | None,
        name: str,
        stopped: threading.Event,
    ) -> None:
        self._awaited = awaited
        self._most = min(max_concurrency, len(items))
        self._beside = self._most if beside is None or awaited is None else min(beside, self._most)
        self._work, self._items, self._name, self._stopped = work, items, name, stopped
        self._pending = iter(range(len(items)))
        self._lock = threading.Lock()
        self.results: list[Any] = [None] * len(items)
        self.errors: list[BaseException] = []
        self.helpers: list[Helper] = []

    def run(self) -> None:
        """Take one item after the other, in any of the threads."""
        try:
            while not self._stopped.is_set():
                with self._lock:
                    number = next(self._pending, None)
                    if number is None:
                        return
                    self._start_helpers()
                self.results[number] = self._work(self._items[number])
        except BaseException as error:  # raised by the calling thread, above
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)
        self._stopped.set()

    def _start_helpers(self) -> None:
        awaited = self._awaited is not None and self._awaited.is_set()
        while len(self.helpers) + 1 < (self._most if awaited else self._beside):
            # Plain threads: an executor refuses work once the main thread has ended, and saves continue after that.
            name = f"{self._name}-{len(self.helpers) + 1}"
            self.helpers.append(Helper(self.run, name, daemon=True))
            self.helpers[-1].start()
