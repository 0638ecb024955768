"""States of jax whose types change while they train: a resumed run has the types and the bits of the other one."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it ships no types
import pytest
import torch
from flax import nnx
from flax.core import freeze
from flax.training.dynamic_scale import DynamicScale
from tests.equality import assert_same
from tests.integrations.states import contents
from tests.versions import nnx_update

import holdfast as hf
from holdfast import graph

pytestmark = pytest.mark.usefixtures("default_sigterm")

TOTAL = 5


def numbers() -> dict[str, Any]:
    """Python numbers beside parameters of low precision, as in a plain script."""
    return {"params": jnp.ones(3, jnp.bfloat16), "rate": 0.1, "average": 0.0, "steps": 0, "hot": True, "last": None}


def weak_arrays() -> dict[str, Any]:
    return {**numbers(), "rate": jnp.asarray(0.1), "average": jnp.asarray(0.0), "steps": jnp.asarray(0)}


def of_numpy() -> dict[str, Any]:
    """What numpy makes: float64, which jit turns into float32."""
    return {**numbers(), "rate": np.float64(0.1), "average": np.zeros(2), "steps": np.int64(0)}


@jax.jit
def _updated(state: Any) -> Any:
    # Products of bfloat16 and a strong float32 would be float32, and round otherwise from then on.
    loss = (state["params"] * state["rate"]).sum()
    return {
        "params": state["params"] - state["params"] * state["rate"],
        "rate": state["rate"] * 0.9,
        "average": 0.9 * state["average"] + 0.1 * loss.astype(jnp.float32),
        "steps": state["steps"] + 1,
        "hot": state["hot"] | (state["steps"] > 2),
        "last": loss,
    }


def update(state: Any) -> Any:
    return _updated({name: value for name, value in state.items() if name != "last"})


CHANGES = optax.chain(optax.scale_by_distance_over_gradients(), optax.apply_every(2), optax.sgd(0.1))


def optimizer() -> dict[str, Any]:
    """States of optax that have other types after the first update: bfloat16 becomes float32, an int32 weak float32."""
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    return {"params": params, "optimizer": CHANGES.init(params)}


@jax.jit
def optimizer_update(state: Any) -> Any:
    grads = jax.tree.map(lambda w: w * 0.3 + 0.1, state["params"])
    updates, after = CHANGES.update(grads, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": after}


def scaled() -> dict[str, Any]:
    return {"scale": DynamicScale(growth_interval=2), "w": jnp.float16(2.0)}


@jax.jit
def scaled_update(state: Any) -> Any:
    scale, _, _, grad = state["scale"].value_and_grad(lambda w: (w * w * w).sum())(state["w"])
    return {"scale": scale, "w": state["w"] - 0.01 * grad}


def growing() -> dict[str, Any]:
    filled = {"w": jnp.ones(2), "window": np.zeros(0), "dropped": [1]}
    return {**filled, "losses": [], "seen": {}, "best": None, "recent": ()}


def growing_update(state: Any) -> Any:
    w = state["w"] * 0.9
    step = len(state["losses"])
    return {
        "w": w,
        "losses": [*state["losses"], w.sum()],
        "seen": {**state["seen"], f"step {step}": {"loss": float(w.sum()), "at": step}},
        "window": np.append(state["window"], float(w[0])),
        "best": {"w": w, "step": step},
        "recent": (*state["recent"][-2:], step),
        "dropped": [],
    }


def empty_at_first() -> dict[str, Any]:
    return {"w": jnp.ones(2), "frozen": None, "variables": None, "moments": None, "history": []}


def empty_at_first_update(state: Any) -> Any:
    w = state["w"] * 0.9
    moments = (
        optax.adam(0.1).init({"w": w}) if state["moments"] is None else jax.tree.map(jnp.add, *[state["moments"]] * 2)
    )
    return {
        "w": w,
        "frozen": freeze({"layer": {"mean": w}}),
        "variables": nnx.State({"layer": {"mean": nnx.BatchStat(w)}}),
        "moments": moments,
        "history": [*state["history"], optax.TraceState(w)],
    }


def beside_modules() -> dict[str, Any]:
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), "losses": [], "rate": 1.0}


def beside_modules_update(state: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda model: (model(jnp.ones((1, 2))) ** 2).sum())(state["model"])
    nnx_update(state["optimizer"], state["model"], grads)
    return {**state, "losses": [*state["losses"], loss], "rate": jnp.asarray(state["rate"]) * 0.5}


class Meter:
    """An average that begins with numbers of Python, as programs write it."""

    def __init__(self) -> None:
        self.total, self.best, self.improved, self.average, self.recent = 0, -math.inf, False, torch.zeros(2), None
        self.best_weights: Any = None


def beside_torch() -> dict[str, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return {"net": model, "optimizer": optimizer, "best_acc": 0, "meter": Meter(), "step": graph.Value(0)}


def beside_torch_update(state: Any) -> Any:
    loss = state["net"](torch.ones(1, 2)).square().sum()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    meter = state["meter"]
    meter.total, meter.best, meter.improved = meter.total + loss.item(), 3, 1
    meter.average, meter.recent = None, loss.item()
    meter.best_weights = copy.deepcopy(state["net"].state_dict())
    state["step"].assign_add(0.5)
    return {**state, "best_acc": max(state["best_acc"], loss.item())}


@jax.tree_util.register_pytree_with_keys_class
@dataclass
class Layer:
    """A module as those of Equinox: its fields are leaves, also the functions among them."""

    weight: Any
    activation: Callable[[Any], Any]
    final: Callable[[Any], Any] = lambda x: x

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey(name), value) for name, value in vars(self).items()], None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Layer:
        return cls(*children)


class Part(nnx.Module):
    def __init__(self, whole: Any) -> None:
        self.whole = whole


class Counted(nnx.Module):
    """A module that holds itself."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(2))
        self.part = Part(self)
        self.phase = 0

    def replace(self, phase: int, axes: Any) -> Counted:
        self.phase = phase
        return self


