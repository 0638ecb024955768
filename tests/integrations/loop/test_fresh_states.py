"""The first save warns exactly where a restore into the fresh state is refused."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it ships no types
import pytest
import torch
from flax import nnx, struct
from flax.core import freeze
from flax.training.train_state import TrainState

import holdfast as hf
from holdfast.components import Checkpointable

pytestmark = [pytest.mark.usefixtures("default_sigterm"), pytest.mark.xdist_group("programs")]

Change = Callable[[Any], Any]  # changes a state before its first save, and returns another one or None


def linear(columns: int = 3) -> Any:
    torch.manual_seed(0)
    return torch.nn.Linear(columns, 1)


class Program:
    """Objects as programs hold them."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def program() -> Any:
    model = linear()
    return Program(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
        layers=torch.nn.ModuleList(),
        lazy=torch.nn.LazyLinear(2),
        rng=np.random.default_rng(0),
        none=None,
        count=0,
        rate=0.5,
        text="x",
        numpy=np.zeros(2),
        tensor=torch.zeros(2),
        array=jnp.zeros(2),
        listed=[],
        pair=(),
        shape=(1, 2),
        queue=deque(maxlen=4),
        named={},
        episodes={"first": torch.zeros(2)},
    )


def sets(**attributes: Callable[[], Any]) -> Change:
    def change(objects: Any) -> None:
        for name, make in attributes.items():
            setattr(objects, name, make())

    return change


def schedules(objects: Any) -> None:
    torch.optim.lr_scheduler.StepLR(objects.optimizer, 1)


OBJECTS: dict[str, Change] = {
    "nothing": sets(),
    **{
        f"{name} becomes {what}": sets(**{name: make})
        for name, what, make in [
            ("none", "a module", linear),
            ("none", "a state dict", lambda: copy.deepcopy(linear().state_dict())),
            ("none", "a tensor", lambda: torch.ones(3)),
            ("none", "a jax array", lambda: jnp.ones(3)),
            ("none", "a dictionary of jax arrays", lambda: {"a": jnp.ones(3)}),
            ("none", "a dictionary of numpy arrays", lambda: {"a": np.ones(3)}),
            ("none", "a list of modules", lambda: [linear()]),
            ("none", "an object", lambda: Program(a=1)),
            ("none", "a number", lambda: 0.5),
            ("none", "a generator", np.random.default_rng),
            ("none", "an object of nnx", lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0))),
            ("count", "a float", lambda: 0.5),
            ("count", "an integer tensor", lambda: torch.tensor(3)),
            ("count", "a float tensor", lambda: torch.tensor(3.0)),
            ("count", "None", lambda: None),
            ("count", "a text", lambda: "a"),
            ("count", "a list", lambda: [1, 2]),
            ("rate", "a jax scalar", lambda: jnp.float32(3)),
            ("text", "a number", lambda: 3),
            ("numpy", "longer", lambda: np.zeros(5)),
            ("numpy", "float32", lambda: np.zeros(2, np.float32)),
            ("numpy", "a tensor", lambda: torch.zeros(2, dtype=torch.float64)),
            ("tensor", "longer", lambda: torch.zeros(5)),
            ("tensor", "None", lambda: None),
            ("tensor", "a dictionary", lambda: {"a": torch.zeros(2)}),
            ("array", "int32", lambda: jnp.zeros(2, jnp.int32)),
            ("pair", "numbers", lambda: (1, 2)),
            ("pair", "tensors", lambda: (torch.ones(2),)),
            ("shape", "text", lambda: ("a", 2)),
            ("shape", "nested", lambda: ([1, 2], [3])),
            ("shape", "longer and nested", lambda: ([1, 2], [3], 4)),
            ("episodes", "None", lambda: None),
            ("rng", "another one", lambda: np.random.default_rng(5)),
            ("rng", "None", lambda: None),
            ("new", "a number", lambda: 0.5),
            ("new", "a module", linear),
            ("new", "an empty dictionary", dict),
            ("new", "None", lambda: None),
        ]
    },
    "a list gets a parameter": lambda objects: objects.listed.append(torch.nn.Parameter(torch.ones(2))),
    "a list gets a tensor that has a name": lambda objects: objects.listed.append(objects.tensor),
    "a list gets a trained parameter": lambda objects: objects.listed.append(objects.model.weight),
    "a queue gets a tensor that has a name": lambda objects: objects.queue.append(objects.tensor),
    "a queue gets a trained parameter": lambda objects: objects.queue.append(objects.model.weight),
    "a dictionary gets a list with a tensor": lambda objects: objects.named.update(a=[objects.tensor]),
    "a list gets another list": lambda objects: objects.listed.append(objects.queue),
    "two dictionaries become one": lambda objects: setattr(objects, "named", objects.episodes),
    "a list grows": lambda objects: objects.listed.extend([1.0, 2.0]),
    "a list becomes long": lambda objects: objects.listed.extend(range(200)),
    "a list gets tensors": lambda objects: objects.listed.append(torch.ones(2)),
    "a list gets jax arrays": lambda objects: objects.listed.append(jnp.ones(2)),
    "a list gets a module": lambda objects: objects.listed.append(linear()),
    "a queue gets arrays": lambda objects: objects.queue.append((np.ones(2), 1)),
    "a dictionary grows": lambda objects: objects.named.update(a=1, b=[2]),
    "a dictionary gets a tensor": lambda objects: objects.named.update(a=torch.ones(1)),
    "a dictionary gets a jax array": lambda objects: objects.named.update(a=jnp.ones(1)),
    "a dictionary gets a module": lambda objects: objects.named.update(a=linear()),
    "a dictionary is cleared": lambda objects: objects.episodes.clear(),
    "a layer is appended": lambda objects: objects.layers.append(linear()),
    "a layer is set": lambda objects: setattr(objects.model, "added", linear(1)),
    "a buffer is registered": lambda objects: objects.model.register_buffer("mean", torch.ones(1)),
    "a group is added": lambda objects: objects.optimizer.add_param_group({"params": linear().parameters()}),
    "an option is added": lambda objects: objects.optimizer.param_groups[0].update(extra=3),
    "another optimizer": lambda objects: setattr(
        objects, "optimizer", torch.optim.SGD(objects.model.parameters(), lr=0.1)
    ),
    "a schedule": schedules,
    "an attribute is deleted": lambda objects: delattr(objects, "count"),
    "a module has two names": lambda objects: setattr(objects, "none", objects.model),
}


