from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tests.equality import assert_same
from tests.ids import plain_id

import holdfast as hf
from holdfast.engine.errors import DamagedCheckpointError, OptionError
from holdfast.engine.stateful import restore_state, state_of


def run(directory: Path, extras: list[Any], then: Callable[[], Any] = lambda: None) -> int:
    """One step with extras; returns the step at which it began. What comes ``then`` is after the step."""
    named = {f"extra_{number}": one for number, one in enumerate(extras)}
    with hf.CheckpointCallback(directory) as checkpoint:
        _, start = checkpoint.restore_or_initialize({"w": 0}, **named)
        assert all(checkpoint.extras[name] is one for name, one in named.items())
        checkpoint.on_step(1, {"w": 0}, **named)
        then()
    return start


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


def test_objects_are_restored_in_place_to_what_they_were_at_the_step(tmp_path: Path) -> None:
    data, timer = Shuffled(), Timer()

    def go_on() -> None:
        data.order[:] = 7
        data.position = 3
        timer.elapsed = 2.0

    data.order[:], timer.elapsed = [3, 1, 2, 0, 5, 4], 1.0
    assert run(tmp_path, [data, timer], go_on) == 0
    fresh, again = Shuffled(), Timer()
    assert run(tmp_path, [fresh, again]) == 1
    assert (fresh.order.tolist(), fresh.position, again.elapsed) == ([3, 1, 2, 0, 5, 4], 0, 1.0)


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


def test_generators_go_on_with_the_same_numbers(tmp_path: Path) -> None:
    """Each has drawn an odd count of numbers before, as some keep the second one of a pair."""
    generators, others = ([make(seed) for make, _ in GENERATORS.values()] for seed in (3, 9))
    expected: list[Any] = []

    def draw(drawing: list[Any]) -> list[Any]:
        return [draw(one) for one, (_, draw) in zip(drawing, GENERATORS.values(), strict=True)]

    draw(generators)
    run(tmp_path, generators, lambda: expected.extend(draw(generators)))
    found: list[Any] = []
    run(tmp_path, others, lambda: found.extend(draw(others)))
    for name, one, other in zip(GENERATORS, found, expected, strict=True):
        np.testing.assert_array_equal(one, other, name)


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


STATES: list[Any] = [
    b"grain",
    [1, (2.5, None), {"a": "x", 3: True}],
    OrderedDict(b=1, a=2),
    Counter(x=3, y=1),
    {"nested": OrderedDict(z={"deep": [Counter(q=2)]})},
    None,
    {
        "tensors": [
            torch.ones(shape, dtype=getattr(torch, dtype))
            for dtype in ("float32", "bfloat16", "int64", "bool", "uint8")
            for shape in ((), (2, 3), (0,))
        ]
    },
    {"arrays": [np.array([1.0, 2.5], ">f4"), np.arange(3)]},
    {"key": jax.random.key(7, impl="rbg"), "ema": jnp.ones(2)},
]


def test_values_of_a_state_come_back_as_they_were(tmp_path: Path) -> None:
    run(tmp_path, [Holder(state) for state in STATES])
    fresh = [Holder() for _ in STATES]
    run(tmp_path, fresh)
    for holder, state in zip(fresh, STATES, strict=True):
        assert_same(holder.held, state)


@pytest.mark.parametrize("thing", [np.zeros(2), [object()], {1.5: 2}, Shuffled], ids=plain_id)
def test_what_is_neither_plain_nor_has_a_state_is_refused(thing: Any) -> None:
    with pytest.raises(OptionError, match="get_state"):
        state_of(thing)