NEGATIVE = jax.jit(jnp.negative)


def modules() -> dict[str, Any]:
    return {"layers": [Layer(jnp.ones((2, 2)), jax.nn.silu), Layer(jnp.ones(2), jnp.tanh, NEGATIVE)]}


def modules_update(state: Any) -> Any:
    def changed(layer: Layer) -> Layer:
        return Layer(layer.final(layer.activation(layer.weight * 0.5)), layer.activation, layer.final)

    return {"layers": list(map(changed, state["layers"]))}


class Packed(NamedTuple):
    """A state as that of jax.example_libraries.optimizers: registered with jax, with a structure beside its leaves."""

    leaves: tuple[Any, ...]
    structure: Any


jax.tree_util.register_pytree_node(
    Packed, lambda one: ((one.leaves,), one.structure), lambda aux, leaf: Packed(*leaf, aux)
)


def grouped() -> dict[str, Any]:
    """States of numpyro: matrices by groups of parameters, and optimizers of jax's examples."""
    leaves, structure = jax.tree.flatten({"a": jnp.ones(2), "b": jnp.zeros(1)})
    return {
        "mass": {("a", "b"): jnp.eye(2), ("c",): jnp.eye(1)},
        "packed": Packed(tuple(leaves), structure),
    }


def grouped_update(state: Any) -> Any:
    leaves, structure = state["packed"]
    return {
        "mass": {key: value * 0.5 for key, value in state["mass"].items()},
        "packed": Packed(tuple(leaf * 2 + 1 for leaf in leaves), structure),
    }


def pools() -> dict[str, Any]:
    """Sequences of plain values that become shorter, such as a pool of examples that are not labelled yet."""
    return {
        "numbers": [*range(9)],
        "texts": [*"abcdefgh"],
        "arrays": [np.full(2, index) for index in range(9)],
        "dictionaries": [{"a": index} for index in range(9)],
        "a deque": deque(range(9), maxlen=9),
    }


def pools_update(state: Any) -> Any:
    for name in pools():
        state[name].pop()
    return state


def tables() -> dict[str, Any]:
    """Dictionaries that get entries, beside a module."""
    kinds: list[Callable[[], Any]] = [dict, OrderedDict, Counter, partial(defaultdict, int)]
    return {"model": beside_torch()["net"], **{str(number): kind() for number, kind in enumerate(kinds)}}


def tables_update(state: Any) -> Any:
    for name, entries in state.items():
        if name != "model":
            entries[9 - len(entries)] = len(entries)
    return state