class Pair(NamedTuple):
    a: Any
    b: Any


@struct.dataclass
class Variables:
    a: Any
    b: Any = None


@dataclasses.dataclass
class Settings:
    a: Any = 0


def tree() -> Any:
    return {
        "w": jnp.ones(2),
        "none": None,
        "listed": [],
        "pair": Pair(jnp.ones(1), None),
        "variables": Variables(a=jnp.ones(1)),
        "frozen": freeze({"a": jnp.ones(1)}),
        "numpy": np.zeros(2),
    }


def replaces(**entries: Callable[[], Any]) -> Change:
    return lambda state: {**state, **{name: make() for name, make in entries.items()}}


TREES: dict[str, Change] = {
    f"{name} becomes {what}": replaces(**{name: make})
    for name, what, make in [
        ("none", "an array", lambda: jnp.ones(3)),
        ("none", "a FrozenDict", lambda: freeze({"a": jnp.ones(3)})),
        ("none", "a struct", lambda: Variables(a=jnp.ones(3))),
        ("none", "a dataclass", Settings),
        ("none", "a named tuple", lambda: Pair(jnp.ones(3), 1)),
        ("none", "a state of optax", lambda: optax.adam(0.1).init({"w": jnp.ones(2)})),
        ("none", "a TrainState", lambda: TrainState.create(apply_fn=None, params={}, tx=optax.sgd(0.1))),  # type: ignore[no-untyped-call]
        ("none", "a counter", lambda: Counter(a=2)),
        ("none", "a queue", lambda: deque([1], 3)),
        ("none", "ordered", lambda: OrderedDict(a=2)),
        ("listed", "a list of structs", lambda: [Variables(a=1)]),
        ("pair", "larger", lambda: Pair(jnp.ones(1), {"c": 1})),
        ("variables", "larger", lambda: Variables(a=jnp.ones(3), b={"c": jnp.ones(1)})),
        ("variables", "nested", lambda: Variables(a=jnp.ones(3), b=Variables(a=1))),
        ("frozen", "a dictionary", lambda: {"a": jnp.ones(1), "b": 2}),
        ("numpy", "longer", lambda: np.zeros(5)),
        ("new", "an array", lambda: jnp.ones(2)),
        ("new", "a struct", lambda: Variables(a=1)),
    ]
}


