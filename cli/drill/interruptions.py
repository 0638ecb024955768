"""What a drill rehearses: its options, and the preemptions that follow from them and from the steps of the program."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ...engine.errors import OptionError
from ...engine.observer import Point
from ..report import count

Kind = Literal["first", "kill", "save", "term", "twice", "validation"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    """What to rehearse."""

    steps: int = 20
    at: tuple[int, ...] = ()  # steps at which to interrupt; random ones if there are none
    kinds: tuple[Kind, ...] = KINDS
    seed: int = 0  # seed of the random steps
    preemption: signal.Signals = signal.SIGTERM  # the signal that announces a preemption
    keep: Path | None = None  # where the runs are kept; None for a temporary directory
    ignore: tuple[str, ...] = ()  # patterns of leaves that are not compared
    hang: float = 1800.0  # seconds without a sign of progress after the first step
    first_step: float = 3600.0  # seconds until the first step, which compiles
    grace: float = 60.0  # seconds within which the program must end after the signal


def named_kinds(text: str | None, default: Sequence[Kind]) -> tuple[Kind, ...]:
    """Return the kinds that ``--kinds`` names, in the order of ``KINDS``."""
    named = default if text is None else [one.strip() for one in text.split(",") if one.strip()]
    if unknown := [one for one in named if one not in KINDS]:
        raise OptionError(f"--kinds {unknown[0]}: the kinds are {', '.join(KINDS)}")
    return tuple(one for one in KINDS if one in named)


def preemption_signal(name: str) -> signal.Signals:
    """Return the signal that ``--signal`` names."""
    number = signal.Signals.__members__.get(f"SIG{name.upper().removeprefix('SIG')}")
    if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
        raise OptionError(f"--signal {name}: name a signal that a program can handle, such as SIGTERM or SIGUSR1")
    return number


@dataclass(frozen=True, slots=True)
class Interruption:
    """One preemption of the rehearsal."""

    signal: signal.Signals
    point: Point
    step: int

    def __str__(self) -> str:
        where = {"step": "after step", "validation": "in the validation after step", "commit": "in the save of step"}
        return f"{self.signal.name} {where[self.point]} {self.step}"


def choose(
    steps: Sequence[int], validations: Sequence[int], options: DrillOptions
) -> tuple[list[Interruption], list[str]]:
    """Return the interruptions of a run with these steps, at least two, and what is left out, in words."""
    # After SIGKILL, the run resumes from an earlier step, so that the same step can be interrupted once more.
    kill, term = signal.SIGKILL, options.preemption
    chosen: list[tuple[int, int, Interruption]] = []
    notes: list[str] = []
    inner = list(steps[1:-1]) or list(steps[:1])

    def add(number: signal.Signals, point: Point, step: int) -> None:
        rank = ("step", "commit", "validation").index(point) + (0 if number == kill else 3)
        chosen.append((step, rank, Interruption(number, point, step)))

    draw = random.Random(options.seed)
    taken: set[int] = set()
    if "validation" in options.kinds:
        places = [step for step in validations if step in inner and step not in options.at] or list(validations[:1])
        if places:
            found = sorted(draw.sample(places, min(2, len(places))))
            numbers = (kill, term) if len(found) == 2 else (term,)
            for step, number in zip(found, numbers, strict=True):
                add(number, "validation", step)
            # A run that resumes at such a step has no validation left.
            around = [steps.index(step) + by for step in found for by in (-1, 0, 1)]
            taken |= {steps[place] for place in around if 0 <= place < len(steps)}
        else:
            notes.append(f"no validation in {count(len(steps), 'step', 'steps')}, so none was interrupted")
    if "first" in options.kinds:
        add(kill, "step", steps[0])
        add(term, "step", steps[0])
    following = dict(itertools.pairwise(steps))
    for kind in ("twice", "kill", "save", "term"):
        if kind not in options.kinds:
            continue
        free = [step for step in inner if step not in taken]
        if kind == "twice":
            free = [step for step in free if following.get(step) in free] or free
        for step in options.at or (draw.choice(free or inner),):
            taken.add(step)
            if kind in ("kill", "save"):
                add(kill, "commit" if kind == "save" else "step", step)
                continue
            add(term, "step", step)
            if kind == "twice" and step in following:
                add(term, "step", following[step])
                taken.add(following[step])
    found_all = [one for _, _, one in sorted(chosen, key=lambda entry: entry[:2])]
    return list(dict.fromkeys(found_all)), notes


def places_to_save(options: DrillOptions) -> tuple[int, ...]:
    """Return the places of steps, from 1, that are saved in any case: those around the likely interruptions."""
    places = range(1, options.steps + 1)
    likely, _ = choose(places, (), options if not options.at else DrillOptions(steps=options.steps, kinds=("first",)))
    around = {one.step + by for one in likely for by in (-1, 0, 1, 2)}
    return tuple(sorted(around.intersection(places)))