def with_a_default() -> dict[str, Any]:
    return {"table": defaultdict(lambda: np.zeros(2))}


def with_a_default_update(state: Any) -> Any:
    step = len(state["table"])
    state["table"][step] = state["table"][step - 2] + 1
    return state


def an_object() -> dict[str, Any]:
    return {"meter": Meter(), "w": jnp.zeros(2)}


def an_object_update(state: Any) -> Any:
    state["meter"].total += 0.5
    return {**state, "w": state["w"] + 1}


def orders() -> dict[str, Any]:
    """A cache that drops its oldest entry depends on the order of its keys."""
    cache = OrderedDict(a=np.zeros(1), b=np.ones(1), c={"x": 1, "y": 2})
    return {"cache": cache, "plain": {"a": 1, "b": {"x": np.ones(1), "y": 2}}, "more": [], "steps": 0}


def orders_update(state: Any) -> Any:
    for entries in (state["cache"], state["cache"]["c"], state["plain"], state["plain"]["b"]):
        first = next(iter(entries))
        entries[first] = entries.pop(first)
    state["steps"] += 1
    state["more"] += [1.0, 2.0] if state["steps"] > 2 else []
    return state


PROGRAMS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "numbers": (numbers, update),
    "weak arrays": (weak_arrays, update),
    "numpy": (of_numpy, update),
    "optimizer": (optimizer, optimizer_update),
    "DynamicScale": (scaled, scaled_update),
    "growing": (growing, growing_update),
    "empty at first": (empty_at_first, empty_at_first_update),
    "modules with functions": (modules, modules_update),
    "tuples as keys": (grouped, grouped_update),
    "beside modules": (beside_modules, beside_modules_update),
    "beside a module of torch": (beside_torch, beside_torch_update),
    "pools": (pools, pools_update),
    "pools beside a module": (lambda: {"model": beside_torch()["net"], **pools()}, pools_update),
    "tables beside a module": (tables, tables_update),
    "a table with a default": (with_a_default, with_a_default_update),
    "an object beside arrays": (an_object, an_object_update),
    "orders": (orders, orders_update),
    "orders beside a module": (lambda: {"model": beside_torch()["net"], **orders()}, orders_update),
}


def train(init: Any, one_update: Callable[[Any], Any], directory: str, last: int) -> Any:
    with hf.CheckpointCallback(directory) as checkpoint:
        state, start = checkpoint.restore_or_initialize(init)
        for step in range(start, last):
            state = one_update(state)
            checkpoint.on_step(step + 1, state)
    return state


@pytest.mark.parametrize(
    ("program", "given"),
    [(name, "a state") for name in PROGRAMS]
    + [(name, "a function") for name in ("numbers", "weak arrays", "optimizer")],
)
def test_a_resumed_run_has_the_types_and_the_bits_of_the_other(program: str, given: str, place: str) -> None:
    init, one_update = PROGRAMS[program]

    def run(directory: str, last: int) -> Any:
        state = train(init if given == "a function" else init(), one_update, directory, last)
        return contents(dict(sorted(state.items())))  # jit sorts the names, and templates have an order of their own

    for last in (1, 2, TOTAL):  # from a run that has resumed, too
        state = run(f"{place}/run", last)
        assert_same(run(f"{place}/run", last), state)
    assert_same(state, run(f"{place}/whole", TOTAL))


class Transition(NamedTuple):
    seen: Any
    reward: float


def numbers_as_extras(extras: dict[str, Any], step: int) -> dict[str, Any]:
    value = jnp.asarray(extras["rate"]) * 0.9
    return {"rate": value, "ema": extras["ema"] * 0.5 + value, "log": {**extras["log"], step: value}}


def containers_as_extras(extras: dict[str, Any], step: int) -> dict[str, Any]:
    extras["window"].append(step)
    extras["losses"].append(jnp.float32(step))
    extras["counts"].update([step % 2])
    return extras


def one(fresh: Any, update: Callable[[Any, int], Any]) -> tuple[dict[str, Any], Callable[[Any, int], Any]]:
    return {"extra": fresh}, lambda extras, step: {"extra": update(extras["extra"], step)}


