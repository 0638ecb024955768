"""The state with which a loop begins: made by a function, abstract, or changed since the last run."""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it ships no types
import pytest
import torch
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec
from tests.integrations.states import bits
from tests.versions import nnx_list, nnx_update

import holdfast as hf
from holdfast import graph
from holdfast.components import Checkpointable

pytestmark = pytest.mark.usefixtures("default_sigterm")

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2)


class Calls:
    """Counts how often an array was made in earnest, and how often only traced."""

    def __init__(self, init: Callable[[], Any]) -> None:
        self._init = init
        self.made = self.traced = 0

    def __call__(self) -> Any:
        if isinstance(jnp.zeros(()) + 0, jax.core.Tracer):
            self.traced += 1
        else:
            self.made += 1
        return self._init()


def linen_state(width: int = 2) -> Any:
    model = nn.Dense(width)
    create: Any = TrainState.create  # untyped in flax
    return create(apply_fn=model.apply, params=model.init(jax.random.key(0), X), tx=optax.adam(0.1))


def linen_update(state: Any) -> Any:
    gradients = jax.grad(lambda params: (state.apply_fn(params, X) ** 2).mean())(state.params)
    return state.apply_gradients(grads=gradients)


class Tied(nnx.Module):
    """Two layers that are one object, and a random stream."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        layer = nnx.Linear(2, 2, rngs=rngs)
        self.layers = nnx_list([layer, layer])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.layers[1](self.dropout(self.layers[0](x)))


def nnx_state() -> Any:
    model = Tied(nnx.Rngs(3))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)}


def nnx_step(state: Any) -> Any:
    gradients = nnx.grad(lambda model: (model(X) ** 2).mean())(state["model"])
    nnx_update(state["optimizer"], state["model"], gradients)
    return state


def dict_state() -> Any:
    return {"w": jnp.arange(4.0), "key": jax.random.key(2), "n": 0}


def dict_update(state: Any) -> Any:
    key, noise = jax.random.split(state["key"])
    return {"w": state["w"] + jax.random.normal(noise, (4,)), "key": key, "n": state["n"] + 1}


PROGRAMS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "TrainState": (linen_state, linen_update),
    "nnx": (nnx_state, nnx_step),
    "dict": (dict_state, dict_update),
}


def train(init: Any, update: Callable[[Any], Any], directory: str, last: int, **options: Any) -> tuple[int, Any]:
    with hf.CheckpointCallback(directory, **{"save_interval_steps": 2, **options}) as checkpoint:
        state, start = checkpoint.restore_or_initialize(init)
        for step in range(start, last):
            state = update(state)
            checkpoint.on_step(step + 1, state)
    return start, state


# A function that makes the state


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_function_is_called_on_a_fresh_start_only(program: str, place: str) -> None:
    init, update = PROGRAMS[program]
    _, whole = train(init(), update, f"{place}/whole", 5)
    first = Calls(init)
    train(functools.partial(first), update, f"{place}/run", 3)
    assert first.made == 1
    second = Calls(init)
    start, resumed = train(functools.partial(second), update, f"{place}/run", 5)
    assert (start, second.made) == (3, 0)
    assert bits(resumed) == bits(whole)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_template_with_shardings(program: str, place: str) -> None:
    """A fresh start makes every array where the template wants it; so does a resumed one."""
    init, update = PROGRAMS[program]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))

    def placed(leaf: Any) -> Any:
        spec: Any = PartitionSpec  # unannotated in jax
        rows = spec("x") if leaf.shape and leaf.shape[0] % 2 == 0 else spec()
        struct: Any = jax.ShapeDtypeStruct
        return struct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, rows))

    def state_like() -> Any:
        if program != "nnx":
            return jax.tree.map(placed, jax.eval_shape(init))
        structure, values = nnx.split(nnx.eval_shape(init))
        return nnx.merge(structure, jax.tree.map(placed, values))

    def arrays(state: Any) -> list[Any]:
        return jax.tree.leaves(nnx.split(state)[1] if program == "nnx" else state)

    for last in (0, 2, 2):
        calls = Calls(init)
        with hf.CheckpointCallback(place, save_interval_steps=1) as checkpoint:
            state, start = checkpoint.restore_or_initialize(functools.partial(calls), like=state_like())
            found = [leaf.sharding for leaf in arrays(state)]
            wanted = [leaf.sharding for leaf in arrays(state_like())]
            shapes = [leaf.ndim for leaf in arrays(state)]
            assert all(one.is_equivalent_to(other, n) for one, other, n in zip(found, wanted, shapes, strict=True))
            assert calls.made == 0
            for step in range(start, last):
                state = update(state)
                checkpoint.on_step(step + 1, state)
    assert start == 2


def test_what_is_no_function_of_jax(place: str) -> None:
    with hf.CheckpointCallback(place) as checkpoint:
        with pytest.raises(
            hf.errors.OptionError, match=r"make_torch was passed as the function.*Pass the state itself"
        ):
            checkpoint.restore_or_initialize(make_torch)
        with pytest.raises(hf.errors.OptionError, match="like= is the template of a function"):
            checkpoint.restore_or_initialize({"w": 1}, like={"w": 2})


def make_torch() -> Any:
    return {"net": torch.nn.Linear(1, 1)}


def nested(levels: int) -> Any:
    tree: Any = jnp.ones(1)
    for _ in range(levels):
        tree = [tree]
    return tree


def within_itself() -> Any:
    tree: list[Any] = []
    tree.append(tree)
    return tree


class Counter:
    """An extra whose state cannot be saved."""

    def get_state(self) -> Any:
        return {"count": 3, "scale": lambda value: value}

    def set_state(self, state: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("state", "extras", "said"),
    [
        ({"w": jnp.ones(2), "tx": optax.sgd(0.1)}, {}, "tx/init: is of type function"),
        ({"w": np.ma.masked_array([1.0])}, {}, "w: is a masked array"),
        ({"w": 1, "seen": {(1, 2)}}, {}, "seen: is a set with an element of type tuple"),
        ({"w": {1.5: 1}}, {}, "w: dict has the key 1.5"),
        ({"w": nested(600)}, {}, "deeper than 200 levels; keep their values in one list"),
        ({"w": within_itself()}, {}, "w/0: list contains itself"),
        ({"w": jnp.ones(2)}, {"config": {"act": lambda w: w, "w": jnp.ones(1)}}, "config/act: is of type function"),
        ({"w": jnp.ones(2)}, {"lock": threading.Lock()}, "lock: is of type _thread.lock"),
        ({"model": torch.nn.Identity(), "w": torch.ones(1).expand(3)}, {}, "w: elements of this tensor share memory"),
    ],
)
def test_what_no_save_can_take_is_found_before_the_first_step(state: Any, extras: Any, said: str, place: str) -> None:
    with hf.CheckpointCallback(place) as checkpoint, pytest.raises(hf.errors.UnsupportedLeafError) as raised:
        checkpoint.restore_or_initialize(state, **extras)
    assert said in str(raised.value)


def test_what_no_save_can_take_is_found_at_the_first_step(place: str) -> None:
    """The state of an object, and what the loop puts into its state."""
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"counter": Counter()}, {}, "counter/scale: is of type function"),
        ({}, {"log": threading.Lock()}, "log: is of type _thread.lock"),
    ]
    for extras, changes, said in cases:
        error = pytest.raises(hf.errors.UnsupportedLeafError, match=re.escape(said))
        with error, hf.CheckpointCallback(place, save_interval_steps=100) as checkpoint:
            state, _ = checkpoint.restore_or_initialize({"w": 1}, **extras)
            checkpoint.on_step(1, {**state, **changes}, **extras)


def test_an_abstract_state_needs_a_checkpoint(tmp_path: Path) -> None:
    abstract = jax.eval_shape(dict_state)
    for resume in ("auto", "never"):
        with (
            hf.CheckpointCallback(tmp_path / "run", resume=resume) as checkpoint,
            pytest.raises(
                hf.errors.OptionError, match=r"is abstract, and there is no checkpoint.*key, n, w.*restore_or_init"
            ),
        ):
            checkpoint.restore_or_initialize(abstract)
    assert not (tmp_path / "run").exists()
    train(dict_state(), dict_update, str(tmp_path / "run"), 3)
    start, state = train(abstract, dict_update, str(tmp_path / "run"), 3)
    assert start == 3
    assert bits(state) == bits(dict_update(dict_update(dict_update(dict_state()))))


def test_a_function_makes_what_the_checkpoint_lacks(tmp_path: Path) -> None:
    def grown() -> Any:
        return {**dict_state(), "more": jnp.full(3, 7.0)}

    train(dict_state(), dict_update, str(tmp_path), 3)
    with hf.CheckpointCallback(tmp_path, partial="initialize", save_at_end=False) as checkpoint:
        state, _ = checkpoint.restore_or_initialize(grown)
    whole = dict_update(dict_update(dict_update(dict_state())))
    assert bits(state) == bits({**whole, "more": jnp.full(3, 7.0)})
    with (
        hf.CheckpointCallback(tmp_path, partial="initialize") as checkpoint,
        pytest.raises(hf.TreeMismatchError, match=r"these leaves are not in the checkpoint, and the state .* abstract"),
    ):
        checkpoint.restore_or_initialize(jax.eval_shape(grown))


# A state that has changed since the last run

ADAM = optax.adam(0.1)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
AVERAGED = optax.chain(optax.ema(0.9), optax.scale_by_adam(), optax.scale(-0.1))
PARAMS: dict[str, Any] = {"w": jnp.arange(3.0), "head": jnp.ones((2, 2))}


def optax_state(optimizer: Any, params: Any = PARAMS, **more: Any) -> Any:
    return {"params": params, "opt": optimizer.init(params), **more}


def optax_update(optimizer: Any, state: Any) -> Any:
    gradients = jax.tree.map(jnp.ones_like, state["params"])
    updates, opt = optimizer.update(gradients, state["opt"], state["params"])
    return {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt}


MU = ["count", "mu/head", "mu/w", "nu/head", "nu/w"]
CHANGES: dict[str, tuple[Any, Any, dict[str, str], list[str]]] = {
    # the state before, the fresh one, where leaves come from that have another path, what stays fresh
    "a clipping": (
        optax_state(ADAM),
        optax_state(CLIPPED),
        {f"opt/1/0/{name}": f"opt/0/{name}" for name in MU},
        [],
    ),
    "no clipping any more": (
        optax_state(CLIPPED),
        optax_state(ADAM),
        {f"opt/0/{name}": f"opt/1/0/{name}" for name in MU},
        [],
    ),
    "an average in the optimizer": (
        optax_state(ADAM),
        optax_state(AVERAGED),
        {f"opt/1/{name}": f"opt/0/{name}" for name in MU},
        ["opt/0/count", "opt/0/ema/head", "opt/0/ema/w"],
    ),
    "an average beside the parameters": (
        optax_state(ADAM),
        optax_state(ADAM, ema=jax.tree.map(jnp.zeros_like, PARAMS)),
        {},
        ["ema/head", "ema/w"],
    ),
    "another head": (
        optax_state(ADAM),
        optax_state(ADAM, {**PARAMS, "head": jnp.ones((2, 5))}),
        {},
        ["opt/0/mu/head", "opt/0/nu/head", "params/head"],
    ),
    "another optimizer": (
        optax_state(ADAM),
        optax_state(optax.sgd(0.1, momentum=0.9)),
        {},
        ["opt/0/trace/head", "opt/0/trace/w"],
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("abstract", [False, pytest.param(True, marks=pytest.mark.sweep)], ids=["state", "function"])
def test_what_fits_is_restored_and_the_rest_is_told(
    change: str, abstract: bool, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, fresh, moved, kept = CHANGES[change]
    optimizers = {"no clipping any more": CLIPPED}
    saved = optax_update(optimizers.get(change, ADAM), before)
    with hf.CheckpointCallback(place, save_interval_steps=1) as checkpoint:
        checkpoint.on_step(1, saved)
    with hf.CheckpointCallback(place) as checkpoint, pytest.raises(hf.TreeMismatchError) as refused:
        checkpoint.restore_or_initialize(fresh)
    assert "partial='initialize' restores what fits" in refused.value.__notes__[0]
    caplog.clear()
    for partial in ("initialize", None):  # once saved, it resumes as any other
        with hf.CheckpointCallback(place, partial=partial, save_interval_steps=1) as checkpoint:
            given: Any = functools.partial(lambda state: state, fresh) if abstract else fresh
            state, start = checkpoint.restore_or_initialize(given)
            expected = bits(saved) | {}
            for name, value in bits(state).items():
                origin = moved.get(name, name)
                assert value == (bits(fresh)[name] if name in kept else expected[origin]), name
            assert start == (1 if partial else 2)
            if partial:
                checkpoint.on_step(2, state)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    told = [line.split(": ")[1] for line in warning.splitlines()[1:] if "kept as initialized" in line]
    assert sorted(told) == sorted(kept)
    assert all(f"moved: {name}, from {origin}" in warning for name, origin in moved.items())


@pytest.mark.parametrize("kind", ["tree", "objects"])
def test_what_fits_of_the_newest_whole_step(
    kind: str, place: str, stored: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What a damaged step lacked is not told of the step before it."""

    def state(*names: str) -> Any:
        values: Any = {name: np.ones(3, np.float32) for name in names}
        return {"net": torch.nn.Linear(2, 2), **values} if kind == "objects" else values

    with hf.CheckpointCallback(place, save_interval_steps=1) as checkpoint:
        checkpoint.on_step(1, state("a", "b"))
        checkpoint.manager.wait_until_finished()
        checkpoint.on_step(2, state("a"))
    files = stored(f"{place}/2")
    files.write("state/d/0", bytes(len(files.read()["state/d/0"])))
    with hf.CheckpointCallback(place, partial="initialize") as checkpoint:
        _, start = checkpoint.restore_or_initialize(state("a", "b", "c"))
    assert start == 1
    (told,) = [text for text in caplog.messages if "partial='initialize'" in text]
    assert [line.strip().split(" ")[:4] for line in told.splitlines()[1:]] == [["kept", "as", "initialized:", "c:"]]


