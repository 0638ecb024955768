"""torch programs whose states are more than tensors of fixed shapes, as their authors write them.

Each is a function that makes the objects of a training loop, and a function that does one step with them.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler, swa_utils

State = dict[str, Any]
Program = tuple[Callable[[], State], Callable[[State, int], None]]

FEATURES = 4


def batch(size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw examples from torch's own generator."""
    x = torch.randn(size, FEATURES)
    return x, x.sin().sum(1, keepdim=True)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


def loss_of(model: Any) -> torch.Tensor:
    x, y = batch()
    return nn.functional.mse_loss(model(x), y)


def backward(loss: Any) -> None:
    loss.backward()  # which torch has no types for


def descend(optimizer: Any, loss: Any) -> None:
    optimizer.zero_grad()
    backward(loss)
    optimizer.step()


def update(model: Any, optimizer: Any) -> torch.Tensor:
    loss = loss_of(model)
    descend(optimizer, loss)
    return loss.detach()


def plain(
    model: Callable[[], nn.Module] = network,
    optimizer: Callable[[Any], Any] = lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    after: Callable[[State, float, int], None] | None = None,
) -> Program:
    """Return a program with a model and an optimizer, and what it does after every update."""

    def make() -> State:
        made = model()
        return {"model": made, "optimizer": optimizer(made.parameters())}

    def step(state: State, number: int) -> None:
        loss = update(state["model"], state["optimizer"])
        if after is not None:
            after(state, float(loss), number)

    return make, step


# ---- modules with a way of their own to give their state


class Normalizer(nn.Module):
    """Normalizes observations by what it has seen so far, which it keeps in plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.mean, self.squares = 0, 0.0, 1.0
        self.layer = nn.Linear(FEATURES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.mean += (float(x.mean()) - self.mean) / self.count
            self.squares += (float(x.square().mean()) - self.squares) / self.count
        found: torch.Tensor = self.layer((x - self.mean) / self.squares**0.5)
        return found

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        state[f"{prefix}statistics"] = (self.count, self.mean, self.squares)
        return state

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        state = dict(state_dict)
        self.count, self.mean, self.squares = state.pop("statistics")
        return super().load_state_dict(state, *args, **kwargs)


class Quantizer(nn.Module):
    """Rounds to a grid whose width follows the data; the width is part of what it saves itself."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 1.0
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.width = 0.9 * self.width + 0.1 * float(x.detach().abs().max())
        return x + (torch.round(x / self.width) * self.width - x).detach() * self.scale

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}width"] = torch.tensor(self.width, dtype=torch.float64)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.width = float(state_dict.pop(f"{prefix}width"))
        super()._load_from_state_dict(state_dict, prefix, *args)


class Counted(nn.Module):
    """Anneals its temperature with a counter that hooks put into its state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.layer = nn.Linear(FEATURES, FEATURES)
        hooks: Any = self  # whose methods have no types
        hooks._register_state_dict_hook(lambda module, state, prefix, _: state.update({f"{prefix}calls": module.calls}))
        hooks.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: setattr(module, "calls", state.pop(f"{prefix}calls"))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = torch.tanh(self.layer(x) / (1 + 1 / self.calls))
        return found


class Annealed(nn.Module):
    """The same with the way that torch has for it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1 - 1 / (1 + self.calls))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Bank(nn.Module):
    """A memory of what was seen, which grows with every batch."""

    memory: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(0, FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.memory):
            x = x + torch.softmax(x @ self.memory.T, 1) @ self.memory
        self.memory = torch.cat([self.memory, x.detach()[:2]])
        return x

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.memory = torch.empty_like(state_dict[f"{prefix}memory"])
        super()._load_from_state_dict(state_dict, prefix, *args)


