"""One callback for any loop: states of every kind, killed and resumed bit for bit, refused where they do not match."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it ships no types
import pytest
import torch
from flax import nnx
from tests.equality import assert_same
from tests.integrations.states import contents
from tests.versions import nnx_update

import holdfast as hf
from holdfast import graph
from holdfast.components import Checkpointable
from holdfast.engine.pytree import encode_state
from holdfast.engine.stateful import state_of

pytestmark = pytest.mark.usefixtures("default_sigterm")

TOTAL = 7


class Net(torch.nn.Module):
    """A module with a buffer that moves and a mask that is drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        return self.last(torch.relu(self.norm(self.first(x))))


def torch_update(net: Any, optimizer: Any, x: Any) -> None:
    optimizer.zero_grad()
    (net(x) ** 2).mean().backward()
    optimizer.step()


class Drawn:
    """A step of training that draws its batch from a generator of torch."""

    def __init__(self, seed: int) -> None:
        self.net = Net(seed)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1, amsgrad=True)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.updates = 0
        self.history: list[float] = []

    def update(self, x: Any) -> None:
        torch_update(self.net, self.optimizer, x)
        self.schedule.step()
        self.updates += 1
        self.history.append(float(self.net.last.bias.detach()))


class Pair(NamedTuple):
    net: Any
    optimizer: Any


class Agent(Checkpointable):
    """A component with everything of its own."""

    def __init__(self, seed: int) -> None:
        self.inner = Drawn(seed)
        self.noise = np.random.default_rng(seed)

    def update(self, x: Any) -> None:
        self.inner.update(x + float(self.noise.random()))


def of_torch(seed: int) -> dict[str, Any]:
    drawn = Drawn(seed)
    return {"net": drawn.net, "optimizer": drawn.optimizer, "schedule": drawn.schedule, "done": 0, "seen": []}


def update_of_torch(state: dict[str, Any], x: Any) -> dict[str, Any]:
    torch_update(state["net"], state["optimizer"], x)
    state["schedule"].step()
    state["seen"].append(state["done"])
    state["done"] += 1
    return state


def listed(seed: int) -> list[Any]:
    drawn = Drawn(seed)
    return [drawn.net, drawn.optimizer, [0.5, seed]]


def update_listed(state: list[Any], x: Any) -> list[Any]:
    torch_update(state[0], state[1], x)
    state[2].append(float(x.sum()))
    return state


def update_pair(state: Pair, x: Any) -> Pair:
    torch_update(*state, x)
    return state


def update_module(net: Net, x: Any) -> Net:
    """A module alone, trained without an optimizer that stays."""
    torch_update(net, torch.optim.SGD(net.parameters(), lr=0.1), x)
    return net


def update_object(state: Any, x: Any) -> Any:
    state.update(x)
    return state


def parts_of_a_graph(seed: int) -> dict[str, Any]:
    drawn = Drawn(seed)
    return {"net": drawn.net, "optimizer": drawn.optimizer, "updates": graph.Value(0), "history": []}


def update_graph(state: Any, x: Any) -> Any:
    torch_update(state.net, state.optimizer, x)
    state.updates.assign(state.updates.value + 1)
    state.history.append(1.5)
    return state


def of_numpy(seed: int) -> dict[Any, Any]:
    return {"w": np.full(3, seed, np.float32), "t": 0, 7: np.full(2, seed)}  # keys that jax does not sort


def update_numpy(state: Any, x: Any) -> Any:
    return {"w": state["w"] + np.float32(0.1) * x.numpy().mean(0), "t": state["t"] + 1, 7: state[7] + 1}


def update_tensors(state: Any, x: Any) -> Any:
    state["mean"].add_(x.mean())
    return {**state, "count": state["count"] + 1}


def of_jax(seed: int) -> dict[str, Any]:
    params = {"w": jnp.full(3, seed, jnp.float32)}
    return {"params": params, "opt": optax.adam(0.1).init(params), "key": jax.random.key(seed)}