class Layers(torch.nn.Module):
    def __init__(self, *names: str, width: int = 2) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, torch.nn.Linear(2, width))


def test_modules_that_have_changed(place: str, caplog: pytest.LogCaptureFixture) -> None:
    def stepped(net: Any) -> Any:
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        sum(parameter.sum() for parameter in net.parameters()).backward()
        optimizer.step()
        return {"net": net, "optimizer": optimizer}

    old = Layers("one", "two", "three")
    with hf.CheckpointCallback(place, save_interval_steps=1) as checkpoint:
        checkpoint.on_step(1, stepped(old), rng=np.random.default_rng(3))
    new = Layers("one", "two", "four")
    new.two = torch.nn.Linear(2, 5)
    fresh = {name: value.clone() for name, value in new.state_dict().items()}
    state: dict[str, Any] = {"net": new, "optimizer": torch.optim.Adam(new.parameters(), lr=0.1)}
    with hf.CheckpointCallback(place, partial="initialize") as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, rng=np.random.default_rng(4), late=[1, 2])
    assert start == 1
    assert checkpoint.extras["late"] == [1, 2]
    for name, value in new.state_dict().items():
        assert torch.equal(value, old.state_dict()[name] if name.startswith("one") else fresh[name]), name
    # An optimizer keeps all values for a parameter or none: one of them alone would break its next step.
    kept = {name for name, parameter in new.named_parameters() if parameter in state["optimizer"].state}
    assert kept == {"one.weight", "one.bias"}
    stepped(new)
    for line in ("net/two/weight: expected", "net/four/bias: not in the checkpoint", "net/three/weight", "late=:"):
        assert line in caplog.text


