"""The progress of a run: a bar on a terminal, lines otherwise."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm  # type: ignore[import-untyped]  # it comes without type information

logger = logging.getLogger("holdfast.recipes")


class Progress:
    """Reports finished steps, on a bar or in lines; by default a bar on a terminal.

    Metrics may be scalars on a device: they are fetched only when they are reported, so that the loop does not wait in
    between.
    """

    def __init__(self, start: int, total: int, interval: int, *, bar: bool | None = None) -> None:
        self._last = self._reported = start
        self._total = total
        self._interval = interval
        self._reported_at = time.monotonic()
        shown = sys.stdout.isatty() and sys.stderr.isatty() if bar is None else bar
        self._bar: Any = None
        if shown and start < total:
            # tqdm's default lock is a semaphore shared between processes, which leaks when a run is killed.
            tqdm.set_lock(threading.RLock())
            self._bar = tqdm(initial=start, total=total, unit=" steps", dynamic_ncols=True, leave=True)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Report that a step is finished, with its metrics."""
        previous, self._last = self._last, step
        due = step // self._interval != previous // self._interval or step >= self._total
        if self._bar is not None:
            if due:
                self._bar.set_postfix_str(_format_metrics(metrics), refresh=False)
            self._bar.update(step - previous)
        elif due:
            now = time.monotonic()
            rate = (step - self._reported) / max(now - self._reported_at, 1e-9)
            self._reported, self._reported_at = step, now
            logger.info(
                "step %d of %d: %s (%s steps/s)",
                step,
                self._total,
                _format_metrics(metrics),
                f"{rate:.{0 if rate >= 10 else 1}f}",
            )

    def close(self) -> None:
        """Leave the bar as it is, so that lines can follow it."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _format_metrics(metrics: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {float(value):.4f}" for name, value in metrics.items())