SETS: dict[str, Any] = {
    "set": {3, 1, 2},
    "frozen": frozenset({"a", None}),
    "inside": {"seen": [{1, 2}, bytearray(b"x")]},
}
EXTRAS: dict[str, tuple[dict[str, Any], Callable[[Any, int], Any]]] = {
    "sets and bytes": ({**SETS, "bytes": bytearray(b"abc")}, lambda extras, _: extras),
    "numbers": ({"rate": 0.5, "ema": jnp.asarray(0.0), "log": {}}, numbers_as_extras),
    "containers": ({"window": deque(maxlen=3), "losses": deque([0.5]), "counts": Counter()}, containers_as_extras),
    "named tuples in a list": one([], lambda kept, step: [*kept, Transition(np.full(2, step), 0.5)]),
    "an array of jax": one(None, lambda mean, step: jnp.full(2, step) if mean is None else 0.9 * mean),
    "a state of optax": one(None, lambda state, _: optax.adam(0.1).init(jnp.ones(2)) if state is None else state),
    "a table with a default": one(
        defaultdict(lambda: np.zeros(2)), lambda table, step: table | {(step, 1): table[step]}
    ),
    "counts of tuples": one(Counter(), lambda counts, step: counts + Counter([(step % 2, 1)])),
    "lists with a default": one(
        {"log": defaultdict(lambda: [0])}, lambda logs, step: logs if logs["log"][step] else {}
    ),
}


@pytest.mark.parametrize("name", EXTRAS)
def test_extras_have_the_types_that_they_had(place: str, name: str) -> None:
    fresh, update = EXTRAS[name]

    def run(directory: str, last: int) -> dict[str, Any]:
        with hf.CheckpointCallback(directory) as checkpoint:
            state, start = checkpoint.restore_or_initialize({"w": jnp.ones(2)}, **copy.deepcopy(fresh))
            extras = dict(checkpoint.extras)
            for step in range(start, last):
                extras = update(extras, step)
                checkpoint.on_step(step + 1, state, **extras)
        return extras

    whole = run(f"{place}/whole", TOTAL)
    for last in (1, 2, TOTAL):
        found = run(f"{place}/run", last)
    assert_same(found, whole)
    assert getattr(found.get("window"), "maxlen", 3) == 3


def test_a_program_that_begins_with_other_types_is_told(place: str) -> None:
    train(numbers(), update, place, 2)
    changed = {**numbers(), "rate": jnp.float32(0.1), "average": 0}
    with pytest.raises(hf.TreeMismatchError) as raised:
        train(changed, update, place, 3)
    text = str(raised.value)
    for name, expected, saved in (("rate", "float32[]", "weak float32[]"), ("average", "int", "float32[]")):
        begun = f"{name}: expected {expected} (the fresh state), found {saved} (checkpoint), in a run that began with"
        assert f"{begun} float" in text
    assert "params" not in text
    # To begin with what was saved, or with what jit cannot tell from it, changes nothing.
    same = {**numbers(), "rate": jnp.asarray(0.1), "average": jnp.float32(0), "last": jnp.zeros((), jnp.bfloat16)}
    restored = train(same, update, place, 2)
    assert restored["rate"].weak_type


def test_a_class_that_the_fresh_state_lacks_is_told(place: str) -> None:
    """Unless the program has it at the top of a module, and it runs no code of the program."""

    class State(NamedTuple):
        trace: Any

    state = {"w": jnp.ones(2), "history": []}
    with hf.CheckpointCallback(place) as checkpoint:
        checkpoint.restore_or_initialize(state)
        checkpoint.on_step(1, {**state, "history": [optax.EmptyState(), State(jnp.ones(2))]})
    with hf.CheckpointCallback(place) as checkpoint, pytest.raises(hf.TreeMismatchError, match="create it in"):
        checkpoint.restore_or_initialize(state)


def test_a_variable_that_the_fresh_module_lacks_is_told(place: str) -> None:
    def grown(state: Any) -> Any:
        state["model"].seen = nnx.Intermediate(jnp.ones(2))
        return state

    train({"model": Counted()}, grown, place, 1)
    with pytest.raises(hf.TreeMismatchError, match=r"nnx\.pop(.|\n)*model/seen: expected a variable"):
        train({"model": Counted()}, grown, place, 2)


