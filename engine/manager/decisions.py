"""Decide when to save, make all processes agree, and track the steps of an abandoned branch.

Triggers evaluate a :class:`Moment` of the training loop, and :func:`decide` combines them. Most steps require no
communication, because each process evaluates the triggers that depend only on the step. Processes may
disagree on time, metrics or failed saves, so process 0 decides for all at the steps that :class:`SyncSchedule` chooses.
"""

from __future__ import annotations

import abc
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from ..clock import Clock
from ..errors import shortened_steps
from ..observer import Observer
from .metrics import BestMode, Metric, metric_name, metric_value

if TYPE_CHECKING:
    from ..distributed import ProcessGroup
    from ..storage import Location
    from .retention import StepInfo

_logger = logging.getLogger("holdfast")


def median(values: Iterable[float]) -> float:
    import statistics  # imported lazily because it loads random and decimal, which are not needed to list steps

    return statistics.median(values)


# ---- triggers


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision on whether to save a step, which is true in a boolean context if a save is due.

    Attributes:
        save: Whether a save is due.
        reason: A message for users that explains the decision.
    """

    save: bool
    reason: str

    def __bool__(self) -> bool:
        return self.save


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The state of a training loop that a :class:`SavePolicy` evaluates.

    Attributes:
        step: The number of completed optimizer updates.
        previous: The step of the last save or restore, or else the step before the run's first step; None if unknown.
        now: The current time of the monotonic clock, in seconds.
        last: The monotonic time of the last save, or else of the start of the run; None disables time-based policies.
        metrics: The metrics of this step, or None.
        earlier: The committed steps with their stored metrics.
        saved: Whether a checkpoint of this step already exists.
    """

    step: int
    previous: int | None = None
    now: float = 0.0
    last: float | None = None
    metrics: Mapping[str, Any] | None = None
    earlier: Sequence[StepInfo] = ()
    saved: bool = False


@runtime_checkable
class SavePolicy(Protocol):
    """A policy for ``save=`` that decides when to save; subclass it, or implement its three members.

    If several policies are given, a step is saved when any of them returns a reason. Time and metrics may differ
    between processes, so only process 0 evaluates policies that depend on them, and the others follow its decision.

    >>> class AtPowersOfTwo(SavePolicy):
    ...     def reason(self, moment):
    ...         return "a power of two" if moment.step.bit_count() == 1 else None
    >>> [step for step in range(10) if AtPowersOfTwo().reason(Moment(step=step))]
    [1, 2, 4, 8]
    """

    @property
    def interval_secs(self) -> float | None:
        """The current interval between saves in seconds; None if this policy does not depend on time."""
        return None

    @property
    def reads_metrics(self) -> bool:
        """Whether this policy depends on metrics."""
        return False

    @abc.abstractmethod
    def reason(self, moment: Moment) -> str | None:
        """Return why a save is due, such as ``"every 15m"``, or None if no save is due.

        Args:
            moment: The state of the training loop after a step.
        """


@dataclass(frozen=True)
class OnBest(SavePolicy):
    """Saves when a metric is better than in every earlier checkpoint, but never at a step without the metric."""

    metric: Metric
    mode: BestMode = "max"
    reads_metrics: ClassVar[bool] = True

    def reason(self, moment: Moment) -> str | None:
        value = metric_value(moment.metrics, self.metric)
        if value is None:
            return None
        for info in reversed(moment.earlier):  # newest first, because newer steps are usually harder to beat
            other = info.value(self.metric)
            if other is not None and not (value > other if self.mode == "max" else value < other):
                return None
        return f"best {metric_name(self.metric)} ({value:.6g})"


@dataclass(frozen=True)
class Wanted(SavePolicy):
    observer: Observer

    def reason(self, moment: Moment) -> str | None:
        return self.observer.wants(moment.step)


def decide(triggers: Sequence[SavePolicy], moment: Moment) -> Decision:
    """Decide to save an unsaved step if any trigger is due. The decision's reason lists all triggers that are due."""
    if moment.saved:
        return Decision(False, f"step {moment.step} is saved already")
    due = [reason for trigger in triggers if (reason := trigger.reason(moment)) is not None]
    return Decision(True, ", ".join(dict.fromkeys(due))) if due else Decision(False, "nothing is due")


# ---- decisions of one process or of several


