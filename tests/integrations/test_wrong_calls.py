"""What a new user writes at first: it works, or the error shows the right call."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Some wrong calls are made of callbacks that nobody closes then."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


loose: Any = hf  # These calls are wrong for type checkers, too.


def begun(directory: Path) -> Any:
    checkpoint = hf.CheckpointCallback(directory)
    checkpoint.restore_or_initialize({"w": 1})
    return checkpoint


NEVER = "did you mean 'never', which raises an error if"
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "two states": (
        lambda path: loose.CheckpointCallback(path).restore_or_initialize("model", "optimizer"),
        'restore_or_initialize({"model": model, "optimizer": optimizer})',
    ),
    "a fraction as the step": (lambda path: begun(path).on_step(0.5, {"w": 1}), "a whole number (found 0.5)"),
    "the state first": (lambda path: begun(path).on_step({"w": 1}, 1), "on_step(step, state, metrics="),
    "metrics by position": (
        lambda path: begun(path).on_step(1, {"w": 1}, {"loss": 1}),
        "on_step(step, state, metrics=",
    ),
    "a step to load": (
        lambda path: loose.load(path, step=400),
        "step: give the path of the step, such as runs/digits/400",
    ),
    "items of Orbax": (
        lambda path: loose.CheckpointManager(path).save(1, args={"w": 1}),
        "'args': pass the tree itself, or a dictionary of items: manager.save(step, {\"state\": tree})",
    ),
    "a template of Orbax": (
        lambda path: loose.CheckpointManager(path).restore(1, args={"w": 1}),
        "manager.restore(step, template)",
    ),
    "options of a checkpointer": (
        lambda path: hf.PyTreeCheckpointer().save(path / "x", {"w": 1}, options=None),
        "hf.CheckpointManager(directory, options=hf.CheckpointManagerOptions(...)) takes it",
    ),
    "options of a save": (lambda path: loose.save(path / "x", {"w": 1}, options=None), "takes options one by one"),
    "options of a callback": (lambda path: loose.CheckpointCallback(path, options=None), "takes options one by one"),
    "a directory of Lightning": (lambda path: loose.CheckpointCallback(dirpath=path), "is the first argument"),
    "a namespace": (
        lambda path: loose.CheckpointCallback(path, metadata=argparse.Namespace(lr=1)),
        "pass vars(metadata)",
    ),
    "options as a dictionary": (
        lambda path: loose.CheckpointManager(path, options={"max_to_keep": 3}),
        "hf.CheckpointManagerOptions(**{'max_to_keep': 3}), not a dict",
    ),
    "resume=False": (lambda path: loose.CheckpointCallback(path, resume=False), NEVER),
    "a word close by": (lambda path: loose.CheckpointCallback(path, resume="muss"), "did you mean 'must'?"),
    "True as an interval": (lambda path: loose.CheckpointCallback(path, save_interval_steps=True), "a whole number"),
    "a drive letter": (lambda path: loose.CheckpointCallback(r"C:\runs\x"), "in WSL it is '/mnt/c/runs/x'"),
    "a lost colon": (lambda path: loose.CheckpointCallback("gs//bucket/x"), "lacks a colon: 'gs://bucket/x'"),
}


@pytest.mark.parametrize(
    ("taker", "name", "said"),
    [
        (hf, "save_pytree", "here it is hf.save"),
        (hf, "training", "here it is hf.CheckpointManager"),
        (hf, "v1", "the names of Orbax v1 are"),
        (hf.CheckpointManager, "latest", "here it is latest_step()"),
        (hf.CheckpointManager, "checkpoints", "here it is all_steps()"),
    ],
)
def test_the_error_has_the_name_that_a_name_of_orbax_has_here(taker: Any, name: str, said: str, tmp_path: Path) -> None:
    owner = taker if taker is hf else taker(tmp_path)
    with pytest.raises(AttributeError, match=re.escape(f"has no attribute {name!r}: {said}")):
        getattr(owner, name)


@pytest.mark.parametrize("call", WRONG)
def test_the_error_shows_the_right_call(call: str, tmp_path: Path) -> None:
    wrong, said = WRONG[call]
    with pytest.raises(hf.HoldfastError, match=re.escape(said)):
        wrong(tmp_path)
    assert not list(tmp_path.glob("[0-9]*"))


def test_whole_numbers_of_numpy_are_options(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_interval_steps": np.int64(2), "max_to_keep": np.int32(3)}
    with hf.CheckpointCallback(tmp_path, **options, keep_steps=np.arange(2).tolist()) as checkpoint:
        checkpoint.restore_or_initialize({"w": 1})
        for step in range(1, 5):
            checkpoint.on_step(step, {"w": step})
    assert [one.step for one in hf.list_checkpoints(tmp_path)] == [2, 4]
    with loose.CheckpointCallback(tmp_path, resume=np.int64(2)) as checkpoint:
        assert checkpoint.restore_or_initialize({"w": 1})[1] == 2


@pytest.mark.parametrize("word", ["latest", "last", True], ids=str)
def test_other_words_for_the_newest_mean_auto(word: Any, tmp_path: Path) -> None:
    hf.save(tmp_path / "1", {"w": 1})
    with loose.CheckpointCallback(tmp_path, resume=word) as checkpoint:
        assert checkpoint.restore_or_initialize({"w": 0})[1] == 1


METRICS = [
    ("high", "that is 'high'"),
    (None, "that is None"),
    ([0.5, 0.6], "that is a list"),
    (np.zeros(3), "that is a ndarray of the shape [3]"),
]


@pytest.mark.parametrize(("value", "said"), METRICS, ids=str)
def test_a_metric_that_is_no_number_is_named_as_such(
    value: object, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hf.CheckpointCallback(tmp_path, best_fn="accuracy", best_mode="max") as checkpoint:
        checkpoint.restore_or_initialize({"w": 1})
        checkpoint.on_step(1, {"w": 1}, metrics={"accuracy": value})
    (message,) = caplog.messages
    assert f"step 1 was reported with a metric accuracy {said}, and best_fn ranks checkpoints by a number" in message
    assert "did you mean accuracy" not in message


def test_a_terminal_of_ascii_shows_what_it_can(tmp_path: Path) -> None:
    (tmp_path / "é").mkdir()
    command = [sys.executable, "-m", "holdfast.cli.main", "ls", str(tmp_path / "é")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"no checkpoints in {tmp_path}/\\xe9\n")
