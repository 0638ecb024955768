"""When to save: triggers that look at one moment of a training loop, and the decision that follows from all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .checks import metric_and_mode, positive_seconds, whole_number
from .metrics import Metric, Mode, better, metric_name, metric_value
from .wording import duration, measure

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
    """One moment of a training loop, as the triggers see it.

    Attributes:
        step: The number of optimizer updates done.
        previous: The step of the last save, or the step that the run was restored from; before either, the first step
            that was asked about. None when this step is the first of all.
        now: The monotonic clock, in seconds.
        last: What the monotonic clock showed at the last save, or when the run started; None leaves time out of it.
        metrics: The metrics of this step, or None.
        earlier: The committed steps, with the metrics stored with them.
        saved: Whether a checkpoint of this very step exists already.
        ended: Whether training is over.
        preempted: Whether the machine is about to be taken away.
        forced: Whether the caller wants a save whatever else holds.
    """

    step: int
    previous: int | None = None
    now: float = 0.0
    last: float | None = None
    metrics: Mapping[str, Any] | None = None
    earlier: Sequence[StepInfo] = ()
    saved: bool = False
    ended: bool = False
    preempted: bool = False
    forced: bool = False


class Trigger(Protocol):
    """Says when a save is due."""

    def reason(self, moment: Moment) -> str | None:
        """Returns why a save is due at this moment, or None when this trigger asks for none."""
        ...


@dataclass(frozen=True)
class EverySteps:
    """Saves each time the step passes a multiple of a number of steps.

    A counter that jumps over a multiple still saves, at the first step at or after it.

    Attributes:
        n: In steps, at least 1.
    """

    n: int

    def __post_init__(self) -> None:
        whole_number(self, "n", self.n)

    def due(self, step: int, previous: int | None) -> bool:
        """Returns whether a multiple of ``n`` lies between the previous step and this one.

        Args:
            step: The step in question.
            previous: The step of the last save or restore, or else the first step seen; None for the first of all,
                which is due when it is a multiple itself. A step below the previous one is measured in the same way.
        """
        if previous is None:
            return step % self.n == 0
        return step // self.n != previous // self.n

    def reason(self, moment: Moment) -> str | None:
        """Returns "every n steps" when due."""
        if not self.due(moment.step, moment.previous):
            return None
        return "every step" if self.n == 1 else f"every {self.n} steps"


@dataclass(frozen=True)
class EverySeconds:
    """Saves when some time has passed since the last save.

    Attributes:
        seconds: The time in seconds, above zero.
    """

    seconds: float

    def __post_init__(self) -> None:
        positive_seconds(self, self.seconds)

    def due(self, now: float, last: float) -> bool:
        """Returns whether the time has passed.

        Args:
            now: The monotonic clock, in seconds.
            last: The same clock at the last save, or when the run started. One that lies ahead of ``now`` comes from
                another clock, such as that of the machine before a move, and makes a save due.
        """
        elapsed = now - last
        return elapsed >= self.seconds or elapsed < 0

    def reason(self, moment: Moment) -> str | None:
        """Returns "every 15m" or the like when due."""
        if moment.last is None or not self.due(moment.now, moment.last):
            return None
        return f"every {duration(self.seconds)}"


@dataclass(frozen=True)
class OnBest:
    """Saves when a metric is better than in every checkpoint before; what counts is stored with the checkpoints.

    Attributes:
        metric: The metric's name, or a function of the metrics.
        mode: Whether larger or smaller is better.
    """

    metric: Metric
    mode: Mode = "max"

    def __post_init__(self) -> None:
        metric_and_mode(self, self.metric, self.mode)

    def due(self, metrics: Mapping[str, Any] | None, earlier: Sequence[StepInfo]) -> bool:
        """Returns whether these metrics beat those of all earlier steps; one without a value beats nothing.

        Args:
            metrics: The metrics of the step in question.
            earlier: The committed steps; those without a value are passed over.
        """
        return self._value(metrics, earlier) is not None

    def reason(self, moment: Moment) -> str | None:
        """Returns "best accuracy (0.93)" or the like when due."""
        value = self._value(moment.metrics, moment.earlier)
        return None if value is None else f"best {metric_name(self.metric)} ({measure(value)})"

    def _value(self, metrics: Mapping[str, Any] | None, earlier: Sequence[StepInfo]) -> float | None:
        value = metric_value(metrics, self.metric)
        if value is None:
            return None
        for info in earlier:
            other = metric_value(info.metrics, self.metric)
            if other is not None and not better(value, other, self.mode):
                return None
        return value


@dataclass(frozen=True)
class AtEnd:
    """Saves when training is over."""

    def due(self, ended: bool) -> bool:
        """Returns whether training is over."""
        return ended

    def reason(self, moment: Moment) -> str | None:
        """Returns "at the end" when due."""
        return "at the end" if self.due(moment.ended) else None


_NOT_DUE = Decision(False, "nothing is due")


def decide(triggers: Sequence[Trigger], moment: Moment) -> Decision:
    """Returns whether to save at this moment, and every reason for it.

    A forced save is always done. Otherwise a step that is saved already is not saved again, a preemption saves, and so
    does any trigger that is due.

    Args:
        triggers: What makes a save due.
        moment: The moment.
    """
    if moment.forced:
        return Decision(True, "forced")
    if moment.saved:
        return Decision(False, f"step {moment.step} is saved already")
    due = ["preempted"] if moment.preempted else []
    due += [reason for trigger in triggers if (reason := trigger.reason(moment)) is not None]
    return Decision(True, ", ".join(dict.fromkeys(due))) if due else _NOT_DUE
