"""One save at a time in the background, whose failure is told exactly once.

The thread is not a daemon: a program that ends while a save is under way waits for it. If a failure has not been
told to anybody when the interpreter exits, it is logged and the process exits with a non-zero status.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable

from .errors import SaveFailedError, StateError, told

_logger = logging.getLogger("holdfast")


class BackgroundSave:
    """Runs at most one save at a time and remembers how it went.

    Args:
        timeout: How long to wait for a save, in seconds, before that is an error.
    """

    def __init__(self, timeout: float = 3600.0) -> None:
        self._timeout = timeout
        self._thread: threading.Thread | None = None
        self._what = ""
        self._step: int | None = None
        self._error: SaveFailedError | None = None

    @property
    def running(self) -> bool:
        """Tells whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None], *, what: str, step: int | None = None) -> None:
        """Runs work on a thread of its own.

        Args:
            work: What to do; must not be called while another save is under way.
            what: What is being saved, for messages.
            step: Its step, if it has one.

        Raises:
            StateError: Another save is still under way.
        """
        if self.running:
            raise StateError(f"{what}: {self._what} is still being saved; wait for it first")

        def run() -> None:
            try:
                work()
            except BaseException as error:  # whatever it was, it is told to the caller's thread
                if isinstance(error, SaveFailedError):
                    self._fail(error)
                    return
                failure = SaveFailedError(f"{what} was not saved: {told(error)}", step)
                failure.__cause__ = error
                self._fail(failure)
            finally:
                _running.discard(self)

        self._what, self._step = what, step
        self._thread = threading.Thread(target=run, name="holdfast-save", daemon=False)
        _running.add(self)
        try:
            self._thread.start()
        except BaseException:  # the system has no more threads
            _running.discard(self)
            self._thread = None
            raise

    def join(self) -> None:
        """Waits until no save is under way; its error, if any, stays to be told.

        Raises:
            SaveFailedError: It takes longer than the timeout.
        """
        thread = self._thread
        if thread is None:
            return
        thread.join(self._timeout)
        if thread.is_alive():
            raise SaveFailedError(
                f"{self._what} is still not saved after {self._timeout:g} s; the storage may hang. "
                "Raise save_timeout_secs if it is only slow",
                self._step,
            )
        self._thread = None

    def take_error(self) -> SaveFailedError | None:
        """Returns the error of the last save and forgets it, so that it is told once."""
        error, self._error = self._error, None
        _untold.discard(self)
        return error

    def _fail(self, error: SaveFailedError) -> None:
        self._error = error
        _untold.add(self)

    def wait(self) -> None:
        """Waits until no save is under way.

        Raises:
            SaveFailedError: The save failed, and that has not been told yet.
        """
        self.join()
        self.check()

    def check(self) -> None:
        """Raises the error of a save that has failed, if that has not been told yet; does not wait."""
        error = self.take_error()
        if error is not None:
            raise error


_untold: set[BackgroundSave] = set()
"""Those with an error to tell, kept alive: a program may have dropped its manager before it ends."""


_running: set[BackgroundSave] = set()


def _wait_at_exit() -> None:
    """Runs when the main thread has ended: the interpreter itself would wait for a save that hangs for ever."""
    hanging = []
    for save in list(_running):
        try:
            save.join()
        except SaveFailedError as error:
            hanging.append(error)
    if hanging:
        _end(hanging)


def _tell_at_exit() -> None:
    """Runs when the interpreter exits, after all saves have ended."""
    if _untold:
        _end([])


def _end(errors: list[SaveFailedError]) -> None:
    """Tells what was lost and ends the process with a non-zero status."""
    for error in [*errors, *(error for save in list(_untold) if (error := save.take_error()) is not None)]:
        _logger.critical("%s", error)
        print(f"holdfast: {error}", file=sys.stderr)  # noqa: T201 - the last chance to tell; logging may be off
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # the only way left to give the process a non-zero status


# Registered when the engine is loaded, before anything that uses it: exit functions run in reverse order, so that
# this one, which ends the process, comes after those of the program.
atexit.register(_tell_at_exit)

# What `concurrent.futures` uses for the same purpose: ordinary exit functions run only after all threads have ended.
_register_early = getattr(threading, "_register_atexit", None)
if _register_early is not None:
    _register_early(_wait_at_exit)
