"""What other intervals between two saves would have cost a run, by its own events."""

from __future__ import annotations

from dataclasses import dataclass

from ...engine.manager import Experience, Loss
from ..report import count, duration

_WORTH = 60.0  # the least seconds a day that another interval must save for the command to name it


@dataclass(frozen=True, slots=True)
class Choice:
    """One interval and what it is expected to lose."""

    name: str  # which one it is
    seconds: float
    loss: Loss


def choices(experience: Experience) -> list[Choice]:
    """Return the interval that the run has used, half and double of it, and the one that loses least, shortest first.

    Without two saves in one start of the program, there are none.
    """
    used = experience.interval
    if used is None:
        return []
    found = {"half": used / 2, "used": used, "double": 2 * used, "loses least": experience.best()}
    every = [Choice(name, seconds, experience.loss(seconds)) for name, seconds in found.items() if seconds > 0]
    return sorted(every, key=lambda one: one.seconds)


def advice(experience: Experience) -> str | None:
    """Return a line about the interval that loses least, if it is worth a change; none for a run that learns it."""
    found = {one.name: one for one in choices(experience)}
    if experience.bounds is not None or not {"used", "loses least"} <= found.keys():
        return None
    used, least = found["used"], found["loses least"]
    if used.loss.together - least.loss.together < _WORTH:
        return None
    return (
        f"saves every {duration(used.seconds)} are expected to lose {duration(used.loss.together)} a day, and every "
        f'{duration(least.seconds)} {duration(least.loss.together)}: save_interval_secs="auto" chooses automatically'
    )


def basis(experience: Experience) -> str:
    """Return the basis of the expectations as text."""
    failures = count(experience.failures, "failure", "failures") if experience.failures else "no failure"
    return (
        f"A save costs {duration(experience.cost or 0.0)} of training and is durable after "
        f"{duration(experience.durable)} (medians of the newest 20). The events show {failures} in "
        f"{duration(experience.ran)}; every run begins with a guess of one a day, so the next one is expected in "
        f"{duration(experience.between_failures)}. Each loses half an interval, the time until a save is durable, "
        f"and {duration(experience.comeback)} to resume.{_learns(experience)}"
    )


def _learns(experience: Experience) -> str:
    if experience.bounds is None:
        return ""
    least, greatest = map(duration, experience.bounds)
    return f" The run learns its interval, between {least} and {greatest}."
