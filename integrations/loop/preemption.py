"""Handle preemption signals by setting a flag that the loop checks after each step, and protect worker processes."""

from __future__ import annotations

import _thread
import contextlib
import logging
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Self

from ...engine.clock import Duration, seconds
from ...engine.manager import Event, slow_saves
from ...engine.pytree import loaded
from ...engine.streams import silence_lost_streams

logger = logging.getLogger("holdfast")

_ONE_CTRL_C = 1.0  # seconds within which repeated signals count as one
_OF_TERMINALS = (signal.SIGHUP, signal.SIGINT)  # ignored under nohup and &, so that the program outlives its terminal

WITHOUT_GRACE = 10.0
"""Number of seconds that an early exit waits for the mirror if ``grace_secs`` is not set."""

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class PreemptionSignal:
    """A flag that preemption signals set, so that a loop can save before the process ends.

    Schedulers announce a preemption with SIGTERM and kill the process some seconds later. The handler only sets a flag,
    because nothing else is safe in the middle of a step, and then calls the previous handler. Handlers can only be
    installed from the main thread. With ``jax.distributed``, JAX's own handler makes all processes agree on a step, so
    no handler is installed here, and :meth:`reached` queries JAX.

    Schedulers send the signal to every process of a job. Processes that :mod:`multiprocessing` starts before
    :meth:`restore` is called, such as data loader workers, survive the signal, because the save may need them; they end
    with this process. Processes created by a bare ``os.fork`` end when they receive the signal.
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM,)) -> None:
        self.signals = tuple(signals)
        self._received: int | None = None
        self._since = 0.0  # arrival time of the signal, on the monotonic clock
        self.again = False  # whether another signal has arrived, not counting a copy forwarded by a launcher
        self._statuses: dict[int, int] = {}
        self._process: int | None = None
        self._has_warned = False  # whether a warning about a missing or replaced handler has been logged
        self._asked = 0  # number of calls to reached(); calls 1, 2, 4, ... check for replaced handlers
        self._previous: dict[int, Handler] = {}
        self._protect_workers()

    @property
    def received(self) -> bool:
        """True if a signal has arrived. Reading this is cheap enough for evaluation loops."""
        return self._received is not None

    @property
    def number(self) -> int:
        """The signal that has arrived, or SIGTERM if no signal has arrived or the signal is unknown."""
        return self._received or signal.SIGTERM

    @property
    def ends_run(self) -> bool:
        """True unless the flag was set by a Ray notice, which is not a signal and lets the run continue."""
        return self.number in signal.valid_signals()

    @property
    def exit_status(self) -> int:
        """The exit status for the process: 128 plus the signal number, unless :meth:`add` has set another status."""
        return self._statuses.get(self.number, 128 + self.number)

    @property
    def installed(self) -> bool:
        """True if the handler is in place in this process."""
        return self._process == os.getpid()

    @property
    def is_agreed(self) -> bool:
        """True if JAX makes all processes agree on the step to stop at. In this case, :meth:`reached` queries JAX."""
        jax = loaded("jax")
        return jax is not None and bool(jax.distributed.is_initialized())

    def request(self, number: int = signal.SIGTERM) -> None:
        """Set the flag as a signal would, for tests and for preemption notices that do not arrive as signals."""
        if self._received is None:
            self._received, self._since = number, time.monotonic()
        elif self.age >= _ONE_CTRL_C:
            self.again = True

    @property
    def age(self) -> float:
        """The number of seconds since the signal arrived."""
        return time.monotonic() - self._since

    def hand_on(self) -> None:
        """Pass the signal to the program's previous handler, if there is one; called after :meth:`restore`."""
        # Do not raise the signal if a later handler is installed: that handler would only call this inactive one.
        handler, previous = signal.getsignal(self.number), self._previous.get(self.number)
        if callable(handler) and handler is previous and handler is not signal.default_int_handler:
            signal.raise_signal(self.number)

    def seconds_left(self, grace: Duration | None) -> float:
        """Return the number of seconds left in the grace period, minus a reserve of 10 %."""
        if grace is None:
            return WITHOUT_GRACE
        return max(0.0, 0.9 * (seconds(grace) - self.age))

    def add(self, number: signal.Signals, status: int) -> None:
        """Add a signal that has its own exit status; called before :meth:`install`."""
        self._statuses[number] = status
        if number not in self.signals:
            self.signals = (*self.signals, number)

    def reached(self) -> bool:
        """Return whether to stop now. In a ``jax.distributed`` run, every process must call this after every step."""
        if not self.received and self.is_agreed and _jax_agreement.reached():
            self.request()
        self._asked += 1
        if not (self._asked & (self._asked - 1) or self._has_warned) and self.installed:
            self._warn_of_later_handlers()
        return self.received

    def _warn_of_later_handlers(self) -> None:
        for number in self._previous:
            handler = signal.getsignal(number)
            if getattr(handler, "__func__", None) is PreemptionSignal._handle:
                continue
            self._has_warned = True
            # Log only at INFO if the new handler is callable, because such a handler may call the one it replaced.
            logger.log(
                logging.INFO if callable(handler) else logging.WARNING,
                "%s goes to %s, which the program has set after it made the callback: a preemption loses the steps "
                "since the last save, unless that calls the earlier handler. Set it before: the callback calls it, too",
                signal.Signals(number).name,
                getattr(handler, "__qualname__", None) or getattr(handler, "name", handler),
            )
            return

    def install(self) -> bool:
        """Install the handler if necessary; return False outside the main thread or if JAX handles the signal."""
        if self.installed:
            return True
        self._protect_workers()
        children = multiprocessing.active_children()
        if exposed := [child for child in children if child.daemon and child not in _started]:
            logger.warning(
                "%d worker processes were started before the checkpoint callback was made: a %s to the whole job ends "
                "them, and then the step may not be saved; make the callback before anything that starts workers",
                len(exposed),
                self._names(),
            )
        if self.is_agreed:
            return False
        if threading.current_thread() is not threading.main_thread():
            if not self._has_warned:
                logger.warning(
                    "%s is not handled: signal handlers can only be installed from the main thread; "
                    "a preemption loses the steps since the last save",
                    self._names(),
                )
            self._has_warned = True
            return False
        self._process = os.getpid()
        for number in self.signals:
            if number not in _OF_TERMINALS or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return True

    def restore(self) -> None:
        """Restore the previous handlers. If a later handler still calls ours, ours only forwards the signal."""
        _watchers.discard(self)
        if not _watchers and multiprocessing.process.BaseProcess.start is _start:
            multiprocessing.process.BaseProcess.start = _original_start  # type: ignore[method-assign]
        if not self.installed:
            return
        self._process = None
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _protect_workers(self) -> None:
        """Make processes that are started from now on survive the signals."""
        _watchers.add(self)
        if multiprocessing.process.BaseProcess.start is _original_start:
            multiprocessing.process.BaseProcess.start = _start  # type: ignore[assignment, method-assign]

    def _names(self) -> str:
        return " or ".join(each.name for each in self.signals)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous, is_active = self._previous.get(number), self.installed
        if is_active:
            self.request(number)
            if number == signal.SIGHUP:
                silence_lost_streams()  # the terminal may be closed, in which case output to it would end the program
            # Python's handler would raise an error before the step is saved, so skip it for the first Ctrl-C, and for
            # repeats within a second: a terminal and a launcher may both forward the same Ctrl-C.
            if previous is signal.default_int_handler and self.age < _ONE_CTRL_C:
                return
        if callable(previous):
            previous(number, frame)
        elif not is_active and previous != signal.SIG_IGN:
            # In a forked process, or if a later handler calls this one after restore(), apply the default action.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def grace_check(grace: float) -> Callable[[Event], None]:
    """Return an event listener that warns about saves that take longer than the grace period."""
    text = (
        "saving step %s took %.1f s, longer than grace_secs=%g: after a preemption the process may be killed before "
        "its last step is durable. Save more often, ask the scheduler for more time, or save less"
    )
    return slow_saves(grace, lambda step, took: logger.warning(text, step, took, grace))


