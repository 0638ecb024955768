"""The progress of a run, as log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("holdfast.recipes")


class Progress:
    """Logs finished steps.

    Metrics may be scalars on a device: they are fetched only for a line, so that the loop does not wait in between.

    Args:
        start: The steps that were done before.
        total: The steps of the run.
        interval: Log a line every so many steps, and at the end.
    """

    def __init__(self, start: int, total: int, interval: int) -> None:
        self._last = self._logged = start
        self._total = total
        self._interval = interval
        self._logged_at = time.monotonic()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Report that a step is finished, with its metrics."""
        previous, self._last = self._last, step
        if step // self._interval == previous // self._interval and step < self._total:
            return
        now = time.monotonic()
        rate = (step - self._logged) / max(now - self._logged_at, 1e-9)
        self._logged, self._logged_at = step, now
        shown = ", ".join(f"{name} {float(value):.4f}" for name, value in metrics.items())
        steps_per_second = f"{rate:.{0 if rate >= 10 else 1}f}"
        logger.info("step %d of %d: %s (%s steps/s)", step, self._total, shown, steps_per_second)
