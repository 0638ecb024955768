from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.ids import plain_id

import holdfast as hf
from holdfast.engine.errors import DamagedCheckpointError, OptionError
from holdfast.engine.pytree import decode_state, is_plain
from holdfast.engine.stateful import is_stateful, restore_state, state_of


class Shuffled:
    """A shuffled iterator that keeps one array and changes it in place."""

    def __init__(self) -> None:
        self.order = np.arange(6)
        self.position = 0

    def get_state(self) -> dict[str, Any]:
        return {"order": self.order, "position": self.position}

    def set_state(self, state: dict[str, Any]) -> None:
        self.order = np.array(state["order"])
        self.position = state["position"]


class Timer:
    def __init__(self) -> None:
        self.elapsed = 0.0

    def state_dict(self) -> dict[str, Any]:
        return self.__dict__

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


@pytest.mark.parametrize("thing", [Shuffled(), Timer()], ids=["get_state", "state_dict"])
def test_objects_are_restored_in_place(thing: Any) -> None:
    assert is_stateful(thing)
    state = state_of(thing)
    fresh = type(thing)()
    assert restore_state(fresh, state) is fresh
    np.testing.assert_equal(fresh.__dict__, thing.__dict__)


def test_a_restore_asks_for_nothing_and_draws_nothing() -> None:
    """An object may count how often it is asked for its state, and only the program begins its iterators."""
    called: list[str] = []

    class Counting(Shuffled):
        def get_state(self) -> dict[str, Any]:
            called.append("get_state")
            return super().get_state()

        def set_state(self, state: dict[str, Any]) -> None:
            called.append("set_state")
            super().set_state(state)

        def __iter__(self) -> Any:
            called.append("iter")
            return self

        def __next__(self) -> Any:
            called.append("next")

    state = state_of(Counting())
    restore_state(Counting(), state)
    assert called == ["get_state", "set_state"]


def test_a_state_is_a_snapshot() -> None:
    data, timer = Shuffled(), Timer()
    before, begun = state_of(data), state_of(timer)
    data.order[:] = 7
    data.position = 3
    timer.elapsed = 2.0
    assert before["order"].tolist() == [0, 1, 2, 3, 4, 5]
    assert before["position"] == 0
    assert begun == {"elapsed": 0.0}


def of_numpy(kind: str, *, legacy: bool = False) -> Callable[[int], Any]:
    return lambda seed: (np.random.RandomState if legacy else np.random.Generator)(getattr(np.random, kind)(seed))


SPAWNS = int(np.__version__.partition(".")[0]) >= 2  # Earlier versions cannot be told which children there are.
BIT_GENERATORS = ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"]
GENERATORS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    **{kind: (of_numpy(kind), lambda one: one.random(5, np.float32)) for kind in BIT_GENERATORS},
    **{
        f"RandomState of {kind}": (of_numpy(kind, legacy=True), lambda one: one.normal(size=3))
        for kind in BIT_GENERATORS
    },
    **({"a Generator that spawns": (of_numpy("PCG64"), lambda one: one.spawn(1)[0].random(3))} if SPAWNS else {}),
    "RandomState": (np.random.RandomState, lambda one: one.normal(size=3)),
    "random": (random.Random, lambda one: [one.gauss() for _ in range(3)]),
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda one: torch.rand(3, generator=one)),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_go_on_with_the_same_numbers(name: str) -> None:
    """Each has drawn an odd count of numbers before, as some keep the second one of a pair."""
    make, draw = GENERATORS[name]
    generator, other = make(3), make(9)
    draw(generator)
    state = state_of(generator)
    expected = draw(generator)
    assert restore_state(other, as_loaded(state)) is other
    np.testing.assert_array_equal(draw(other), expected)


def test_a_generator_without_a_state_is_refused(tmp_path: Path) -> None:
    generator = random.SystemRandom()
    with hf.CheckpointCallback(tmp_path) as callback, pytest.raises(OptionError, match="draws from the operating sys"):
        callback.restore_or_initialize({"w": np.ones(1)}, rng=generator)


def test_the_state_of_another_kind_of_object_is_refused() -> None:
    with pytest.raises(DamagedCheckpointError, match=r"random\.Random"):
        restore_state(random.Random(), {"position": 1})


class Holder:
    """Returns the object that it holds."""

    def __init__(self, held: Any = None) -> None:
        self.held = held

    def get_state(self) -> Any:
        return self.held

    def set_state(self, state: Any) -> None:
        self.held = state


def as_loaded(tree: Any) -> Any:
    """The tree as a checkpoint gives it back without a template: every array is a numpy array."""
    if isinstance(tree, dict):
        copied = tree.copy()
        for key, item in tree.items():
            copied[key] = as_loaded(item)
        return copied
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(as_loaded, tree))
    if isinstance(tree, torch.Tensor) and tree.dtype == torch.bfloat16:
        import ml_dtypes

        return tree.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return np.asarray(tree) if hasattr(tree, "__array__") else tree


@pytest.mark.parametrize(
    "state",
    [
        b"grain",
        [1, (2.5, None), {"a": "x", 3: True}],
        OrderedDict(b=1, a=2),
        Counter(x=3, y=1),
        {"nested": OrderedDict(z={"deep": [Counter(q=2)]})},
        None,
    ],
    ids=str,
)
def test_containers_and_values_come_back_as_they_were(state: Any) -> None:
    fresh = Holder()
    restore_state(fresh, as_loaded(state_of(Holder(state))))
    assert fresh.held == state
    assert type(fresh.held) is type(state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "uint8"])
@pytest.mark.parametrize("shape", [(), (2, 3), (0,)], ids=str)
def test_torch_tensors_come_back_as_tensors(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(getattr(torch, dtype))
    fresh = Holder()
    restore_state(fresh, as_loaded(state_of(Holder({"order": tensor}))))
    assert torch.equal(fresh.held["order"], tensor)
    assert fresh.held["order"].dtype == tensor.dtype


def test_tensors_are_made_of_arrays_of_any_byte_order() -> None:
    array = np.array([1.0, 2.5], ">f4")
    array.flags.writeable = False
    found = decode_state({"torch.Tensor": array})
    assert (found.dtype, found.tolist()) == (torch.float32, [1.0, 2.5])


def test_jax_arrays_and_keys_come_back_as_what_they_were() -> None:
    jax = pytest.importorskip("jax")
    key = jax.random.key(7, impl="rbg")
    fresh = Holder()
    restore_state(fresh, as_loaded(state_of(Holder({"key": key, "ema": jax.numpy.ones(2)}))))
    assert isinstance(fresh.held["ema"], jax.Array)
    assert fresh.held["key"].dtype == key.dtype
    np.testing.assert_array_equal(jax.random.key_data(fresh.held["key"]), jax.random.key_data(key))


def test_plain_data_is_its_own_state() -> None:
    data = {"epoch": 3, "history": [0.5, 0.25]}
    assert is_plain(data)
    assert not is_stateful(data)
    assert state_of(data) == data
    assert restore_state({"epoch": 0, "history": []}, data) == data


@pytest.mark.parametrize("thing", [np.zeros(2), [object()], {1.5: 2}, Shuffled], ids=plain_id)
def test_what_is_neither_is_refused(thing: Any) -> None:
    assert not is_plain(thing)
    assert not is_stateful(thing)
    with pytest.raises(OptionError, match="get_state"):
        state_of(thing)