class _JaxAgreement:
    """Asks JAX whether the processes of a ``jax.distributed`` run have reached the point at which all of them stop."""

    # JAX agrees only once per connection, on one more than the largest number passed by any process, and returns True
    # only for that number. Therefore, pass the number of calls since the connection was made, across all runs. Step
    # numbers would not work: a resumed run would be far above the agreed number, and a second run of the process below
    # it. Once the point is reached, the answer stays True, because JAX does not report later signals.

    def __init__(self) -> None:
        self._connection: Any = None
        self._calls = 0
        self._reached = False

    def reached(self) -> bool:
        from jax.experimental import multihost_utils

        connection = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
        connection = getattr(connection, "preemption_sync_manager", None)
        if connection is not self._connection:
            self._connection, self._calls, self._reached = connection, 0, False
        if not self._reached:
            self._calls += 1
            self._reached = bool(multihost_utils.reached_preemption_sync_point(self._calls))
        return self._reached


_jax_agreement = _JaxAgreement()


# ---- worker processes that survive the signals of a preemption, and end with their parent process
#
# Schedulers send SIGTERM to every process of a job. The training process can save only if the worker processes that
# load its data survive the signal, too. While a callback watches for signals, this module wraps ``Process.start`` of
# ``multiprocessing``, which starts these workers: the new process then runs inside :class:`_Worker`, which ignores the
# signals regardless of the start method.
#
# ``terminate()``, called by the parent or by multiprocessing at exit, also sends SIGTERM, but announces it through a
# pipe first, so the worker then ends. A worker also ends after its parent has ended.

