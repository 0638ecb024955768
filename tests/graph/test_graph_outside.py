"""Objects whose values are not in their Python attributes: refused by name before the first step, or no state."""

from __future__ import annotations

import argparse
import array
import collections
import concurrent.futures
import datetime
import functools
import io
import itertools
import logging
import os
import pathlib
import queue
import re
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from tests.documents.examples import Examples
from tests.graph.held import Held

import holdfast as hf
from holdfast import components, graph


class Holder:
    """An object of a program, with one more attribute."""

    def __init__(self, thing: Any) -> None:
        self.step = 3
        self.thing = thing


class Root(components.Checkpointable):
    def __init__(self, thing: Any) -> None:
        self.holder = Holder(thing)


# ---- stand-ins for classes of libraries that are not installed here


def of_module(module: str, kind: type) -> Any:
    kind.__module__ = module
    return kind


class _Handle:
    """Has any method, as handles of Ray's actors do, and none can be called."""

    def __getattr__(self, name: str) -> Any:
        if name not in ("get_state", "set_state"):
            raise AttributeError(name)
        return _RemoteMethod()


class _RemoteMethod:
    def __call__(self) -> None:
        raise TypeError("Actor methods cannot be called directly.")

    def remote(self) -> None:
        """Nothing."""


class _Variable:
    def __init__(self) -> None:
        self._name = "v"


