"""Modules and optimizers that give and take their state by methods or hooks of their own, saved by a training loop."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.processes.threads import memory_coordinators

import holdfast as hf
from holdfast import graph
from holdfast.components import Checkpointable

Program = dict[str, Any]


def resumed(path: Path, make: Callable[[], Any], train: Callable[[Any], None]) -> tuple[Any, Any]:
    """Returns the objects of a run that was saved after its training, and those of the next start."""
    with hf.CheckpointCallback(path, save_interval_steps=1) as checkpoint:
        before, _ = checkpoint.restore_or_initialize(make())
        train(before)
        checkpoint.on_step(1, before)
    with hf.CheckpointCallback(path, save_interval_steps=1) as checkpoint:
        after, start = checkpoint.restore_or_initialize(make())
    assert start == 1
    return before, after


def equal(one: Any, other: Any) -> bool:
    """Returns whether two states are the same, bit by bit."""
    if isinstance(one, torch.Tensor):
        if one.layout is not torch.strided:
            one, other = one.to_dense(), other.to_dense()
        if one.is_quantized:
            return torch.equal(one, other)
        return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


# ---- modules


class Whole(torch.nn.Module):
    """Counts what it has seen, and says so in the state that it gives as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.layer = torch.nn.Linear(2, 2)

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        state[f"{prefix}seen"] = self.seen
        return state

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        state = dict(state_dict)
        self.seen = state.pop("seen")
        return super().load_state_dict(state, *args, **kwargs)


class Part(torch.nn.Module):
    """Counts what it has seen, and says so as a part of any module, in a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.weight = torch.nn.Parameter(torch.randn(3))

    def _save_to_state_dict(self, state: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[f"{prefix}seen"] = [torch.ones(2), torch.tensor(self.seen)]

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        _, seen = state.pop(f"{prefix}seen")
        self.seen = int(seen)
        super()._load_from_state_dict(state, prefix, *args)


class Hooked(torch.nn.Module):
    """Counts what it has seen, and says so by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.weight = torch.nn.Parameter(torch.randn(3))
        hooks: Any = self  # whose methods have no types
        hooks._register_state_dict_hook(lambda module, state, prefix, _: state.update({f"{prefix}seen": module.seen}))
        hooks.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: setattr(module, "seen", state.pop(f"{prefix}seen"))
        )


class Compressed(torch.nn.Module):
    """Gives its weight in half precision, and computes a table from it whenever it takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))
        self.table = self.weight.detach() * 2
        hooks: Any = self
        hooks._register_state_dict_hook(self._halve)
        hooks.register_load_state_dict_post_hook(lambda module, _: setattr(module, "table", module.weight.detach() * 2))

    @staticmethod
    def _halve(module: Any, state: Any, prefix: str, _: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].half()


class Bank(torch.nn.Module):
    """A memory that grows, as those of observers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(0, 3))

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.memory = torch.empty_like(state[f"{prefix}memory"])
        super()._load_from_state_dict(state, prefix, *args)


class Sparse(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("coo", (torch.eye(3) * torch.rand(1)).to_sparse())


class Extra(torch.nn.Module):
    seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "tensor": torch.ones(2, dtype=torch.bfloat16)}

    def set_extra_state(self, state: Any) -> None:
        assert state["tensor"].dtype == torch.bfloat16
        self.seen = state["seen"]


def count(program: Program) -> None:
    for module in program["model"].modules():
        if hasattr(module, "seen"):
            module.seen = 7
    with torch.no_grad():
        for parameter in program["model"].parameters():
            parameter.add_(torch.randn_like(parameter))


def grow(program: Program) -> None:
    program["model"][0].memory = torch.randn(4, 3)


def channels_last() -> torch.nn.Module:
    model: Any = torch.nn.Conv2d(2, 3, 2)
    model.to(memory_format=torch.channels_last)
    assert not model.weight.is_contiguous()
    return model  # type: ignore[no-any-return]


def quantized() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    quantize: Any = torch.ao.quantization.quantize_dynamic
    return quantize(model, {torch.nn.Linear})  # type: ignore[no-any-return]


MODULES: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[Program], None]]] = {
    "a state_dict of its own": (Whole, count),
    "a part that saves itself": (Part, count),
    "a part in another module": (lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), Part()), count),
    "parts in a part": (lambda: torch.nn.Sequential(torch.nn.Sequential(Part(), Part()), Hooked()), count),
    "hooks": (Hooked, count),
    "hooks in another module": (lambda: torch.nn.Sequential(Hooked(), torch.nn.BatchNorm1d(2)), count),
    "an extra state": (lambda: torch.nn.Sequential(Extra()), count),
    "a buffer that grows": (lambda: torch.nn.Sequential(Bank()), grow),
    "sparse buffers": (lambda: torch.nn.Sequential(Sparse()), lambda _: None),
    "channels last": (channels_last, count),
    "quantized": (quantized, lambda _: None),
}


