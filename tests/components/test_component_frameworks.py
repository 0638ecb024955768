"""Components made of what other libraries offer: flax nnx, optax, TrainState, torch without a mixin, plain Python."""

from __future__ import annotations

import copy
import enum
import functools
import logging
import pickle
import random
import re
import types
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from tests.ids import plain_id

import holdfast as hf
from holdfast.components import Checkpointable, allow, read_state
from holdfast.integrations.components import Component


class Net(Checkpointable, nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(2, 3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def test_what_is_kept_of_the_constructor_is_nothing_to_flax(place: str) -> None:
    @nnx.jit
    def first(net: Net) -> Any:
        traces.append(1)
        return net.first.kernel[...].sum()

    traces: list[int] = []
    one, other = Net(rngs=nnx.Rngs(0)), Net(rngs=nnx.Rngs(1))
    assert first(one) != first(other)
    assert len(traces) == 1
    assert len(jax.tree.leaves(nnx.state(one))) == len(jax.tree.leaves(nnx.state(nnx.clone(one))))
    path = one.save_to_path(place)
    assert first(Net.from_checkpoint(path)) == first(one)
    assert set(hf.load(path)) == {"first", "drop"}


class Plain:
    """A component that has no mixin: objects of torch below it, found by name."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(2, 1)
        self.frozen = copy.deepcopy(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.steps = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(torch.ones(2)).sum().backward()
        self.optimizer.step()
        self.steps += 1

    def get_state(self) -> dict[str, Any]:
        return {"steps": self.steps, "optimizer": self.optimizer.state_dict()}

    def set_state(self, state: Any) -> None:
        self.steps = state["steps"]
        self.optimizer.load_state_dict(state["optimizer"])

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        return [("net", self.net), ("opponents/frozen", self.frozen)]


class Host(Checkpointable):
    def __init__(self) -> None:
        self.plain = Plain()


def test_components_without_the_mixin(place: str) -> None:
    host, running = Host(), Host()
    host.plain.step()
    assert isinstance(host.plain, Component)
    path = host.save_to_path(place)
    report = running.restore_from_path(path, strict=True)
    assert set(report.restored) == {"(root)", "plain", "plain/net", "plain/opponents/frozen"}
    for one in (host, running):
        one.plain.step()
    assert torch.equal(running.plain.net.weight, host.plain.net.weight)
    assert torch.equal(running.plain.frozen.weight, host.plain.frozen.weight)
    with pytest.raises(hf.errors.NotAllowedError, match=r":Plain, which is not allowed"):
        Checkpointable.from_checkpoint(f"{path}/plain")
    state = read_state(path)
    assert set(state["plain"]) == {"steps", "optimizer", "net", "opponents/frozen"}


class Statistics(Checkpointable):
    __untracked__ = ("lock",)

    def __init__(self, size: int = 2) -> None:
        self.total = np.zeros(size)
        self.history: list[float] = []
        self.random = random.Random(0)
        self.by_agent: dict[Any, Any] = {0: np.zeros(1), "a": None}
        self.lock = open  # code is not state


@dataclass
class Config:
    rate: float
    sizes: tuple[int, ...] = (1, 2)


class Limits(NamedTuple):
    low: float
    high: float


class Configured(Checkpointable):
    def __init__(self, config: Config, *more: Any, limits: Limits | None = None, part: Any = None, **rest: Any) -> None:
        self.rate = config.rate
        self.part = part
        self.given = [config, more, limits, rest]

    __untracked__ = ("given",)


def test_constructors_that_take_objects(place: str) -> None:
    made = Configured(
        Config(0.5, (3,)), 1, np.float32(2), limits=Limits(0, 1), part=Statistics(3), extra={"t": torch.float16}
    )
    path = made.save_to_path(place)
    with pytest.raises(hf.errors.NotAllowedError, match=":Config, which is not allowed"):
        Configured.from_checkpoint(path)
    found = Configured.from_checkpoint(path, allowed=[Config, Limits])
    assert found.given == made.given
    assert found.part.total.shape == (3,)
    part = Statistics(4)
    assert Configured.from_checkpoint(path, allowed=[Config, Limits], part=Statistics(3)).rate == 0.5
    with pytest.raises(hf.TreeMismatchError, match="total"):
        Configured.from_checkpoint(path, allowed=[Config, Limits], part=part)


@allow
class Colour(enum.Enum):
    RED = 1


@allow
def add(one: int, other: int) -> int:
    return one + other


class Anything(Checkpointable):
    __untracked__ = ("given",)

    def __init__(self, given: Any) -> None:
        self.given = given


ARGUMENTS: list[Any] = [
    -(1 << 70), "text \u20ac", [1, [2, (3, {"a": {4}})]], {1: "int", "1": "text", (1, 2): "tuple"}, range(1, 9, 2),
    slice(None, 5), Path("a/b"), types.SimpleNamespace(a=1, b=[2]),
    np.dtype(">i2"), np.arange(6, dtype=">f4").reshape(2, 3), np.float32(1.5),
    torch.bfloat16, torch.device("cpu"), torch.arange(3), torch.nn.ReLU, torch.optim.Adam,
    jnp.bfloat16, jnp.arange(3.0), jax.random.key(3),
    Colour.RED, add, functools.partial(add, 1, other=2), Limits(0.5, 1.5), Config(0.5), Statistics,
]  # fmt: skip


@pytest.mark.parametrize("value", ARGUMENTS, ids=plain_id)
def test_arguments_of_all_kinds(place: str, value: Any) -> None:
    found = Anything.from_checkpoint(Anything(value).save_to_path(place), allowed=[Config]).given
    assert type(found) is type(value)
    assert getattr(found, "dtype", None) == getattr(value, "dtype", None)
    assert repr(found) == repr(value)


endless: list[Any] = []
endless.append(endless)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (object(), "is a builtins.object, which a constructor spec cannot hold"),
        (endless, "is nested too deeply, or contains itself"),
        ("\ud800", "is text with lone surrogates"),
        (1 << 20_000, "is an integer of more than 10000 bits"),
        (lambda: 0, "is a lambda, which has no name; use a function of a module"),
        (plain_id.__get__(1), "is a builtins.method, which a constructor spec cannot hold"),
        (np.zeros(200_000), "is an array of 1600000 bytes; it belongs in the state"),
        (np.array([object()]), "is an array of object"),
        (torch.zeros(400_000), "is a Tensor of torch.float32[400000]; it belongs in the state"),
        (torch.eye(2).to_sparse(), "is a Tensor of torch.float32[2, 2]; it belongs in the state"),
        (jnp.zeros(400_000), "is a jax array of float32[400000]; it belongs in the state"),
    ],
    ids=["object", "cycle", "surrogate", "big", "lambda", "method", "array", "objects", "tensor", "sparse", "jax"],
)
def test_arguments_that_cannot_be_kept(place: str, value: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    path = Configured(Config(0.5), limits=value).save_to_path(place)
    assert f"'limits' {why}; from_checkpoint() will need it as an argument" in caplog.text
    with pytest.raises(hf.errors.OptionError, match=re.escape(f"not saved; pass them by name: limits ({why}")):
        Configured.from_checkpoint(path, allowed=[Config])
    assert Configured.from_checkpoint(path, allowed=[Config], limits=None).rate == 0.5


def test_copies_know_how_they_were_made(place: str) -> None:
    one = copy.deepcopy(Statistics(5))
    two = pickle.loads(pickle.dumps(Statistics(6)))
    assert Statistics.from_checkpoint(one.save_to_path(f"{place}/1")).total.shape == (5,)
    assert Statistics.from_checkpoint(two.save_to_path(f"{place}/2")).total.shape == (6,)


class Counting(torch.nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra
        self.layer = torch.nn.Linear(2, 1)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [9, torch.ones(2), {"seen": 5, "last": torch.zeros(1)}, {}, [1, 2], ({"a": 1}, 2)])
def test_a_state_dict_is_a_state_and_has_extra_states(extra: Any) -> None:
    class Module(Checkpointable, Counting):
        def __init__(self, extra: Any) -> None:
            super().__init__(extra)
            self.blocks = torch.nn.Sequential(torch.nn.Linear(2, 1), Counting(extra))

    saved, module = Module(extra), Module(None)
    module.set_state(saved.state_dict())
    assert repr(module.extra) == repr(module.blocks[1].extra) == repr(extra)
    assert all(map(torch.equal, module.parameters(), saved.parameters()))
    module.set_state({"layer.weight": saved.layer.weight.detach().numpy() + 1})
    assert torch.equal(module.layer.weight, saved.layer.weight + 1)


class Normalising(Checkpointable, torch.nn.Module):
    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.size, self.name = size, "configuration"
        self.net = torch.nn.Linear(size, size)
        self.mean = np.zeros(size)
        self.history: dict[str, Any] = {"last": torch.zeros(1)}
        self.random = np.random.default_rng(0)
        self.key = jax.random.key(0)
        self.generator = torch.Generator()


def test_modules_have_more_than_torch_knows(place: str) -> None:
    one, other = Normalising(), Normalising()
    one.mean += 1
    one.history["last"] += 2
    one.random.normal()
    one.generator.manual_seed(3)
    one.key = jax.random.key(7)
    one.name = "another"
    report = other.restore_from_path(one.save_to_path(place), strict=True)
    assert report.complete
    assert other.mean.tolist() == [1, 1]
    assert other.history["last"].tolist() == [2]
    assert other.random.normal() == one.random.normal()
    assert other.generator.initial_seed() == 3
    assert torch.rand(2, generator=other.generator).tolist() == torch.rand(2, generator=one.generator).tolist()
    assert jax.random.key_data(other.key).tolist() == jax.random.key_data(one.key).tolist()
    assert other.name == "configuration"


class Called(Checkpointable):
    """Has something that refers back to it, and a component that it forgets."""

    def __init__(self) -> None:
        self.callback = types.SimpleNamespace(owner=self, calls=0)
        self.forgotten = Statistics()
        self.net = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        return []


def test_references_back_and_forgotten_components(place: str, caplog: pytest.LogCaptureFixture) -> None:
    one, other = Called(), Called()
    one.callback.calls = 5
    one.net(torch.ones(1)).sum().backward()
    one.optimizer.step()
    with caplog.at_level(logging.WARNING, "holdfast"):
        path = one.save_to_path(place)
    assert "forgotten is a component that get_checkpointable_components() does not name" in caplog.text
    other.restore_from_path(path, strict=True)
    assert (other.callback.owner is other, other.callback.calls) == (True, 5)
    assert torch.equal(other.net.weight, one.net.weight)
    assert [entry["momentum_buffer"].tolist() for entry in other.optimizer.state.values()] == [[[1.0]], [1.0]]


def test_methods_may_be_extended(place: str) -> None:
    class WithHooks(Statistics):
        def set_state(self, state: Any) -> None:
            super().set_state(state)
            self.history.append(-1.0)

    class Around(Checkpointable):
        def __init__(self) -> None:
            self.inner = WithHooks()

    one, other = Around(), Around()
    one.inner.total += 5
    other.restore_from_path(one.save_to_path(place), strict=True)
    assert other.inner.total.tolist() == [5, 5]
    assert other.inner.history == [-1.0]
    other.set_state(one.get_state())
    assert other.inner.history == [-1.0]


def test_containers_of_components_and_other_things(place: str) -> None:
    class Mixed(Checkpointable):
        def __init__(self) -> None:
            self.by_name: dict[str, Any] = {"net": Normalising(), "rating": 1500.0, "wins": np.zeros(2)}
            self.pairs: list[Any] = [(Normalising(), 1), (Statistics(), 2)]
            self.past: deque[Any] = deque([Statistics(), Normalising()], maxlen=2)
            parameters = [*self.by_name["net"].parameters(), *self.pairs[0][0].parameters()]
            self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    one, other = Mixed(), Mixed()
    one.by_name["rating"] = 1700.0
    one.by_name["wins"] += 3
    one.pairs[0] = (one.pairs[0][0], 11)
    for number, statistics in enumerate((one.pairs[1][0], one.past[0])):
        statistics.total += number + 1
    one.by_name["net"].net(torch.ones(2)).sum().backward()
    one.optimizer.step()
    path = one.save_to_path(place)
    assert set(hf.load(path)) == {"state", "by_name/net", "pairs/0/0", "pairs/1/0", "past/0", "past/1"}
    first = other.past[0]
    other.restore_from_path(path, strict=True)
    assert other.past[0] is first
    assert (other.by_name["rating"], other.by_name["wins"].tolist(), other.pairs[0][1]) == (1700.0, [3, 3], 11)
    assert (other.pairs[1][0].total.tolist(), first.total.tolist()) == ([1, 1], [2, 2])
    assert torch.equal(other.past[1].net.weight, one.past[1].net.weight)
    slots, expected = (
        [entry["momentum_buffer"].tolist() for entry in each.optimizer.state.values()] for each in (other, one)
    )
    assert slots == expected
    assert len(slots) == 2


def test_names_of_components(place: str) -> None:
    class Named(Checkpointable):
        def __init__(self, names: list[str]) -> None:
            self.parts = {name: Statistics() for name in names}

        def get_checkpointable_components(self) -> list[tuple[str, Any]]:
            return list(self.parts.items())

    named = Named(["state", "v1.2", "(0)AddObs", ".."])
    for number, part in enumerate(named.parts.values()):
        part.total[:] = number
    path = named.save_to_path(place)
    found = Named.from_checkpoint(path)
    assert [part.total[0] for part in found.parts.values()] == [0, 1, 2, 3]
    for name in ("v1.2", "state"):
        found.parts[name].total[:] = -1
        found.restore_from_path(f"{path}/v1%252E2", component=name)
        assert found.parts[name].total[0] == 1
    for names, message in (
        (["a", "a/b"], "two components called 'a/b', or one inside"),
        ([""], "a component called ''"),
    ):
        with pytest.raises(hf.errors.OptionError, match=message):
            Named(names).save_to_path(f"{place}/x")


allow(Limits)
