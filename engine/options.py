"""What a checkpoint manager can be told, and the policies that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .durations import Duration, seconds
from .errors import OptionError
from .policy import (
    EverySeconds,
    EverySteps,
    KeepAll,
    KeepBest,
    KeepLatest,
    KeepPeriod,
    KeepPinned,
    KeepSteps,
    KeepTimeInterval,
    KeepWithoutMetrics,
    OnBest,
    Rule,
    Trigger,
)


@dataclass(frozen=True, kw_only=True)
class CheckpointManagerOptions:
    """When a manager saves and which checkpoints it keeps.

    A step is saved when any trigger asks for it, and kept when any rule wants it; the newest is always kept.

    Attributes:
        save_interval_steps: Save whenever the step passes a multiple of this; None saves on other triggers only.
        save_interval_secs: Save when this much time has passed since the last save: seconds, or ``"15m"``, ``"1h"``.
        save_on_best: Save when the metric is better than at every checkpoint so far; needs ``best_fn``.
        max_to_keep: With ``best_fn``, keep this many of the best checkpoints; without, this many of the newest. None
            keeps all.
        keep_latest: Keep this many of the newest checkpoints as well, best or not.
        keep_period: Never delete a checkpoint whose step is a multiple of this.
        keep_time_interval: Never delete a checkpoint that was saved at least this long after the last one kept by this
            rule; roughly one an hour for ``"1h"``.
        keep_steps: Never delete these steps.
        best_fn: Name of the metric that ranks checkpoints, or a function of the metrics.
        best_mode: Whether the largest or the smallest value is best.
        keep_checkpoints_without_metrics: Never delete checkpoints without metrics. By default they are kept or deleted
            by the other rules.
        step_prefix: Steps live in directories named ``<step_prefix>_<step>`` instead of ``<step>``; a prefix that ends
            in ``-`` needs no underscore.
        read_only: Only look: nothing is saved, deleted or swept, and the directory may belong to another run.
        save_timeout_secs: How long waiting for a save may take before it is an error: seconds, or ``"10m"``.
        barrier_timeout_secs: How long a process waits for the others of its program before that is an error that names
            them: seconds, or ``"10m"``.
    """

    save_interval_steps: int | None = 1
    save_interval_secs: Duration | None = None
    save_on_best: bool = False
    max_to_keep: int | None = None
    keep_latest: int | None = None
    keep_period: int | None = None
    keep_time_interval: Duration | None = None
    keep_steps: Collection[int] = ()
    best_fn: str | Callable[[Mapping[str, Any]], float] | None = None
    best_mode: Literal["max", "min"] = "max"
    keep_checkpoints_without_metrics: bool = False
    step_prefix: str | None = None
    read_only: bool = False
    save_timeout_secs: Duration = "1h"
    barrier_timeout_secs: Duration = "10m"

    def __post_init__(self) -> None:
        if self.save_on_best and self.best_fn is None:
            raise OptionError("save_on_best=True needs best_fn: the name of a metric, or a function of the metrics")
        if self.step_prefix is not None and (not self.step_prefix or set("/\\\0") & set(self.step_prefix)):
            raise OptionError(f"step_prefix={self.step_prefix!r} cannot be part of a directory's name")
        for name in ("save_interval_steps", "max_to_keep", "keep_latest", "keep_period"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise OptionError(f"{name}={value!r} must be a whole number of at least 1, or None")
        if self.best_mode not in ("max", "min"):
            raise OptionError(f"best_mode={self.best_mode!r} must be 'max' or 'min'")
        if not isinstance(self.keep_steps, Collection) or isinstance(self.keep_steps, str):
            raise OptionError(f"keep_steps={self.keep_steps!r} must be a collection of steps")
        seconds(self.save_timeout_secs, name="save_timeout_secs")
        seconds(self.barrier_timeout_secs, name="barrier_timeout_secs")
        self.triggers()
        self.rules()

    def triggers(self) -> tuple[Trigger, ...]:
        """Returns what makes a save due."""
        found: list[Trigger] = []
        if self.save_interval_steps is not None:
            found.append(EverySteps(self.save_interval_steps))
        if self.save_interval_secs is not None:
            found.append(EverySeconds(seconds(self.save_interval_secs, name="save_interval_secs")))
        if self.save_on_best and self.best_fn is not None:
            found.append(OnBest(self.best_fn, self.best_mode))
        return tuple(found)

    def rules(self) -> tuple[Rule, ...]:
        """Returns what keeps a checkpoint; without any limit, everything is kept."""
        limited = self._limited()
        return (*limited, KeepAll()) if self.max_to_keep is None and self.keep_latest is None else limited

    def _limited(self) -> tuple[Rule, ...]:
        found: list[Rule] = []
        if self.best_fn is not None:
            found.append(KeepBest(self.max_to_keep or 1, self.best_fn, self.best_mode))
        elif self.max_to_keep is not None:
            found.append(KeepLatest(self.max_to_keep))
        if self.keep_latest is not None:
            found.append(KeepLatest(self.keep_latest))
        if self.keep_period is not None:
            found.append(KeepPeriod(self.keep_period))
        if self.keep_time_interval is not None:
            found.append(KeepTimeInterval(seconds(self.keep_time_interval, name="keep_time_interval")))
        if self.keep_steps:
            found.append(KeepSteps(frozenset(self.keep_steps)))
        if self.keep_checkpoints_without_metrics:
            found.append(KeepWithoutMetrics())
        return (*found, KeepPinned())

    def to_document(self) -> dict[str, Any]:
        """Returns the retention rules as JSON, for those who look at the directory later."""
        return {
            "max_to_keep": self.max_to_keep,
            "keep_latest": self.keep_latest,
            "keep_period": self.keep_period,
            "keep_time_interval": None
            if self.keep_time_interval is None
            else seconds(self.keep_time_interval, name="keep_time_interval"),
            "keep_steps": sorted(self.keep_steps),
            "best_fn": self.best_fn if isinstance(self.best_fn, str) else None,
            "best_mode": self.best_mode,
            "keep_checkpoints_without_metrics": self.keep_checkpoints_without_metrics,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> CheckpointManagerOptions:
        """Reads what :meth:`to_document` wrote; what is unknown is left out.

        Raises:
            OptionError: A value makes no sense.
        """
        known = cls().to_document().keys()
        try:
            return cls(read_only=True, **{name: value for name, value in document.items() if name in known})
        except (TypeError, AttributeError) as error:
            raise OptionError(f"these are no options of a checkpoint manager: {error}") from error
