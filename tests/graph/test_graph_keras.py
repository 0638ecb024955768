"""Objects of Keras 3 in a graph, on torch and jax."""

from __future__ import annotations

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


@pytest.fixture(params=BACKENDS)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A model that was trained, and a fresh one."""
    trained, fresh = keras_like.model(request.param), keras_like.model(request.param)
    keras_like.train(trained)
    return trained, fresh


def test_a_model_restores_with_its_optimizer(tmp_path: Path, models: tuple[Any, Any]) -> None:
    """Keras gives the second model of a process other names; the optimizer has no variables before the first step."""
    saved, fresh = models
    path = graph.Checkpoint(model=saved).save(tmp_path / "ckpt")
    assert fresh.name != saved.name
    graph.Checkpoint(model=fresh).restore(path).assert_consumed()
    assert keras_like.values(fresh) == keras_like.values(saved)
    reader = graph.load_checkpoint(path)
    names = {"dense/kernel", "mine/kernel", "dense_1/kernel", "optimizer/_iterations"}
    names.update(f"optimizer/_momentums/{index}" for index in range(3))
    assert reader.get_variable_to_shape_map().keys() == {"save_counter", *(f"model/{name}" for name in names)}


def test_parts_of_a_model_and_a_model_as_the_root(tmp_path: Path, models: tuple[Any, Any]) -> None:
    saved, fresh = models
    fresh.optimizer.build(fresh.variables)
    path = graph.Checkpoint(optimizer=saved.optimizer, kernel=saved.variables[1]).save(tmp_path / "parts")
    graph.Checkpoint(optimizer=fresh.optimizer, kernel=fresh.variables[1]).restore(path).assert_consumed()
    expected = keras_like.values(saved)
    assert [value == other for value, other in zip(keras_like.values(fresh), expected, strict=True)] == [
        index not in (0, 2) for index in range(len(expected))
    ]
    checkpoint = graph.Checkpoint(fresh, step=0)
    checkpoint.restore(graph.Checkpoint(saved, step=7).save(tmp_path / "root")).assert_consumed()
    assert (checkpoint.step, keras_like.values(fresh)) == (7, expected)


class ActorCritic(keras_like.Layer):
    """A model with layers in attributes and in a list, as programs write them."""

    def __init__(self, *names: str, backend: str) -> None:
        super().__init__(backend=backend)
        self.blocks: Any = keras_like.TrackedList()
        for name in names:
            layer = keras_like.Dense(backend=backend)
            self.layers.append(layer)
            if name == "blocks":
                self.blocks.append(layer)
            else:
                setattr(self, name, layer)
        self.build()
        self.optimizer = keras_like.Optimizer()

    def moments(self) -> dict[str, Any]:
        """Return the kernels and their momentums by the names of the layers."""
        known = {id(one): name for name in ("actor", "critic") for one in getattr(self, name).variables}
        pairs = zip(self.variables, self.optimizer._momentums, strict=True)
        found = {known.get(id(one), "blocks"): (one, momentum) for one, momentum in pairs}
        return {name: [np.asarray(one.value.tolist()).tolist() for one in pair] for name, pair in found.items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_keep_their_values_and_moments_and_one_that_is_gone_is_told(tmp_path: Path, backend: str) -> None:
    saved = ActorCritic("actor", "critic", "blocks", backend=backend)
    keras_like.train(saved)
    path = graph.Checkpoint(net=saved).save(tmp_path / "ckpt")
    fresh = ActorCritic("critic", "blocks", "actor", backend=backend)
    graph.Checkpoint(net=fresh).restore(path).assert_consumed()
    assert fresh.moments() == saved.moments()
    names = set(graph.load_checkpoint(path).get_variable_to_shape_map())
    assert {"net/actor/kernel", "net/critic/kernel", "net/blocks/0/kernel"} <= names

    fewer = ActorCritic("actor", "critic", backend=backend)
    status = graph.Checkpoint(net=fewer).restore(path, partial=True)
    pending = {"net/blocks/0/kernel", *(f"net/optimizer/_momentums/{index}" for index in range(3))}
    assert set(status.report.pending) == pending
    for name, (kernel, _) in fewer.moments().items():
        assert kernel == saved.moments()[name][0]


def test_a_part_alone_and_a_later_one_as_in_the_guide_of_tensorflow(tmp_path: Path) -> None:
    net = ActorCritic("actor", "critic", backend="jax")
    keras_like.train(net)
    path = graph.Checkpoint(net=net).save(tmp_path / "ckpt")
    critic, actor = (keras_like.Variable(np.zeros(2), "mine", "jax") for _ in range(2))
    fake = graph.Checkpoint(critic=graph.Checkpoint(kernel=critic))
    status = graph.Checkpoint(net=fake).restore(path).assert_existing_objects_matched()
    fake.actor = graph.Checkpoint()
    fake.actor.kernel = actor
    assert [one.value.tolist() for one in (actor, critic)] == [one.value.tolist() for one in net.variables]
    assert "net/optimizer/_iterations" in status.expect_partial().report.pending
    reader = graph.load_checkpoint(path)
    assert reader.get_tensor("net/critic/kernel/.ATTRIBUTES/VARIABLE_VALUE").tolist() == critic.value.tolist()


def test_a_checkpoint_of_tensorflow_restores_into_the_same_model() -> None:
    net: Any = ActorCritic("critic", "actor", backend="torch")
    net.l1 = net.actor
    net.l1._kernel = keras_like.Variable(np.zeros((1, 5)), "kernel", "torch")
    net.l1.own = [net.l1._kernel]
    source = Path(__file__).parents[1] / "formats" / "tensorflow" / "guide" / "ckpt-5"
    status = graph.Checkpoint(net=net).restore(source, partial=True)
    assert "net/l1/_kernel" not in status.report.pending
    expected = graph.load_checkpoint(source).get_tensor("net/l1/_kernel")
    assert np.array_equal(net.l1.kernel.value.detach().numpy(), expected)


def test_a_checkpoint_of_a_version_that_numbered_layers_and_variables() -> None:
    saved, fresh = keras_like.model("torch"), keras_like.model("torch")
    keras_like.train(saved)
    graph.Checkpoint(model=fresh).restore(Path(__file__).parent / "numbered_keras").assert_consumed()
    assert keras_like.values(fresh) == keras_like.values(saved)


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
    with pytest.raises(UnsupportedLeafError, match=r"net: has no variables yet .* not built: call its build\("):
        graph.Checkpoint(net=thing).save(tmp_path / "ckpt")
    assert not list(tmp_path.iterdir())


def test_another_architecture_is_told(tmp_path: Path) -> None:
    path = graph.Checkpoint(model=keras_like.model("jax")).save(tmp_path / "ckpt")
    fresh = keras_like.model("jax")
    fresh.layers[1].own[0] = keras_like.Variable(np.zeros(3), "kernel", "jax")
    with pytest.raises(TreeMismatchError, match="model/mine/kernel"):
        graph.Checkpoint(model=fresh).restore(path)


def test_a_callback_resumes_a_model(tmp_path: Path, models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", keras_like)
    saved, fresh = models
    before = keras_like.values(fresh)
    with CheckpointCallback(tmp_path, save_interval_steps=1) as callback:
        callback.restore_or_initialize({"model": saved})
        callback.on_step(1, {"model": saved})
    with CheckpointCallback(tmp_path, save_interval_steps=1) as callback:
        callback.restore_or_initialize({"model": fresh})
    assert keras_like.values(fresh) == keras_like.values(saved) != before