def update_jax(state: Any, x: Any) -> Any:
    key, noise = jax.random.split(state["key"])
    gradients = {"w": jnp.asarray(x.numpy()).mean(0) + jax.random.normal(noise, (3,))}
    updates, opt = optax.adam(0.1).update(gradients, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "key": key}


def of_nnx(seed: int) -> dict[str, Any]:
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    return {"model": model, "optimizer": optimizer, "average": [jnp.zeros(2)], "done": 0}


def update_nnx(state: Any, x: Any) -> Any:
    inputs = jnp.asarray(x.numpy())
    gradients = nnx.grad(lambda model: (model(inputs) ** 2).mean())(state["model"])
    nnx_update(state["optimizer"], state["model"], gradients)
    return {**state, "average": [state["average"][0] + 1], "done": state["done"] + 1}


Kind = tuple[Callable[[int], Any], Callable[[Any, Any], Any]]  # how a state is made of a seed, and updated
KINDS: dict[str, Kind] = {
    "dict of torch": (of_torch, update_of_torch),
    "dict made at every step": (of_torch, lambda state, x: dict(update_of_torch(state, x))),
    "list of torch": (listed, update_listed),
    "tuple of torch": (lambda seed: Pair(*listed(seed)[:2]), update_pair),
    "module": (Net, update_module),
    "object": (Drawn, update_object),
    "graph node": (lambda seed: graph.Node(**parts_of_a_graph(seed)), update_graph),
    "graph checkpoint": (lambda seed: graph.Checkpoint(**parts_of_a_graph(seed)), update_graph),
    "component": (Agent, update_object),
    "numpy": (of_numpy, update_numpy),
    "tensors": (lambda _: {"mean": torch.zeros(2), "count": 0}, update_tensors),
    "jax": (of_jax, update_jax),
    "nnx": (of_nnx, update_nnx),
}
ENDS = [*((kind, "killed") for kind in KINDS), ("dict of torch", "damaged")]


class Killed(BaseException):
    """Ends a loop in the middle, as an error does: nothing more is saved."""


def run(kind: str, directory: Path | str, last: int, *, seed: int = 1, killed: bool = False) -> tuple[int, Any]:
    """Trains in a loop as its author writes it; returns the first step and the values of the state."""
    make, update = KINDS[kind]
    generator = torch.Generator().manual_seed(7)
    with hf.CheckpointCallback(directory, save_interval_steps=2) as checkpoint:
        state, start = checkpoint.restore_or_initialize(make(seed), rng=generator)
        for step in range(start, last):
            state = update(state, torch.randn(4, 3, generator=generator))
            checkpoint.on_step(step + 1, state, rng=generator)
        if killed:
            raise Killed
    return start, contents(state)


@pytest.mark.parametrize(
    ("kind", "how"), [*ENDS, *(pytest.param(kind, "stopped", marks=pytest.mark.sweep) for kind in KINDS)]
)
def test_a_resumed_loop_ends_with_the_same_bits(kind: str, how: str, place: str, stored: Any) -> None:
    _, whole = run(kind, f"{place}/whole", TOTAL)
    with pytest.raises(Killed) if how == "killed" else contextlib.nullcontext():
        run(kind, f"{place}/run", 5, killed=how == "killed")
    if how == "damaged":
        files = stored(f"{place}/run/5")
        files.write("state/d/0", bytes(len(files.read()["state/d/0"])))
    start, resumed = run(kind, f"{place}/run", TOTAL, seed=2)
    assert start == (5 if how == "stopped" else 4)
    assert_same(resumed, whole)
    assert hf.verify(f"{place}/run").ok == (how != "damaged")


