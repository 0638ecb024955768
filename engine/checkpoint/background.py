"""Run one save at a time in the background, and raise its error exactly once.

The thread is not a daemon, so a program that ends during a save waits for the save. If an error has not been raised
when the interpreter exits, it is logged, and the process exits with a non-zero status.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..distributed import missed_a_process
from ..errors import SaveFailedError, StateError, describe_error
from ..forks import Lock
from ..storage import Helper
from ..streams import handlers_of

_logger = logging.getLogger("holdfast")

_HEAD_START = 0.005  # maximum time, in seconds, that a save's thread waits so that the training loop can continue first


class _UnderWay(NamedTuple):
    thread: Helper
    awaited: threading.Event  # set once the program waits for the save
    what: str  # description of the save for error messages
    step: int | None


class BackgroundSave:
    """Runs at most one background save at a time, and keeps the error of a failed save until it is raised."""

    def __init__(self, timeout: float = 3600.0) -> None:
        self._timeout = timeout
        self._current: _UnderWay | None = None  # the save in progress, or a finished save that has not been joined
        self._changing = Lock()  # protects `_current` from concurrent access
        self._error: SaveFailedError | None = None

    @property
    def running(self) -> bool:
        """True if a save is in progress."""
        current = self._current
        return current is not None and current.thread.is_alive()

    def start(
        self,
        work: Callable[[threading.Event], Any],
        *,
        what: str,
        step: int | None = None,
        ended: Callable[[Any, SaveFailedError | None], object] | None = None,
    ) -> None:
        """Run ``work(event)`` and then ``ended`` on a new thread; the event is set once a caller waits for the save."""

        def run() -> None:
            # Let the training loop continue first, because this thread may hold the GIL for milliseconds.
            started.acquire(timeout=_HEAD_START)
            result = failure = None
            try:
                result = work(awaited)
            except BaseException as error:  # raised later, on the caller's thread
                failure = error if isinstance(error, SaveFailedError) else None
                if failure is None:
                    failure = SaveFailedError(f"{what} was not saved: {describe_error(error)}", step)
                    failure.__cause__ = error
                self._error = failure
                _unraised.add(self)
            finally:
                _running.discard(self)
            if ended is not None:
                ended(result, failure)

        awaited = threading.Event()
        started = threading.Lock()  # a local variable, so that a forked process never waits for this lock
        started.acquire()
        thread = Helper(run, "holdfast-save")
        with self._changing:
            if self._current is not None and self.running:
                raise StateError(f"{what}: {self._current.what} is still being saved; wait for it first")
            self._current = _UnderWay(thread, awaited, what, step)
            _running.add(self)
            try:
                thread.start()
            except BaseException:  # an interrupt, after which the thread may still run, or a failed start
                if not thread.is_alive():
                    _running.discard(self)
                raise
        started.release()

    def hurry(self) -> None:
        """Notify the running save that the program is waiting for it."""
        if (current := self._current) is not None:
            current.awaited.set()

    def join(self) -> None:
        """Wait until no save is in progress. The error of a failed save is kept, but not raised."""
        while True:
            with self._changing:  # waits while another thread is starting a save
                current = self._current
            if current is None:
                return
            if current.thread is threading.current_thread():
                raise StateError(
                    f"{current.what} is saved on this thread, which cannot wait for it: in a listener, note what is to "
                    "be done, and do it in the training loop"
                )
            current.awaited.set()
            current.thread.join(self._timeout)
            if current.thread.is_alive():
                raise SaveFailedError(
                    f"{current.what} is still not saved after {self._timeout:g} s; the storage may hang. "
                    "Raise save_timeout_secs if it is only slow",
                    current.step,
                )
            with self._changing:
                if self._current is current:  # False if another thread has started the next save
                    self._current = None

    @property
    def has_missed_a_process(self) -> bool:
        """True if the last save failed because a process did not respond, and its error has not been raised yet."""
        return self._error is not None and missed_a_process(self._error.__cause__)

    def take_error(self) -> SaveFailedError | None:
        """Return the last save's error and clear it, so that it is raised only once."""
        error, self._error = self._error, None
        _unraised.discard(self)
        return error

    def wait(self) -> None:
        """Wait until no save is in progress; raise the error of a failed save."""
        self.join()
        self.check()

    def check(self) -> None:
        """Raise the error of a failed save, without waiting, if it has not been raised yet."""
        if (error := self.take_error()) is not None:
            raise error


_unraised: set[BackgroundSave] = set()  # saves with an unraised error, kept even if the program discards the manager

_running: set[BackgroundSave] = set()

_last_words: list[Callable[[], None]] = []


def at_exit(speak: Callable[[], None]) -> None:
    """Register a function to call at interpreter exit, after all saves have ended or been abandoned."""
    _last_words.append(speak)


def _wait_at_exit() -> None:
    """Wait for running saves after the main thread has ended; unlike the interpreter, give up after a timeout."""
    hanging = []
    for save in list(_running):
        try:
            save.join()
        except SaveFailedError as error:
            hanging.append(error)
    if hanging:
        _report_at_exit(hanging)


def _report_at_exit(hanging: Sequence[SaveFailedError] = ()) -> None:
    """Report errors that have never been raised, after all saves have ended or been abandoned."""
    for speak in _last_words:
        speak()
    errors = [*hanging, *(error for save in list(_unraised) if (error := save.take_error()) is not None)]
    if not errors:
        return
    is_on_stderr = _logger.isEnabledFor(logging.CRITICAL) and logging.lastResort is not None
    if handlers := handlers_of(_logger, logging.CRITICAL):
        is_on_stderr = any(getattr(handler, "stream", None) is sys.stderr for handler in handlers)
    for error in errors:
        _logger.critical("%s", error)
        if not is_on_stderr:
            print(f"holdfast: {error}", file=sys.stderr)  # noqa: T201 - the last chance; logging may be off
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # the only way to set a non-zero exit status at this point


# Exit functions run in reverse order of registration. Because this function ends the process, it is registered as soon
# as the engine is imported, so that the program's own exit functions run first.
atexit.register(_report_at_exit)

# Like `concurrent.futures`, use an early hook, because ordinary exit functions run only after all threads have ended.
_register_early = getattr(threading, "_register_atexit", None)
if _register_early is not None:
    _register_early(_wait_at_exit)
