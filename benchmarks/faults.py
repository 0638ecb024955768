"""A simulated save in which one process fails, at each of its calls in turn.

After each, the checkpoint is whole or does not exist, and the next save, which replaces what is left, is committed.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .protocol import SimulatedProcess, Simulation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SLOW = 100.0
"""How many times longer the requests of a slow process take: seconds each."""

HANGING = 1e6
"""The same of a process whose requests take longer than the others wait."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a save in which something happened to processes.

    Attributes:
        what: What that was.
        first: The call at which it began.
        last: The last call with the same outcome.
        points: How many calls have that outcome.
        told: The kind of error that the others have got; "": none.
        message: What it said to the first of them.
        seconds: From the fault until the last of the others had ended; the longest of all points.
        committed: Whether there was a checkpoint afterwards, a whole one.
    """

    what: str
    first: str
    last: str
    points: int
    told: str
    message: str
    seconds: float
    committed: bool


def outcomes(count: int = 16, *, timeout: float = 600.0) -> Iterator[Outcome]:
    """Let processes die, be slow and be cut off, at each call, and join neighbouring calls with the same outcome.

    Args:
        count: How many processes there are.
        timeout: Seconds that they wait for each other.
    """
    _, healthy = Simulation(count, timeout=timeout, measured=False).save()
    last = count - 1
    cases: list[tuple[str, int, Callable[[int], Sequence[SimulatedProcess]]]] = [
        ("process 0 dies", 0, lambda at: [SimulatedProcess(0, "dies", at)]),
        (f"process {last} dies", last, lambda at: [SimulatedProcess(last, "dies", at)]),
        (f"process {last} is slow", last, lambda at: [SimulatedProcess(last, "slow", at, SLOW)]),
        (f"process {last} hangs", last, lambda at: [SimulatedProcess(last, "slow", at, HANGING)]),
        (f"process {last} is cut off", last, lambda at: [SimulatedProcess(last, "cut off", at)]),
        (
            f"processes {count // 2} to {last} are cut off",
            last,
            lambda at: [SimulatedProcess(index, "cut off", at) for index in range(count // 2, count)],
        ),
    ]
    for what, process, afflict in cases:
        calls = range(len(healthy[process].calls))
        found = [one_outcome(what, count, timeout, afflict(at)) for at in calls]
        for _, group in itertools.groupby(found, key=lambda one: (one.told, one.committed)):
            alike = list(group)
            yield replace(alike[0], last=alike[-1].first, points=len(alike), seconds=max(one.seconds for one in alike))


def one_outcome(what: str, count: int, timeout: float, afflicted: Sequence[SimulatedProcess]) -> Outcome:
    """Save with some processes afflicted, and once more with all of them well."""
    simulation = Simulation(count, timeout=timeout, measured=False)
    _, processes = simulation.save(*afflicted)
    began = [process.began_at for process in afflicted if process.began_at is not None]
    assert began, f"{what}: none of them has made call {afflicted[-1].at_call}"
    call = re.sub(r"\.[0-9a-f]{8}\b", "", afflicted[-1].calls[afflicted[-1].at_call])
    others = [process for process in processes if process.fault is None]
    error = next((process.error for process in others if process.error is not None), None)
    committed = simulation.found()
    _, again = simulation.save()
    failed = [process for process in again if process.error is not None]
    assert not failed, f"{what} at {call!r}: the next save failed: {failed[0].error}"
    assert simulation.found(), f"{what} at {call!r}: the next save was not committed"
    return Outcome(
        what=what,
        first=call,
        last=call,
        points=1,
        told="" if error is None else type(error).__name__,
        message="" if error is None else str(error),
        seconds=max(process.ended_at for process in others) - min(began),
        committed=committed,
    )
