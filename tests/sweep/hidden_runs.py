"""Programs that hide state, interrupted and resumed: is the resumed run exact, and does the witness say so?

After a save at N, the run before the stop records steps N+1, N+2, N+4, N+8, ... up to the next one that is saved, and
the resumed run compares these. An exact resume must be called exact. An inexact one must be named at the first compared
step that differs; if none of them differs, it may be called exact, as no more is claimed.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

# The modules of programs enter them into the table.
from . import hidden_elsewhere, hidden_jax, hidden_programs, lightning_runs, public_jax_programs, public_torch_programs  # noqa: F401  # noqa: F401
from .cases import NEVER, Case, judge, new_directory
from .hidden_case import INTERRUPTIONS, PROGRAMS, SURELY, TOTAL, Trace, differing, start

be_quiet = lightning_runs.be_quiet


# ---- what is so


@functools.cache
def whole(name: str) -> dict[int, dict[str, Any]]:
    """Return what each step of the uninterrupted run gives, which must be the same every time."""
    runs = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as files:
            runs.append(start(name, new_directory(), files).seen)
    if runs[0] != runs[1] or max(runs[0]) != TOTAL:
        raise RuntimeError(f"{name} does not always do the same")
    return runs[0]


def interrupted(name: str, directory: Path, options: dict[str, int]) -> tuple[Trace, Trace]:
    """Return what the interrupted run of a program leaves, and the resumed one."""
    files, every = directory / "files", options.get("every", NEVER)
    files.mkdir()
    before = start(name, str(directory / "run"), str(files), **options)
    if TOTAL in before.seen:
        raise RuntimeError("the run was not interrupted")
    if differing_steps(before, whole(name)):
        raise RuntimeError("the interrupted run was another one from the beginning")
    return before, start(name, str(directory / "run"), str(files), every=every)


# ---- what the witness says of it


def compared(before: Trace, after: Trace, every: int) -> list[int]:
    """Return the steps that the run before the stop has recorded, and the resumed one has done again."""
    following = after.start - after.start % every + every  # the next step that is saved
    last = min(following, max(before.seen), max(after.seen))
    steps = [after.start + 2**power for power in range(TOTAL)]
    return sorted({step for step in steps if step <= last} | ({following} if following == last else set()))


def differing_steps(found: Trace, expected: dict[int, dict[str, Any]]) -> dict[int, set[str]]:
    """Return the steps that differ from those of the uninterrupted run, each with the parts that do."""
    parts = {step: differing(seen, expected[step]) for step, seen in found.seen.items()}
    return {step: names for step, names in parts.items() if names}


def contradiction(expected: dict[int, dict[str, Any]], after: Trace, steps: list[int]) -> str | None:
    """Return what the witness says that is not so, or None.

    Args:
        expected: What each step of the uninterrupted run gives.
        after: The resumed run.
        steps: The steps that it has compared; more are no mistake.
    """
    if after.proof is None:
        return None  # there is no witness
    exact, proven, layers = after.proof
    parts = differing_steps(after, expected)
    pairs = pairwise(steps)
    # Gradients that earlier steps have left, and that the program has set to zero unused, make no difference.
    left = {step for step, following in pairs if parts.get(step) == {"gradients"} and following not in parts}
    steps = [step for step in steps if step not in left]
    parts = {step: names for step, names in parts.items() if step not in left}
    first = min(parts.keys() & {*steps}, default=None)
    if wrong := parts.keys() & {*proven}:
        return f"steps {sorted(wrong)} differ, and are called those before the stop"
    if first is None and after.named is None:
        is_said = exact is not False and (not steps or (exact is True and {*steps} <= {*proven}))
        return None if is_said else f"steps {steps} are equal; exact is {exact}, and proven are {[*proven]}"
    if after.named is None:
        return f"the first compared step that differs is {first}, and none is named"
    if after.named not in parts:
        return f"the first step that differs is {first}, and {after.named} is named"
    if first is not None and after.named > first:
        return f"the first compared step that differs is {first}, and {after.named} is named"
    if exact is not False or not layers:
        return f"step {after.named} is named, and exact is {exact}, with the layers {layers}"
    really = set().union(*parts.values())
    if wrong_layers := {*layers} - really:
        return f"{sorted(wrong_layers)} are called different, and {sorted(really)} are"
    return None


# ---- cases


def groups() -> list[tuple[str, str]]:
    """Return pairs of a kind and a program."""
    return [("exact" if program.is_exact else "inexact", name) for name, program in PROGRAMS.items()]


def run_case(name: str, title: str, directory: Path) -> Case:
    """Interrupt a program, resume it, and judge what is said of it."""
    program, options = PROGRAMS[name], PROGRAMS[name].options(title)
    heard: list[str] = []

    def run() -> str | None:
        before, after = interrupted(name, directory, options)
        heard.extend(after.warnings)
        if TOTAL not in after.seen:
            raise RuntimeError("the resumed run ended early")
        is_exact = not differing_steps(after, whole(name))
        if program.is_exact and not is_exact:
            return "all is handed over, and the resumed run is not exact"
        if not program.is_exact and title == SURELY:
            if is_exact:
                return "state is hidden, and the resumed run is exact"
            layers = after.proof[2] if after.proof else ()
            if not program.layers <= {*layers} or program.says not in "".join(heard):
                return f"{sorted(program.layers)} differ, and {layers} are named; said is {heard}"
        return contradiction(whole(name), after, compared(before, after, options.get("every", NEVER)))

    case = judge(f"hidden/{'exact' if program.is_exact else 'inexact'}/{name}/{title}", run, is_exact=program.is_exact)
    case.warnings = heard
    return case


def run_group(kind: str, program: str, only: tuple[str, ...] = ()) -> Iterator[Case]:
    """Yield the cases of one program whose names contain one of ``only``."""
    for title in INTERRUPTIONS:
        name = f"hidden/{kind}/{program}/{title}"
        if not only or any(text in name for text in only):
            with tempfile.TemporaryDirectory() as directory:
                yield run_case(program, title, Path(directory))
