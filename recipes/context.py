"""What the runner gives to a training program, its progress as log lines among them, and takes back from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .schema import Config

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What a program gets in addition to its configuration.

    Attributes:
        config: The checked configuration, with the keys that all recipes have, such as ``train.steps`` and ``seed``.
        run_dir: Where the run keeps its files.
        checkpoints: Where its checkpoints go: a path or a URL.
        callback_arguments: The keyword arguments for its checkpoint callback.
        log_interval: Report the progress every so many steps.
    """

    config: Config
    run_dir: Path
    checkpoints: str
    callback_arguments: dict[str, Any]
    log_interval: int

    def progress(self, start: int, total: int) -> Progress:
        """Return the report of a run that begins with `start` of `total` steps done."""
        return Progress(start, total, self.log_interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended: the steps done when it began, the steps done now, and whether it was preempted.

    A preempted run has saved, and resumes when it is run again.
    """

    start: int
    step: int
    preempted: bool
