"""Show the progress of a command on standard error: as a bar on a terminal, and as occasional lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from ..engine.clock import format_size
from .report import duration
from .streams import say

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_QUIET = 1.0  # delay before the bar appears, in seconds
_BETWEEN_LINES = 30.0  # interval between lines, in seconds
_WITH_BAR = 72  # minimum terminal width for the bar, in columns; narrower terminals show only the numbers
_BETWEEN_FRAMES = 0.1  # refresh interval, in seconds


class Meter:
    """A :class:`~holdfast.reports.Progress` that displays the number of bytes processed during a long call."""

    def __init__(self, call: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._call = call
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self._clock = clock
        self._lock = threading.Lock()
        self._expected = self._done = 0
        self._began = self._printed_at = clock()
        self._printed = 0  # number of bytes processed when the last line was printed
        self._bar: Bar | None = None

    def expect(self, nbytes: int) -> None:
        with self._lock:
            self._expected += nbytes

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes

    def tick(self) -> None:
        """Update the display if an update is due."""
        now = self._clock()
        if self._is_terminal and now - self._began >= _QUIET:
            self._draw()
        elif not self._is_terminal and now - self._printed_at >= _BETWEEN_LINES:
            self._print(now)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _draw(self) -> None:
        if self._bar is None:
            from rich import progress
            from rich.console import Console

            console = Console(file=self._stream)
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                *([progress.BarColumn(None)] if console.width >= _WITH_BAR else []),  # fills the rest of the line
                progress.TaskProgressColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
                console=console,
                expand=True,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,  # otherwise, rich would send stdout, which may be a file, to stderr
                get_time=self._clock,
            )
            self._bar.add_task(self._call, total=None)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], total=self._expected or None, completed=self._done)
        self._bar.refresh()

    def _print(self, now: float) -> None:
        rate = (self._done - self._printed) / (now - self._printed_at)
        self._printed, self._printed_at = self._done, now
        line = f"{self._call}: {format_size(self._done)} of {format_size(self._expected)}, {format_size(int(rate))}/s"
        if rate > 0:
            line += f", {duration(math.ceil((self._expected - self._done) / rate))} left"
        say(f"holdfast: {line}", file=self._stream, flush=True)


@contextlib.contextmanager
def progress_of(call: str, *, shown: bool = True) -> Iterator[Meter]:
    """Yield a meter, and display its progress with the label ``call``, such as ``copy``."""
    meter = Meter(call)
    if not shown:
        yield meter
        return
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(_BETWEEN_FRAMES):
            meter.tick()

    thread = threading.Thread(target=show, name="holdfast-progress", daemon=True)
    thread.start()
    try:
        yield meter
    finally:
        ended.set()
        try:
            thread.join()
        finally:
            meter.close()
