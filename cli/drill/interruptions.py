"""The drill options, and the choice of preemptions to rehearse."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from ...engine.errors import OptionError
from ...engine.observer import Point
from ..report import count

Kind = Literal["first", "kill", "save", "term", "twice", "validation"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    steps: int = 20
    at: tuple[int, ...] = ()  # steps to interrupt at; empty for random steps
    kinds: tuple[Kind, ...] = KINDS
    seed: int = 0  # seed for choosing random steps
    preemption: signal.Signals = signal.SIGTERM  # the signal that announces a preemption
    keep: Path | None = None  # directory to keep the runs in; None for a temporary one
    ignore: tuple[str, ...] = ()  # patterns for leaves to exclude from the comparison
    hang: float = 1800.0  # hang timeout: seconds without a sign of progress after the first step
    first_step: float = 3600.0  # start timeout: seconds until the first step, including compilation
    grace: float = 60.0  # seconds between the signal and SIGKILL


def named_kinds(text: str | None, default: Sequence[Kind]) -> tuple[Kind, ...]:
    """Parse the value of ``--kinds``, and return the kinds in the order of ``KINDS``."""
    named = default if text is None else [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in named if name not in KINDS]:
        raise OptionError(f"--kinds {unknown[0]}: the kinds are {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in named)


def preemption_signal(name: str) -> signal.Signals:
    """Parse the value of ``--signal``."""
    number = signal.Signals.__members__.get(f"SIG{name.upper().removeprefix('SIG')}")
    if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
        raise OptionError(f"--signal {name}: name a signal that a program can handle, such as SIGTERM or SIGUSR1")
    return number


@dataclass(frozen=True, slots=True)
class Interruption:
    signal: signal.Signals
    point: Point
    step: int

    def __str__(self) -> str:
        where = {"step": "after step", "validation": "in the validation after step", "commit": "in the save of step"}
        return f"{self.signal.name} {where[self.point]} {self.step}"


def choose(
    steps: Sequence[int], validations: Sequence[int], options: DrillOptions
) -> tuple[list[Interruption], list[str]]:
    """Return the interruptions to rehearse, and notes about omitted kinds. The run must have at least two steps."""
    # After SIGKILL, the run resumes from an earlier step, so it can be interrupted at the same step again.
    kill, term = signal.SIGKILL, options.preemption
    chosen: list[Interruption] = []
    notes: list[str] = []
    inner = list(steps[1:-1]) or list(steps[:1])

    draw = random.Random(options.seed)
    taken: set[int] = set()
    if "validation" in options.kinds:
        candidates = [step for step in validations if step in inner and step not in options.at] or validations[:1]
        validated = sorted(draw.sample(candidates, min(2, len(candidates))))
        for step, number in zip(validated, (kill, term) if len(validated) == 2 else (term,), strict=False):
            chosen.append(Interruption(number, "validation", step))
        # Avoid the steps around a validation, because a run that resumes at such a step may skip the validation.
        around = [steps.index(step) + by for step in validated for by in (-1, 0, 1)]
        taken |= {steps[index] for index in around if 0 <= index < len(steps)}
        if not validated:
            notes.append(f"no validation in {count(len(steps), 'step')}, so none was interrupted")
    if "first" in options.kinds:
        chosen += [Interruption(kill, "step", steps[0]), Interruption(term, "step", steps[0])]
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
                chosen.append(Interruption(kill, "commit" if kind == "save" else "step", step))
                continue
            chosen.append(Interruption(term, "step", step))
            if kind == "twice" and step in following:
                chosen.append(Interruption(term, "step", following[step]))
                taken.add(following[step])
    points: Sequence[Point] = ("step", "commit", "validation")
    chosen.sort(key=lambda planned: (planned.step, planned.signal != kill, points.index(planned.point)))
    return list(dict.fromkeys(chosen)), notes


def places_to_save(options: DrillOptions) -> tuple[int, ...]:
    """Return the 1-based positions of the steps around likely interruptions. These steps are always saved."""
    positions = range(1, options.steps + 1)
    likely, _ = choose(positions, (), replace(options, kinds=("first",), at=()) if options.at else options)
    around = {interruption.step + by for interruption in likely for by in (-1, 0, 1, 2)}
    return tuple(sorted(around.intersection(positions)))
