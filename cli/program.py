"""Run another program as a child process: start, watch and signal it, and end it with all its descendants.

The child's environment names an observer (``cli/child.py``), which writes events and heartbeats to a folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from ..engine.errors import OptionError
from ..engine.manager import EVENTS, read_events
from ..engine.observer import OBSERVER
from .child import BEAT, ENTRY, STACKS, SUPERVISOR

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_TICK = 0.25  # polling interval for the child's events and heartbeats, in seconds
_SUBREAPER, _DEATH_SIGNAL = 36, 1  # options of prctl(2)
_libc = ctypes.CDLL(None)


class Signals:
    """A context manager that collects the signals to forward. Each signal interrupts :meth:`sleep`."""

    def __init__(self) -> None:
        self.received: list[int] = []  # in order of arrival; callers remove the signals that they have handled
        self._previous: dict[int, Any] = {}
        self._sockets = socket.socketpair()

    def __enter__(self) -> Self:
        for end in self._sockets:
            end.setblocking(False)
        for number in FORWARDED:
            self._previous[number] = signal.signal(number, lambda number, _: self.received.append(number))
        self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)  # interrupts sleep()
        self._wakeup = signal.set_wakeup_fd(self._sockets[1].fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, previous in self._previous.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        for end in self._sockets:
            end.close()

    def sleep(self, seconds: float) -> None:
        """Sleep for a number of seconds, or until a signal arrives or a child process ends."""
        read = self._sockets[0]
        if select.select([read], [], [], max(0.0, seconds))[0]:
            with contextlib.suppress(BlockingIOError):
                read.recv(4096)


class Program:
    """A command that runs in its own process group. Its processes write events and heartbeats to ``folder``."""

    # On Linux, this process is a subreaper: it adopts the command's descendants when their parents die. `sweep` can
    # therefore end all of them, even torchrun workers, which run in their own sessions.

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        signals: Signals,
        environment: Mapping[str, str] | None = None,
        output: IO[bytes] | None = None,
    ) -> None:
        self._folder = folder
        self._signals = signals
        self._offset = 0
        self._others = {*_children(os.getpid())}  # children of this process that existed before the program
        self.began = time.monotonic()
        self.forwarded: list[int] = []
        _prctl(_SUBREAPER, 1)
        parent = os.getpid()

        def die_with_parent() -> None:  # Python code is safe between fork and exec, because there is only one thread
            _prctl(_DEATH_SIGNAL, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(128 + signal.SIGTERM)

        with contextlib.suppress(OSError):  # a stream may be a pipe whose reader has exited
            sys.stdout.flush()
            sys.stderr.flush()
        observed = {OBSERVER: ENTRY, SUPERVISOR: str(folder)}
        # A background process group must not read from a terminal. If stdin is a terminal, use /dev/null instead.
        try:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONFAULTHANDLER": "1", **(environment or {}), **observed},
                stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
                stdout=output,
                stderr=output,
                process_group=0,
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )
        except OSError as error:
            raise OptionError(f"cannot start {command[0]}: {error.strerror or error}") from error
        self.pid = self._process.pid

    def new_events(self) -> list[dict[str, Any]]:
        """Return the events written by the program since the last call."""
        events, self._offset = read_events(self._folder / EVENTS, self._offset)
        return events

    def wait(self, look: Callable[[], bool], limit: float | None = None) -> int | None:
        """Forward signals until the program ends, ``look()`` is true or ``limit`` seconds pass; return its status."""
        until = None if limit is None else time.monotonic() + limit
        while (status := self._process.poll()) is None:
            while self._signals.received:
                number = self._signals.received.pop(0)
                self.forwarded.append(number)
                self._process.send_signal(number)  # not to the process group, because the command may forward signals
            if look() or (until is not None and time.monotonic() >= until):
                return self._process.poll()
            self._signals.sleep(_TICK if until is None else min(_TICK, until - time.monotonic()))
        return status

    def last_sign(self) -> tuple[float, int]:
        """Return the monotonic time of the last sign of progress, and the newest step (-1 before the first step)."""
        contents = (path.read_bytes() for path in self._folder.glob("heartbeat.*"))
        beats = [BEAT.unpack(content) for content in contents if len(content) == BEAT.size]
        return max((when for when, _ in beats), default=self.began), max((step for _, step in beats), default=-1)

    def end_after_hang(self, grace: float, between: float) -> int:
        """Dump the program's thread stacks twice, ``between`` seconds apart, then end it and return its status."""
        alive = {self.pid, *_descendants(self.pid)}
        asked = [pid for path in self._folder.glob("stacks.*") if (pid := int(path.suffix[1:])) in alive]
        for _ in range(2):
            for pid in asked:
                _kill(pid, STACKS)
            status = self.wait(lambda: False, between if asked else 0.0)
            if status is not None:
                return status
        if not asked:  # faulthandler dumps the stacks on SIGABRT and ends the process
            self._process.send_signal(signal.SIGABRT)
            self.wait(lambda: False, 1.0)
        return self.end(grace)

    def end(self, grace: float) -> int:
        """Send SIGTERM to the program and, after ``grace`` seconds, SIGKILL to all its processes; return its status."""
        self._process.send_signal(signal.SIGTERM)
        if self.wait(lambda: False, grace) is None:
            for pid in _descendants(self.pid):
                _kill(pid, signal.SIGKILL)
            self._process.kill()
        return self._process.wait()

    def sweep(self, grace: float) -> list[int]:
        """End leftover processes of the program, because they may hold devices or directories. Return their PIDs."""
        left = self._left()
        for number, limit in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
            for pid in left:
                _kill(pid, number)
            until = time.monotonic() + limit
            while self._left() and time.monotonic() < until:
                self._signals.sleep(0.05)
        return left

    def _left(self) -> list[int]:
        """Reap processes that the program left behind, and return the PIDs of those still running."""
        for pid in (left := set(_children(os.getpid())) - {*self._others, self.pid}):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return sorted(left.intersection(_children(os.getpid())))


def shell_status(returncode: int) -> int:
    """Convert a ``subprocess`` return code to a shell exit status, such as 137 after SIGKILL."""
    return returncode if returncode >= 0 else 128 - returncode


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _parents() -> Iterator[tuple[int, int]]:
    """Yield (PID, parent PID) for all processes on this system, or nothing on systems without ``/proc``."""
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = Path("/proc", name, "stat").read_bytes()
                yield int(name), int(stat[stat.rindex(b")") + 2 :].split()[1])


def _children(pid: int) -> list[int]:
    return [child for child, parent in _parents() if parent == pid]


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    descendants = list(children.get(pid, ()))
    for descendant in descendants:
        descendants += children.get(descendant, ())
    return descendants


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)
