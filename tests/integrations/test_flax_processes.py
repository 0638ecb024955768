"""Real processes that end by real signals, and what the next one makes of it."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import starts

import holdfast as hf

pytestmark = pytest.mark.xdist_group("programs")

EPOCH = 4
TOTAL = 10

# Momentum on a quadratic, with noise: state, data order and generator all matter for the result.
NUMPY_LOOP = """
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

FLAX_LOOP = """
import json, os, signal, sys, zlib
import flax.linen as nn, jax, jax.numpy as jnp, numpy as np, optax
from flax.training.train_state import TrainState
from holdfast.integrations.flax import CheckpointCallback

directory, total, epoch, stop, name = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
model = nn.Dense(3)

class Batches:
    position = 0
    def __next__(self):
        self.position += 1
        return np.random.default_rng(self.position // epoch).permutation(8)[:4].astype(np.float32)
    def state_dict(self):
        return {"position": self.position}
    def load_state_dict(self, state):
        self.position = state["position"]

@jax.jit
def update(state, x, key):
    loss = lambda params: (state.apply_fn(params, x + jax.random.normal(key, x.shape)) ** 2).sum()
    return state.apply_gradients(grads=jax.grad(loss)(state.params))

data, key = Batches(), jax.random.key(0)
state = TrainState.create(apply_fn=model.apply, params=model.init(key, jnp.ones(4)), tx=optax.adamw(0.01))
with CheckpointCallback(directory, save_interval_steps=1, max_to_keep=2) as checkpoint:
    state, start = checkpoint.restore_or_initialize(state, data=data, rng=key)
    key = checkpoint.extras["rng"]
    for step in range(start + 1, total + 1):
        key, noise = jax.random.split(key)
        state = update(state, next(data), noise)
        if step == stop and name == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        outcome = checkpoint.on_step(step, state, data=data, rng=key)
        if step == stop and name == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if outcome.should_stop:
            sys.exit(75)
leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
print(json.dumps([start, zlib.crc32(b"".join(leaves)), data.position, jax.random.key_data(key).tolist()]))
"""


def run(program: str, directory: Path, stop: int = 0, name: str = "") -> subprocess.CompletedProcess[str]:
    return starts.run("-c", program, directory, TOTAL, EPOCH, stop, name, backend=starts.backend_of(program))


def finished(program: str, directory: Path) -> list[Any]:
    done = run(program, directory)
    assert done.returncode == 0, done.stderr
    result: list[Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return finished(NUMPY_LOOP, tmp_path_factory.mktemp("whole"))[1:]


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
        ended = run(NUMPY_LOOP, tmp_path, stop, name)
        assert ended.returncode == (75 if name == "SIGTERM" else -signal.SIGKILL), ended.stderr
    start, *result = finished(NUMPY_LOOP, tmp_path)
    stop, name = ends[-1]
    # A kill right after on_step may come before or after the commit of the save that it began.
    assert start == stop if name == "SIGTERM" else start in (stop - 1, stop)
    assert result == expected
    assert hf.verify(tmp_path).ok


def finished_here(program: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The same in this process, where jax is loaded already."""
    output = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["-c", str(directory), str(TOTAL), str(EPOCH), "0", ""])
    with contextlib.redirect_stdout(output):
        exec(program, {})
    result: list[Any] = json.loads(output.getvalue())
    return result


def test_a_flax_run_through_a_chain_of_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stop, name in [(EPOCH, "SIGKILL"), (EPOCH + 2, "SIGTERM")]:
        ended = run(FLAX_LOOP, tmp_path / "chain", stop, name)
        assert ended.returncode == (75 if name == "SIGTERM" else -signal.SIGKILL), ended.stderr
    start, *result = finished_here(FLAX_LOOP, tmp_path / "chain", monkeypatch)
    assert start == EPOCH + 2
    assert result == finished_here(FLAX_LOOP, tmp_path / "whole", monkeypatch)[1:]


def test_importing_the_callback_loads_no_framework() -> None:
    program = "import sys, holdfast.integrations.flax as f; print({'jax', 'flax', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\n", "")