def test_what_is_saved_reads_without_the_program(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also what a resumed run has saved; neither run has said anything."""
    caplog.set_level(logging.WARNING, "holdfast")
    for last in (2, 5):
        run("dict of torch", place, last)
        found = hf.load(place, item="state")
        assert found["net"]["first"]["weight"].shape == (4, 3)
        assert (found["done"], found["seen"]) == (last, [*range(last)])
    assert caplog.messages == []


def layers(**widths: int) -> Any:
    return torch.nn.ModuleDict({name: torch.nn.Linear(3, width) for name, width in widths.items()})


@pytest.mark.parametrize(
    ("state", "lines"),
    [
        ({"net": layers(first=4, more=1)}, ["net/more/bias: in the program", "net/last/bias: in the checkpoint"]),
        ({"net": layers(first=5)}, ["net/first/weight: expected", "[5, 3]", "[4, 3]"]),
        ({"model": Net(1)}, ["model/first/weight: in the program", "net/first/weight: in the checkpoint"]),
        ({"params": np.zeros(4)}, ["params: expected float64[4]", "net/first/weight: not in the template"]),
    ],
    ids=["parts", "shapes", "names", "arrays"],
)
def test_objects_that_do_not_match_stay_as_they_are(place: str, state: Any, lines: list[str]) -> None:
    with hf.CheckpointCallback(place, save_interval_steps=1) as checkpoint:
        checkpoint.on_step(1, {"net": Net(1)})
    before = copy.deepcopy(contents(state))
    with hf.CheckpointCallback(place) as checkpoint:
        with pytest.raises(hf.TreeMismatchError) as caught:
            checkpoint.restore_or_initialize(state)
        assert all(line in str(caught.value) for line in lines), str(caught.value)
        assert "begin a run in another directory" in caught.value.__notes__[0]
        assert_same(contents(state), before)
        with pytest.raises(hf.errors.StateError, match="has not restored"):  # and the loop cannot continue without it
            checkpoint.on_step(2, state)


@pytest.mark.parametrize("kind", ["dict of torch", "module", "object", "component", "tensors", "nnx"])
def test_a_state_that_has_moved_on_is_not_saved_under_the_last_step_unless_it_is_reported_again(
    kind: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, update = KINDS[kind]
    for again in (False, True):
        state = make(1)
        with hf.CheckpointCallback(f"{place}/{again}", save_interval_steps=2) as checkpoint:
            for step in (1, 2, 3):
                state = update(state, torch.ones(4, 3))
                checkpoint.on_step(step, state)
            state = update(state, torch.ones(4, 3))  # and the loop ends
            if again:
                checkpoint.on_step(3, state)
        assert hf.CheckpointManager(f"{place}/{again}").all_steps() == [2, 3][: 1 + again]
    [lost] = [text for text in caplog.messages if "not saved at the end" in text]
    changed = "objects were updated" if kind == "nnx" else "tensors were changed"
    assert f"step 3 is not saved at the end: its {changed} since; call on_step after every update" in lost


class Bare(Checkpointable):
    """A component without a module."""


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda: [np.zeros(2)], "or one module of nnx, and this is a list without params"),
        (lambda: graph.Node(a=graph.Value(1)), "needs one torch module in the state, and this is 0 torch modules"),
        (lambda: {"0": Net(0), "1": Net(1)}, "needs one torch module in the state, and this is 2 torch modules"),
        (Bare, "needs a state with params, and this is a tree of components without a torch module"),
    ],
    ids=["a list", "none", "two", "a component"],
)
def test_weights_of_another_checkpoint_need_one_module(place: str, state: Any, message: str) -> None:
    hf.save(f"{place}/weights", dict(Net(3).state_dict()))
    net = Net(1)
    with hf.CheckpointCallback(f"{place}/run", init_from=f"{place}/weights", save_at_end=False) as checkpoint:
        checkpoint.restore_or_initialize({"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=1.0)})
    assert all(map(torch.equal, net.state_dict().values(), Net(3).state_dict().values()))
    with (
        hf.CheckpointCallback(f"{place}/other", init_from=f"{place}/weights", save_at_end=False) as checkpoint,
        pytest.raises(hf.errors.OptionError, match=message),
    ):
        checkpoint.restore_or_initialize(state())


@pytest.mark.parametrize(
    "name", ["step", "metrics", "partial", "max_to_keep", "resume", "best_fn", "global_generators"]
)
def test_names_that_an_extra_cannot_have(name: str, tmp_path: Path) -> None:
    """Those of parameters, and those of options."""
    state, mistaken = {"w": np.ones(2)}, {name: "initialize"}
    of_calls = f"an extra cannot be called '{name}', as the callback uses this name"
    is_option = name not in ("step", "metrics")
    message = rf"pass it to CheckpointCallback\(..., {name}=...\)" if is_option else of_calls
    with hf.CheckpointCallback(tmp_path) as checkpoint:
        with pytest.raises(hf.errors.OptionError, match=message):
            checkpoint.restore_or_initialize(state, **mistaken)
        assert list(tmp_path.iterdir()) == []
        checkpoint.restore_or_initialize(state)
        if is_option:
            with pytest.raises(hf.errors.OptionError, match=f"{name}= is an option"):
                checkpoint.on_step(1, state, **mistaken)  # type: ignore[arg-type]


# ---- loops of torch that accumulate gradients


class Trainer:
    """An object with its model and optimizer as attributes."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.parts = [model]
        self.optimizer = optimizer


class SparseNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 2, sparse=True)

    def forward(self, x: Any) -> Any:
        return self.embedding((x.abs() * 3).long().clamp(max=8))


