"""Programs of several processes, as tests run them: results, failures, deaths and processes that hang."""

from __future__ import annotations

import time

import pytest
from tests.processes.harness import Process, run_outcomes, run_processes


def troubled(process: Process) -> None:
    print(f"this is process {process.index}")
    if process.index == 1:
        raise ValueError("no luck")
    if process.index == 2:
        time.sleep(60)


def test_failures_and_processes_that_hang_are_shown() -> None:
    with pytest.raises(AssertionError) as caught:
        run_processes(troubled, 3, backend="none", timeout=3)
    message = str(caught.value)
    assert "this is process 0" in message
    assert "ValueError: no luck" in message
    assert 'test_harness.py", line' in message.split("process 2 ended with 1")[1]


def test_a_process_that_was_to_die_and_did_not_is_an_error() -> None:
    with pytest.raises(AssertionError, match="process 0 was to die at 'never'"):
        run_outcomes(troubled, 1, backend="none", kill=(0, "never"))