_INTERVAL = 1.0  # seconds between checks that the parent is alive

_watchers: weakref.WeakSet[PreemptionSignal] = weakref.WeakSet()
_started: weakref.WeakSet[multiprocessing.process.BaseProcess] = weakref.WeakSet()
_original_start = multiprocessing.process.BaseProcess.start


def _start(process: multiprocessing.process.BaseProcess) -> None:
    signals = {int(number) for watcher in list(_watchers) for number in watcher.signals}
    if not signals or vars(process).get("_popen") is not None:
        _original_start(process)
        return
    receiver, sender = multiprocessing.Pipe(duplex=False)
    # The new process inherits the signal mask, and unblocks the signals when its handlers are in place.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    vars(process)["run"] = _Worker(process.run, signals, signals - blocked, receiver)
    try:
        _original_start(process)
    finally:
        del vars(process)["run"]
        receiver.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    _started.add(process)
    popen: Any = vars(process)["_popen"]
    terminate = popen.terminate

    def announce_and_terminate() -> None:
        with contextlib.suppress(OSError):  # the worker has already ended
            sender.send_bytes(b"end")
        terminate()

    popen.terminate = announce_and_terminate


class _Worker:
    """A replacement for the ``run`` method of a process. It is picklable, as spawned processes require."""

    def __init__(self, run: Callable[[], None], signals: set[int], unblock: set[int], receiver: Connection) -> None:
        self._run = run
        self._signals = signals
        self._unblock = unblock
        self._receiver = receiver
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
        """Install the handlers again after a torch or torchdata loader has replaced them with its own C handlers."""
        module: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
        original = getattr(module, "_set_worker_signal_handlers", None)
        if original is None:
            return

        def set_handlers() -> None:
            original()
            self._status = 0  # the exit status that torch's own handler uses
            self._handle_signals()

        module._set_worker_signal_handlers = set_handlers

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._receiver.poll():
            if self._status is not None:
                os._exit(self._status)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self._follows:
            self._follows = True
            # Block the signals in the new thread, because signals sent to it would not interrupt a waiting main thread.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
            # Do not use threading.Thread, because the interrupted code may hold a lock that threading needs.
            _thread.start_new_thread(self._end_with_parent, ())
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _end_with_parent(self) -> None:
        while os.getppid() == self._parent:
            time.sleep(_INTERVAL)
        os._exit(128 + signal.SIGTERM)