def accumulate(directory: Path, kind: str, stop: int = 0, batches_a_step: int = 3) -> list[Any]:
    """The optimizer takes one step for three batches; ``on_step`` comes after each, or after each batch."""
    torch.manual_seed(4)
    net: Any = SparseNet() if kind == "sparse" else torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.0 if kind == "sparse" else 0.9)
    extras: dict[str, Any] = {"net": net} if kind == "extras" else {}
    extras |= {"optimizer": optimizer} if "extra" in kind else {}
    state = {"extras": {"w": 1}, "extra": net, "object": Trainer(net, optimizer)}.get(
        kind, {"net": net, "optimizer": optimizer}
    )
    with hf.CheckpointCallback(directory, save_interval_steps=1) as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, **extras)
        for number in range(batches_a_step * start + 1, 10):
            net(torch.randn(4, 3)).square().mean().backward()
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
            step, rest = divmod(number, batches_a_step)
            if not rest:
                checkpoint.on_step(step, state, **extras)
                if step == stop:
                    break
    return list(net.state_dict().values())


@pytest.mark.parametrize("kind", ["dict", "extras", "extra", "object", "sparse"])
def test_steps_of_several_batches_come_after_the_optimizers(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = accumulate(tmp_path / "whole", kind)
    for stop in (1, 2):
        accumulate(tmp_path / f"{stop}", kind, stop)
        assert all(map(torch.equal, accumulate(tmp_path / f"{stop}", kind), whole)), stop
    assert "gradients" not in caplog.text
    accumulate(tmp_path / "each batch", kind, batches_a_step=1)
    (said,) = [one.getMessage() for one in caplog.records if "gradients" in one.getMessage()]
    assert said.startswith("step 1 is saved without the gradients of ")
    assert said.endswith("Call on_step after optimizer.step(), not for each micro-batch")
    assert "accumulated_gradients" not in hf.load(tmp_path / "each batch" / "1", item="extras")


def every_other_step(net: Any, optimizer: Any, step: int) -> None:
    """Gradients that an optimizer has used stay until the next backward."""
    if step % 2:
        optimizer.zero_grad()
        net(torch.ones(4, 3)).sum().backward()
        optimizer.step()


def overflowing(net: Any, optimizer: Any, _: int) -> None:
    """A scaler leaves out steps whose gradients overflow."""
    (net(torch.ones(4, 3)).sum() * float("inf")).backward()


def cleared(net: Any, optimizer: Any, _: int) -> None:
    net(torch.ones(4, 3)).sum().backward()
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("update", [every_other_step, overflowing, cleared])
def test_gradients_that_no_optimizer_will_use_are_not_told(
    update: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = torch.nn.Linear(3, 2)
    state = {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
    with hf.CheckpointCallback(tmp_path, save_interval_steps=1) as checkpoint:
        checkpoint.restore_or_initialize(state)
        for step in range(1, 5):
            update(net, state["optimizer"], step)
            checkpoint.on_step(step, state)
    assert "gradients" not in caplog.text


def test_gradients_that_an_earlier_version_has_saved_are_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = {"state.weights.0": torch.ones(3, 2), "state.gone": torch.ones(1), "extras.net.bias": torch.full((2,), 2.0)}
    net = torch.nn.Linear(3, 2)
    with hf.CheckpointCallback(tmp_path) as checkpoint:
        state, _ = checkpoint.restore_or_initialize({"weights": [torch.zeros(3, 2, requires_grad=True)]}, net=net)
        extras = {"net": dict(state_of(net)), "accumulated_gradients": encode_state(saved)}
        checkpoint.manager.save(1, {"state": state, "extras": extras}, force=True)
    net = torch.nn.Linear(3, 2)
    with hf.CheckpointCallback(tmp_path) as checkpoint:
        state, _ = checkpoint.restore_or_initialize({"weights": [torch.zeros(3, 2, requires_grad=True)]}, net=net)
    gradients: list[Any] = [state["weights"][0].grad, net.bias.grad]
    assert [one.tolist() for one in gradients] == [[[1, 1]] * 3, [2, 2]]
    assert "accumulated gradients are lost, as their parameters are gone: state.gone" in caplog.text


# ---- hyperparameters that the program has changed


def torch_state(rate: float, schedule: str) -> dict[str, Any]:
    net = Net(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate)
    state = {"net": net, "optimizer": optimizer}
    if schedule == "step":
        state["schedule"] = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    elif schedule == "a tensor":
        optimizer.param_groups[0]["lr"] = torch.tensor(rate)
    elif schedule == "one cycle":
        state["schedule"] = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=9)
    return state


def rate_after(directory: Path, rate: float, schedule: str, step: int, **options: Any) -> float:
    """Trains one step, and returns the rate of the next one."""
    state = torch_state(rate, schedule)
    with hf.CheckpointCallback(directory, **options) as checkpoint:
        checkpoint.restore_or_initialize(state)
        found = float(state["optimizer"].param_groups[0]["lr"])
        torch_update(state["net"], state["optimizer"], torch.ones(2, 3))
        if "schedule" in state:
            state["schedule"].step()
        checkpoint.on_step(step, state)
    return found


@pytest.mark.parametrize(
    ("schedule", "chosen", "rates"),
    [
        ("none", "saved", (0.1, 0.1)),
        ("none", "program", (0.4, 0.4)),
        ("a tensor", "saved", (0.1, 0.1)),
        ("a tensor", "program", (0.4, 0.4)),
        ("step", "saved", (0.05, 0.025)),
        ("step", "program", (0.2, 0.1)),
    ],
)
def test_a_new_learning_rate_is_said_and_can_be_chosen(
    schedule: str, chosen: str, rates: tuple[float, float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "holdfast")
    rate_after(tmp_path, 0.1, schedule, 1)
    caplog.clear()
    assert rate_after(tmp_path, 0.4, schedule, 2, hyperparameters=chosen) == pytest.approx(rates[0])
    option = "initial_lr" if schedule == "step" else "lr"
    (record,) = [one for one in caplog.records if "hyperparameters differ" in one.getMessage()]
    assert record.levelno == (logging.WARNING if chosen == "saved" else logging.INFO)
    said = record.getMessage()
    assert f"optimizer.param_groups[0].{option} (program 0.4, saved 0.1)" in said
    assert f"hyperparameters='{chosen}'" in said
    caplog.clear()
    again = 0.4 if chosen == "program" else 0.1
    assert rate_after(tmp_path, again, schedule, 3, hyperparameters=chosen) == pytest.approx(rates[1])
    assert "hyperparameters differ" not in caplog.text


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] ** 2 / group["weight_sum"])


@pytest.mark.parametrize("chosen", ["saved", "program"])
def test_what_an_optimizer_counts_in_its_groups_is_no_hyperparameter(
    chosen: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def steps(directory: Path, rate: float, stop: int) -> Any:
        net = Net(0)
        state: dict[str, Any] = {"net": net, "optimizer": Counting(net.parameters(), rate)}
        with hf.CheckpointCallback(directory, hyperparameters=chosen) as checkpoint:
            _, start = checkpoint.restore_or_initialize(state)
            for step in range(start, stop):
                torch_update(net, state["optimizer"], torch.ones(2, 3))
                checkpoint.on_step(step + 1, state)
        return state["optimizer"].param_groups[0], list(net.parameters())

    steps(tmp_path / "again", 0.1, 3)
    caplog.set_level("INFO", "holdfast")
    (group, weights), (expected, whole) = steps(tmp_path / "again", 0.1, 6), steps(tmp_path / "whole", 0.1, 6)
    assert {**group, "params": None} == {**expected, "params": None}
    assert all(map(torch.equal, weights, whole))
    assert "hyperparameters differ" not in caplog.text
    group, _ = steps(tmp_path / "again", 0.4, 6)
    (said,) = [one.getMessage() for one in caplog.records if "hyperparameters differ" in one.getMessage()]
    assert said.endswith(": optimizer.param_groups[0].lr (program 0.4, saved 0.1)")
    assert group["k"] == 6


def torch_by_hand(rate: float) -> Any:
    net = Net(0)
    return {"net": net, "optimizer": torch.optim.SGD(net.parameters(), rate)}


def optax_by_hand(rate: float) -> Any:
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
    params = {"w": jnp.ones(2)}
    return {"params": params, "optimizer": tx.init(params)}


@pytest.mark.parametrize("make", [torch_by_hand, optax_by_hand])
def test_rates_that_the_loop_sets_itself_are_a_difference_only_if_the_program_begins_with_another(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = []
    for rate in (0.1, 0.1, 0.1, 0.2, 0.2, 0.1):
        caplog.clear()
        with hf.CheckpointCallback(tmp_path) as checkpoint:
            state, start = checkpoint.restore_or_initialize(make(rate))
            for step in range(start, start + 2):
                if make is torch_by_hand:
                    state["optimizer"].param_groups[0]["lr"] = 0.1 / (2 + step // 4)
                else:
                    state["optimizer"].hyperparams["learning_rate"] = jnp.asarray(0.1 / (2 + step // 4))
                checkpoint.on_step(step + 1, state)
        said.append("hyperparameters differ" in caplog.text)
    assert said == [False, False, False, True, True, False]
    name = "param_groups[0].lr" if make is torch_by_hand else "hyperparams.learning_rate"
    recorded = {"hyperparameters": {f"optimizer.{name}": pytest.approx(0.1)}}
    assert hf.CheckpointManager(tmp_path).custom_metadata(12) == recorded


def test_what_a_schedule_moves_is_no_difference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "holdfast")
    for step in (1, 2, 3):
        rate_after(tmp_path, 0.1, "one cycle", step)
    assert "hyperparameters differ" not in caplog.text


@pytest.mark.parametrize("given", ["a state", "a function"])
@pytest.mark.parametrize(("chosen", "rate"), [("saved", 0.1), ("program", 0.4)])
def test_a_new_rate_of_optax_is_said_and_can_be_chosen(
    given: str, chosen: Any, rate: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "holdfast")

    def state_with(rate: float) -> Any:
        def init() -> dict[str, Any]:
            params = {"w": jnp.ones(2)}
            optimizer = optax.chain(
                optax.clip(1.0),
                optax.inject_hyperparams(optax.adamw)(rate, weight_decay=optax.linear_schedule(0.1, 0.2, 3)),
            )
            return {"params": params, "opt": optimizer.init(params)}

        return init if given == "a function" else init()

    with hf.CheckpointCallback(tmp_path) as checkpoint:
        state, _ = checkpoint.restore_or_initialize(state_with(0.1))
        checkpoint.on_step(1, state)
    with hf.CheckpointCallback(tmp_path, hyperparameters=chosen) as checkpoint:
        state, _ = checkpoint.restore_or_initialize(state_with(0.4))
    assert float(state["opt"][1].hyperparams["learning_rate"]) == pytest.approx(rate)
    assert "opt/1/hyperparams/learning_rate (program 0.4, saved 0.1)" in caplog.text
    assert "weight_decay" not in caplog.text


# ---- options of managers, and mistakes of the first day


def test_the_callback_takes_whatever_a_manager_takes(tmp_path: Path) -> None:
    of_managers = inspect.signature(hf.CheckpointManagerOptions).parameters
    of_the_callback = inspect.signature(hf.CheckpointCallback).parameters
    assert set(of_managers) - set(of_the_callback) == {"read_only"}
    given: dict[str, Any] = {
        "keep_checkpoints_without_metrics": True,
        "item_intervals": {"extras": 4},
        "step_prefix": "step",
        "save_timeout_secs": "20m",
        "barrier_timeout_secs": "2m",
    }
    with hf.CheckpointCallback(tmp_path, save_interval_steps=2, resume="auto", **given) as checkpoint:
        assert {name: getattr(checkpoint.manager.options, name) for name in given} == given
        state, _ = checkpoint.restore_or_initialize({"w": np.ones(2)})
        for step in range(1, 7):
            checkpoint.on_step(step, state)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_2", "step_4", "step_6"]
    with pytest.raises(hf.CheckpointExistsError):
        hf.CheckpointCallback(tmp_path, resume="never", step_prefix="step").restore_or_initialize(state)
    with pytest.raises(hf.errors.OptionError, match="item_intervals"):
        hf.CheckpointCallback(tmp_path, item_intervals={"extras": 0})


def test_steps_that_go_down_are_refused(tmp_path: Path) -> None:
    state = {"w": np.ones(2)}
    with hf.CheckpointCallback(tmp_path, save_interval_steps=5) as checkpoint:
        checkpoint.restore_or_initialize(state)
        checkpoint.on_step(5, state)
        with pytest.raises(hf.errors.OptionError, match=r"on_step\(3\) came after step 5"):
            checkpoint.on_step(3, state)
        checkpoint.on_step(10, state)
    with hf.CheckpointCallback(tmp_path) as checkpoint:
        checkpoint.restore_or_initialize(state)
        with pytest.raises(hf.errors.OptionError, match=r"on_step\(1\) came after step 10"):
            checkpoint.on_step(1, state)  # a loop that begins at 0 again
        checkpoint.manager.restore(5, {"state": state})  # a program that goes back says so
        assert checkpoint.on_step(6, state).saved is False


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "the first save is in 15 minutes or at the end, or at a preemption"),
        ({"save_at_end": False}, "the first save is in 15 minutes, or at a preemption"),
        ({"save_interval_steps": 5}, None),
    ],
)
def test_a_run_without_a_trigger_says_when_it_saves(
    options: dict[str, Any], said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "holdfast")
    with hf.CheckpointCallback(tmp_path, **options) as checkpoint:
        checkpoint.restore_or_initialize({"w": np.ones(2)})
    found = [one.getMessage() for one in caplog.records if "the first save" in one.getMessage()]
    assert [text.partition(": ")[2] for text in found] == ([] if said is None else [said])
