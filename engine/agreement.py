"""When processes have to ask process 0 whether a save is due, so that most steps need no word between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .policy import Decision, EverySeconds, EverySteps, OnBest, Trigger


class AgreementSchedule:
    """The steps at which processes agree on whether to save.

    What depends on the step alone, every process knows by itself. Time is process 0's: at each agreement it says at
    which step they shall meet again, from how fast steps go by, half-way to the moment at which a save would be due. So
    there are a few agreements for each save, however many steps lie between. New metrics are a reason to meet, too.

    Args:
        triggers: What makes a save due.

    Attributes:
        certain: Those that depend on the step alone.
        ranks: Whether any depends on metrics.
        agreements: How many there have been.
    """

    def __init__(self, triggers: Sequence[Trigger]) -> None:
        self.certain = tuple(trigger for trigger in triggers if isinstance(trigger, EverySteps))
        self._interval = min(
            (trigger.seconds for trigger in triggers if isinstance(trigger, EverySeconds)), default=None
        )
        self.agreements = 0
        self.ranks = any(isinstance(trigger, OnBest) for trigger in triggers)
        self._next: int | None = None
        self._answer: tuple[int, Decision] | None = None
        self._last: tuple[int, float] | None = None  # of the last agreement: its step, and the monotonic clock

    def asks(self, step: int, metrics: Mapping[str, Any] | None) -> bool:
        """Tells whether this step needs an agreement. The answer is the same on all processes.

        Args:
            step: The step in question.
            metrics: Its metrics; whether there are any has to be the same everywhere, their values need not.
        """
        if self.ranks and metrics is not None:
            return True
        return self._interval is not None and (self._next is None or step >= self._next)

    def next_step(self, step: int, now: float, since: float) -> int | None:
        """Returns the step of the next agreement; on process 0.

        Args:
            step: The step of this one.
            now: The monotonic clock, in seconds.
            since: Seconds since the last save.
        """
        if self._interval is None:
            return None
        last, self._last = self._last, (step, now)
        if last is None or step <= last[0]:
            return step + 1
        pace = max(1e-9, (now - last[1]) / (step - last[0]))
        return step + max(1, int((self._interval - since) / pace / 2))

    def agreed(self, step: int, decision: Decision, following: int | None) -> None:
        """Notes what was agreed.

        Args:
            step: The step of the agreement.
            decision: What was decided for it.
            following: The step of the next one.
        """
        self.agreements += 1
        self._next = following
        self._answer = step, decision

    def answer(self, step: int) -> Decision | None:
        """Returns what was agreed for a step, so that asking again needs no word; None if nothing was."""
        return self._answer[1] if self._answer is not None and self._answer[0] == step else None
