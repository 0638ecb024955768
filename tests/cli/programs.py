"""A training program as its author would write it, with mistakes and troubles on demand; run as a process.

``python programs.py DIR STEPS [MISTAKE ...] [TROUBLE@STEP ...]``: a linear model on shuffled data with noise. Troubles
happen once each: ``crash``, ``kill``, ``hang``, ``term``. Mistakes: ``no-generator`` and ``no-loader`` leave out of the
checkpoints what the loop depends on, ``sum`` adds numbers in an order of its own, ``unseeded`` is not seeded,
``deaf`` continues after a preemption, ``fresh`` never resumes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

import holdfast as hf

EPOCH = 6  # batches
PROGRAM = [sys.executable, "-W", "error", __file__]


class Batches:
    """Batches of a data set in a shuffled order, with a state."""

    def __init__(self) -> None:
        self.drawn = 0

    def __next__(self) -> NDArray[np.float64]:
        epoch, place = divmod(self.drawn, EPOCH)
        self.drawn += 1
        order = np.random.default_rng(epoch).permutation(2 * EPOCH)
        return np.sin(order[2 * place : 2 * place + 2]).astype(np.float64)

    def get_state(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def set_state(self, state: Any) -> None:
        self.drawn = state["drawn"]


def validate(checkpoint: Any, step: int, weights: NDArray[np.float32]) -> None:
    for _ in range(3):
        if checkpoint.preempted:
            return
    checkpoint.on_eval(step, {"loss": float(np.square(weights).sum())})


def total(values: NDArray[np.float32], *, in_any_order: bool) -> np.float32:
    """The sum of numbers, from one end to the other; of which end a kernel with atomic additions says nothing.

    In half precision, one sum in four is the same in another order: after ten steps, one run in 10^5.
    """
    order = np.frombuffer(os.urandom(4 * len(values)), np.uint32).argsort() if in_any_order else np.arange(len(values))
    return np.float32(np.cumsum(values[order], dtype=np.float16)[-1])


def main(directory: str, steps: int, *options: str) -> int:
    mistakes = {one for one in options if "@" not in one}
    troubles = {one for one in options if "@" in one}
    noise = np.random.default_rng(None if "unseeded" in mistakes else 7)
    batches = Batches()
    extras: dict[str, Any] = {"data": batches, "rng": noise}
    for mistake, name in (("no-loader", "data"), ("no-generator", "rng")):
        if mistake in mistakes:
            del extras[name]
    resume: Any = "never" if "fresh" in mistakes else "auto"
    with hf.CheckpointCallback(directory, save_interval_steps=2, max_to_keep=2, resume=resume) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"weights": np.ones(64, np.float32)}, **extras)
        for step in range(start + 1, steps + 1):
            batch = next(batches)
            change = batch.mean() + 0.1 * noise.normal(size=64)
            mean = total(state["weights"], in_any_order="sum" in mistakes) / 64
            state = {"weights": (0.9 * state["weights"] + 0.1 * mean + change).astype(np.float32)}
            for trouble in sorted(one for one in troubles if one.endswith(f"@{step}")):
                happen(trouble.partition("@")[0], f"{directory}.{trouble}")
            stop = checkpoint.on_step(step, state, **extras).should_stop
            if stop and "deaf" not in mistakes:
                break
            if step % 4 == 0:
                validate(checkpoint, step, state["weights"])
    return checkpoint.exit_status


def happen(trouble: str, mark: str) -> None:
    if os.path.exists(mark):
        return
    with open(mark, "w"):
        pass
    if trouble == "crash":
        raise RuntimeError("a mistake in the program")
    if trouble == "hang":
        threading.Event().wait()
    if trouble == "ready":  # until a line comes, before which the test sends a signal
        print("ready", flush=True)
        os.read(0, 1)
        return
    os.kill(os.getpid(), signal.SIGKILL if trouble == "kill" else signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
