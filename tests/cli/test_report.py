from __future__ import annotations

import json
import math
import re
import sys

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cli.report import age, count, duration, metrics_text, print_json, print_table


def test_words_for_times_counts_and_metrics() -> None:
    ages = {-5: "0 s", 0: "0 s", 59.9: "59 s", 60: "1 min", 3599: "59 min", 7300: "2 h", 200_000: "2 d"}
    assert {seconds: age(seconds) for seconds in ages} == ages
    spans = {0: "0 s", 0.5: "500 ms", 59.96: "1 min 00 s", 3599.9: "1 h 00 min", 3e5: "3 d 11 h"}
    assert {seconds: duration(seconds) for seconds in spans} == spans
    assert [count(number, "leaf", "leaves") for number in (0, 1, 2)] == ["0 leaves", "1 leaf", "2 leaves"]
    assert metrics_text({"loss": 0.123456789, "eval": {"top": {"1": 3}}}) == "loss 0.12346, eval/top/1 3"
    assert metrics_text({"recall": [1, 0.25, 3.0, 4, 5], "two": [1, 2]}) == "recall [1, 0.25, 3, 4, ...], two [1, 2]"
    assert metrics_text(None) == ""


@pytest.mark.parametrize(
    "cells",
    [
        ["plain", "", "x"],
        ["two\nlines", "a longer line\n\nafter an empty one", "y"],
        ["日本語", "naïve", "🙂"],
        ["[red]not markup[/red]", " leading", "trailing "],
        ["/".join(["[bold]layer"] * 60), "1", "a pipe is as wide as a table needs it to be"],
    ],
)
def test_a_table_in_a_pipe_is_the_one_that_rich_lays_out(capsys: pytest.CaptureFixture[str], cells: list[str]) -> None:
    columns, rows = ["NAME", "N", "WHAT"], [["first", "1", "-"], cells]
    print_table(columns, rows, right=["N"])
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column == "N" else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(width=1_000_000, highlight=False)
    with console.capture() as capture:
        console.print(table)
    lines = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in lines] == [line.rstrip() for line in capture.get().splitlines()]
    assert cells[-1].endswith(" ") or not any(line.endswith(" ") for line in lines)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (
            ["1.5", "2.5"],
            [
                "LEAF                       TYPE       A    B",
                "layers/0/attention/query/  float32  1.5  2.5",
                "kernel",
            ],
        ),
        (
            ["123456.7", "-1.2345e-07"],
            ["layers/0/attention/query/kernel", "  type float32  a 123456.7  b -1.2345e-07"],
        ),
    ],
)
def test_a_table_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, values: list[str], shown: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "44")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    print_table(["LEAF", "TYPE", "A", "B"], [["layers/0/attention/query/kernel", "float32", *values]], right=["A", "B"])

    assert re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).splitlines() == shown
    assert max(map(len, shown)) <= 44


def test_a_table_that_fits_the_terminal_is_the_one_of_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "44")
    monkeypatch.setenv("TERM", "xterm")
    columns, rows = ["NAME", "N"], [["a/\x1b[31mb", "1"], ["日本語", "23"]]
    print_table(columns, rows, right=["N"])
    in_a_pipe = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    print_table(columns, rows, right=["N"])

    header, _, rest = in_a_pipe.partition("\n")
    assert capsys.readouterr().out == f"\x1b[1m{header}\x1b[0m\n{rest}"


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"metrics": {"loss": math.nan, "list": [1.5, -math.inf]}, "text": "ü"})

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found == {"metrics": {"loss": None, "list": [1.5, None]}, "text": "ü"}
