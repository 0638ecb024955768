from __future__ import annotations

import pytest

from holdfast.engine.clock import format_duration
from holdfast.engine.manager.metrics import format_metric
from holdfast.engine.manager.retention import _ordinal


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0s"),
        (0.00025, "0.00025s"),
        (0.25, "0.25s"),
        (1, "1s"),
        (59.9996, "1m"),
        (60.0, "1m"),
        (90.5, "1m30.5s"),
        (900, "15m"),
        (3600, "1h"),
        (5400, "1h30m"),
        (3601, "1h1s"),
        (86400 * 400, "400d"),
        (90061.1, "1d1h1m1.1s"),
    ],
)
def test_durations_are_spelled_as_options_are(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1, "1st"),
        (2, "2nd"),
        (3, "3rd"),
        (4, "4th"),
        (11, "11th"),
        (12, "12th"),
        (13, "13th"),
        (21, "21st"),
        (111, "111th"),
    ],
)
def test_ordinals(number: int, expected: str) -> None:
    assert _ordinal(number) == expected


def test_measures_are_short() -> None:
    assert [format_metric(value) for value in (0.9312345678, 2.0, 1e-9, float("-inf"))] == [
        "0.931235",
        "2",
        "1e-09",
        "-inf",
    ]