class Model(nnx.Module):
    def __init__(self) -> None:
        self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.none = nnx.Variable[Any](None)


def with_model() -> Any:
    return {"model": Model(), "count": 0}


MODELS: dict[str, Change] = {
    "nothing": lambda model: None,
    "a variable that was sown": lambda model: setattr(model, "seen", nnx.Intermediate(jnp.ones(1))),
    "a new layer": lambda model: setattr(model, "more", nnx.Linear(2, 2, rngs=nnx.Rngs(0))),
    "a variable gets an array": lambda model: model.none.set_value(jnp.ones(2)),
    "a variable gets a dictionary": lambda model: model.none.set_value({"a": jnp.ones(2)}),
}


def of_model(change: Change) -> Change:
    return lambda state: change(state["model"])


NNX: dict[str, Change] = {
    **{name: of_model(change) for name, change in MODELS.items()},
    "a new number": replaces(new=lambda: 3),
    "a new struct": replaces(new=lambda: Variables(a=1)),
}


class Learner(Checkpointable):
    def __init__(self) -> None:
        self.model, self.none, self.tensor, self.count = linear(), None, torch.zeros(2), 0
        self.named: dict[str, Any] = {}
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


class Root(Checkpointable):
    def __init__(self) -> None:
        self.learner, self.numpy = Learner(), np.zeros(2)

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        return [("learner", self.learner)]


COMPONENTS: dict[str, Change] = {
    "nothing": lambda root: None,
    "a module": lambda root: setattr(root.learner, "none", linear()),
    "a layer is set": lambda root: setattr(root.learner.model, "added", linear(1)),
    "a longer tensor": lambda root: setattr(root.learner, "tensor", torch.zeros(3)),
    "integers": lambda root: setattr(root, "numpy", np.zeros(2, np.int64)),
    "a dictionary grows": lambda root: root.learner.named.update(a=torch.zeros(3)),
    "an attribute is deleted": lambda root: delattr(root.learner, "count"),
}

CASES = [
    pytest.param(make, change, kind.endswith("as an extra"), id=f"{kind}: {name}")
    for kind, make, table in [
        ("objects", lambda: {"program": program()}, OBJECTS),
        ("tree", tree, TREES),
        ("nnx", with_model, NNX),
        ("components", Root, COMPONENTS),
        ("a tree as an extra", tree, TREES),
        ("a model of nnx as an extra", Model, MODELS),
    ]
    for name, change in table.items()
]


@pytest.mark.parametrize(("make", "change", "is_extra"), CASES)
def test_the_first_save_warns_exactly_where_a_restore_into_the_fresh_state_is_refused(
    make: Callable[[], Any], change: Change, is_extra: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def begin(checkpoint: hf.CheckpointCallback) -> Any:
        if not is_extra:
            return checkpoint.restore_or_initialize(make())[0]
        checkpoint.restore_or_initialize({"w": np.ones(1)}, extra=make())
        return checkpoint.extras["extra"]

    with hf.CheckpointCallback(tmp_path, save_interval_steps=1) as checkpoint:
        value = begin(checkpoint)
        if isinstance(value, dict) and "program" in value:
            change(value["program"])
            value["program"].lazy(torch.ones(1, 3))
        elif (changed := change(value)) is not None:
            value = changed
        for step in (1, 2):
            if is_extra:
                checkpoint.on_step(step, {"w": np.ones(1)}, extra=value)
            else:
                checkpoint.on_step(step, value)
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    told = [text for text in warnings if "a resume would be refused" in text]
    refused = False
    try:
        with hf.CheckpointCallback(tmp_path) as again:
            restored = begin(again)
    except hf.TreeMismatchError:
        refused = True
    assert len(told) == refused, told
    if not refused and isinstance(value, dict) and "program" in value:
        for name in ("listed", "queue", "named", "episodes"):
            saved, now = (vars(one["program"])[name] for one in (value, restored))
            assert saved is None or len(saved) == len(now), name