def test_steps_without_recorded_types_go_by_the_template(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """As those of earlier versions, and of loops that restored nothing."""
    state = update(numbers())
    with hf.CheckpointCallback(place) as checkpoint:
        checkpoint.on_step(1, state)
    with caplog.at_level(logging.WARNING), hf.CheckpointCallback(place) as checkpoint:
        restored, _ = checkpoint.restore_or_initialize({**state, "rate": 0.1})
    assert restored["rate"] == pytest.approx(0.09)
    assert type(restored["rate"]) is float
    assert not caplog.records


def scaled_by(factor: Any) -> Callable[[Any], Any]:
    return lambda x: x * factor


def test_functions_come_from_the_program(place: str) -> None:
    """By their names; those that hold values, which may change, are refused."""
    layer = Layer(jnp.ones(2), jax.nn.silu, scaled_by(2.0))
    train({"layer": layer}, lambda state: state, place, 1)
    with pytest.raises(
        hf.TreeMismatchError, match=r"layer/activation: expected the function jax:relu .*found .* jax:silu"
    ):
        train({"layer": Layer(jnp.ones(2), jax.nn.relu, scaled_by(2.0))}, lambda state: state, place, 2)
    assert train({"layer": layer}, lambda state: state, place, 1)["layer"].final is layer.final
    saved = hf.load(f"{place}/1")
    assert saved["state"]["layer"]["activation"] is ...
    functions: list[Any] = [scaled_by(jnp.ones(2)), scaled_by([1.0]), [].append, partial(jnp.add, jnp.ones(2))]
    for function in functions:
        with pytest.raises(hf.errors.UnsupportedLeafError, match=r"layer/activation: .* is code.*eqx\.partition"):
            train({"layer": Layer(jnp.ones(2), function)}, lambda state: state, f"{place}/other", 1)


def aligned(count: int) -> Any:
    """Return an array that jax on CPUs takes over without a copy."""
    memory = np.zeros(count + 16, np.float32)
    first = -memory.ctypes.data // 4 % 16
    return memory[first : first + count]


def test_jax_arrays_in_the_memory_of_others_are_named(place: str, caplog: pytest.LogCaptureFixture) -> None:
    host, tensor = aligned(64), torch.zeros(64)
    state = {
        "host": host[::-1],
        "tensor": {"t": tensor},
        "put": jax.device_put(host),
        "dlpack": jnp.from_dlpack(tensor),
        "copy": jnp.array(host, copy=True),
        "empty": jnp.zeros(0),
    }
    shares = np.shares_memory(np.asarray(state["put"]), host)
    with hf.CheckpointManager(place) as manager:
        for step in (1, 2):
            manager.save(step, state)
    [said] = [record.getMessage() for record in caplog.records]
    pairs = ["put with host"] * shares + ["dlpack with tensor/t"]
    assert f"as after jax.device_put or dlpack: {', '.join(pairs)}. Such a change" in said


class Records:
    """Keeps a record of each step, and the best of them, which is one of these."""

    def __init__(self, kind: str) -> None:
        self.model = torch.nn.Linear(1, 1)
        if kind == "after":
            self.records: list[Any] = []
        self.best: Any = {"step": 0} if kind == "of its own" else None
        if kind != "after":
            self.records = []

    def note(self, step: int) -> None:
        self.records += [{"step": step}] * 2
        if step == 1:
            self.best = self.records[0]


@pytest.mark.parametrize("kind", ["before", "after", "of its own"])
def test_a_record_that_a_list_and_an_attribute_hold(kind: str, tmp_path: Path) -> None:
    """It is one object again; if the program holds another one there, the resume is refused."""
    with hf.CheckpointCallback(tmp_path) as checkpoint:
        records, _ = checkpoint.restore_or_initialize(Records(kind))
        for step in (1, 2):
            records.note(step)
            checkpoint.on_step(step, records)
    refused = pytest.raises(hf.TreeMismatchError) if kind == "of its own" else contextlib.nullcontext()
    with refused, hf.CheckpointCallback(tmp_path) as checkpoint:
        records, _ = checkpoint.restore_or_initialize(Records(kind))
        assert records.records == [{"step": 1}] * 2 + [{"step": 2}] * 2
        assert records.best is records.records[0] is records.records[1]
