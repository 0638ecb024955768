"""Lets worker processes survive the signals of a preemption, and end with their parent process.

Schedulers send SIGTERM to every process of a job. The process that trains survives it and saves, but only if the
processes that load its data survive, too. ``multiprocessing`` starts all such processes. While a callback watches for
signals, this module wraps its ``Process.start``: a process that is started then runs inside :class:`_Worker`, which
ignores those signals, whichever start method is used.

A worker still ends when its parent calls ``terminate()``, which sends SIGTERM as well, and when multiprocessing does so
at the end of a program: the parent tells the worker through a pipe. A worker also ends when its parent has ended.
"""

from __future__ import annotations

import _thread
import contextlib
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Protocol

_INTERVAL = 1.0  # seconds between two checks whether the parent is alive


class Watcher(Protocol):
    """An object that handles signals, such as a callback."""

    @property
    def signals(self) -> Collection[int]: ...


_watchers: weakref.WeakSet[Any] = weakref.WeakSet()
_started: weakref.WeakSet[multiprocessing.process.BaseProcess] = weakref.WeakSet()
_original_start = multiprocessing.process.BaseProcess.start


def protect_workers(watcher: Watcher) -> None:
    """Let processes that start after this call survive the signals that ``watcher`` handles."""
    _watchers.add(watcher)
    if multiprocessing.process.BaseProcess.start is _original_start:
        multiprocessing.process.BaseProcess.start = _start  # type: ignore[assignment, method-assign]


def expose_workers(watcher: Watcher) -> None:
    """Stop protecting processes that start after this call."""
    _watchers.discard(watcher)
    if not _watchers and multiprocessing.process.BaseProcess.start is _start:
        multiprocessing.process.BaseProcess.start = _original_start  # type: ignore[method-assign]


def exposed_workers() -> list[multiprocessing.process.BaseProcess]:
    """Return the workers of this process that were started too early to be protected."""
    return [process for process in multiprocessing.active_children() if process.daemon and process not in _started]


def _start(process: multiprocessing.process.BaseProcess) -> None:
    signals = {int(number) for watcher in list(_watchers) for number in watcher.signals}
    if not signals or vars(process).get("_popen") is not None:
        _original_start(process)
        return
    told, tell = multiprocessing.Pipe(duplex=False)
    # The new process inherits the blocked signals, and unblocks them when its handlers are in place.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    vars(process)["run"] = _Worker(process.run, signals, signals - blocked, told)
    try:
        _original_start(process)
    finally:
        del vars(process)["run"]
        told.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    _started.add(process)
    popen: Any = vars(process)["_popen"]
    popen.terminate = _Terminate(popen.terminate, tell)


class _Terminate:
    """Replaces the method ``terminate`` of the object that multiprocessing keeps for a worker."""

    def __init__(self, original: Callable[[], None], tell: Connection) -> None:
        self._original = original
        self._tell = tell

    def __call__(self) -> None:
        with contextlib.suppress(OSError):  # The worker has ended.
            self._tell.send_bytes(b"end")
        self._original()


class _Worker:
    """Replaces the method ``run`` of a process; it is pickled where processes are spawned."""

    def __init__(self, run: Callable[[], None], signals: set[int], unblock: set[int], told: Connection) -> None:
        self._run = run
        self._signals = signals
        self._unblock = unblock
        self._told = told
        self._parent: int | None = None
        self._status: int | None = None
        self._follows = False

    def __call__(self) -> None:
        self._parent = os.getppid()
        self._handle_signals()
        self._handle_signals_after_torch()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._unblock)
        self._run()

    def _handle_signals(self) -> None:
        for number in self._signals:
            signal.signal(number, self._on_signal)

    def _handle_signals_after_torch(self) -> None:
        """Restore the handlers after a loader of torch or torchdata has replaced them by its own, in C."""
        module: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
        original = getattr(module, "_set_worker_signal_handlers", None)
        if original is None:
            return

        def set_handlers() -> None:
            original()
            self._status = 0  # torch's own handler ends a process with this status.
            self._handle_signals()

        module._set_worker_signal_handlers = set_handlers

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._told.poll():
            if self._status is not None:
                os._exit(self._status)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self._follows:
            self._follows = True
            # The interrupted code may hold a lock that threading would acquire.
            _thread.start_new_thread(self._end_with_parent, ())

    def _end_with_parent(self) -> None:
        while os.getppid() == self._parent:
            time.sleep(_INTERVAL)
        os._exit(128 + signal.SIGTERM)
