"""Histories of numbers, queues, and states with classes: what a training loop keeps beside its arrays."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax  # type: ignore[import-untyped]  # it ships no types
import pytest
import torch
from tests.equality import assert_same
from tests.graph.held import Held

import holdfast as hf
from holdfast import graph
from holdfast.integrations.graph import views

LONG = [math.sin(number) for number in range(500)]
MIXED = [True, 1, 1.0, -0.0, float("inf"), 2**62] * 20


def filled(count: int) -> deque[Any]:
    """Transitions, each of which begins with the very array that the one before ended with."""
    buffer: deque[Any] = deque(maxlen=8)
    before = np.zeros(3, np.float32)
    for number in range(count):
        after = np.full(3, number + 1, np.float32)
        buffer.append((before, number, 0.5 * number, after, number % 2 == 0))
        before = after
    return buffer


# As saved, as it is in the program before the restore; the program's kind of sequence stays.
SEQUENCES: dict[str, tuple[Any, Any, Any]] = {
    "floats": (LONG, [], LONG),
    "into others": (LONG, [0.0] * 40, LONG),
    "mixed": (MIXED, [], MIXED),
    "shorter": (LONG[:3], LONG, LONG[:3]),
    "empty": ([], LONG, []),
    "a tuple": (tuple(LONG), (0.0,) * 33, tuple(LONG)),
    "a short tuple": (tuple(LONG), (), tuple(LONG)),
    "a queue": (deque(LONG, 600), deque(maxlen=600), deque(LONG, 600)),
    "a queue of few": (deque([1.0, 2.0], 5), deque(maxlen=5), deque([1.0, 2.0], 5)),
    "a queue from a list": (LONG, deque(maxlen=500), deque(LONG, 500)),
    "nothing yet": (deque(LONG, 700), None, deque(LONG, 700)),
    "tracked": (graph.TrackedList(LONG), graph.TrackedList(), LONG),
    "nested": ({"a": {"b": LONG}}, {"a": {}}, {"a": {"b": LONG}}),
    "an entry to be": ({"a": deque(LONG[:40], 41)}, {}, {"a": deque(LONG[:40], 41)}),
    "text": ([str(number) for number in LONG[:40]], [], [str(number) for number in LONG[:40]]),
    "big": ([2**70] * 40, [], [2**70] * 40),
}
BUFFERS: dict[str, deque[Any]] = {
    "arrays": deque([np.ones(3), np.arange(4, dtype=np.int16)], maxlen=8),
    "without a limit": deque([np.ones(3)]),
    "transitions": filled(5),
    "dictionaries": deque([{"obs": np.ones((2, 2)), "reward": 0.5}, {"obs": np.zeros((2, 2)), "reward": 1.0}], 8),
    "tensors": deque([torch.ones(2), torch.arange(3)], maxlen=8),
    "bfloat16": deque([torch.ones(2, dtype=torch.bfloat16), np.ones(2, ml_dtypes.bfloat16)], maxlen=8),
    "no dimensions": deque([np.array(1.5), np.array(True)], maxlen=8),
    "no elements": deque([np.zeros((0, 3), np.uint8)], maxlen=8),
}
SEQUENCES |= {name: (saved, deque(maxlen=saved.maxlen), saved) for name, saved in BUFFERS.items()}


def assert_holds(found: Any, expected: Any) -> None:
    """Compares types and values of elements, and limits; the kind of the sequence may be another one."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_holds(found[key], value)
    else:
        assert_same(list(found), list(expected))
        assert getattr(found, "maxlen", None) == getattr(expected, "maxlen", None)