class Masked(nn.Module):
    """Adds a sparse prior, which it makes from its first batch."""

    prior: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("prior", (torch.eye(FEATURES) * torch.rand(FEATURES)).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = torch.sparse.mm(self.prior, x.T).T
        return x + added


def in_a_network(part: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that makes a model with the part as a child of a child."""
    return lambda: nn.Sequential(nn.Sequential(part(), nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Linear(8, 1))


def _with_metric() -> nn.Module:
    torchmetrics = importlib.import_module("torchmetrics")
    model: Any = network()
    model.losses = torchmetrics.CatMetric()
    model.losses.persistent(True)
    model.forward = model[0:4].forward
    return model  # type: ignore[no-any-return]


def _observe(state: State, loss: float, _: int) -> None:
    metric = state["model"].losses
    metric.update(torch.tensor(loss))
    for group in state["optimizer"].param_groups:
        group["lr"] = 0.05 / (1 + float(metric.compute().mean()))


def _distillation() -> Program:
    """A student of a quantized teacher, which every start makes anew from other random weights."""

    def make() -> State:
        quantize: Any = torch.ao.quantization.quantize_dynamic
        student = network()
        teacher = quantize(nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 1)), {nn.Linear})
        return {"student": student, "teacher": teacher, "optimizer": torch.optim.Adam(student.parameters(), lr=0.05)}

    def step(state: State, _: int) -> None:
        x = batch()[0]
        with torch.no_grad():
            y = state["teacher"](x)
        descend(state["optimizer"], nn.functional.mse_loss(state["student"](x), y))

    return make, step


def _quantization_aware() -> nn.Module:
    """Observers whose buffers grow with the first batch."""
    quantization: Any = torch.ao.quantization
    model = nn.Sequential(quantization.QuantStub(), nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 1))
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    prepared: nn.Module = quantization.prepare_qat(model.train())
    return prepared


def _tied() -> nn.Module:
    model: Any = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES), nn.Linear(4, 1))
    model[2].weight = model[0].weight
    return model  # type: ignore[no-any-return]


def _parametrized() -> nn.Module:
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(FEATURES, 8)),
        nn.Tanh(),
        parametrizations.weight_norm(nn.Linear(8, FEATURES)),
        parametrizations.orthogonal(nn.Linear(FEATURES, FEATURES)),
        nn.Linear(FEATURES, 1),
    )


class Recurrent(nn.Module):
    """Carries its hidden state from batch to batch, as truncated backpropagation does."""

    hidden: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(FEATURES, 8), nn.Linear(8, 1)
        self.register_buffer("hidden", torch.zeros(1, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, hidden = self.cell(x[:, None], self.hidden)
        self.hidden = hidden.detach()
        found: torch.Tensor = self.head(out[:, 0])
        return found


# ---- optimizers


class Lookahead(torch.optim.Optimizer):
    """Pulls slow weights after those of another optimizer, as implementations of Lookahead do."""

    def __init__(self, inner: torch.optim.Optimizer, every: int = 3) -> None:
        self.inner, self.every, self.steps = inner, every, 0
        self.defaults: dict[str, Any] = {}
        self.param_groups = inner.param_groups
        self.state = {}  # type: ignore[assignment]
        self._optimizer_step_pre_hooks = {}
        self._optimizer_step_post_hooks = {}

    def _parameters(self) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        for number, group in enumerate(self.param_groups):
            yield from (((number, index), one) for index, one in enumerate(group["params"]))

    def state_dict(self) -> dict[str, Any]:
        slow = {place: self.state[one] for place, one in self._parameters() if one in self.state}
        return {"inner": self.inner.state_dict(), "slow": slow, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.steps = state["steps"]
        for place, one in self._parameters():
            if place in state["slow"]:
                self.state[one] = state["slow"][place]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _, one in self._parameters():
            self.state.setdefault(one, {"slow": one.clone()})
        self.inner.step()
        self.steps += 1
        if self.steps % self.every == 0:
            for _, one in self._parameters():
                slow = self.state[one]["slow"]
                one.copy_(slow.lerp_(one, 0.5))


class Sharpness(torch.optim.Optimizer):
    """Scales gradients by a momentum of its own before an optimizer inside takes them, and says nothing of either."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer = torch.optim.Adam(self.param_groups, lr=0.05)
        self.param_groups = self.base_optimizer.param_groups
        self.param_groups[0]["norm"] = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [one.grad for group in self.param_groups for one in group["params"] if one.grad is not None]
        first = self.param_groups[0]
        first["norm"] = 0.9 * first["norm"] + 0.1 * float(torch.stack([one.norm() for one in gradients]).norm())
        for one in gradients:
            one.div_(first["norm"])
        self.base_optimizer.step()


class Rotated(torch.optim.Optimizer):
    """Adam in the basis of the gradients' covariance, whose matrices have the order of Fortran, as those of SOAP."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None or one.ndim != 2:
                    continue
                state = self.state[one]
                if not state:
                    state.update(step=0, moment=torch.zeros_like(one), dtype=one.dtype, covariance={("left", 0): 0.0})
                left = state["covariance"][("left", 0)] * 0.9 + one.grad @ one.grad.T
                state["covariance"] = {("left", 0): left}
                state["Q"] = [torch.linalg.eigh(left + 1e-3 * torch.eye(len(left)))[1]]  # in the order of Fortran
                state["moment"].mul_(0.9).add_(state["Q"][0].T @ one.grad, alpha=0.1)
                state["step"] += 1
                one.sub_(state["Q"][0] @ state["moment"], alpha=group["lr"])


def _closures() -> Program:
    def make() -> State:
        model = nn.Linear(FEATURES, 1)
        return {"model": model, "optimizer": torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)}

    def step(state: State, _: int) -> None:
        x, y = batch()

        def closure() -> torch.Tensor:
            state["optimizer"].zero_grad()
            loss = nn.functional.mse_loss(state["model"](x), y)
            backward(loss)
            return loss

        state["optimizer"].step(closure)

    return make, step


def _sparse_embedding() -> Program:
    def make() -> State:
        table, head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1)
        optimizers = [torch.optim.SparseAdam(table.parameters(), lr=0.05), torch.optim.SGD(head.parameters(), lr=0.1)]
        return {"table": table, "head": head, "optimizers": optimizers}

    def step(state: State, _: int) -> None:
        loss = state["head"](state["table"](torch.randint(9, (5,)))).square().mean()
        for optimizer in state["optimizers"]:
            optimizer.zero_grad()
        backward(loss)
        for optimizer in state["optimizers"]:
            optimizer.step()

    return make, step


# ---- schedules, averages and all that a loop changes as it goes


def _scheduled(schedule: Callable[[Any], Any], *, metric: bool = False) -> Program:
    def make() -> State:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "schedule": schedule(optimizer)}

    def step(state: State, _: int) -> None:
        loss = update(state["model"], state["optimizer"])
        state["schedule"].step(*([loss] if metric else []))

    return make, step


def _averaged(average: Callable[[nn.Module], Any]) -> Program:
    def make() -> State:
        model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=4)
        return {"model": model, "average": average(model), "optimizer": optimizer, "schedule": schedule}

    def step(state: State, number: int) -> None:
        update(state["model"], state["optimizer"])
        if number > 2:
            state["average"].update_parameters(state["model"])
            state["schedule"].step()

    return make, step


_exponential: Any = getattr(swa_utils, "get_ema_multi_avg_fn")(0.9)  # noqa: B009  # it has no types


def _unfreezing(state: State, _: float, number: int) -> None:
    if number == 1:
        state["model"][0].requires_grad_(False)
        state["model"][2].eval()
    if number == 5:
        state["model"][0].requires_grad_(True)


def _scaled() -> Program:
    """Automatic mixed precision, with gradients that overflow."""

    def make() -> State:
        model = nn.Linear(FEATURES, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.05), "scaler": scaler}

    def step(state: State, number: int) -> None:
        scaler = state["scaler"]
        loss = loss_of(state["model"]) * (float("inf") if number in (2, 5) else 1.0)
        state["optimizer"].zero_grad()
        backward(scaler.scale(loss))
        scaler.unscale_(state["optimizer"])
        nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
        scaler.step(state["optimizer"])
        scaler.update()

    return make, step


class Replay:
    """A ring of what was seen, with a generator of its own."""

    def __init__(self) -> None:
        self.seen: list[np.ndarray[Any, Any]] = []
        self.rng = np.random.default_rng(3)
        self.best = {"loss": float("inf"), "step": 0}

    def add(self, x: np.ndarray[Any, Any]) -> None:
        self.seen = [*self.seen, x][-4:]

    def sample(self) -> torch.Tensor:
        return torch.from_numpy(self.seen[int(self.rng.integers(len(self.seen)))])


def _reinforcement() -> Program:
    def make() -> State:
        model = nn.Linear(FEATURES, 1)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.02)
        return {"model": model, "optimizer": optimizer, "replay": Replay(), "random": random.Random(4)}

    def step(state: State, number: int) -> None:
        replay = state["replay"]
        replay.add(replay.rng.normal(size=(5, FEATURES)).astype(np.float32) * state["random"].random())
        loss = (state["model"](replay.sample()) - 1).square().mean()
        descend(state["optimizer"], loss)
        if float(loss) < replay.best["loss"]:
            replay.best = {"loss": float(loss), "step": number}

    return make, step


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW, amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, amsgrad=True),
    "Adam, capturable": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.05), foreach=False),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, t0=2),
    "Rprop": torch.optim.Rprop,
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
    "Lookahead": lambda parameters: Lookahead(torch.optim.Adam(parameters, lr=0.05)),
    "one that drives another": Sharpness,
    "matrices in the order of Fortran": Rotated,
}


def _of_pytorch_optimizer() -> dict[str, Callable[[Any], Any]]:
    """Return optimizers of pytorch_optimizer that keep more than values for each parameter."""
    library: Any = importlib.import_module("pytorch_optimizer")
    return {
        "Lookahead of pytorch_optimizer": lambda parameters: library.Lookahead(torch.optim.AdamW(parameters), k=3),
        "Ranger21 of pytorch_optimizer": lambda parameters: library.Ranger21(parameters, num_iterations=10),
        "SOAP of pytorch_optimizer": lambda parameters: library.SOAP(parameters, precondition_frequency=2),
        "ScheduleFreeAdamW of pytorch_optimizer": library.ScheduleFreeAdamW,
    }


if importlib.util.find_spec("pytorch_optimizer") is not None:
    OPTIMIZERS |= _of_pytorch_optimizer()

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=12),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3),
    "one after another": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 8)], [3]
    ),
    "several at once": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.StepLR(optimizer, 2)]
    ),
}

STEPS: dict[str, Callable[[], Program]] = {
    "a state_dict of its own": lambda: plain(Normalizer),
    "a part that saves itself": lambda: plain(in_a_network(Quantizer)),
    "state_dict hooks": lambda: plain(in_a_network(Counted)),
    "extra state": lambda: plain(in_a_network(Annealed)),
    "a persistent metric": lambda: plain(_with_metric, after=_observe),
    "a quantized teacher": _distillation,
    "quantization-aware training": lambda: plain(_quantization_aware),
    "a buffer that grows": lambda: plain(in_a_network(Bank)),
    "a sparse buffer": lambda: plain(in_a_network(Masked)),
    "tied weights": lambda: plain(_tied),
    "parametrizations": lambda: plain(_parametrized),
    "a hidden state": lambda: plain(Recurrent),
    "frozen and thawed": lambda: plain(after=_unfreezing),
    "LBFGS": _closures,
    "a sparse embedding": _sparse_embedding,
    "an averaged model": lambda: _averaged(swa_utils.AveragedModel),
    "an exponential average": lambda: _averaged(
        lambda model: swa_utils.AveragedModel(model, multi_avg_fn=_exponential, use_buffers=True)
    ),
    "GradScaler": _scaled,
    "a replay buffer": _reinforcement,
    "ReduceLROnPlateau": lambda: _scheduled(
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), metric=True
    ),
    **{name: partial(_scheduled, make) for name, make in SCHEDULES.items()},
    **{name: partial(plain, optimizer=make) for name, make in OPTIMIZERS.items()},
}
