"""The part of Keras 3 that a graph sees, for tests without Keras: names, numbers and variables are as there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch


class Variable:
    def __init__(self, value: Any, name: str, backend: str) -> None:
        self.name = name
        array = np.asarray(value, "float32")
        self.value: Any = torch.nn.Parameter(torch.tensor(array)) if backend == "torch" else jnp.asarray(array)

    def assign(self, value: Any) -> None:
        if isinstance(self.value, torch.Tensor):
            self.value.data.copy_(torch.as_tensor(value))
        else:
            self.value = jnp.asarray(value)


class TrackedList(list[Any]):
    """What Keras makes of a list of a program."""


class Layer(torch.nn.Module):
    """A dense layer, or layers one after the other; a module of torch, as on that backend."""

    numbers = count()

    def __init__(self, layers: list[Any] | None = None, name: str | None = None, backend: str = "torch") -> None:
        super().__init__()
        number = next(self.numbers)
        kind = type(self).__name__.lower()
        self.name = name or (f"{kind}_{number}" if number else kind)
        self.backend, self.built = backend, False
        self.optimizer: Any = None
        self.own: list[Variable] = []
        self.layers: list[Any] = layers or []

    def build(self) -> None:
        self.built = True
        if not self.layers:
            self._kernel = Variable(np.random.rand(2), "kernel", self.backend)
            self.own = [self._kernel]
        for layer in self.layers:
            layer.build()
        values = {f"{self.name}/{one.name}{index}": one.value for index, one in enumerate(self.variables)}
        if self.backend == "torch":
            self._torch_params = torch.nn.ParameterDict(values)

    @property
    def variables(self) -> list[Variable]:
        return [*self.own, *(one for layer in self.layers for one in layer.variables)]

    trainable_variables = variables

    def _flatten_layers(self, include_self: bool = True, recursive: bool = True) -> list[Any]:
        assert not include_self
        assert not recursive
        return list(self.layers)

    def save_own_variables(self, store: Any) -> None:
        store.update({str(index): one for index, one in enumerate(self.own)})

    def load_own_variables(self, store: Any) -> None:
        for index, one in enumerate(self.own):
            one.assign(store[str(index)])


class Dense(Layer):
    numbers = count()

    @property
    def kernel(self) -> Variable:
        return self._kernel


class Sequential(Layer):
    numbers = count()


class Optimizer:
    def __init__(self) -> None:
        self.built = False
        self.variables: list[Variable] = []

    def build(self, variables: list[Variable]) -> None:
        self.built = True
        backend = "torch" if isinstance(variables[0].value, torch.Tensor) else "jax"
        self._trainable_variables = variables
        self._iterations = Variable(0, "iteration", backend)
        self._momentums = TrackedList(Variable(np.zeros(2), f"{one.name}_momentum", backend) for one in variables)
        self.variables = [self._iterations, *self._momentums]


for kind in (Variable, TrackedList, Layer, Dense, Sequential, Optimizer):
    kind.__module__ = "keras.src.models"


def model(backend: str, make: Callable[[], Any] = Optimizer) -> Any:
    layers = [Dense(backend=backend), Dense(name="mine", backend=backend), Dense(backend=backend)]
    found = Sequential(layers, backend=backend)
    found.build()
    found.optimizer = make()
    return found


def train(model: Any) -> None:
    """Give every variable another value."""
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    for number, one in enumerate([*model.variables, *model.optimizer.variables]):
        one.assign(np.full(one.value.shape, number + 0.5, "float32"))


def values(model: Any) -> list[list[float]]:
    found = (*model.variables, *(model.optimizer.variables if model.optimizer else ()))
    return [np.asarray(one.value.detach() if hasattr(one.value, "detach") else one.value).tolist() for one in found]
