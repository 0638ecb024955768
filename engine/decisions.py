"""Whether to save a step: the triggers, asked by one process or agreed between several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .agreement import AgreementSchedule
from .clock import Clock
from .policy import Decision, Moment, StepInfo, Trigger, decide
from .together import Together

Earlier = Callable[[], Sequence[StepInfo]]
"""Returns the steps that a new best has to beat; called only where there is a best."""


class SaveDecisions:
    """Decides for one run, step by step.

    Args:
        triggers: What makes a save due.
        clock: Where the time comes from.
        together: The processes that have to decide alike.

    Attributes:
        previous: The step of the last save or restore, or else the first that was asked about; None before.
    """

    def __init__(self, triggers: Sequence[Trigger], clock: Clock, together: Together) -> None:
        self._triggers = triggers
        self._clock = clock
        self._together = together
        self._schedule = AgreementSchedule(triggers)
        self._last_save = clock.monotonic()
        self.previous: int | None = None

    @property
    def agreements(self) -> int:
        """Returns how often the processes had to agree."""
        return self._schedule.agreements

    def note_save(self, step: int) -> None:
        """Notes that a step is being saved."""
        self.previous, self._last_save = step, self._clock.monotonic()

    def decide(self, step: int, metrics: Mapping[str, Any] | None, *, saved: bool, earlier: Earlier) -> Decision:
        """Tells whether a save is due, and why or why not; the same on all processes.

        Args:
            step: The number of optimizer updates done.
            metrics: The metrics of this step.
            saved: Whether this step is saved already.
            earlier: Returns the steps that a new best has to beat.
        """

        def ask(triggers: Sequence[Trigger]) -> Decision:
            return self._decide(step, metrics, saved, earlier, triggers)

        if self._together.alone:
            decision = ask(self._triggers)
        elif self._schedule.asks(step, metrics):
            decision = self._agree(step, ask)
        else:
            decision = ask(self._schedule.certain)
            answer = self._schedule.answer(step)  # where this step was asked about before
            if answer is not None and answer.save and not saved:
                decision = answer
        if self.previous is None and not decision.save:
            self.previous = step
        return decision

    def _decide(
        self,
        step: int,
        metrics: Mapping[str, Any] | None,
        saved: bool,
        earlier: Earlier,
        triggers: Sequence[Trigger],
    ) -> Decision:
        return decide(
            triggers,
            Moment(
                step=step,
                previous=self.previous,
                now=self._clock.monotonic(),
                last=self._last_save,
                metrics=metrics,
                earlier=earlier() if self._schedule.ranks else (),
                saved=saved,
            ),
        )

    def _agree(self, step: int, ask: Callable[[Sequence[Trigger]], Decision]) -> Decision:
        """Decides as process 0 does: clocks and metrics may differ from process to process."""

        def answer() -> list[Any]:
            decision = ask(self._triggers)
            now = self._clock.monotonic()
            since = 0.0 if decision.save else now - self._last_save
            return [decision.save, decision.reason, self._schedule.next_step(step, now, since)]

        save, reason, following = self._together.decide(f"decision at step {step}", answer)
        decision = Decision(save, reason)
        self._schedule.agreed(step, decision, following)
        return decision