@pytest.mark.filterwarnings("ignore:.*quantiz", "ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(("make", "train"), MODULES.values(), ids=MODULES.keys())
def test_modules_are_restored_as_torch_does(
    tmp_path: Path, make: Callable[[], torch.nn.Module], train: Callable[[Program], None]
) -> None:
    before, after = resumed(tmp_path, lambda: {"model": make()}, train)
    assert equal(dict(before["model"].state_dict()), dict(after["model"].state_dict()))


def test_exact_values_and_what_is_computed_from_them(tmp_path: Path) -> None:
    before, after = resumed(tmp_path, lambda: {"model": Compressed()}, count)
    assert torch.equal(before["model"].weight, after["model"].weight)
    assert torch.equal(after["model"].table, before["model"].weight.detach().half().float() * 2)


def test_a_module_of_torch_has_no_protocol_of_its_own(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.LazyLinear(2), torch.nn.LSTM(2, 2))
    checkpoint = graph.Checkpoint(model=model)
    model(torch.zeros(3, 2))
    checkpoint.save(tmp_path / "c")
    assert not [leaf.path for leaf in hf.describe(tmp_path) if "_own_state" in leaf.path]


# ---- optimizers


class Around(torch.optim.Optimizer):
    """An optimizer around another, as Lookahead is: their state is a dictionary with keys that are pairs."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.defaults: dict[str, Any] = {}
        self.param_groups = inner.param_groups
        self.state = {}  # type: ignore[assignment]
        self._optimizer_step_pre_hooks = {}
        self._optimizer_step_post_hooks = {}
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        slow = {
            (group, number): self.state[one]
            for group, options in enumerate(self.param_groups)
            for number, one in enumerate(options["params"])
            if one in self.state
        }
        return {"slow": slow, "steps": self.steps, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.inner.load_state_dict(state["inner"])
        for (group, number), value in state["slow"].items():
            self.state[self.param_groups[group]["params"][number]] = value

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        self.inner.step()
        for group in self.param_groups:
            for one in group["params"]:
                self.state.setdefault(one, {"slow": one.detach().clone()})


class Driving(torch.optim.Optimizer):
    """An optimizer that drives another and says nothing of it, as implementations of SAM do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer = torch.optim.Adam(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base_optimizer.step()


class Odd(torch.optim.SGD):
    """Keeps values under keys that are no text, small objects, and matrices in the order of Fortran."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for one in group["params"]:
                matrix = torch.arange(6.0).reshape(3, 2).T  # A product with it rounds otherwise in the order of C.
                self.state[one].update({("q", 0): torch.ones(2), "dtype": torch.float16, "Q": [matrix], "R": matrix})


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "around another": lambda parameters: Around(torch.optim.Adam(parameters)),
    "driving another": Driving,
    "odd keys and objects": lambda parameters: Odd(parameters, lr=0.1, momentum=0.9),
}


def states(optimizer: Any) -> list[Any]:
    inner = [one for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer)]
    return [one.state_dict() for one in (optimizer, *inner)]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_optimizers_are_restored_as_torch_does(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    def program() -> Program:
        model = torch.nn.Linear(3, 2)
        return {"model": model, "optimizer": make(model.parameters())}

    def train(program: Program) -> None:
        for _ in range(2):
            program["model"](torch.randn(4, 3)).square().sum().backward()
            program["optimizer"].step()

    before, after = resumed(tmp_path, program, train)
    assert equal(states(before["optimizer"]), states(after["optimizer"]))
    for one in (before, after):
        one["model"].zero_grad()
        one["model"](torch.ones(4, 3)).square().sum().backward()
        one["optimizer"].step()
    assert equal(dict(before["model"].state_dict()), dict(after["model"].state_dict()))


class Reloading(torch.optim.Optimizer):
    """Counts the steps of another optimizer; to load the count, it loads the other one, too."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.param_groups[0]["params"], {})
        self.inner = inner
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.inner.step(closure)
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        self.inner.load_state_dict(self.inner.state_dict())


def test_an_optimizer_is_restored_although_another_one_loads_it_meanwhile(tmp_path: Path) -> None:
    def make(steps: int) -> graph.Checkpoint:
        torch.manual_seed(steps)
        net = torch.nn.Linear(3, 1)
        inner = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2, history_size=3)
        outer = Reloading(inner)

        def closure() -> Any:
            inner.zero_grad()
            loss = net(torch.eye(3)).square().sum()
            loss.backward()
            return loss

        for _ in range(steps):
            outer.step(closure)
        return graph.Checkpoint(net=net, outer=outer, inner=inner)

    saved, other = make(3), make(0)
    other.restore(saved.write(tmp_path / "checkpoint")).assert_consumed()
    one, two = (sorted(map(str, each.inner.state_dict()["state"][0].items())) for each in (other, saved))
    assert one == two
    assert other.outer.count == 3


# ---- metrics, whose state_dict() lacks what they have accumulated


def test_metrics_go_on_with_what_they_have_accumulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    def metrics() -> Any:
        several = torchmetrics.MetricCollection([torchmetrics.MeanMetric(), torchmetrics.CatMetric()])
        others = {"recent": torchmetrics.RunningSum(2), "extremes": torchmetrics.MinMaxMetric(torchmetrics.MaxMetric())}
        return {"layer": torch.nn.Linear(1, 1), "several": several, "new": torchmetrics.SumMetric(), **others}

    def update(state: Any, *values: float) -> None:
        for value in values:
            for name in ("several", "recent", "extremes"):
                state[name](torch.tensor(value))

    _, again = resumed(tmp_path, metrics, lambda state: update(state, 2.0, 1.0))
    update(again, 6.0)
    found = again["several"].compute()
    assert found["MeanMetric"] == 3
    assert found["CatMetric"].tolist() == [2, 1, 6]
    assert again["recent"].compute() == 7
    assert {name: float(value) for name, value in again["extremes"].compute().items()} == {"raw": 6, "max": 6, "min": 1}
    assert not again["new"].update_called
    for coordinator, expected in zip(memory_coordinators(2), [3.0, 0.0], strict=True):  # two processes continue
        monkeypatch.setattr("holdfast.integrations.graph.frameworks.current_coordinator", lambda one=coordinator: one)
        share = metrics()
        with hf.CheckpointCallback(tmp_path) as checkpoint:
            checkpoint.restore_or_initialize(share)
        assert float(share["several"]["MeanMetric"].mean_value) == expected


class Holder(Checkpointable):
    def __init__(self) -> None:
        self.objects: Program = {}


# ---- modes, and containers of arrays that grow


@pytest.mark.parametrize("component", [False, True], ids=["objects", "component"])
def test_modes_and_containers_of_arrays_are_those_of_the_save(
    component: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def objects(state: Any) -> Program:
        return state.objects if component else state  # type: ignore[no-any-return]

    def make() -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
        model[2].requires_grad_(False)
        replay = types.SimpleNamespace(seen=[], pairs=[], window=[np.zeros(2)], named={}, best=None)
        holder = Holder()
        holder.objects = {"model": model, "replay": replay}
        return holder if component else holder.objects

    def train(state: Any) -> None:
        first, second, third = objects(state)["model"]
        first.requires_grad_(False)
        second.eval()
        third.requires_grad_(True)
        replay = objects(state)["replay"]
        replay.seen = [np.ones(3), torch.ones(2)]
        replay.pairs = [(np.ones(1), 2, {"done": np.zeros(1)})]
        replay.window += [np.ones(2), np.full(2, 2.0)]
        replay.named = {"a": np.ones(2)}
        replay.best = {"weights": {"w": torch.full((2,), 3.0)}, "loss": 0.5}

    caplog.set_level(logging.INFO, "holdfast")
    before, after = resumed(tmp_path, make, train)
    model = objects(after)["model"]
    assert [one.requires_grad for one in model.parameters()] == [False, False, True, True, True, True]
    assert [one.training for one in model.modules()] == [True, True, False, True]
    (line,) = [record.getMessage() for record in caplog.records if "as at the save" in record.getMessage()]
    assert "model/0/weight.requires_grad = False" in line
    assert "model/1.training = False" in line
    assert repr(objects(after)["replay"]) == repr(objects(before)["replay"])


class Environment:
    """Has the methods of an environment of gymnasium, and makes its generators when they are first needed."""

    def __init__(self) -> None:
        self.spaces: list[Any] = []
        self._np_random: np.random.Generator | None = None
        self.place = 0.0

    def reset(self, seed: int) -> None:
        self._np_random = np.random.default_rng(seed)

    def step(self) -> float:
        assert self._np_random is not None
        self.place += self._np_random.normal()
        return self.place


def environment_of(program: Program) -> Environment:
    found: Environment = getattr(program["env"], "parts", [program["env"]])[0]
    return found


def trained(program: Program) -> None:
    environment_of(program).reset(seed=1)
    environment_of(program).step()


@pytest.mark.parametrize("nested", [False, True], ids=["env", "agent"])
def test_an_environment_continues_where_it_was_if_it_was_reset(nested: bool, tmp_path: Path) -> None:
    def make() -> Program:
        environment = Environment()
        return {"model": torch.nn.Linear(1, 1), "env": graph.Node(parts=[environment]) if nested else environment}

    def make_and_reset() -> Program:
        program = make()
        environment_of(program).reset(seed=7)
        return program

    states = resumed(tmp_path / "reset", make_and_reset, trained)
    before, after = ([environment_of(state).step() for _ in range(3)] for state in states)
    assert before == after
    # The generator of one that was not reset is not replaced by the state of one.
    path = "env/parts/0" if nested else "env"
    with pytest.raises(hf.TreeMismatchError, match=f"{path}/_np_random: expected None .*, found the state of") as error:
        resumed(tmp_path / "new", make, trained)
    (note,) = error.value.__notes__
    assert note.startswith("A run resumes with the state that it had, or not at all")


def test_an_environment_as_an_extra_is_refused_with_what_to_do(tmp_path: Path) -> None:
    message = r"env: is an environment \(.*\.Environment\); leave it out, and after a resume, start an episode with a"
    refused = pytest.raises(hf.errors.UnsupportedLeafError, match=message)
    with hf.CheckpointCallback(tmp_path) as checkpoint, refused:
        checkpoint.restore_or_initialize({"w": np.zeros(3)}, env=Environment())
