"""The sweep runs interrupted programs, compares them, and counts; a few of its cases, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.sweep import summary
from tests.starts import run
from tests.sweep.cases import Case, first_difference, judge

PERSISTENT = "lightning/persistent/default"
NEW_WORKERS = "continues with new worker processes, whose random generators cannot be saved"


@pytest.mark.xdist_group("programs")
@pytest.mark.needs("flax", "0.11")  # whose optimizers take the module
def test_a_few_cases(tmp_path: Path) -> None:
    report = tmp_path / "cases.json"
    only = [
        f"{PERSISTENT}/error after",
        "lightning/shuffled/default/longer with the same trainer",
        "jax/nnx/adam/SIGTERM in step 4",
        "jax/program/numbers/SIGTERM in step 4",
        "torch/callback/a part that saves itself/SIGTERM at the end",
        "torch/loop/two workers/SIGTERM at the end of an epoch",
    ]
    arguments = ["--processes", "1", "--json", str(report)]
    for text in only:
        arguments += ["--only", text]
    done = run("-W", "ignore", "-m", "benchmarks.sweep", *arguments, backend="torch")
    assert done.returncode == 0, done.stdout + done.stderr
    cases = {case["name"]: case for case in json.loads(report.read_text())}
    assert {case["verdict"] for case in cases.values()} == {"equal"}
    assert {name for text in only for name in cases if name.startswith(text)} == cases.keys()
    assert len(cases) == 10  # the first of them stands for four
    assert "10 of 10 cases equal bit for bit, 0 refused with a message, 0 not equal" in done.stdout
    # Only where the workers have lived through an epoch before, their random generators are lost.
    warned = {
        int(name.rpartition(" ")[2]): any(NEW_WORKERS in warning for warning in case["warnings"])
        for name, case in cases.items()
        if name.startswith(PERSISTENT) and name[-1].isdecimal()
    }
    assert warned == {step: step >= 5 for step in warned}
    assert len(warned) == 3


def test_judging() -> None:
    assert judge("a/b/c/d", lambda: None) == Case("a/b/c/d")
    assert judge("a/b/c/d", lambda: "x: expected 1, found 2") == Case("a/b/c/d", "differs", "x: expected 1, found 2")

    def fails() -> None:
        raise ValueError("not so")

    assert judge("a/b/c/d", fails) == Case("a/b/c/d", "failed", "ValueError: not so")
    assert judge("a/b/c/d", fails, "not so") == Case("a/b/c/d", "refused", "ValueError: not so")


def test_differences() -> None:
    for found, expected, difference in (
        ({"a": [1, b"x"]}, {"a": [1, b"x"]}, None),
        ({"a": [1, b"x"]}, {"a": [1, b"y"]}, "/a/1: expected b'y', found b'x'"),
        ({"a": 1}, {"b": 1}, "all: expected {'b': 1}, found {'a': 1}"),
        ([1], [1, 2], "all: expected [1, 2], found [1]"),
    ):
        assert first_difference(found, expected) == difference


def test_the_table() -> None:
    text = summary([Case("jax/tree/adam/a"), Case("jax/tree/adam/b", "differs"), Case("jax/nnx/sgd/a", "refused")])
    assert [line.split()[-4:] for line in text.splitlines()[1:]] == [
        ["2", "1", "0", "1"],
        ["1", "0", "1", "0"],
        ["3", "1", "1", "1"],
        ["3", "1", "1", "1"],
    ]
