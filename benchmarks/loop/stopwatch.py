"""The times of a training program: of every step, and until everything is durable."""

from __future__ import annotations

import gc
import os
import resource
import time
from typing import TYPE_CHECKING

from ..disk import fsync_all

if TYPE_CHECKING:
    from pathlib import Path

    from . import Plan


class Stopwatch:
    """Measures from one step to the end of the program.

    A step lasts until the next one begins, so it includes everything that a callback does in between.

    Args:
        plan: Says which steps count.
        path: Where the program saves.
    """

    def __init__(self, plan: Plan, path: Path) -> None:
        self._plan = plan
        self._path = path
        self._ends: list[float] = []
        self._cpu = 0.0

    def step_ends(self, step: int) -> None:
        """Note that a step is over, and its save as far as it holds up the loop."""
        if step == self._plan.first:
            gc.collect()
            os.sync()  # what the save before has left in the page cache
            self._cpu = _cpu_seconds()
        if step >= self._plan.first:
            self._ends.append(time.perf_counter())

    def finish(self) -> dict[str, float]:
        """Return the measurements, once the program has waited for its saves."""
        if self._path.exists():
            fsync_all(self._path)
        total = time.perf_counter() - self._ends[0]
        steps = [end - start for start, end in zip(self._ends, self._ends[1:], strict=False)]
        if len(steps) != self._plan.last - self._plan.first:
            raise AssertionError(f"measured {len(steps)} steps, expected {self._plan.last - self._plan.first}")
        return {
            "worst_seconds": max(steps),
            "mean_seconds": sum(steps) / len(steps),
            "total_seconds": total,
            "cpu_seconds": _cpu_seconds() - self._cpu,
        }


def _cpu_seconds() -> float:
    """Seconds of all processors that this process and its children that have ended have taken."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
