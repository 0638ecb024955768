"""Runs that tests begin with."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import holdfast as hf


def tree(step: int) -> dict[str, Any]:
    return {"a": step, "b": {"c": np.full(3, step)}}


def opened(place: object, checkpointers: Any = None, **arguments: Any) -> hf.CheckpointManager:
    """A manager with some options, and with what else it takes."""
    others = {name: arguments.pop(name) for name in ("clock", "coordinator", "observer") if name in arguments}
    return hf.CheckpointManager(str(place), checkpointers, hf.CheckpointManagerOptions(**arguments), **others)


def reading(place: object) -> hf.CheckpointManager:
    """A manager that only looks on."""
    return opened(place, read_only=True)


def commit(manager: hf.CheckpointManager, step: int, items: Any, **arguments: Any) -> bool:
    """Saves a step, and waits until it is there."""
    is_saved = manager.save(step, items, **arguments)
    manager.wait_until_finished()
    return is_saved


def saved(place: object, *steps: int, items: Callable[[int], Any] = tree, **options: Any) -> list[int]:
    """Saves steps by a manager with some options, and returns those that are there in the end."""
    metrics = options.pop("metrics", lambda step: None)
    with opened(place, **options) as manager:
        for step in steps:
            manager.save(step, items(step), metrics=metrics(step))
        manager.wait_until_finished()
        return manager.all_steps()


def train(directory: Path, last: int, *, every: int, told: int = 0, error: int = 0) -> list[int]:
    """Trains from what is there to a step, is told to end at one and fails after one; returns the saved steps."""
    found = []
    with hf.CheckpointCallback(directory, save_interval_steps=every) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"w": np.zeros(3)})
        for step in range(start + 1, last + 1):
            if step == told:
                os.kill(os.getpid(), signal.SIGTERM)
            outcome = checkpoint.on_step(step, state)
            found += [step] if outcome.saved else []
            if outcome.should_stop:
                break
            if step == error:
                raise RuntimeError("a mistake")
    return found


def newest_whole(manager: hf.CheckpointManager, items: Any = None) -> Any:
    """Restores the newest step that is whole; there is one."""
    restored = manager.restore_latest(items)
    assert restored is not None
    return restored


class HeldHandler(hf.PyTreeCheckpointHandler):
    """Writes only once it is let go, and takes a snapshot unless it is held; fails to write while it is told to."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.snapshot, self.writing, self.written = (threading.Event() for _ in range(4))
        self.snapshot.set()

    def prepare(self, item: Any, **kwargs: Any) -> Any:
        self.begun.set()
        assert self.snapshot.wait(60)
        prepared: Any = super().prepare(item, **kwargs)
        write, fails = prepared.write, self.fails

        def held(*arguments: Any) -> Any:
            self.writing.set()
            assert self.written.wait(60)
            if fails:
                raise hf.errors.StorageError("the disk is gone")
            return write(*arguments)

        prepared.write = held
        return prepared


def let_go() -> HeldHandler:
    """A handler that waits for nothing, and fails if it is told to."""
    handler = HeldHandler()
    handler.written.set()
    return handler
