"""`model.fit` of Keras, stopped and resumed, on torch and jax."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.documents.examples import Examples

pytestmark = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs keras")

PROGRAM = """
import os, signal, sys
import keras
import numpy as np
from holdfast.keras import CheckpointCallback

class Stops(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if (os.environ.get("STOP") or "") == f"{self.epoch},{batch}":
            os.kill(os.getpid(), signal.SIGTERM)
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(90, 6)).astype("float32")
y = (x.sum(1) > 0).astype("int64")
layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3), keras.layers.BatchNormalization()]
model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(2)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss, metrics=["accuracy"])
with CheckpointCallback(sys.argv[1], witness_steps_after_signal=0) as checkpoint:
    first = checkpoint.initial_epoch if sys.argv[3:] != ["0"] else 0
    model.fit(
        x, y, batch_size=16, epochs=int(sys.argv[2]), initial_epoch=first, callbacks=[Stops(), checkpoint],
        validation_split=0.2, verbose=0,
    )
print(checkpoint.loop.manager.all_steps())
print([weight.tobytes().hex() for weight in map(np.asarray, model.get_weights())])
sys.exit(checkpoint.exit_status)
"""


@pytest.fixture(params=["torch", "jax"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(backend: str, program: str, *arguments: object, stop: str = "", status: int = 0) -> list[str]:
    """Runs a program; returns what it has printed, and the lines of stderr at the end."""
    environment = {**os.environ, "KERAS_BACKEND": backend, "STOP": stop, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == status, done.stderr
    return [*done.stdout.splitlines(), done.stderr]


def test_a_run_that_resumes_at_the_end_of_an_epoch_ends_with_the_same_bits(tmp_path: Path, backend: str) -> None:
    whole = run(backend, PROGRAM, tmp_path / "whole", 3)
    assert whole[0] == "[5, 10, 15]"
    run(backend, PROGRAM, tmp_path / "parts", 2)
    assert run(backend, PROGRAM, tmp_path / "parts", 3)[:2] == whole[:2]


def test_a_run_that_stops_within_an_epoch_says_what_it_repeats(tmp_path: Path, backend: str) -> None:
    stopped = run(backend, PROGRAM, tmp_path, 3, stop="1,2", status=75)
    assert stopped[0] == "[5, 8]"
    assert (
        "StateError: fit begins with initial_epoch=0, and 1 epochs are in the state"
        in (run(backend, PROGRAM, tmp_path, 3, 0, status=1)[-1])
    )
    resumed = run(backend, PROGRAM, tmp_path, 3)
    assert resumed[0] == "[5, 8, 13, 18]"
    assert "step 8 is within epoch 2, 3 batches after its beginning, where fit cannot begin" in resumed[-1]


@pytest.mark.examples("docs/keras.md")
def test_the_program_of_the_page(
    tmp_path: Path, backend: str, examples: Examples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = examples["python 1"]
    assert run(backend, program)[0] == "[9, 12, 15]"
    assert run(backend, program)[0] == "[9, 12, 15]"