class _NumpyIterator:
    """Gives its state as tensors, under the names of methods that write files elsewhere."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> int:
        return 1

    def save(self) -> Any:
        """Nothing."""

    def restore(self, state: Any) -> Any:
        """Nothing."""


ActorHandle = of_module("ray.actor", _Handle)
ResourceVariable = of_module("tensorflow.python.ops.resource_variable_ops", _Variable)
OwnedIterator = of_module("tensorflow.python.data.ops.iterator_ops", _NumpyIterator)


class Derived(_Variable):
    """A class of the program that derives from one of TensorFlow."""


class Ring(array.array):  # type: ignore[type-arg]
    """An extension type with attributes of its own."""

    def __new__(cls) -> typing.Self:
        made: Any = super().__new__(cls, "d", [1.0, 2.0])
        made.position = 1
        return made  # type: ignore[no-any-return]


def numbers() -> Iterator[int]:
    yield 1


REFUSED: dict[str, Callable[[], Any]] = {
    "Variable": ResourceVariable,
    "Derived": Derived,
    "NumpyIterator": OwnedIterator,
    "Handle": ActorHandle,
    "Ring": Ring,
    "array": lambda: array.array("d", [1.0]),
    "generator": numbers,
    "list_iterator": lambda: iter([1]),
    "count": itertools.count,
    "BytesIO": lambda: io.BytesIO(b"data"),
    "BufferedReader": lambda: io.BufferedReader(io.BytesIO(b"data")),
    "Queue": queue.Queue,
    "date": lambda: datetime.date(2026, 1, 1),
    "DataLoader": lambda: torch.utils.data.DataLoader([1, 2]),  # type: ignore[arg-type]
    "Normal": lambda: torch.distributions.Normal(0.0, 1.0),
    "local": threading.local,
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_outside_of_attributes_are_refused_before_the_first_step(tmp_path: Path, name: str) -> None:
    refused = pytest.raises(hf.errors.UnsupportedLeafError, match=rf"holder/thing: is of type .*{name}.*__untracked__")
    with refused:
        graph.Checkpoint(holder=Holder(REFUSED[name]())).save(tmp_path / "graph")
    saved = graph.Checkpoint(holder=Holder(1)).write(tmp_path / "number")
    with refused:
        graph.Checkpoint(holder=Holder(REFUSED[name]())).read(saved)
    kinds: dict[str, Callable[[Any], Any]] = {"components": Root, "loop": lambda one: graph.Node(holder=Holder(one))}
    for (kind, make), resume in itertools.product(kinds.items(), (False, True)):
        directory = tmp_path / f"{kind}{resume:d}"
        if resume:
            with hf.CheckpointCallback(directory, save_interval_steps=1) as checkpoint:
                checkpoint.restore_or_initialize(make(1))
                checkpoint.on_step(1, make(1))
        with refused, hf.CheckpointCallback(directory) as checkpoint:
            checkpoint.restore_or_initialize(make(REFUSED[name]()))
    with refused:
        Root(REFUSED[name]()).save_to_path(tmp_path / "component")
    steps = graph.CheckpointManager(graph.Checkpoint(holder=Holder(REFUSED[name]())), tmp_path / "manager", 3)
    with refused, steps:
        steps.restore_or_initialize()
    assert not (tmp_path / "component").exists()
    for run in ("loop0", "components0", "manager"):
        assert not [*(tmp_path / run).rglob("checkpoint.json")]


TOOLS: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock, "reentrant lock": threading.RLock, "event": threading.Event, "sentinel": object,
    "logger": lambda: logging.getLogger("x"), "handler": logging.NullHandler, "stream": lambda: sys.stderr,
    "pattern": lambda: re.compile("a"), "path": lambda: pathlib.Path("a"),
    "lambda": lambda: lambda: 1, "class": lambda: Holder, "module": lambda: os,
    "weak reference": lambda: weakref.ref(Holder), "arguments": lambda: argparse.Namespace(lr=1.0),
    "partial": lambda: functools.partial(print, 1), "cached": lambda: functools.lru_cache(print),
    "jitted": lambda: jax.jit(lambda x: x), "compiled": lambda: torch.compile(torch.sin, backend="eager"),
    "ufunc": lambda: np.add, "numpy's dtype": lambda: np.dtype("int8"), "dtype": lambda: torch.float32,
    "device": lambda: torch.device("cpu"), "device of jax": lambda: jax.devices()[0],
    "sharding": lambda: jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    "alias": lambda: typing.Optional[int], "executor": lambda: concurrent.futures.ThreadPoolExecutor(1),  # noqa: UP045
}  # fmt: skip


@pytest.mark.parametrize("name", TOOLS)
def test_code_and_tools_are_no_state(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    path = graph.Checkpoint(holder=Holder(TOOLS[name]())).save(tmp_path / "x")
    thing = TOOLS[name]()
    again = graph.Checkpoint(holder=Holder(thing))
    again.restore(path).assert_consumed()
    assert again.holder.thing is thing
    assert again.unsaved() == {}
    assert not caplog.records


class Slotted:
    __slots__ = ("__weakref__", "_left", "right")

    def __init__(self, left: int, right: Any) -> None:
        self._left, self.right = left, right


class Partly(Slotted):
    """Has a dictionary beside the slots of its base."""

    __untracked__ = ("right",)

    def __init__(self, left: int, right: Any, own: int) -> None:
        super().__init__(left, right)
        self.own = own


def test_slots_are_attributes(tmp_path: Path) -> None:
    lock = threading.Lock()
    path = graph.Checkpoint(one=Slotted(1, np.ones(2)), two=Partly(2, numbers(), 3)).save(tmp_path / "x")
    again = graph.Checkpoint(one=Slotted(0, np.zeros(2)), two=Partly(0, lock, 0))
    again.restore(path).assert_consumed()
    assert (again.one._left, again.one.right.tolist()) == (1, [1, 1])
    assert (again.two._left, again.two.right, again.two.own) == (2, lock, 3)


def test_containers_of_other_classes(tmp_path: Path) -> None:
    class Replay(list):  # type: ignore[type-arg]
        def __init__(self) -> None:
            super().__init__([1, 2])
            self.position = 1

    class Settings(dict):  # type: ignore[type-arg]
        def __init__(self) -> None:
            super().__init__(a=1)
            self.__dict__ = self

    message = r"replay: is a .*Replay with its own attributes \(position\)"
    with pytest.raises(hf.errors.UnsupportedLeafError, match=message):
        graph.Checkpoint(replay=Replay()).save(tmp_path / "x")
    state = collections.OrderedDict(torch.nn.Linear(1, 1).state_dict())
    again = graph.Checkpoint(settings=Settings(), state=state)
    again.restore(again.save(tmp_path / "x")).assert_consumed()


@pytest.mark.examples("docs/outside_python.md")
def test_the_page_runs(
    examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With stand-ins for TensorFlow and Ray, which are not installed here."""

    class Numbers:
        """A dataset, and the iterator over it."""

        place = 0

        def shuffle(self, size: int, seed: int) -> Any:
            return self

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            self.place += 1
            if self.place > 10:
                raise StopIteration
            return self.place - 1

    class Train:
        def __init__(self, data: Numbers, average: Any) -> None:
            self.data = data

        def write(self, path: str) -> None:
            Path(f"{path}.index").write_text(str(self.data.place))

        def read(self, path: str) -> Any:
            self.data.place = int(Path(f"{path}.index").read_text())
            return types.SimpleNamespace(assert_existing_objects_matched=lambda: None)

    dataset = types.SimpleNamespace(range=lambda _: of_module("tensorflow.python.data", Numbers)())
    tensorflow: Any = types.ModuleType("tensorflow")
    tensorflow.train = types.SimpleNamespace(Checkpoint=of_module("tensorflow.python.checkpoint", Train))
    tensorflow.data = types.SimpleNamespace(Dataset=dataset)
    tensorflow.Variable = lambda value: ResourceVariable()
    ray: Any = types.ModuleType("ray")
    ray.get = lambda result: result
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    examples.run(names)
    assert "trainer/stream: is of type list_iterator" in capsys.readouterr().out

    class Remote:
        state = 1

        def __init__(self) -> None:
            self.save_state = types.SimpleNamespace(remote=lambda: {"n": self.state})
            self.load_state = types.SimpleNamespace(remote=lambda found: setattr(self, "state", found["n"]))

    one, other = Remote(), Remote()
    one.state = 7
    path = graph.Checkpoint(actor=names["ActorState"](one)).save("actor")
    graph.Checkpoint(actor=names["ActorState"](other)).restore(path).assert_consumed()
    assert other.state == 7

    class Replay:
        """Writes a chunk whenever it is saved."""

        loaded: tuple[str, ...] = ()

        def save(self) -> None:
            Path("chunks", f"{len(os.listdir('chunks'))}.npz").write_text("")

        def load(self) -> None:
            self.loaded = tuple(sorted(os.listdir("chunks")))

    Path("chunks").mkdir()
    replay = Replay()
    path = graph.Checkpoint(replay=names["ReplayFiles"](replay, "chunks")).save("replay")
    replay.save()
    graph.Checkpoint(replay=names["ReplayFiles"](replay, "chunks")).restore(path)
    assert replay.loaded == ("0.npz",)


