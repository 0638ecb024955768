"""An nnx module, its state and plain dictionaries of it are saved, and each is restored from any other."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.integrations.states import bits
from tests.versions import nnx_list, nnx_update

import holdfast as hf
from holdfast.integrations.flax import CheckpointCallback

optax: Any = pytest.importorskip("optax")
ocp: Any = pytest.importorskip("orbax.checkpoint")


class Model(nnx.Module):
    """Layers in a list, random streams, statistics, and one parameter under two names."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.layers = nnx_list([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.tied = self.layers[0].kernel

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = self.drop(self.norm(layer(x)))
        return x @ self.tied[...] if hasattr(self.tied, "get_value") else x @ self.tied.value


class Line(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.inner = nnx.Linear(2, 2, rngs=rngs)


class Parts(NamedTuple):
    model: Any


def pure(module: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(module))


def trained() -> Model:
    model = Model(1)
    model(jnp.ones((3, 2)))
    return model


def by_callback(path: Path, model: Model) -> None:
    with CheckpointCallback(path, save_interval_steps=1) as checkpoint:
        checkpoint.on_step(1, model)


def by_manager(path: Path, model: Model) -> None:
    with hf.CheckpointManager(path) as manager:
        manager.save(1, nnx.state(model))


def by_orbax(path: Path, model: Model) -> None:
    handler = ocp.PyTreeCheckpointHandler()
    with ocp.Checkpointer(handler) as checkpointer:
        keyless = nnx.state(model, (nnx.Param, nnx.BatchStat))
        checkpointer.save(path, args=ocp.args.PyTreeSave(keyless))


SAVERS: dict[str, Callable[[Path, Model], Any]] = {
    "module": lambda path, model: hf.save(path, model),
    "state": lambda path, model: hf.save(path, nnx.state(model)),
    "pure dictionaries": lambda path, model: hf.save(path, pure(model)),
    "manager": by_manager,
    "callback": by_callback,
}


def into_the_callback(path: Path) -> Any:
    model = Model(2)
    with CheckpointCallback(path, save_interval_steps=1) as checkpoint:
        restored, step = checkpoint.restore_or_initialize(model)
        assert (restored is model, step) == (True, 1)
    return model


LOADERS: dict[str, Callable[[Path], Any]] = {
    "module": lambda path: hf.load(path, like=Model(2), item="state"),
    "abstract": lambda path: hf.load(path, like=nnx.eval_shape(lambda: Model(2)), item="state"),
    "state": lambda path: hf.load(path, like=nnx.state(Model(2)), item="state"),
    "abstract state": lambda path: hf.load(path, like=nnx.state(nnx.eval_shape(lambda: Model(2))), item="state"),
    "pure dictionaries": lambda path: hf.load(path, like=pure(Model(2)), item="state"),
    "manager": lambda path: hf.CheckpointManager(path).restore(None, Model(2)),
    "callback": into_the_callback,
}


@pytest.mark.parametrize("saver", SAVERS)
def test_every_form_restores_every_other(tmp_path: Path, saver: str) -> None:
    model = trained()
    path = tmp_path / "run"
    SAVERS[saver](path if saver in ("manager", "callback") else path / "1", model)
    expected = bits(model)
    template = Model(2)
    assert hf.load(path, like={"x": template}["x"], item="state") is not template
    assert bits(template) == bits(Model(2)), "a template is not changed"
    for name, load in LOADERS.items():
        fresh = Model(2)
        before = bits(fresh)
        found = load(path)
        if name in ("state", "abstract state"):
            assert isinstance(found, nnx.State)
            nnx.update(fresh, found)
        elif "dictionaries" in name:
            state = nnx.state(fresh)
            nnx.replace_by_pure_dict(state, found)
            nnx.update(fresh, state)
        else:
            assert type(found) is Model
            assert found.tied is found.layers[0].kernel
            fresh = found
        assert bits(fresh) == expected != before, name
        assert np.array_equal(fresh(jnp.ones((3, 2))), nnx.clone(model)(jnp.ones((3, 2)))), name


def test_objects_that_share_variables(tmp_path: Path) -> None:
    trunk = Model(1)

    def make(model: Model) -> dict[str, Any]:
        return {"policy": model, "again": {"value": model}, "optimizer": nnx.Optimizer(model, optax.adam(0.1), **WRT)}

    hf.save(tmp_path / "1", make(trunk))
    found = hf.load(tmp_path / "1", like=make(Model(2)))
    assert found["policy"] is found["again"]["value"]
    assert bits(found["policy"]) == bits(trunk)
    with CheckpointCallback(tmp_path, save_interval_steps=1) as checkpoint:
        state, _ = checkpoint.restore_or_initialize(make(Model(3)))
        assert bits(state["policy"]) == bits(trunk)


@pytest.mark.needs("flax", "0.11")  # before, the state of an optimizer holds that of the model once more
def test_a_run_of_orbax_goes_on(tmp_path: Path) -> None:
    """Saved as Flax's Gemma example saves it."""

    def make(seed: int) -> dict[str, Any]:
        model = Line(rngs=nnx.Rngs(seed))
        return {"model": model, "optimizer": nnx.Optimizer(model, optax.adamw(0.1), **WRT)}

    def update(objects: dict[str, Any]) -> None:
        loss: Any = nnx.grad(lambda model: jnp.mean(model.inner(jnp.ones((3, 2))) ** 2))
        nnx_update(objects["optimizer"], objects["model"], loss(objects["model"]))

    objects = make(1)
    update(objects)
    with ocp.CheckpointManager(tmp_path / "theirs") as manager:
        states = {name: nnx.state(value) for name, value in objects.items()}
        manager.save(1, args=ocp.args.StandardSave(states))
    hf.import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    with CheckpointCallback(tmp_path / "ours", save_interval_steps=1) as checkpoint:
        again, step = checkpoint.restore_or_initialize(make(2))
        assert step == 1
    manager = hf.CheckpointManager(tmp_path / "ours")
    for other in (again, manager.restore(1, make(3))):
        assert [bits(other[name]) for name in objects] == [bits(value) for value in objects.values()]
    update(objects)
    update(again)
    assert bits(again["model"]) == bits(objects["model"])


@pytest.mark.needs("flax", "0.11")
def test_a_clip_before_adam_keeps_the_moments(tmp_path: Path) -> None:
    def make(transformation: Any) -> dict[str, Any]:
        model = Line(rngs=nnx.Rngs(0))
        return {"model": model, "optimizer": nnx.Optimizer(model, transformation, **WRT)}

    with CheckpointCallback(tmp_path) as checkpoint:
        objects, _ = checkpoint.restore_or_initialize(make(optax.adam(0.1)))
        grads = nnx.grad(lambda model: jnp.mean(model.inner(jnp.ones((3, 2))) ** 2))(objects["model"])
        nnx_update(objects["optimizer"], objects["model"], grads)
        checkpoint.on_step(1, objects)
    with CheckpointCallback(tmp_path, partial="initialize") as checkpoint:
        clipped, _ = checkpoint.restore_or_initialize(make(optax.chain(optax.clip(1.0), optax.adam(0.1))))
    moved = {name.replace("opt_state/1/", "opt_state/"): one for name, one in bits(clipped["optimizer"]).items()}
    assert moved == bits(objects["optimizer"])


class Cached(nnx.Module):
    def __init__(self, step: float = 0.0) -> None:
        self.cache = nnx.Variable({"keys": jnp.full(2, step), "at": {"step": jnp.full(1, step)}})


def test_a_variable_that_holds_a_dictionary_resumes(tmp_path: Path) -> None:
    saved = Cached(5.0)
    with CheckpointCallback(tmp_path) as checkpoint:
        checkpoint.on_step(1, {"model": saved})
    with CheckpointCallback(tmp_path) as checkpoint:
        restored, _ = checkpoint.restore_or_initialize({"model": Cached()})
    assert bits(restored["model"]) == bits(saved)


@pytest.mark.parametrize("saver", ["state", "pure dictionaries", "by Orbax"])
def test_every_reader_takes_states_and_plain_dictionaries(tmp_path: Path, saver: str) -> None:
    model = Line(nnx.Rngs(1))
    if saver == "by Orbax":
        by_orbax(tmp_path / "1", model)  # type: ignore[arg-type]  # any module
    else:
        SAVERS[saver](tmp_path / "1", model)  # type: ignore[arg-type]
    with CheckpointCallback(tmp_path / "run", init_from=tmp_path / "1") as checkpoint:
        started, step = checkpoint.restore_or_initialize({"net": Line(nnx.Rngs(2))})
    assert (bits(started["net"]), step) == (bits(model), 0)
    renamed = {"other": hf.Transform(original_key="inner")}
    hf.import_checkpoint(tmp_path / "1", tmp_path / "copy") if saver == "by Orbax" else None
    for fresh in (nnx.state(Line(nnx.Rngs(2))), pure(Line(nnx.Rngs(2)))):
        loaded = hf.load(tmp_path / ("copy" if saver == "by Orbax" else "1"), like=fresh)
        assert type(loaded) is type(fresh)
        kept = hf.load_transformed(tmp_path / "1", {}, fresh)
        found = hf.load_transformed(tmp_path / "1", renamed, {"other": fresh["inner"]})
        kernels: list[Any] = [loaded["inner"]["kernel"], kept["inner"]["kernel"], found["other"]["kernel"]]
        for kernel in kernels:
            assert np.array_equal(kernel[...], model.inner.kernel[...])


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    hf.save(tmp_path / "1", pure(trained()))
    larger = Model(2)
    larger.head = nnx.Linear(2, 1, rngs=nnx.Rngs(0))  # type: ignore[attr-defined]  # a new layer
    with pytest.raises(hf.TreeMismatchError, match=r"head/kernel/value: expected .*, not in the checkpoint"):
        hf.load(tmp_path / "1", like=larger)


WRT: dict[str, Any] = {"wrt": nnx.Param}


def first_in(value: Any) -> Any:
    """Return the object in containers that hold nothing else."""
    while not isinstance(value, nnx.Module):
        (value,) = value.values() if isinstance(value, dict) else value
    return value


@pytest.mark.parametrize("as_extra", [False, True])
@pytest.mark.parametrize(
    ("hold", "is_kept"),
    [
        pytest.param(lambda model: model, True, id="alone"),
        pytest.param(lambda model: {"model": model}, True, id="dict"),
        pytest.param(lambda model: [(model,)], True, id="list and tuple"),
        pytest.param(Parts, False, id="named tuple"),
        pytest.param(lambda model: OrderedDict(model=model), False, id="OrderedDict"),
        pytest.param(lambda model: deque([model]), False, id="deque"),
    ],
)
def test_an_object_comes_back_in_its_container(
    tmp_path: Path, hold: Callable[[Model], Any], is_kept: bool, as_extra: bool
) -> None:
    def given(held: Any) -> tuple[Any, dict[str, Any]]:
        return ({"w": jnp.zeros(2)}, {"held": held}) if as_extra else (held, {})

    saved = trained()
    with hf.CheckpointCallback(tmp_path, save_interval_steps=1) as checkpoint:
        state, extras = given(hold(saved))
        checkpoint.restore_or_initialize(state, **extras)
        checkpoint.on_step(1, state, **extras)
    with hf.CheckpointCallback(tmp_path) as checkpoint:
        fresh = Model(9)
        state, extras = given(hold(fresh))
        state, step = checkpoint.restore_or_initialize(state, **extras)
        found = first_in(checkpoint.extras["held"] if as_extra else state)
        assert (step, bits(found)) == (1, bits(saved))
        assert (found is fresh) is is_kept
