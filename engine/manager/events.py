"""The events of a run, stored in ``events.jsonl`` in its directory.

Users, reports and supervisors read the events, and ``save_interval_secs="auto"`` learns from them. Nothing else depends
on them, so file errors are ignored, and readers skip incomplete lines. Runs in object stores have no events file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from ..clock import Clock
from ..errors import PREEMPTED
from ..forks import Lock
from ..observer import Observer
from ..storage import Location, append_line, open_own

_logger = logging.getLogger("holdfast")

EVENTS = "events.jsonl"  # name of the events file
ROTATED = "events.1.jsonl"  # name of the events file after rotation
_LIMIT = 8 << 20  # size in bytes at which the file is rotated
_MOST = 8 * _LIMIT  # maximum number of bytes read from a file
_METRICS = 64  # maximum number of metrics in an event
_PREEMPTED = (PREEMPTED, 128 + signal.SIGTERM)  # exit statuses of a preempted program
_EARLY = 8  # maximum number of events buffered until the run owns its directory

_PROGRAM = os.urandom(6).hex()  # identifies this process; a PID would not, because PIDs are reused

T = TypeVar("T")
Event = Mapping[str, Any]
"""An event, parsed from one line of the file; :class:`RunEvents` describes the format."""


class RunEvents:
    """Appends a run's events to the file in its directory, and passes them to listeners and to an observer.

    Every line is a JSON object with ``event``, ``time`` (seconds since 1970-01-01 UTC), ``run`` (a random token that
    identifies the manager), and the fields that ``docs/events.md`` lists for each event.
    """

    def __init__(self, directory: Location, clock: Clock, process: int, observer: Observer) -> None:
        self.has_callback = False  # whether a callback reports the end of training
        self._directory = directory
        self._clock = clock
        self._process = process
        self._observer = observer
        self._run = os.urandom(6).hex()
        self._file = directory.path / EVENTS if process == 0 and directory.is_local else None
        self._has_ended = False  # whether the program has reported the end of training
        self._logged = False
        self._early: list[dict[str, Any]] | None = []  # buffered events; None once the run owns its directory
        self._listeners: list[Callable[[dict[str, Any]], None]] = []

    def add_listener(self, listener: Callable[[dict[str, Any]], object]) -> None:
        """Register a function that is called with every event, for example to forward events to a logger.

        The listener runs on the thread that produces the event; for ``saved``, this is the background thread that
        writes the checkpoint. If several processes save, listeners are called only on process 0. Errors in the listener
        are logged, the first one as a warning, and have no other effect.

        Args:
            listener: A function that takes the event as a dictionary.

        >>> import tempfile
        >>> from holdfast import CheckpointManager
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with CheckpointManager(directory) as manager:
        ...         manager.events.add_listener(lambda event: print(event["event"], event.get("step")))
        ...         _ = manager.save(7, {"w": 1.0})
        started None
        saved 7
        """
        self._listeners.append(guarded(listener))

    def earlier(self) -> list[dict[str, Any]]:
        """Return the stored events, oldest first, or an empty list for a run in an object store."""
        return read_run_events(self._directory)

    def begin(self, newest: int | None) -> None:
        """Record that the run has acquired its directory, in which ``newest`` is the newest step."""
        if self._file is not None:
            with self._only_logged():
                _cut_torn_line(self._file)
        early, self._early = self._early or [], None
        pid = os.getpid()
        self.write("started", newest=newest, pid=pid, host=os.uname().nodename, program=f"{_PROGRAM}.{pid}")
        for event in early:
            self._append(event)

    def write(self, event: str, **facts: Any) -> None:
        """Append an event. This method never raises an error."""
        self._has_ended |= event in ("finished", "preempted", "failed")
        line = {"event": event, "time": self._clock.now(), "run": self._run, **facts}
        if self._early is None:
            self._append(line)
        else:
            self._early = [*self._early, line][-_EARLY:]

    def end(self, step: int | None, error: BaseException | None) -> None:
        """Record that the manager has been closed, unless a callback reports the end in more detail."""
        if self._early is not None or self.has_callback or self._has_ended:
            return
        status = error.code if isinstance(error, SystemExit) else None
        if error is None or (isinstance(error, SystemExit) and status in (None, 0)):
            self.write("closed", step=step)
        elif status in _PREEMPTED:
            self.write("preempted", step=step)
        else:
            self.write("failed", step=step, error=described(error))

    def _append(self, event: Event) -> None:
        if self._process == 0:
            for listener in self._listeners:
                listener(dict(event))
        with self._only_logged():
            self._observer.event({**event, "directory": self._directory.url, "process": self._process})
            if self._file is not None:
                _append(self._file, event)

    @contextlib.contextmanager
    def _only_logged(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, TypeError) as error:
            if not self._logged:
                self._logged = True
                _logger.info("%s: %s cannot be written, and lacks events: %s", self._directory, EVENTS, error)


def slow_saves(limit: float, report: Callable[[Any, float], object]) -> Callable[[Event], None]:
    """Return a listener that reports a save longer than ``limit`` seconds, unless the previous save was also slow."""
    was_slow = False

    def listen(event: Event) -> None:
        nonlocal was_slow
        if event["event"] != "saved":
            return
        took = number_in_event(event.get("total_seconds")) or 0.0
        if took > limit and not was_slow:
            report(event.get("step"), took)
        was_slow = took > limit

    return listen


def guarded(listener: Callable[[T], object], name: str | None = None) -> Callable[[T], None]:
    """Wrap a listener so that its errors are only logged, the first one as a warning."""
    warned = False
    shown = name or getattr(listener, "__qualname__", type(listener).__qualname__)

    def call(value: T) -> None:
        nonlocal warned
        try:
            listener(value)
        except Exception as error:
            text = "the listener %s failed, and is called again at the next event; nothing else depends on it: %s: %s"
            _logger.log(logging.DEBUG if warned else logging.WARNING, text, shown, type(error).__name__, error)
            warned = True

    return call


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


def event_scalars(event: Event) -> dict[str, float]:
    """Return the numbers in an event that a logger can plot over steps, or an empty dictionary if there are none.

    Args:
        event: An event as passed to a listener of ``manager.events``.

    Returns:
        For ``saved``: ``checkpoint/bytes``, ``checkpoint/shared_bytes``, ``checkpoint/blocked_seconds`` and
        ``checkpoint/total_seconds``. For ``restored``: ``checkpoint/restore_seconds`` and ``checkpoint/skipped``, the
        number of damaged steps. For ``save_failed``, ``preempted`` and ``failed``: ``checkpoint/<event>``, which is 1.

    >>> event_scalars({"event": "restored", "step": 7, "seconds": 0.5, "skipped": []})
    {'checkpoint/restore_seconds': 0.5, 'checkpoint/skipped': 0}
    """
    name = event["event"]
    if name == "saved":
        scalars = {key: event.get(key) for key in ("bytes", "shared_bytes", "blocked_seconds", "total_seconds")}
    elif name == "restored":
        scalars = {"restore_seconds": event.get("seconds"), "skipped": len(event.get("skipped") or ())}
    else:
        scalars = {name: 1} if name in ("save_failed", "preempted", "failed") else {}
    return {f"checkpoint/{key}": value for key, value in scalars.items() if isinstance(value, int | float)}


def few(metrics: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return at most ``_METRICS`` metrics for an event, excluding long lists, or None if there are none."""
    pairs = (metrics or {}).items()
    short = ((name, value) for name, value in pairs if not isinstance(value, list) or len(value) <= _METRICS)
    return dict(islice(short, _METRICS)) or None


