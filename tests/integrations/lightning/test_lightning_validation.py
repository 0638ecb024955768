"""A run that has to end in a validation leaves it at once; one that has to end before it saves, and validates later."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as lightning
import pytest
from tests.integrations.lightning.program import new_directory
from tests.sweep.lightning_programs import AVERAGES, SETUPS
from tests.sweep.lightning_runs import NEVER, Interruption, Program

pytestmark = [
    pytest.mark.filterwarnings("ignore:Swapping scheduler"),
]

IN_FIRST, IN_SECOND, BEFORE = (
    ("signal in validation", 0),
    ("signal in validation", 1),
    ("signal before validation", 0),
)
CASES = {
    "EMA": IN_SECOND,
    "EMA, validation within epochs": BEFORE,
    "EMA, accumulation": IN_FIRST,
    "swap by hand": IN_FIRST,
    "swap by the module": IN_SECOND,
    "moved and returned": IN_SECOND,
    "counts validation batches": IN_FIRST,
    "validation within epochs": IN_FIRST,
}


def check(setup: str, *interruptions: Interruption) -> list[Program]:
    """Interrupts a program, and compares it with the whole run; gives the programs that did it together.

    A signal before a validation saves; one within it loses what is not saved, so that such a program saves every step.
    """
    whole = Program(new_directory(), setup, "shuffled")
    whole.fit()
    directory = new_directory()
    parts = []
    for seed, interruption in enumerate([*interruptions, None], start=1):
        every = 1 if any(one.kind == "signal in validation" for one in interruptions) else NEVER
        parts.append(Program(directory, setup, "shuffled", seed=seed, every=every))
        assert parts[-1].fit(interruption) == (None if interruption is None else 143)
    assert parts[-1].final() == whole.final()
    assert {key: value for part in parts for key, value in part.recorder.events.items()} == whole.recorder.events
    return parts


def _case(setup: str) -> Any:
    needs_newer = pytest.mark.needs("lightning", "2.6")
    return pytest.param(setup, marks=[needs_newer] if "EMA" in setup or setup == "WeightAveraging" else [], id=setup)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("setup", [_case(name) for name in CASES])
def test_left_in_a_validation(setup: str) -> None:
    kind, batch = CASES[setup]
    step = 3 if "accumulate_grad_batches" in SETUPS[setup].trainer or _is_within(setup) else 5
    check(setup, Interruption(kind, step, batch))


@pytest.mark.sweep
@pytest.mark.parametrize("setup", [_case(name) for name in [*AVERAGES, "validation within epochs"]])
def test_left_in_any_validation(setup: str) -> None:
    steps = (3, 8) if _is_within(setup) else (3, 6) if "accumulation" in setup else (5, 10)
    for step in steps:
        for kind, batch in (IN_FIRST, IN_SECOND, BEFORE):
            check(setup, Interruption(kind, step, batch))


def _is_within(setup: str) -> bool:
    return "val_check_interval" in SETUPS[setup].trainer


@pytest.mark.needs("lightning", "2.6")
def test_left_twice_in_the_same_validation() -> None:
    in_validation = Interruption("signal in validation", 5, 1)
    check("EMA", in_validation, in_validation)


def test_a_validation_is_left_with_its_first_batch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        first, _ = check("counts validation batches", Interruption("signal in validation", 3, 0))
    assert "preempted in the validation after step 3, which is not saved: the run resumes from step 2" in caplog.text
    assert first.recorder.validations == []


class CountsStates(lightning.Callback):
    count = 0

    def state_dict(self) -> dict[str, Any]:
        self.count += 1
        return {}


def test_nothing_is_captured_before_a_validation() -> None:
    program = Program(new_directory(), "swap by hand", "shuffled")
    counts = CountsStates()
    program.trainer.callbacks.insert(0, counts)
    program.fit()
    assert len(program.recorder.validations) == 3
    assert counts.count == 1  # at the end
