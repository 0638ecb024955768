from __future__ import annotations

import datetime
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ids import plain_id

import holdfast as hf
from holdfast.engine.clock import Duration, format_duration, format_size, seconds
from holdfast.engine.errors import OptionError


@pytest.mark.parametrize(
    ("duration", "expected"),
    [
        (90, 90.0),
        (0.5, 0.5),
        ("90", 90.0),
        ("1e3", 1000.0),
        ("250ms", 0.25),
        ("15m", 900.0),
        ("1h 30m", 5400.0),
        (" 1 h 30 m ", 5400.0),
        ("1.5h", 5400.0),
        ("30m1h", 5400.0),
        ("1d2h3m4s500ms", 93784.5),
        (datetime.timedelta(days=1, milliseconds=1), 86400.001),
    ],
    ids=plain_id,
)
def test_durations_are_seconds(duration: Duration, expected: float) -> None:
    assert seconds(duration) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    "duration",
    [
        0,
        -1,
        math.nan,
        math.inf,
        10**400,
        True,
        None,
        [],
        b"15m",
        "",
        "0s",
        "-5m",
        "nan",
        "inf",
        "m",
        "15 minutes",
        "1h30",
        "1h-30m",
        "1:30:00",
        "x15m",
        ".5h",
        "9" * 400 + "s",
        datetime.timedelta(0),
        datetime.timedelta(seconds=-1),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_what_is_no_duration_is_refused(duration: Any) -> None:
    told = "^save_interval_secs=.* is not a duration: give seconds above zero, or text such as"
    with pytest.raises(OptionError, match=told):
        seconds(duration, name="save_interval_secs")


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 10**9))
def test_reasons_spell_durations_so_that_they_can_be_read_back(milliseconds: int) -> None:
    assert seconds(format_duration(milliseconds / 1000)) == pytest.approx(milliseconds / 1000, abs=1e-6)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1234, "1.2 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (1_234_567, "1.2 MB"),
        (5_000_000_000, "5.0 GB"),
        (2 * 10**18, "2000.0 PB"),
    ],
)
def test_sizes(number: int, text: str) -> None:
    assert format_size(number) == text


def test_reports_of_saves_give_sizes_like_commands() -> None:
    report = hf.reports.SaveReport(
        step=7, path="/run/7", reason="last", bytes=999_999, blocked_seconds=0.25, total_seconds=2.0, shared_bytes=512
    )
    assert str(report).startswith(
        "saved step 7 (last): 1.0 MB (and 512 B unchanged since earlier steps), blocked 0.250 s"
    )
