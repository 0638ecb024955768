"""One start of a program that may hide state: what happens to it, and what each of its steps has given."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from . import cases
from .cases import InterruptionError, Listener, bits, seed_all

TOTAL = 20  # steps
_NAMED = re.compile(r"^not exact from step (\d+)")

# Epochs end at steps 5, 10, 15 and 20.
SURELY = "error soon after a save"  # after which each program that hides state is inexact
INTERRUPTIONS: dict[str, dict[str, int]] = {
    SURELY: {"every": 6, "error": 8},
    "error 5 steps after a save": {"every": 6, "error": 11},
    "error across the end of an epoch": {"every": 9, "error": 13},
    "SIGTERM in mid-epoch": {"told": 8},
    "SIGTERM in the last batch of an epoch": {"told": 10},
}


@dataclass
class Run(cases.Run):
    """One start of a program, and what is known of it afterwards.

    Attributes:
        files: A directory for what the program itself writes, which outlives the process.
        ends: What ends with the process, such as threads and open files.
        is_advised: Whether the program has the line that hands over what it would hide otherwise.
        seen: What each step gave: state, metrics, batch, generators, counters and gradients, by name.
        start: The step that it resumed from.
        checkpoint: Its callback.
    """

    total: int = TOTAL
    files: str = ""
    ends: ExitStack = field(default_factory=ExitStack)
    is_advised: bool = False
    seen: dict[int, dict[str, Any]] = field(default_factory=dict)
    start: int = 0
    checkpoint: Any = None

    def callback(self, part: str = "") -> Any:
        self.checkpoint = super().callback(part)
        return self.checkpoint

    def handed(self, **parts: Any) -> dict[str, Any]:
        """Return what is handed over with the advised line, and nothing without it."""
        return parts if self.is_advised else {}

    def note(self, step: int, state: Any, loss: Any, batch: Any = None, epoch: int = 0, **extras: Any) -> None:
        """Note what a step has given, before anything is told of it."""
        kinds = np.random.Generator | random.Random | torch.Generator
        handed = {name: extra for name, extra in extras.items() if isinstance(extra, kinds)}
        generators = [random.getstate(), np.random.get_state(), torch.get_rng_state(), handed]
        parts = {"state": state, "metrics": float(loss), "batch": batch, "generators": generators, "counters": epoch}
        parts |= {"gradients": _gradients(state)}
        self.start = self.start if self.seen else step - 1
        self.seen[step] = {name: bits(part) for name, part in parts.items()}

    def report(self, checkpoint: Any, step: int, state: Any, loss: Any = None, **arguments: Any) -> bool:
        """Report a step with its loss, and return whether to leave the loop."""
        self.note(step, state, loss, **arguments)
        return super().report(checkpoint, step, state, metrics={"loss": loss}, **arguments)


def _gradients(state: Any) -> dict[str, Any]:
    """Return the gradients of the modules in a state, by name."""
    parts = state if isinstance(state, dict) else {}
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    named = {f"{name}.{path}": one for name, part in modules.items() for path, one in part.named_parameters()}
    return {name: one.grad for name, one in named.items() if one.grad is not None}


def differing(found: dict[str, Any], expected: dict[str, Any]) -> set[str]:
    """Return the parts in which two runs of a step differ; a gradient that only one of them has is no difference."""
    both = found.get("gradients", {}).keys() & expected.get("gradients", {}).keys()
    parts = {part for part in found if part != "gradients" and found[part] != expected[part]}
    return parts | {"gradients" for name in both if found["gradients"][name] != expected["gradients"][name]}


@dataclass(frozen=True)
class Program:
    """A program of the sweep.

    Attributes:
        train: Trains once.
        is_exact: Whether it hands over all that its next steps depend on.
        is_advised: Whether it has the line that does so, without which it is another program of the table.
        layers: What surely differs where it hides state.
        says: What a warning then advises.
        surely: The interruption after which it does, if it is another one than that of the table.
    """

    train: Callable[[Run], None]
    is_exact: bool = False
    is_advised: bool = False
    layers: frozenset[str] = frozenset()
    says: str = ""
    surely: dict[str, int] = field(default_factory=dict)

    def options(self, title: str) -> dict[str, int]:
        """Return what happens in an interruption."""
        return self.surely if title == SURELY and self.surely else INTERRUPTIONS[title]


PROGRAMS: dict[str, Program] = {}
Enter = Callable[[Callable[[Run], None]], Callable[[Run], None]]


def program(name: str) -> Enter:
    """Enter a function that hands over all into the table of programs."""

    def enter(train: Callable[[Run], None]) -> Callable[[Run], None]:
        PROGRAMS[name] = Program(train, is_exact=True)
        return train

    return enter


def hides(name: str) -> Enter:
    """Enter a function that hides state, for which the words of a warning are not looked at."""

    def enter(train: Callable[[Run], None]) -> Callable[[Run], None]:
        PROGRAMS[name] = Program(train)
        return train

    return enter


def hiding(name: str, *layers: str, says: str = "", **surely: int) -> Enter:
    """Enter a function twice: it hides state, of which ``layers`` differ, and hands it over if it ``is_advised``."""

    def enter(train: Callable[[Run], None]) -> Callable[[Run], None]:
        PROGRAMS[name] = Program(train, layers=frozenset(layers), says=says, surely=surely)
        PROGRAMS[f"{name}, handed over"] = Program(train, is_exact=True, is_advised=True, surely=surely)
        return train

    return enter


@dataclass
class Trace:
    """What one start of a program leaves.

    Attributes:
        start: The step that it has resumed from.
        seen: What each of its steps gave, by the name of the part.
        proof: What its witness says: ``exact``, ``steps`` and ``differs``; None where it has none.
        warnings: What holdfast has warned of.
    """

    start: int = 0
    seen: dict[int, dict[str, Any]] = field(default_factory=dict)
    proof: tuple[bool | None, tuple[int, ...], tuple[str, ...]] | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def named(self) -> int | None:
        """The step that a warning names as the first that is not exact."""
        return next((int(found[1]) for text in self.warnings if (found := _NAMED.match(text))), None)


def start(name: str, directory: str, files: str, **options: Any) -> Trace:
    """Start a program."""
    seed_all(0)
    logger, listener = logging.getLogger("holdfast"), Listener()
    logger.addHandler(listener)
    run = Run(directory, files=files, is_advised=PROGRAMS[name].is_advised, **options)
    try:
        with suppress(InterruptionError), run.ends:
            PROGRAMS[name].train(run)
    finally:
        logger.removeHandler(listener)
    proof = run.checkpoint.proof
    said = None if proof is None else (proof.exact, tuple(proof.steps), tuple(proof.differs))
    return Trace(run.start, run.seen, said, listener.heard)
