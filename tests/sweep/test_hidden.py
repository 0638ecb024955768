"""Programs that hide state, and programs that hand over all: the witness calls each resume what it is."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from tests.sweep.hidden_case import INTERRUPTIONS, PROGRAMS, SURELY, Trace
from tests.sweep.hidden_runs import compared, contradiction, run_case

pytestmark = pytest.mark.filterwarnings(r"ignore:::lightning\.|torch\.|torchdata\.")  # they speak of every program

TENTH = random.Random(31).sample([*PROGRAMS], len(PROGRAMS) // 10)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "title"),
    [
        pytest.param(name, title, marks=() if title == SURELY or name in TENTH else pytest.mark.sweep)
        for title in INTERRUPTIONS
        for name in PROGRAMS
    ],
)
def test_a_resume_is_called_what_it_is(name: str, title: str, tmp_path: Path) -> None:
    """After the first interruption, a program that hides state is inexact in the layers that the table names."""
    case = run_case(name, title, tmp_path)
    assert case.is_good, case.detail


# ---- the judge


def seen(*values: int) -> dict[int, dict[str, Any]]:
    """Returns what steps 7, 8, ... gave: a value each."""
    return {step: {"state": value, "batch": 0} for step, value in enumerate(values, start=7)}


@pytest.mark.parametrize(
    ("last", "every", "steps"),
    [(8, 6, [7, 8]), (11, 6, [7, 8, 10]), (12, 6, [7, 8, 10, 12]), (17, 10_000, [7, 8, 10, 14]), (6, 6, [])],
)
def test_steps_that_are_compared(last: int, every: int, steps: list[int]) -> None:
    before = Trace(seen={step: {} for step in range(1, last + 1)})
    assert compared(before, Trace(start=6, seen={step: {} for step in range(7, 21)}), every) == steps


SAME, FIRST, LATER = (1, 2, 3, 4), (1, 9, 9, 9), (1, 2, 9, 9)  # nothing differs, from step 8 on, from step 9 on


@pytest.mark.parametrize(
    ("values", "proof", "named", "said"),
    [
        (SAME, (True, (7, 8, 10), ()), None, None),
        (SAME, None, None, None),
        ((1, 2, 9, 4), (True, (7, 8, 10), ()), None, None),  # step 9 is not compared, and 10 is as it was
        (LATER, (False, (7, 8), ("state",)), 10, None),
        (FIRST, (False, (7,), ("state",)), 8, None),
        (SAME, (None, (), ()), None, r"steps \[7, 8, 10\] are equal; exact is None"),
        (SAME, (True, (7,), ()), None, r"proven are \[7\]"),
        (SAME, (False, (7,), ("state",)), 8, "the first step that differs is None, and 8 is named"),
        (FIRST, (True, (7, 8, 10), ()), None, r"steps \[8, 10\] differ, and are called"),
        (FIRST, (True, (7,), ()), None, "the first compared step that differs is 8, and none is named"),
        (FIRST, (False, (7,), ("state",)), 10, "the first compared step that differs is 8, and 10 is named"),
        (FIRST, (None, (7,), ("state",)), 8, "exact is None"),
        (FIRST, (False, (7,), ()), 8, "with the layers"),
        (FIRST, (False, (7,), ("batch",)), 8, r"\['batch'\] are called different, and \['state'\] are"),
    ],
)
def test_what_the_judge_says(values: tuple[int, ...], proof: Any, named: int | None, said: str | None) -> None:
    warnings = [] if named is None else ["another warning", f"not exact from step {named}: state"]
    found = contradiction(seen(*SAME), Trace(6, seen(*values), proof, warnings), [7, 8, 10])
    assert (found is None) == (said is None)
    assert said is None or re.search(said, str(found))
