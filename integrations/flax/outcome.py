"""What the callback answers after each step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a call of ``on_step`` or ``on_eval`` did, and what the loop should do next.

    Attributes:
        saved: Whether this call saved the step. The files are written in the background, except after a preemption,
            when they are durable already.
        reason: Why it was saved, or why not, for people.
        should_stop: Whether to leave the loop now.
    """

    saved: bool
    reason: str
    should_stop: bool