@pytest.mark.parametrize("earlier", [False, True], ids=["now", "saved by an earlier version"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_come_back(place: str, name: str, earlier: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, live, expected = SEQUENCES[name]
    live = live.copy() if isinstance(live, list | dict | deque) else live
    with monkeypatch.context() as patched:
        if earlier:  # a leaf for each element
            patched.setattr(views, "pack_numbers", lambda value: None)
        path = graph.Checkpoint(history=saved, step=1).write(f"{place}/x")
    checkpoint = graph.Checkpoint(history=live, step=0)
    checkpoint.restore(path).assert_consumed()
    assert_holds(checkpoint.history, expected)
    if live is not None:
        assert type(checkpoint.history) is type(live)
    if isinstance(live, list | deque | dict):
        assert checkpoint.history is live  # others may hold it, too
    blank = deque(maxlen=expected.maxlen) if isinstance(expected, deque) else type(expected)()
    again = graph.Checkpoint(history=blank, step=0)
    again.restore(checkpoint.write(f"{place}/again")).assert_consumed()
    assert_holds(again.history, expected)


def test_a_long_history_costs_what_an_array_costs(tmp_path: Path) -> None:
    size: dict[str, int] = {}
    numbers = np.random.default_rng(0).random(50_000)
    for name, history in {"array": numbers, "list": numbers.tolist(), "queue": deque(numbers.tolist(), 60_000)}.items():
        graph.Checkpoint(history=history, state=Held({"history": numbers.tolist()[:100]})).write(tmp_path / name)
        size[name] = sum(file.stat().st_size for file in (tmp_path / name).rglob("*") if file.is_file())
        assert len(hf.describe(tmp_path / name)) < 8  # the work goes with the number of leaves
    assert max(size.values()) < 1.5 * size["array"]
    assert hf.load(tmp_path / "list")["history"] == numbers.tolist()
    assert graph.load_checkpoint(tmp_path / "list").get_tensor("history") == numbers.tolist()


@pytest.mark.parametrize(
    "saved", [deque(LONG, 500), deque(LONG[:5], 500), filled(5)], ids=["many numbers", "few numbers", "arrays"]
)
def test_a_queue_that_is_too_short_is_refused_or_left_out(place: str, saved: deque[Any]) -> None:
    path = graph.Checkpoint(returns=saved, step=1).write(f"{place}/x")
    checkpoint = graph.Checkpoint(returns=deque(maxlen=3), step=0)
    with pytest.raises(hf.TreeMismatchError, match="returns: expected at most 3 elements"):
        checkpoint.restore(path)
    assert (list(checkpoint.returns), checkpoint.step) == ([], 0)
    checkpoint.read(path, exclude="returns/**").assert_consumed()
    assert (list(checkpoint.returns), checkpoint.step) == ([], 1)


def test_shared_histories_stay_one_object(place: str) -> None:
    history = [1.0] * 50
    path = graph.Checkpoint(a={"losses": history}, b={"losses": history}).write(f"{place}/x")
    live = [0.0] * 40
    checkpoint = graph.Checkpoint(a={"losses": live}, b={"losses": live})
    checkpoint.restore(path).assert_consumed()
    assert live == history
    assert checkpoint.a["losses"] is checkpoint.b["losses"] is live


def test_arrays_among_many_elements_are_objects(place: str) -> None:
    """A list of many scalars of jax was saved; the program has numbers there: each takes its own."""
    path = graph.Checkpoint(history=[jnp.float32(number) for number in range(40)]).write(f"{place}/x")
    checkpoint = graph.Checkpoint(history=[0.5] * 40)
    checkpoint.restore(path).assert_consumed()
    assert checkpoint.history == [float(number) for number in range(40)]


# ---- replay buffers: an empty deque gets the arrays that were saved


def test_arrays_in_two_places_stay_one_object(place: str) -> None:
    path = graph.Checkpoint(buffer=filled(5)).write(f"{place}/x")
    checkpoint = graph.Checkpoint(buffer=deque(maxlen=8))
    checkpoint.restore(path).assert_consumed()
    buffer = checkpoint.buffer
    assert all(buffer[number][3] is buffer[number + 1][0] for number in range(4))
    buffer[0][3][:] = 7.0  # the program owns them
    assert buffer[1][0].tolist() == [7.0] * 3


def held_outside() -> dict[str, Any]:
    buffer = filled(2)
    return {"buffer": buffer, "last": buffer[-1][3]}


def of_an_optimizer() -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.ones(2))
    return {"buffer": deque([weight], maxlen=8), "optimizer": torch.optim.SGD([weight])}


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        (held_outside, lambda: {"buffer": deque(maxlen=8), "last": np.zeros(3, np.float32)}),
        (of_an_optimizer, lambda: {"buffer": deque(maxlen=8)}),
        (lambda: {"buffer": deque([jnp.ones(2)], maxlen=8)}, lambda: {"buffer": deque(maxlen=8)}),
        (lambda: {"buffer": filled(2)}, lambda: {"buffer": deque([filled(1)[0]], maxlen=8)}),
        (lambda: {"buffer": [np.ones(2)]}, lambda: {"buffer": []}),
    ],
    ids=["held outside", "a parameter", "jax", "not empty", "a list"],
)
def test_what_is_more_than_its_values_is_missing(place: str, saved: Any, live: Any) -> None:
    path = graph.Checkpoint(**saved()).write(f"{place}/x")
    status = graph.Checkpoint(**live()).read(path).expect_partial()
    with pytest.raises(hf.errors.UnmatchedObjectsError, match=r"in the checkpoint, not in the program .*\n?.*buffer/"):
        status.assert_consumed()


