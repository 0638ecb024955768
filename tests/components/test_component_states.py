"""Components with a get_state of their own: what it returns is what set_state gets, types included."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from flax import struct
from tests.equality import assert_same

import holdfast as hf
from holdfast.components import Checkpointable, read_state
from holdfast.integrations.components.constructor_spec import SpecDecoder, encode_spec
from holdfast.integrations.components.permissions import Permissions


class Transition(NamedTuple):
    observation: Any
    reward: float


@dataclasses.dataclass(frozen=True)
class Best:
    step: int
    weights: Any
    note: str = "none"

    def __post_init__(self) -> None:
        raise AssertionError("its constructor is never called on a restore")


@dataclasses.dataclass
class Meter:
    total: float = 0.0
    history: list[float] = dataclasses.field(default_factory=list)


@struct.dataclass
class Norm:
    mean: Any
    count: Any


def best(step: int) -> Best:
    found = object.__new__(Best)
    for name, value in {"step": step, "weights": torch.ones(2) * step, "note": "x"}.items():
        object.__setattr__(found, name, value)
    return found


class Stateful(Checkpointable):
    """Returns the object that it holds, and takes it back."""

    def __init__(self, held: Any = None) -> None:
        self.held = held

    def get_state(self, *_: Any, **__: Any) -> Any:
        return {"held": self.held}

    def set_state(self, state: Any) -> None:
        self.held = state["held"]


class Tree(Checkpointable):
    def __init__(self) -> None:
        self.part: Any = Stateful()


def holding(held: Any) -> Tree:
    tree = Tree()
    tree.part.held = held
    return tree


HELD: dict[str, Any] = {
    "named tuples": [Transition(np.arange(2.0), 0.5), Transition(None, 1)],
    "a dataclass": Meter(1.5, [1.0, 2.0]),
    "a frozen dataclass with a tensor": {"best": best(3)},
    "a dataclass of flax's": (Norm(np.zeros(2), 1),),
    "a deque": deque([Transition(1, 2.0)], maxlen=3),
    "nested": Meter(0.0, [Transition(best(1), 2.0)]),  # type: ignore[list-item]  # anything may be in a list
    "a long deque": deque([0.5, 1] * 40, maxlen=100),
    "a long list": [True, 1, 1.5] * 40,
    "values of all kinds": {
        "tuple": (1, (2.5, "x")),
        3: {"int key": np.int16(3), -1: b"bytes"},
        "arrays": [np.arange(6.0).reshape(2, 3), np.arange(3).astype(ml_dtypes.bfloat16)],
        "torch": torch.ones(2, dtype=torch.bfloat16),
        "plain": [None, 1 << 80, float("inf"), {1, "a"}, {}],
        "ordered": OrderedDict(b=1, a=2),
    },
}


@pytest.mark.parametrize("use_msgpack", [False, True], ids=["arrays", "msgpack"])
@pytest.mark.parametrize("name", HELD)
def test_a_state_comes_back_as_what_it_is(name: str, use_msgpack: bool, place: str) -> None:
    held = HELD[name]
    path = holding(held).save_to_path(place, use_msgpack=use_msgpack)
    running = Tree()
    running.restore_from_path(path, strict=True)
    given = Tree()
    given.set_state(holding(held).get_state())
    for one in (running, Tree.from_checkpoint(path), given):
        assert_same(one.part.held, held)
    assert getattr(running.part.held, "maxlen", None) == getattr(held, "maxlen", None)


class InPlace(Stateful):
    """Takes a state into the arrays that it has."""

    def set_state(self, state: Any) -> None:
        self.held[0].observation[:] = state["held"][0].observation


def test_a_state_is_taken_back_where_another_does_not_fit(place: str) -> None:
    class Two(Checkpointable):
        def __init__(self, size: int = 2) -> None:
            self.part = InPlace([Transition(np.zeros(2), 0.0)])
            self.last = np.zeros(size)

    path = Two(3).save_to_path(place)
    running = Two()
    running.part.held[0].observation[:] = 5
    with pytest.raises(hf.TreeMismatchError, match="last"):
        running.restore_from_path(path)
    assert running.part.held[0].observation.tolist() == [5, 5]


def test_a_state_is_taken_back_where_another_is_refused(place: str) -> None:
    class Layer(Checkpointable):
        def __init__(self, value: float) -> None:
            self.weight = torch.full((2,), float(value)).requires_grad_()

    class Refusing(Stateful):
        def __init__(self, value: float) -> None:
            super().__init__(value)
            self.layer = Layer(value)

        def set_state(self, state: Any) -> None:
            assert self.layer.weight.tolist() == [1, 1]
            raise ValueError(f"{state} is refused")

    path = Refusing(1).save_to_path(place)
    running = Refusing(0)
    with pytest.raises(ValueError, match="is refused"):
        running.restore_from_path(path)
    assert running.layer.weight.tolist() == [0, 0]
    assert running.layer.weight.requires_grad


def test_only_classes_that_the_component_shows_come_back(place: str, caplog: pytest.LogCaptureFixture) -> None:
    Hidden = NamedTuple("Hidden", [("a", int)])  # noqa: UP014 - in a function, where no module names it

    class CompletedProcess(NamedTuple):
        a: int

    CompletedProcess.__module__, CompletedProcess.__qualname__ = "subprocess", "CompletedProcess"
    path = holding([Hidden(1), CompletedProcess(2)]).save_to_path(place)
    showing = holding([Hidden(0)])
    showing.restore_from_path(path)
    assert type(showing.part.held[0]) is Hidden
    running = Tree()
    with caplog.at_level(logging.WARNING):
        running.restore_from_path(path)
    assert running.part.held == read_state(path)["part"]["held"] == [{"a": 1}, {"a": 2}]
    assert "Hidden, but the program has no such class with the same fields" in caplog.text
    assert "subprocess.CompletedProcess" in caplog.text


def test_long_lists_take_the_space_of_an_array(tmp_path: Path) -> None:
    """In a state, and among the arguments of a constructor."""
    floats = np.random.default_rng(0).normal(size=50_000)
    for kind in (holding, Table):
        sizes = []
        for name, numbers in (("array", floats), ("floats", floats.tolist()), ("mixed", [1, *floats.tolist()])):
            path = Path(kind(numbers).save_to_path(tmp_path / kind.__name__ / name))
            sizes.append(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
        assert max(sizes) <= 1.5 * sizes[0]


def test_a_state_whose_document_names_the_elements_of_a_list() -> None:
    """Earlier versions described each number of a list."""
    array = np.ones(2)
    tree, running = holding(None), holding(None)
    tree.part, running.part = {"one": array, "same": array, "history": [0.5] * 40}, {"history": []}
    state = tree.get_state()
    document = json.loads(state["__graph__"])
    nodes = document["nodes"]
    (node,) = [node for node in nodes if node.get("value") == "part.history"]
    elements = [{"value": f"part.history.{index}"} for index in range(40)]
    node.pop("value")
    node.update(type="list", edges={str(index): len(nodes) + index for index in range(40)})
    nodes += elements
    running.set_state({**state, "__graph__": json.dumps(document)})
    assert running.part["history"] == [0.5] * 40


# ---- a class of a program that is run


class Policy(Checkpointable):
    def __init__(self, size: int) -> None:
        self.weights = np.full(size, 7)


class League(Checkpointable):
    class Member(Policy):
        pass

    def __init__(self, policies: dict[str, Policy]) -> None:
        self.policies = policies


def test_a_class_of_a_program_is_found_by_its_qualified_name(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as program:
        for kind in (Policy, League, League.Member):
            program.setattr(kind, "__module__", "__main__")
        League({"a": Policy(3), "b": League.Member(2)}).save_to_path(tmp_path / "saved")
    league = League.from_checkpoint(tmp_path / "saved", strict=True)
    assert [type(one) for one in league.policies.values()] == [Policy, League.Member]
    members = tmp_path / "saved" / "policies"
    assert Policy.from_checkpoint(members / "a").weights.tolist() == [7, 7, 7]
    assert League.Member.from_checkpoint(members / "b").weights.tolist() == [7, 7]
    with pytest.raises(hf.errors.NotAllowedError, match=r"__main__:League.Member, which is not allowed"):
        Policy.from_checkpoint(members / "b")


class Table(Checkpointable):
    def __init__(self, numbers: Any, names: Any = ()) -> None:
        self.total = 0.0
        self.made_with = [numbers, names]


NUMBERS: dict[str, Any] = {
    "floats": [0.1, float("nan"), float("-inf"), -0.0] * 50,
    "larger integers": [1 << 80] * 50,
    "mixed": [1, 2.5, True] * 100,
    "complex numbers": [1 + 2j, 3j] * 50,
    "a tuple": tuple(range(100)),
    "within others": {"rows": [[float(row)] * 40 for row in range(40)], "few": [1, 2.0]},
    "scalars of numpy": [np.float32(0.1)] * 40,
    "a million and more bytes": [0.5] * 200_000,
}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_as_constructor_arguments(case: str, tmp_path: Path) -> None:
    numbers = NUMBERS[case]
    Table(numbers, names=["a"] * 100).save_to_path(tmp_path / "table")
    found, names = Table.from_checkpoint(tmp_path / "table").made_with
    assert names == ["a"] * 100
    assert (repr(found), type(found)) == (repr(numbers), type(numbers))


@pytest.mark.parametrize(
    "changes", [{0: "deque "}, {1: "int"}, {1: "mixed"}, {2: "|O"}, {3: [41]}, {3: [-40]}, {3: [2, 20]}, {4: "AA"}]
)
def test_forged_numbers_of_a_constructor_spec_are_damage(changes: dict[int, Any]) -> None:
    spec, _ = encode_spec(([1.5] * 40,), {}, lambda _: None, lambda _: None)
    (written,) = spec["args"]
    decoder = SpecDecoder(Permissions(base=Checkpointable), lambda _: None, lambda _: None, "here")
    assert decoder.decode(written) == [1.5] * 40
    forged = [changes.get(index, part) for index, part in enumerate(written["numbers"])]
    with pytest.raises(hf.DamagedCheckpointError):
        decoder.decode({"numbers": forged})