_rotating = Lock()


def _append(path: Path, event: Event) -> None:
    """Append an event; if the file exceeds its size limit, rotate it first, keeping one old file."""
    with _rotating:
        if path.exists() and path.stat().st_size > _LIMIT:
            path.replace(path.with_name(ROTATED))
    append_line(path, json.dumps(finite(event), default=str))


def read_events(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Return the events in the complete lines after a byte offset, and the offset for the next read."""
    try:
        with open(open_own(path, os.O_RDONLY), "rb") as file:
            offset = max(offset, os.fstat(file.fileno()).st_size - _MOST)
            file.seek(offset)
            content = file.read(_MOST)
    except OSError:
        return [], offset
    end = content.rfind(b"\n") + 1
    events = []
    for line in content[:end].splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                events.append(event)
    return events, offset + end


def read_run_events(directory: Location) -> list[dict[str, Any]]:
    """Return all events in a run's directory, oldest first."""
    if not directory.is_local:
        return []
    return [event for name in (ROTATED, EVENTS) for event in read_events(directory.path / name)[0]]


def has_finished(path: Path) -> bool:
    """Return whether the events show that training has finished, ignoring events written by later commands."""
    for event in reversed(read_events(path)[0]):
        if event["event"] == "ended" and event.get("how") == "finished":
            return True
        if event["event"] in ("finished", "preempted", "failed", "saved", "restored", "ended"):
            return bool(event["event"] == "finished")
    return False


def append_after_death(path: Path, event: Event) -> None:
    _cut_torn_line(path)
    _append(path, event)


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with open(open_own(path, os.O_RDWR), "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - (1 << 16)))
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)


def finite(value: Any) -> Any:
    """Convert a value to a form that strict JSON can represent, replacing NaN and infinities with None."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def number_in_event(value: Any) -> float | None:
    """Convert a time, duration, step or byte count to float; return None if the value is not a valid number."""
    return float(value) if isinstance(value, int | float) and type(value) is not bool and 0 <= value < 2**63 else None
