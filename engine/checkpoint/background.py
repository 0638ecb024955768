"""One save at a time in the background; its error is raised exactly once.

The thread is not a daemon: a program that ends while a save is under way waits for it. An error that was not raised
by the time the interpreter exits is logged, and the process exits with a non-zero status.
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

_HEAD_START = 0.005  # seconds, at most


class _UnderWay(NamedTuple):
    thread: Helper
    awaited: threading.Event  # whether the program waits for the save
    what: str
    step: int | None


class BackgroundSave:
    """Runs at most one save at a time, and keeps its error until it is raised."""

    def __init__(self, timeout: float = 3600.0) -> None:
        self._timeout = timeout
        self._current: _UnderWay | None = None  # or the last one, until something waits for it
        self._changing = Lock()  # guards it: several threads of the program may save and wait
        self._error: SaveFailedError | None = None

    @property
    def running(self) -> bool:
        """Whether a save is under way."""
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
        """Run work on a new thread, with an event that is set when the program waits; then call ``ended`` there."""

        def run() -> None:
            # The loop continues first: a thread that works may keep the interpreter from it for milliseconds.
            started.acquire(timeout=_HEAD_START)
            result = failure = None
            try:
                result = work(awaited)
            except BaseException as error:  # the caller's thread raises it later
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
        started = threading.Lock()  # own: a process that the loop forks now needs no lock that the thread holds
        started.acquire()
        thread = Helper(run, "holdfast-save")
        with self._changing:
            if self._current is not None and self.running:
                raise StateError(f"{what}: {self._current.what} is still being saved; wait for it first")
            self._current = _UnderWay(thread, awaited, what, step)
            _running.add(self)
            try:
                thread.start()
            except BaseException:  # an interrupt, after which the thread may run, or the system has no more threads
                if not thread.is_alive():
                    _running.discard(self)
                raise
        started.release()

    def hurry(self) -> None:
        """Let the save that is under way know that the program waits for it."""
        if (current := self._current) is not None:
            current.awaited.set()

    def join(self) -> None:
        """Wait until no save is under way; an error of it is kept."""
        while True:
            with self._changing:  # a save that another thread begins has started then
                current = self._current
            if current is None:
                return
            current.awaited.set()
            current.thread.join(self._timeout)
            if current.thread.is_alive():
                raise SaveFailedError(
                    f"{current.what} is still not saved after {self._timeout:g} s; the storage may hang. "
                    "Raise save_timeout_secs if it is only slow",
                    current.step,
                )
            with self._changing:
                if self._current is current:  # otherwise another thread has begun the next save
                    self._current = None

    @property
    def has_missed_a_process(self) -> bool:
        """Whether the last save failed because another process did not answer, and this was not raised yet."""
        return self._error is not None and missed_a_process(self._error.__cause__)

    def take_error(self) -> SaveFailedError | None:
        """Return the error of the last save and forget it, so that it is raised once."""
        error, self._error = self._error, None
        _unraised.discard(self)
        return error

    def wait(self) -> None:
        """Wait until no save is under way; raise its error."""
        self.join()
        self.check()

    def check(self) -> None:
        """Raise the error of a failed save that was not raised yet; do not wait."""
        error = self.take_error()
        if error is not None:
            raise error


_unraised: set[BackgroundSave] = set()  # saves with an error; a program may drop its manager before it ends

_running: set[BackgroundSave] = set()

_last_words: list[Callable[[], None]] = []


def at_exit(speak: Callable[[], None]) -> None:
    """Call a function as the interpreter exits, when all saves have ended or are given up."""
    _last_words.append(speak)


def _wait_at_exit() -> None:
    """Run when the main thread has ended: the interpreter itself would wait for ever for a save that hangs."""
    hanging = []
    for save in list(_running):
        try:
            save.join()
        except SaveFailedError as error:
            hanging.append(error)
    if hanging:
        _report_at_exit(hanging)


def _report_at_exit(hanging: Sequence[SaveFailedError] = ()) -> None:
    """Run when the interpreter exits, after all saves have ended or are given up."""
    for speak in _last_words:
        speak()
    errors = [*hanging, *(error for save in list(_unraised) if (error := save.take_error()) is not None)]
    for error in errors:
        _logger.critical("%s", error)
        if not _is_on_stderr():
            print(f"holdfast: {error}", file=sys.stderr)  # noqa: T201 - the last chance; logging may be off
    if errors:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # nothing else gives the process a non-zero status at this point


def _is_on_stderr() -> bool:
    """Return whether logging has written an error to stderr."""
    handlers = handlers_of(_logger, logging.CRITICAL)
    if not handlers:
        return _logger.isEnabledFor(logging.CRITICAL) and logging.lastResort is not None
    return any(getattr(handler, "stream", None) is sys.stderr for handler in handlers)


# Exit functions run in reverse order. This one ends the process; registered when the engine is loaded, it runs after
# those of the program.
atexit.register(_report_at_exit)

# `concurrent.futures` does the same: ordinary exit functions run only after all threads have ended.
_register_early = getattr(threading, "_register_atexit", None)
if _register_early is not None:
    _register_early(_wait_at_exit)
