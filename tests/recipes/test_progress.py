from __future__ import annotations

import logging

import pytest

from holdfast.recipes.registry import Progress


class Scalar:
    """A number on a device, which counts how often it is fetched."""

    def __init__(self) -> None:
        self.fetched = 0

    def __float__(self) -> float:
        self.fetched += 1
        return 0.25


def steps_reported(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().partition(":")[0] for record in caplog.records]


@pytest.mark.parametrize(
    ("start", "steps", "expected"),
    [
        (0, range(1, 11), [4, 8, 10]),
        (5, range(6, 11), [8, 10]),
        (0, [3, 6, 7, 9], [6, 9]),
        (0, range(1, 4), []),
    ],
    ids=["from the start", "resumed", "jumps", "stopped early"],
)
def test_lines_at_the_interval_and_at_the_end(
    caplog: pytest.LogCaptureFixture, start: int, steps: range, expected: list[int]
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    progress = Progress(start, 10, 4)
    for step in steps:
        progress.update(step, {"loss": 1.0})

    assert steps_reported(caplog) == [f"step {step} of 10" for step in expected]


def test_metrics_are_fetched_only_when_they_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    loss = Scalar()
    progress = Progress(0, 10, 5)
    for step in range(1, 11):
        progress.update(step, {"loss": loss})

    assert loss.fetched == 2
    assert "step 5 of 10: loss 0.2500 (" in caplog.text
    assert caplog.text.count("steps/s)") == 2
