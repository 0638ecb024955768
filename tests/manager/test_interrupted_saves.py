"""Ctrl-C in the middle of a call to save, or no thread: it is saved or not, nothing is lost, and no lock is kept."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.manager.runs import commit, let_go

import holdfast as hf

TREE = {"weights": np.arange(300.0)}
NEW = {"weights": -np.arange(300.0)}


class Interrupt:
    """Interrupts the start of the thread that saves, at a moment, and waits for that thread in the end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handler = let_go()
        self.threads: list[threading.Thread] = []
        self.rest: list[Callable[[], None]] = []
        self._patch = monkeypatch

    def at(self, moment: str) -> None:
        real = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if thread.name != "holdfast-save" or self.threads:
                real(thread)
                return
            self.threads.append(thread)
            if moment == "later":  # The thread is there, and begins to run after the call has ended.
                self.rest.append(lambda: real(thread))
            elif moment == "writing":  # The thread writes until the call has ended.
                self.handler.writing.clear()
                self.handler.written.clear()
                real(thread)
                assert self.handler.writing.wait(30)
                self.rest.append(self.handler.written.set)
            elif moment == "committed":
                real(thread)
                thread.join()
            raise RuntimeError("can't start new thread") if moment == "no thread" else KeyboardInterrupt()

        self._patch.setattr(threading.Thread, "start", start)

    def ends(self) -> None:
        for rest in self.rest:
            rest()
        for thread in self.threads:
            if thread.ident is not None:
                thread.join()


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupt]:
    found = Interrupt(monkeypatch)
    yield found
    found.handler.written.set()
    found.rest.clear()
    found.ends()


# Whether the step is saved.
MOMENTS = {"never": False, "no thread": False, "later": False, "writing": True, "committed": True}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("replaces", [False, True], ids=["a new step", "a step that is replaced"])
def test_an_interrupt_while_a_thread_starts(moment: str, replaces: bool, tmp_path: Path, interrupt: Interrupt) -> None:
    saved = MOMENTS[moment]
    with hf.CheckpointManager(tmp_path, hf.AsyncCheckpointer(interrupt.handler)) as manager:
        commit(manager, 1, TREE)
        step = 1 if replaces else 2
        interrupt.at(moment)
        with pytest.raises((KeyboardInterrupt, RuntimeError)) as kept:  # as a notebook keeps the last error
            manager.save(step, NEW, force=replaces)
        interrupt.ends()
        manager.wait_until_finished()
        steps = [1, 2] if saved and not replaces else [1]
        assert manager.all_steps() == steps
        expected = NEW if saved else TREE
        np.testing.assert_array_equal(hf.load(tmp_path)["weights"], expected["weights"])
        assert not list(tmp_path.glob("*/checkpoint.partial"))
        if step not in steps:
            with pytest.raises(hf.CheckpointNotFoundError):
                manager.record_metrics(step, {"loss": 1})
        manager.save(step, TREE, force=True)
        manager.save(3, NEW)
    assert kept.value is not None
    assert hf.verify(tmp_path).ok
    assert hf.CheckpointManager(tmp_path).all_steps() == sorted({1, step, 3})


def test_a_save_without_a_manager(tmp_path: Path, interrupt: Interrupt) -> None:
    with hf.AsyncCheckpointer(interrupt.handler) as checkpointer:
        checkpointer.save(tmp_path / "saved", TREE)
        checkpointer.wait_until_finished()
        interrupt.at("writing")
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(tmp_path / "saved", NEW, force=True)
        interrupt.ends()
    np.testing.assert_array_equal(hf.load(tmp_path / "saved")["weights"], NEW["weights"])


@pytest.mark.parametrize("locked", ["owner.json", "1/checkpoint.partial", "2/checkpoint.partial"])
def test_a_lock_that_is_taken_at_the_interrupt(locked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's file, what a killed save has left, and the marker of a new save."""
    if locked.startswith("1"):
        (tmp_path / "1").mkdir()
        (tmp_path / "1/checkpoint.partial").write_text("{}")
    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        real(descriptor, operation)
        if Path(f"/proc/self/fd/{descriptor}").resolve() == tmp_path / locked:
            monkeypatch.setattr(fcntl, "flock", real)
            raise KeyboardInterrupt

    monkeypatch.setattr(fcntl, "flock", flock)
    interrupted = hf.CheckpointManager(tmp_path, hf.PyTreeCheckpointer())
    with pytest.raises(KeyboardInterrupt) as kept:
        interrupted.save(2, TREE)
    for manager in (interrupted, hf.CheckpointManager(tmp_path, hf.PyTreeCheckpointer())):
        assert manager.save(2, TREE, force=True)
    assert kept.value is not None  # and with it all that the call had


@pytest.mark.parametrize("checkpointer", [hf.PyTreeCheckpointer, None], ids=["foreground", "background"])
def test_the_first_saves_of_two_threads(checkpointer: Any, tmp_path: Path) -> None:
    barrier = threading.Barrier(2, timeout=30)
    with hf.CheckpointManager(tmp_path, checkpointer and checkpointer()) as manager, ThreadPoolExecutor(2) as threads:

        def save(step: int) -> None:
            barrier.wait()
            manager.save(step, {"step": step}, force=True)

        assert len([*threads.map(save, (1, 2))]) == 2
    assert [hf.load(tmp_path / str(step)) for step in (1, 2)] == [{"step": 1}, {"step": 2}]
