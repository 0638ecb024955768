"""The events of a run, in the file ``events.jsonl`` of its directory, and what watches the process from outside.

The events are for people, reports and supervisors. Nothing that holdfast does depends on them: a file that cannot be
written or read is no error, a line that a crash cut off is skipped, and object stores have no such file.

A *watcher* is told of the points that a training loop passes. ``holdfast supervise`` starts a program with an
environment variable, and only then does its process have a watcher.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import math
import mmap
import os
import signal
import socket
import struct
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from ..clock import Clock
from ..storage import Location

_logger = logging.getLogger("holdfast")

EVENTS = "events.jsonl"  # name of the file
ROTATED = "events.1.jsonl"  # what it is called when it has reached its limit
_LIMIT = 8 << 20  # bytes
_EARLY = 8  # events that are kept before the run owns its directory

SUPERVISOR = "HOLDFAST_SUPERVISOR"  # environment variable: the folder in which a supervisor listens
STACKS = getattr(signal, "SIGRTMAX", 64) - 5  # signal to a supervised process that asks for the stacks of its threads
BEAT = struct.Struct("=dq")  # a heartbeat: seconds on the system's monotonic clock, and the step; -1 before the first

Point = Literal["step", "batch", "validation", "restored", "saving", "commit", "committed"]
"""A point that a run passes: ``step`` after an update, ``commit`` right before the commit record of a step is written,
``committed`` after it; ``saving`` when the files of a step are about to be written in the background."""


class Watcher(Protocol):
    """Something that is told of the points that the run in this process passes."""

    def reached(self, point: Point, step: int | None) -> None:
        """Take note of a point; on the thread that passes it."""
        ...


_watchers: list[Watcher] = []
_supervisor: Path | None = None
_looked = False


def reached(point: Point, step: int | None = None) -> None:
    """Tell the watchers that a point is reached; costs nothing where there are none."""
    for watcher in _watchers:
        watcher.reached(point, step)


def find_watchers() -> None:
    """Find out, once, whether a supervisor watches this process."""
    global _looked, _supervisor
    if _looked:
        return
    _looked = True
    if folder := os.environ.get(SUPERVISOR):
        try:
            _watchers.append(_Heartbeat(Path(folder)))
            _supervisor = Path(folder)
        except OSError as error:
            _logger.warning("%s=%s: the supervisor cannot be told of this run: %s", SUPERVISOR, folder, error)


class _Heartbeat:
    """Shows a supervisor that this process makes progress, and prints the stacks of its threads if asked to."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"heartbeat.{os.getpid()}"
        path.write_bytes(BEAT.pack(time.monotonic(), -1))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), BEAT.size)
        self._step = -1
        if sys.stderr is not None and hasattr(faulthandler, "register"):
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # such as a stderr without a descriptor
                faulthandler.register(STACKS, all_threads=True)
                (folder / f"stacks.{os.getpid()}").touch()

    def reached(self, point: Point, step: int | None) -> None:
        if point == "step" and step is not None:
            self._step = step
        BEAT.pack_into(self._memory, 0, time.monotonic(), self._step)


class RunEvents:
    """Appends the events of one run to the file in its directory, and tells a supervisor of them.

    Every line is a JSON object with ``event``, ``time`` (seconds since 1970-01-01 UTC), ``run`` (a token of this start
    of the program), and what belongs to the event:

    ===============  ==================================================================================
    ``started``      the run has taken its directory: ``newest`` step that is there or null, ``pid``, ``host``
    ``restored``     ``step``, and ``skipped``: newer steps that are damaged, each with what is wrong
    ``saved``        ``step``, ``reason``, ``bytes``, ``blocked_seconds``, ``total_seconds``
    ``save_failed``  ``step``, ``error``
    ``preempted``    the run was asked to stop, and has saved ``step``
    ``finished``     training ended by itself after ``step``
    ``failed``       training ended with an exception: ``error``
    ===============  ==================================================================================
    """

    def __init__(self, directory: Location, clock: Clock, process: int) -> None:
        self._directory = directory
        self._clock = clock
        self._process = process
        self._run = uuid.uuid4().hex[:12]
        self._writes = process == 0 and directory.is_local
        self._began = False
        self._logged = False
        self._early: list[dict[str, Any]] = []  # before the run owns its directory

    def begin(self, newest: int | None) -> None:
        """Note that the run has taken its directory, in which ``newest`` is the newest step."""
        if self._writes:
            with self._only_logged():
                _cut_torn_line(self._directory.path / EVENTS)
        early, self._early = self._early, []
        self._began = True
        self.write("started", newest=newest, pid=os.getpid(), host=socket.gethostname())
        for event in early:
            self._append(event)

    def write(self, event: str, **facts: Any) -> None:
        """Append an event; never raises."""
        if not self._writes and _supervisor is None:
            return
        line = {"event": event, "time": self._clock.now(), "run": self._run, **facts}
        if self._began:
            self._append(line)
        else:
            self._early = [*self._early, line][-_EARLY:]

    def _append(self, event: Mapping[str, Any]) -> None:
        with self._only_logged():
            text = json.dumps(_finite(event), default=str)
            if _supervisor is not None:
                told = {**json.loads(text), "directory": self._directory.url, "process": self._process}
                append_line(_supervisor / EVENTS, json.dumps(told))
            if self._writes:
                append_line(self._directory.path / EVENTS, text, limit=_LIMIT)

    @contextlib.contextmanager
    def _only_logged(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, TypeError) as error:
            if not self._logged:
                self._logged = True
                _logger.info("%s: %s cannot be written, and lacks events: %s", self._directory, EVENTS, error)


def append_line(path: Path, text: str, *, limit: int | None = None) -> None:
    """Append a line with one write; a file beyond its limit begins anew, and the lines before it are kept once."""
    if limit is not None and path.exists() and path.stat().st_size > limit:
        path.replace(path.with_name(ROTATED))
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        os.write(descriptor, f"{text}\n".encode())
    finally:
        os.close(descriptor)


def read_events(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Read the events in a file from an offset on; return them and the offset to go on from.

    A last line without its end is left for the next call, and a line that is no event is skipped.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read()
    except OSError:
        return [], offset
    end = content.rfind(b"\n") + 1
    found = []
    for line in content[:end].splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                found.append(event)
    return found, offset + end


def _cut_torn_line(path: Path) -> None:
    """Remove a last line that a crash has cut off, so that the next one begins on a line of its own."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - (1 << 16)))
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)


def _finite(value: Any) -> Any:
    """Return what strict JSON can hold: null for NaN and infinities."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
