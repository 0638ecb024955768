"""The options that every training callback takes, in one list."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..engine.errors import OptionError
from ..engine.handlers import PyTreeCheckpointHandler
from ..engine.options import CheckpointManagerOptions
from ..engine.storage import as_location

if TYPE_CHECKING:
    from ..engine.checkpointer import Place
    from ..engine.durations import Duration

BestMode = Literal["max", "min"]
Resume = Literal["auto", "must", "never"]
BestFn = str | Callable[[Mapping[str, Any]], float]

DEFAULT_INTERVAL = "15m"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallbackOptions:
    """When a callback saves, what it keeps, and whether it resumes.

    The triggers add up: a step is saved when any of them says so. With none of the three given, a checkpoint is
    saved every 15 minutes. The retention rules add up, too: a step is kept when any of them wants it.

    Attributes:
        save_interval_steps: Save every so many steps.
        save_interval_secs: Save when so much time has passed since the last save: seconds, or ``"15m"``, ``"1h"``.
        save_on_best: Save when the metric is better than at every earlier checkpoint; needs ``best_fn``.
        save_at_end: Save the last step when training ends, whatever the triggers say.
        best_fn: The metric that tells which step is best: its name, or a function of the metrics.
        best_mode: Whether the best value of the metric is the largest or the smallest.
        max_to_keep: Keep so many checkpoints: the best ones with ``best_fn``, the newest ones without; None for all.
        keep_latest: Keep so many of the newest checkpoints, best or not.
        keep_period: Keep every checkpoint whose step is a multiple of this.
        keep_time_interval: Keep one checkpoint in every such span of time.
        keep_steps: Keep these steps.
        resume: ``"auto"`` resumes if there is something to resume from, ``"must"`` raises if there is not, and
            ``"never"`` raises if there is.
        init_from: The checkpoint that a fresh start takes its weights from, or None.
        compression: Compress arrays with zstd at this level, 1 to 22; None does not.
    """

    save_interval_steps: int | None = None
    save_interval_secs: Duration | None = None
    save_on_best: bool = False
    save_at_end: bool = True
    best_fn: BestFn | None = None
    best_mode: BestMode = "max"
    max_to_keep: int | None = None
    keep_latest: int | None = None
    keep_period: int | None = None
    keep_time_interval: Duration | None = None
    keep_steps: Collection[int] = ()
    resume: Resume = "auto"
    init_from: Place | None = None
    compression: int | None = None

    def __post_init__(self) -> None:
        if self.init_from is not None:
            as_location(self.init_from)  # whether it is a place at all
        if self.resume not in get_args(Resume):
            close = difflib.get_close_matches(str(self.resume), get_args(Resume), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise OptionError(f"resume={self.resume!r} is not one of 'auto', 'must', 'never'{hint}")
        if self.save_on_best and self.best_fn is None:
            raise OptionError("save_on_best=True needs best_fn=: the name of the metric, or a function of the metrics")
        self.manager_options()
        self.tree_handler()

    def tree_handler(self) -> PyTreeCheckpointHandler:
        """Returns what saves a tree as these options say.

        Raises:
            OptionError: A value makes no sense.
        """
        return PyTreeCheckpointHandler(compression=self.compression)

    def manager_options(self) -> CheckpointManagerOptions:
        """Returns the same for a :class:`~holdfast.CheckpointManager`.

        Raises:
            OptionError: A value makes no sense.
        """
        interval = self.save_interval_secs
        if interval is None and self.save_interval_steps is None and not self.save_on_best:
            interval = DEFAULT_INTERVAL
        return CheckpointManagerOptions(
            save_interval_steps=self.save_interval_steps,
            save_interval_secs=interval,
            save_on_best=self.save_on_best,
            best_fn=self.best_fn,
            best_mode=self.best_mode,
            max_to_keep=self.max_to_keep,
            keep_latest=self.keep_latest,
            keep_period=self.keep_period,
            keep_time_interval=self.keep_time_interval,
            keep_steps=self.keep_steps,
        )