class SyncSchedule:
    """Schedules the steps at which processes agree on whether to save. The schedule is the same on all processes."""

    # Process 0 predicts from the loop's pace how many steps remain until a time-based save, and schedules an agreement
    # halfway to it. If saves depend on the step, processes also check for a failed save at growing intervals.

    def __init__(self, triggers: Sequence[SavePolicy]) -> None:
        self.certain = tuple(  # triggers that depend only on the step
            trigger for trigger in triggers if trigger.interval_secs is None and not trigger.reads_metrics
        )
        self._counts_steps = any(not isinstance(trigger, Wanted) for trigger in self.certain)
        self.reads_metrics = any(trigger.reads_metrics for trigger in triggers)
        self._timed = tuple(trigger for trigger in triggers if trigger.interval_secs is not None)
        self._next: int | None = None
        # The step at which to check whether the last save succeeded, and the number of steps until the following check.
        self._outcome: tuple[int, int] | None = None
        self.answers: Mapping[int, Decision] = {}  # the last agreed decision, keyed by its step
        self._last: tuple[int, float] | None = None  # the step and monotonic time of the last agreement

    def asks(self, step: int, metrics: Mapping[str, Any] | None, previous: int | None) -> bool:
        """Return whether time, metrics or the outcome of the last save may affect the decision at this step."""
        if self.reads_metrics and metrics is not None:
            return True
        if self._timed and (self._next is None or step >= self._next):
            return True
        if not self._counts_steps or self._outcome is None or step < self._outcome[0]:
            return False
        # The outcome of the last save does not matter if a save is due at this step anyway.
        return not any(trigger.reason(Moment(step=step, previous=previous)) for trigger in self.certain)

    def save_began(self, step: int) -> None:
        self._outcome = step + 1, 1

    def next_step(self, step: int, now: float, since: float) -> int | None:
        """Return the step of the next agreement on time-based saves. Called only on process 0."""
        intervals = (trigger.interval_secs for trigger in self._timed)
        interval = min((secs for secs in intervals if secs is not None), default=None)
        if interval is None:
            return None
        last, self._last = self._last, (step, now)
        if last is None or step <= last[0]:
            return step + 1
        pace = max(1e-9, (now - last[1]) / (step - last[0]))
        return step + max(1, int((interval - since) / pace / 2))

    def agreed(self, step: int, decision: Decision, following: int | None, *, ended: bool) -> None:
        self._next = following
        self.answers = {step: decision}
        if ended:
            self._outcome = None
        elif self._outcome is not None and step >= self._outcome[0]:
            gap = self._outcome[1]
            self._outcome = step + gap, 4 * gap