class Policy(Checkpointable):
    def __init__(self, width: int) -> None:
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, width))
        self.scale = 1.0


class Learner(Checkpointable):
    """Adam's moments belong to the learner, and their parameters to the policy."""

    def __init__(self, width: int, **counters: int) -> None:
        self.policy = Policy(width)
        self.optimizer = torch.optim.Adam(self.policy.net.parameters(), lr=0.1)
        vars(self).update(counters)

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.policy.net(torch.ones(4, 2)).sum().backward()
        self.optimizer.step()
        self.policy.scale += 1


def test_components_that_have_changed(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """Another number of actions: the last layer starts afresh, and so do its moments."""
    old, new = Learner(4, steps=7, old=1), Learner(6, steps=0, new=2)
    fresh = {name: value.clone() for name, value in new.policy.net.state_dict().items()}
    old.update()
    with hf.CheckpointCallback(place, save_interval_steps=1) as checkpoint:
        checkpoint.on_step(1, old)
    with (
        hf.CheckpointCallback(place) as checkpoint,
        pytest.raises(hf.TreeMismatchError, match="values do not fit component policy"),
    ):
        checkpoint.restore_or_initialize(new)
    caplog.clear()
    with hf.CheckpointCallback(place, partial="initialize", save_interval_steps=1) as checkpoint:
        state, start = checkpoint.restore_or_initialize(new)
        assert state is new
        for name, value in new.policy.net.state_dict().items():
            assert torch.equal(value, fresh[name] if name[0] == "1" else old.policy.net.state_dict()[name]), name
        assert (start, new.policy.scale, vars(new)["steps"], vars(new)["new"]) == (1, 2.0, 7, 2)
        parameters = dict(new.policy.net.named_parameters())
        assert {name for name, value in parameters.items() if value in new.optimizer.state} == {"0.weight", "0.bias"}
        new.update()
        checkpoint.on_step(2, new)
    (told,) = [text for text in caplog.messages if "partial='initialize'" in text]
    found = {tuple(line.strip().split(": ")[:3]) for line in told.splitlines()[1:]}
    assert found == {
        ("kept as initialized", "policy", "net/1/weight"),
        ("kept as initialized", "policy", "net/1/bias"),
        ("kept as initialized", "(root)", "new"),
        ("kept as initialized", "(root)", "optimizer"),
        ("left in the checkpoint", "(root)", "old"),
    }
    assert "optimizer: its values for policy/net/1/bias, whose shape has changed" in told
    with hf.CheckpointCallback(place) as checkpoint:  # once saved, it resumes as any other
        again, start = checkpoint.restore_or_initialize(Learner(6, steps=0, new=0))
    assert start == 2
    assert torch.equal(*(one.policy.net.get_parameter("1.weight") for one in (again, new)))
    assert vars(again)["new"] == 2


def test_a_value_that_does_not_fit_is_told_once(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also one whose name has the colon that follows names in messages."""

    def train(size: int, **options: Any) -> None:
        net = torch.nn.ParameterDict({"x:y": torch.nn.Parameter(torch.zeros(size))})
        with hf.CheckpointCallback(place, save_interval_steps=1, **options) as checkpoint:
            state, start = checkpoint.restore_or_initialize(graph.Checkpoint(net=net))
            checkpoint.on_step(start + 1, state)

    train(2)
    train(3, partial="initialize")
    (told,) = [text for text in caplog.messages if "does not have all of the state" in text]
    assert [line.strip() for line in told.splitlines()[1:]] == [
        "kept as initialized: net/x:y: expected float32[3] (program), found float32[2] (checkpoint)"
    ]
