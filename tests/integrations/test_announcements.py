"""One line says where a run begins and how it ends: on stderr unless a handler shows it or the program silences us."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.logs import unconfigure

from holdfast.integrations.loop import CheckpointCallback, announce


def train(place: str, last: int, *, preempt: bool = False) -> None:
    with CheckpointCallback(place, save_interval_steps=2) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"w": np.zeros(2)})
        for step in range(start + 1, last + 1):
            if preempt:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpoint.on_step(step, state).should_stop:
                break


def test_a_loop_says_where_it_is(
    place: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unconfigure(monkeypatch)
    said = []
    for last, preempt in ((3, False), (5, False), (5, False), (9, True)):
        train(place, last, preempt=preempt)
        said.append(capfd.readouterr().err.splitlines())
    assert said == [
        [f"holdfast: started fresh: no checkpoint in {place}"],
        [
            f"holdfast: resumed from step 3 in {place}",
            "holdfast: not witnessed: step 3 was restored as it was saved, and no step was recorded after it",
        ],
        [f"holdfast: resumed from step 5 in {place}", f"holdfast: nothing left to do after step 5 in {place}"],
        [
            f"holdfast: resumed from step 5 in {place}",
            "holdfast: not witnessed: step 5 was restored as it was saved, and no step was recorded after it",
            f"holdfast: preempted: step 6 is saved in {place}; stopping",
        ],
    ]


def handler_of_its_own() -> None:
    logging.getLogger("holdfast").addHandler(logging.NullHandler())


CONFIGURED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "not at all": (lambda: None, ["holdfast: at step 3"]),
    "warnings": (logging.basicConfig, ["holdfast: at step 3"]),
    "info": (lambda: logging.basicConfig(level=logging.INFO, format="%(message)s"), ["at step 3"]),
    "a handler": (handler_of_its_own, ["holdfast: at step 3"]),
    "our level": (lambda: logging.getLogger("holdfast").setLevel(logging.WARNING), []),
    "the root's level": (lambda: logging.getLogger().setLevel(logging.ERROR), ["holdfast: at step 3"]),
    "disabled": (lambda: logging.disable(logging.INFO), []),
}


@pytest.mark.parametrize("how", CONFIGURED)
def test_a_line_is_shown_once_unless_the_application_wants_silence(
    how: str, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    unconfigure(monkeypatch)
    configure, said = CONFIGURED[how]
    request.addfinalizer(lambda: logging.disable(logging.NOTSET))
    configure()
    announce("at step %d", 3)
    assert capfd.readouterr().err.splitlines() == said


def test_only_the_first_process_speaks(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    unconfigure(monkeypatch)
    announce("at step %d", 3, shown=False)
    assert capfd.readouterr().err == ""
