"""Objects of Keras 3 in a graph, on torch and jax."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.graph import keras_like

from holdfast import CheckpointCallback, graph
from holdfast.engine.errors import TreeMismatchError, UnsupportedLeafError

BACKENDS = ("torch", "jax")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_restores_with_its_optimizer(tmp_path: Path, backend: str) -> None:
    """Keras gives the second model of a process other names; the optimizer has no variables before the first step."""
    saved = keras_like.model(backend)
    keras_like.train(saved)
    path = graph.Checkpoint(model=saved).save(tmp_path / "ckpt")
    fresh = keras_like.model(backend)
    assert fresh.name != saved.name
    graph.Checkpoint(model=fresh).restore(path).assert_consumed()
    assert keras_like.values(fresh) == keras_like.values(saved)
    reader = graph.load_checkpoint(path)
    names = {"dense/kernel", "mine/kernel", "dense_1/kernel", *(f"optimizer/variable_{index}" for index in range(4))}
    assert reader.get_variable_to_shape_map().keys() == {"save_counter", *(f"model/{name}" for name in names)}


def test_a_loop_of_torch_with_a_model_of_keras_resumes(tmp_path: Path) -> None:
    def program() -> tuple[Any, torch.optim.Adam]:
        model = keras_like.model("torch", make=lambda: None)
        return model, torch.optim.Adam([one.value for one in model.variables], 0.1)

    model, optimizer = program()
    sum((one.value.sum() for one in model.variables), torch.tensor(0.0)).backward()
    optimizer.step()
    path = graph.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "ckpt")
    other, resumed = program()
    graph.Checkpoint(model=other, optimizer=resumed).restore(path).assert_consumed()
    assert keras_like.values(other) == keras_like.values(model)
    moments = [[state["exp_avg"].tolist() for state in one.state.values()] for one in (optimizer, resumed)]
    assert moments[0] == moments[1]
    assert len(moments[0]) == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_variables_and_optimizers_alone(tmp_path: Path, backend: str) -> None:
    saved, fresh = keras_like.model(backend), keras_like.model(backend)
    keras_like.train(saved)
    fresh.optimizer.build(fresh.variables)
    path = graph.Checkpoint(optimizer=saved.optimizer, kernel=saved.variables[1]).save(tmp_path / "ckpt")
    graph.Checkpoint(optimizer=fresh.optimizer, kernel=fresh.variables[1]).restore(path).assert_consumed()
    assert keras_like.values(fresh)[1:2] + keras_like.values(fresh)[3:] == [
        *keras_like.values(saved)[1:2],
        *keras_like.values(saved)[3:],
    ]


def test_what_a_layer_of_the_program_saves_by_itself(tmp_path: Path) -> None:
    names = iter(("variable", "variable_1"))

    class Counting(keras_like.Dense):
        seen = 0

        def build(self) -> None:
            super().build()
            self.own[0].name = next(names)

        def save_own_variables(self, store: Any) -> None:
            super().save_own_variables(store)
            store["seen"] = np.array(self.seen)

        def load_own_variables(self, store: Any) -> None:
            self.seen = int(store["seen"])
            super().load_own_variables(store)

    saved, fresh = Counting(), Counting()
    for layer in (saved, fresh):
        layer.build()
    saved.seen = 7
    assert saved.own[0].name != fresh.own[0].name  # Keras numbers weights without a name, too
    path = graph.Checkpoint(layer=saved).save(tmp_path / "ckpt")
    graph.Checkpoint(layer=fresh).restore(path).assert_consumed()
    assert fresh.seen == 7
    assert keras_like.values(fresh) == keras_like.values(saved)


@pytest.mark.parametrize("thing", [keras_like.Sequential([keras_like.Dense()]), keras_like.Optimizer()])
def test_what_is_not_built_yet_is_an_error(tmp_path: Path, thing: Any) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"net: has no variables yet, as it is not built: call its build\("):
        graph.Checkpoint(net=thing).save(tmp_path / "ckpt")
    assert not list(tmp_path.iterdir())


def test_another_architecture_is_told(tmp_path: Path) -> None:
    path = graph.Checkpoint(model=keras_like.model("jax")).save(tmp_path / "ckpt")
    fresh = keras_like.model("jax")
    fresh.layers[1].own[0] = keras_like.Variable(np.zeros(3), "kernel", "jax")
    with pytest.raises(TreeMismatchError, match="model/mine/kernel"):
        graph.Checkpoint(model=fresh).restore(path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_callback_resumes_a_model(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", keras_like)
    saved, fresh = keras_like.model(backend), keras_like.model(backend)
    with CheckpointCallback(tmp_path, save_interval_steps=1) as callback:
        callback.restore_or_initialize({"model": saved})
        keras_like.train(saved)
        callback.on_step(1, {"model": saved})
    with CheckpointCallback(tmp_path, save_interval_steps=1) as callback:
        callback.restore_or_initialize({"model": fresh})
    assert keras_like.values(fresh) == keras_like.values(saved)


_PROGRAM = """
import os, sys
os.environ["KERAS_BACKEND"] = sys.argv[1]
import keras, numpy as np
from holdfast import graph

def model():
    found = keras.Sequential([keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    found.build((None, 4))
    found.compile(keras.optimizers.Adam(0.1), "mse")
    return found

x, y = np.eye(8, 4, dtype="float32"), np.ones((8, 1), "float32")
first, second = model(), model()
first.fit(x, y, verbose=0)
graph.Checkpoint(model=second).restore(graph.Checkpoint(model=first).save(sys.argv[2])).assert_consumed()
for one in (first, second):
    one.fit(x, y, verbose=0, shuffle=False)
assert all(map(np.array_equal, first.get_weights(), second.get_weights()))
"""


@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="no Keras")
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_with_keras_itself_goes_on(tmp_path: Path, backend: str) -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM, backend, str(tmp_path / "ckpt")], check=True)