# ---- states


class Transition(NamedTuple):
    observation: np.ndarray[Any, Any]
    reward: float


@dataclasses.dataclass
class Statistics:
    count: int
    best: Transition | None = None
    recent: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=3))

    def __post_init__(self) -> None:
        assert self.count >= 0, "is not called for what was saved"


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    value: torch.Tensor


def test_classes_in_a_state_come_back(place: str) -> None:
    class Local(NamedTuple):
        a: int

    transition = Transition(np.arange(3.0), 0.5)
    state = {
        "buffer": [transition, Transition(np.zeros(2), 1.0)],
        "statistics": Statistics(3, transition, deque([1.0, 2.0], 3)),
        "fixed": Fixed(torch.ones(2)),
        "history": list(LONG),
        "local": Local(3),
        "moments": optax.EmptyState(),
    }
    path = graph.Checkpoint(batches=Held(state)).write(f"{place}/x")
    live = Held({"local": Local(0)})
    graph.Checkpoint(batches=live).restore(path).assert_consumed()
    assert_same(live.state, state)
    assert live.state["statistics"].recent.maxlen == 3


@dataclasses.dataclass
class Progress:
    done: int = dataclasses.field(default=0, init=False)
    best: float = 0.0

    __untracked__ = ("seen",)

    def __post_init__(self) -> None:
        self.total = np.zeros(2)  # an attribute that is no field
        self.seen = 0


def test_a_dataclass_is_saved_with_all_its_attributes(place: str) -> None:
    saved, live = Progress(), Progress()
    saved.done, saved.best, saved.total, saved.seen = 3, 0.5, np.ones(2), 7
    path = graph.Checkpoint(progress=saved).write(f"{place}/x")
    graph.Checkpoint(progress=live).restore(path).assert_consumed()
    assert (live.done, live.best, live.total.tolist(), live.seen) == (3, 0.5, [1, 1], 0)


def test_a_class_that_is_gone_is_named(place: str) -> None:
    def saved_with_a_class_of_its_own() -> str:
        class Gone(NamedTuple):
            observation: Any
            reward: float

        return graph.Checkpoint(batches=Held({"one": Gone(np.zeros(1), 2.0)})).write(f"{place}/x")

    path = saved_with_a_class_of_its_own()
    gc.collect()
    message = r"test_graph_sequences:.*\.Gone with the fields observation, reward"
    with pytest.raises(hf.errors.StateError, match=message):
        graph.Checkpoint(batches=Held({})).restore(path)


# ---- parameters in tracked containers


def test_parameters_that_are_attached_late_are_trained(place: str) -> None:
    params = {"dense": {"kernel": jnp.arange(3.0), "bias": jnp.ones(1)}, "scales": [jnp.ones(2)]}
    path = graph.Checkpoint(net=graph.Node(params=params)).write(f"{place}/x")
    net = graph.Node()
    graph.Checkpoint(net=net).restore(path)
    net.params = jax.tree.map(jnp.zeros_like, params)  # the values come now

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(params["dense"]["kernel"] * x) + params["dense"]["bias"][0] + params["scales"][0].sum()

    def updated(params: Any) -> Any:
        optimizer = optax.adam(0.1)
        updates, _ = optimizer.update(jax.jit(jax.grad(loss))(params, 2.0), optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    net.params = updated(net.params)
    assert type(net.params) is graph.TrackedDict
    found, expected = (jax.tree_util.tree_leaves_with_path(each) for each in (net.params, updated(params)))
    assert [(jax.tree_util.keystr(path), str(leaf)) for path, leaf in found] == [
        (jax.tree_util.keystr(path), str(leaf)) for path, leaf in expected
    ]
    tracked = graph.TrackedDict({"w": torch.ones(2), "more": graph.TrackedList([torch.ones(1)])})
    gradients = torch.func.grad(lambda one: (3 * one["w"]).sum() + one["more"][0].sum())(tracked)
    assert (gradients["w"].tolist(), type(gradients), type(gradients["more"])) == (
        *([3, 3], graph.TrackedDict, graph.TrackedList),
    )
    hf.save(f"{place}/tree", net.params)
    loaded = hf.load(f"{place}/tree")
    assert (type(loaded), type(loaded["scales"])) == (dict, list)  # as they were
