"""The observer inside a program started by ``holdfast supervise`` or ``holdfast drill``.

``cli/program.py`` puts the name of :func:`observer` in the program's environment, and ``process_observer`` in
``engine/observer.py`` calls that function in each of the program's processes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..engine.manager import EVENTS, finite
from ..engine.observer import DRILL, Observer, Point
from ..engine.storage import append_line

ENTRY = f"{__name__}:observer"
SUPERVISOR = "HOLDFAST_SUPERVISOR"  # environment variable that contains the path of the folder to report to
STACKS = getattr(signal, "SIGRTMAX", 64) - 5  # signal that makes a supervised process dump its thread stacks
BEAT = struct.Struct("=dq")  # heartbeat: monotonic time in seconds, and step (-1 before the first step)

_logger = logging.getLogger("holdfast")


def observer() -> Observer:
    """Return this process's observer: a heartbeat or, under ``holdfast drill``, a rehearsal with a heartbeat."""
    heartbeat = Observer()
    if folder := os.environ.get(SUPERVISOR):
        try:
            heartbeat = Heartbeat(Path(folder))
        except OSError as error:
            _logger.warning("%s=%s: cannot tell the supervisor about this run: %s", SUPERVISOR, folder, error)
    if folder := os.environ.get(DRILL):
        from .drill.rehearsal import Rehearsal

        return Rehearsal(Path(folder), heartbeat)
    return heartbeat


class Heartbeat(Observer):
    """Reports this process's progress and events to a supervisor, and dumps the thread stacks on request."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"heartbeat.{os.getpid()}"
        path.write_bytes(BEAT.pack(time.monotonic(), -1))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), BEAT.size)
        self._events = folder / EVENTS
        self._step = -1
        if sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # stderr may have no file descriptor
                faulthandler.register(STACKS, all_threads=True)
                (folder / f"stacks.{os.getpid()}").touch()

    def reached(self, point: Point, step: int | None) -> None:
        if point == "step" and step is not None:
            self._step = step
        BEAT.pack_into(self._memory, 0, time.monotonic(), self._step)

    def event(self, event: Mapping[str, Any]) -> None:
        append_line(self._events, json.dumps(finite(event), default=str))