class StepPace:
    """Measures how much a background save slows down the steps of a loop."""

    _FEWEST = 8  # minimum number of steps for a comparison

    def __init__(self) -> None:
        self._last: tuple[int, float, int | None] | None = None
        self._without: deque[float] = deque(maxlen=200)  # durations of recent steps without a save
        self._usual: Sequence[float] = ()  # snapshot of _without, taken when the save started
        self._during: list[float] = []  # durations, in seconds, of the steps during the latest save

    def step(self, step: int, now: float, save: int | None) -> None:
        """Record the end of a step. ``save`` is the step of the save in progress, or None."""
        last = self._last
        if last is not None and step <= last[0]:
            return
        self._last = step, now, save
        if last is not None and last[2] == save:
            (self._without if save is None else self._during).append((now - last[1]) / (step - last[0]))

    def save_begins(self) -> None:
        self._usual = tuple(self._without)
        self._during = []

    def slowed(self, duration: float) -> float | None:
        """Return the delay, in seconds, caused by a save of the given duration; None if too few steps were timed."""
        during = sorted(self._during)
        if min(len(self._usual), len(during)) < self._FEWEST:
            return None
        usual = median(self._usual)  # computed here, because in save_begins() it would delay the loop
        # Durations vary, so report a delay only if 3 in 4 steps during the save took longer than the usual median.
        if during[len(during) // 4] <= usual:
            return 0.0
        return duration * (1 - usual / median(during))


class SaveDecisions:
    """Decides at each step whether to save. Intervals are measured from the start of the last successful save."""

    # If a background save fails, intervals are measured from the save before it, so a save is due at the next step.
    # Processes may notice the failure at different steps, so process 0 reports it to all of them.

    def __init__(
        self, triggers: Sequence[SavePolicy], clock: Clock, processes: ProcessGroup, previous: int | None
    ) -> None:
        self._triggers = triggers
        self._clock = clock
        self._processes = processes
        self._schedule = SyncSchedule(triggers)
        self.pace = StepPace()
        # The step of the last save or restore, and the monotonic time of the last save. The tuple is replaced as a
        # whole, because the saving thread resets both values if a background save fails.
        self._last: tuple[int | None, float] = (previous, clock.monotonic())
        self._before = self._last
        self._failed: bool | None = False  # whether the last save failed; None while it is in progress

    def restored(self, step: int) -> None:
        self._last = self._before = step, self._last[1]

    def deleted(self, newest: int) -> None:
        """After a deletion, count the interval to the next save from ``newest``, the newest remaining step."""
        previous, now = self._last
        if previous is not None and previous > newest:
            self._last = self._before = newest, now

    def save_begins(self, step: int) -> None:
        self._starts_at(step)
        self._before, self._last = self._last, (step, self._clock.monotonic())
        self.pace.save_begins()
        self._failed = None
        self._schedule.save_began(step)

    def save_ended(self, *, failed: bool) -> None:
        """Record whether the save failed; called on the saving thread."""
        if failed and self._processes.alone:
            self._last = self._before
        self._failed = failed

    def decide(
        self, step: int, metrics: Mapping[str, Any] | None, *, saved: bool, earlier: Sequence[StepInfo]
    ) -> Decision:
        """Return whether a save is due, and why. The decision is the same on all processes."""
        self._starts_at(step)
        (previous, last), now = self._last, self._clock.monotonic()
        self.pace.step(step, now, previous if self._failed is None else None)
        moment = Moment(step=step, previous=previous, now=now, last=last, metrics=metrics, earlier=earlier, saved=saved)
        if self._processes.alone:
            return decide(self._triggers, moment)
        if self._schedule.asks(step, metrics, previous):
            return self._agree(moment)
        answer = self._schedule.answers.get(step)
        return answer if answer and not saved else decide(self._schedule.certain, moment)

    def _starts_at(self, step: int) -> None:
        """Treat the first step that is saved or checked as the first step of the run."""
        if self._last[0] is None:
            self._last = step - 1, self._last[1]

    def _agree(self, moment: Moment) -> Decision:
        label = f"decision at step {moment.step}"
        save, reason, following, failed = self._processes.decide(label, self._decide_for_all, moment)
        if failed:
            self._last = self._before
        decision = Decision(save, reason)
        self._schedule.agreed(moment.step, decision, following, ended=failed is not None)
        return decision

    def _decide_for_all(self, moment: Moment) -> list[Any]:
        """Return process 0's decision and reason, the step of the next agreement, and whether the last save failed."""
        failed = self._failed
        if failed:
            self._last = previous, last = self._before
            moment = replace(moment, previous=previous, last=last)
        decision = decide(self._triggers, moment)
        since = 0.0 if decision.save else moment.now - self._last[1]
        return [decision.save, decision.reason, self._schedule.next_step(moment.step, moment.now, since), failed]


class AbandonedSteps:
    """Tracks the steps that a run abandons by resuming from an earlier step, until the run replaces or passes them."""

    # Warn about these steps in this run, because a later run cannot determine which branch a step belongs to.

    def __init__(self, directory: Location, *, warns: bool) -> None:
        self._directory = directory
        self._warns = warns
        self._origin: int | None = None  # the step from which the run resumed; None once the warning is logged
        self._left: frozenset[int] = frozenset()
        self._began = False  # whether the run has restored or saved a step
        self.resumed_from: int | None = None  # the step of the last restore, unless a step has been saved since
        self.restores = 0  # number of restores

    def restored(self, step: int, later: Sequence[int]) -> None:
        """Record a restored step, and the later steps that are abandoned if the run resumes from it."""
        self.resumed_from = step
        self.restores += 1
        self._origin, self._left, self._began = step, frozenset(later), True

    def replaces(self, step: int) -> bool:
        """Return whether a save may replace an existing step, that is, whether the step is on the abandoned branch."""
        return step in self._left

    def saving(self, step: int, later: Sequence[int], *, leaves: bool = False) -> None:
        """Record a save's start. Warn once about later steps unless the save marks them as abandoned (``leaves``)."""
        self.resumed_from = None
        if leaves:
            self._left &= {step}
        elif not self._began and later:
            self._warn(
                f"step {step} is saved, and this run has not restored the later steps that are there "
                f"({shortened_steps(later)}): they are replaced only if that is forced"
            )
        elif not self._left.intersection(later):  # the run has passed the abandoned steps, or has not gone back
            self._left &= {step}
        else:
            self.warn(later)
        self._began = True

    def saved(self, step: int) -> None:
        self._left -= {step}

    def warn(self, later: Sequence[int]) -> None:
        """Warn once that the run has resumed from an earlier step although later ones exist."""
        origin, self._origin = self._origin, None
        if origin is not None and later:
            self._warn(
                f"this run went back to step {origin}, and later steps are there ({shortened_steps(later)}): each is "
                "replaced when the run saves it again",
                origin,
            )

    def _warn(self, message: str, origin: int | str = "step") -> None:
        if self._warns:
            text = (
                "%s: %s. Until then they count as the newest, for retention and for the next resume. Delete them with "
                "delete_after(%s) before the run continues, or use another directory to keep both"
            )
            _logger.warning(text, self._directory, message, origin)