def test_an_error_of_a_state_names_its_object(tmp_path: Path) -> None:
    class Broken(Held):
        def get_state(self) -> Any:
            raise RuntimeError("the simulator is gone")

    with pytest.raises(RuntimeError, match="the simulator is gone") as raised:
        graph.Checkpoint(holder=Holder(Broken())).save(tmp_path / "x")
    assert "raised while reading the state of holder/thing" in raised.value.__notes__[0]


def decorated(kind: type) -> Any:
    """What ``ray.remote`` makes of a class: an object of a class that derives from it, which is not initialized."""
    base: Any = of_module("ray.actor", type("ActorClass", (), {}))
    derived: Any = type(f"ActorClass({kind.__name__})", (base, kind), {})
    return derived.__new__(derived)


@pytest.mark.parametrize("kind", [Held, Root, torch.nn.Linear])
@pytest.mark.parametrize("component", [False, True], ids=["object", "component"])
def test_classes_decorated_by_ray_are_code(kind: type, component: bool, tmp_path: Path) -> None:
    for start in range(2):
        holder: Any = Root(start) if component else Holder(start)
        holder.worker = decorated(kind)
        with hf.CheckpointCallback(tmp_path, save_interval_steps=1) as checkpoint:
            state, step = checkpoint.restore_or_initialize(holder)
            assert (step, (holder.holder if component else holder).thing) == (start, 0)
            checkpoint.on_step(step + 1, state)
    paths = [leaf.path for leaf in hf.describe(tmp_path)]
    assert ("holder/thing" if component else "thing") in paths
    assert not [path for path in paths if "worker" in path]
