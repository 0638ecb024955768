"""The data that the runner gives to a training program and takes back from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .progress import Progress
from .schema import Config


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
