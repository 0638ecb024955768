"""Real processes that end by real signals, and what the next one makes of it."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests import starts

import holdfast as hf

pytestmark = pytest.mark.xdist_group("programs")

EPOCH = 4
TOTAL = 10

# Momentum on a quadratic, with noise: state, data order and generator all matter for the result.
LOOP = """
import json, os, signal, sys, zlib
import numpy as np
from holdfast.integrations.flax import CheckpointCallback

directory, total, epoch, stop, name = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]

class Batches:
    def __init__(self):
        self.drawn, self.order, self.generator = 0, np.arange(epoch), np.random.default_rng(1)
    def __next__(self):
        if self.drawn % epoch == 0:
            self.generator.shuffle(self.order)
        self.drawn += 1
        return self.order[(self.drawn - 1) % epoch]
    def get_state(self):
        return {"drawn": self.drawn, "order": self.order, "generator": self.generator.bit_generator.state}
    def set_state(self, state):
        self.drawn, self.order = state["drawn"], state["order"]
        self.generator.bit_generator.state = state["generator"]

data, noise = Batches(), np.random.default_rng(2)
state = {"w": np.ones(50_000), "v": np.zeros(50_000), "lr": 0.1}
with CheckpointCallback(directory, save_interval_steps=1, max_to_keep=2) as checkpoint:
    state, start = checkpoint.restore_or_initialize(state, data=data, noise=noise)
    for step in range(start + 1, total + 1):
        gradient = state["w"] * (1 + next(data)) + noise.normal(size=50_000)
        velocity = 0.9 * state["v"] + gradient
        state = {"w": state["w"] - state["lr"] * velocity, "v": velocity, "lr": state["lr"] * 0.9}
        if step == stop and name == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        outcome = checkpoint.on_step(step, state, data=data, noise=noise)
        if step == stop and name == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if outcome.should_stop:
            sys.exit(75)
bits = zlib.crc32(state["w"].tobytes() + state["v"].tobytes())
print(json.dumps([start, bits, data.drawn, noise.random()]))
"""


def run(directory: Path, stop: int = 0, name: str = "") -> subprocess.CompletedProcess[str]:
    return starts.run("-c", LOOP, directory, TOTAL, EPOCH, stop, name)


def finished(directory: Path) -> list[Any]:
    done = run(directory)
    assert done.returncode == 0, done.stderr
    result: list[Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return finished(tmp_path_factory.mktemp("whole"))[1:]


POINTS = [  # in pairs by default; the end of an epoch is among TWICE
    pytest.param(
        [(stop, name)],
        id=f"{name}-{stop}",
        marks=pytest.mark.sweep if (place + number) % 2 or stop == EPOCH else (),
    )
    for place, stop in enumerate((1, EPOCH, EPOCH + 1, TOTAL))
    for number, name in enumerate(("SIGKILL", "SIGTERM"))
]
TWICE = [
    pytest.param([(3, "SIGKILL"), (EPOCH, "SIGTERM")], id="killed-then-preempted"),
    pytest.param([(EPOCH, "SIGTERM"), (2 * EPOCH, "SIGKILL")], id="preempted-then-killed"),
]


@pytest.mark.parametrize("ends", POINTS + TWICE)
def test_a_process_that_ends_by_a_signal_is_continued_exactly(
    tmp_path: Path, expected: list[Any], ends: list[tuple[int, str]]
) -> None:
    for stop, name in ends:
        ended = run(tmp_path, stop, name)
        assert ended.returncode == (75 if name == "SIGTERM" else -signal.SIGKILL), ended.stderr
    start, *result = finished(tmp_path)
    stop, name = ends[-1]
    # A kill right after on_step may come before or after the commit of the save that it began.
    assert start == stop if name == "SIGTERM" else start in (stop - 1, stop)
    assert result == expected
    assert hf.verify(tmp_path).ok
