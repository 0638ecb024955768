"""When to save: pure triggers that look at one moment of a training loop, and the decision that follows from all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ..clock import format_duration
from .metrics import Metric, Mode, better, format_metric, metric_name, metric_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .retention import StepInfo


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to save now; true in a condition when so.

    Attributes:
        save: Whether to save.
        reason: Why, or why not, for people.
    """

    save: bool
    reason: str

    def __bool__(self) -> bool:
        return self.save


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One moment of a training loop, as the triggers see it."""

    step: int  # the number of optimizer updates done
    # The step of the last save or restore, or the one before the run began; None if there is none.
    previous: int | None = None
    now: float = 0.0  # the monotonic clock, in seconds
    # The monotonic clock at the last save or at the start of the run; None leaves time out of it.
    last: float | None = None
    metrics: Mapping[str, Any] | None = None  # the metrics of this step, or None
    earlier: Sequence[StepInfo] = ()  # the committed steps, with the metrics stored with them
    saved: bool = False  # whether a checkpoint of this step exists already


class Trigger(Protocol):
    """Decides whether a save is due.

    What does not depend on the step alone is agreed between processes: their clocks and metrics may differ.
    """

    @property
    def interval_secs(self) -> float | None:
        """The seconds between two saves that this trigger asks for; None if it does not depend on time."""
        ...

    @property
    def reads_metrics(self) -> bool:
        """Whether it depends on metrics."""
        ...

    def reason(self, moment: Moment) -> str | None:
        """Return why a save is due at this moment, such as ``"every 15m"``, or None if this trigger asks for none."""
        ...


@dataclass(frozen=True)
class EverySteps:
    """Saves each time the step passes a multiple of ``n``; a counter that jumps over one saves right after it."""

    n: int
    interval_secs: ClassVar[None] = None
    reads_metrics: ClassVar[bool] = False

    def due(self, step: int, previous: int | None) -> bool:
        """Whether a multiple of ``n`` lies after the previous step, up to this one."""
        if previous is None:
            return step % self.n == 0
        return step // self.n != previous // self.n

    def reason(self, moment: Moment) -> str | None:
        if not self.due(moment.step, moment.previous):
            return None
        return "every step" if self.n == 1 else f"every {self.n} steps"


@dataclass(frozen=True)
class EverySeconds:
    """Saves when some seconds have passed since the last save, or the clock was set back."""

    seconds: float
    reads_metrics: ClassVar[bool] = False

    @property
    def interval_secs(self) -> float:
        return self.seconds

    def reason(self, moment: Moment) -> str | None:
        if moment.last is None or 0 <= moment.now - moment.last < self.seconds:
            return None
        return f"every {format_duration(self.seconds)}"


@dataclass(frozen=True)
class OnBest:
    """Saves when a metric is better than in every earlier checkpoint; a step without the metric beats nothing."""

    metric: Metric
    mode: Mode = "max"
    interval_secs: ClassVar[None] = None
    reads_metrics: ClassVar[bool] = True

    def reason(self, moment: Moment) -> str | None:
        value = metric_value(moment.metrics, self.metric)
        if value is None:
            return None
        for info in moment.earlier:
            other = info.value(self.metric)
            if other is not None and not better(value, other, self.mode):
                return None
        return f"best {metric_name(self.metric)} ({format_metric(value)})"


def decide(triggers: Sequence[Trigger], moment: Moment) -> Decision:
    """Return whether any trigger is due, with every reason for it; a step is not saved twice."""
    if moment.saved:
        return Decision(False, f"step {moment.step} is saved already")
    due = [reason for trigger in triggers if (reason := trigger.reason(moment)) is not None]
    return Decision(True, ", ".join(dict.fromkeys(due))) if due else Decision(False, "nothing is due")
