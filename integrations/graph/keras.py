"""Models, layers, optimizers, metrics and variables of Keras 3 on torch and jax, as parts of a graph.

Their state is in their variables. Keras numbers layers without a name of the program in the order in which a process
makes them (``dense``, ``dense_1``), so that a second model of a process has other names. Here they are numbered within
the layer that holds them, as in the files of ``save_weights``
(https://keras.io/api/models/model_saving_apis/weights_saving_and_loading).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from ...engine.pytree import is_jax_array, is_torch_tensor
from ...engine.stateful import decode_state, encode_state
from .frameworks import OWN_STATE
from .slots import BoxSlot, PartState

LAYER, OPTIMIZER, VARIABLE = "Layer", "Optimizer", "Variable"
_KINDS = {LAYER, OPTIMIZER, VARIABLE, "Metric", "SeedGenerator"}
_OWN_METHODS = ("save_own_variables", "load_own_variables")


@lru_cache(maxsize=1024)  # many objects have few types
def _kind_of(cls: Any) -> str | None:
    return next((base.__name__ for base in cls.__mro__ if base.__name__ in _KINDS and _is_of_keras(base)), None)


def _kind(value: object) -> str | None:
    return _kind_of(type(value))  # type: ignore[arg-type]  # mypy takes the class for an instance


def _is_of_keras(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "keras"


def keras_kind(value: object) -> str | None:
    """Return the kind of an object of Keras whose values are tensors of torch or arrays of jax; None for others."""
    kind = _kind(value)
    if kind is None or not all(is_torch_tensor(one) or is_jax_array(one) for one in map(_value, _variables(value))):
        return None
    return kind


def variable_slot(variable: Any) -> BoxSlot:
    return BoxSlot(variable, (), lambda: variable.value, variable.assign)


def bare_variable(value: Any) -> Any:
    """Return the parameter of torch that a variable of Keras stands for; any other object as it is."""
    if _kind(value) == VARIABLE and is_torch_tensor(found := _value(value)):
        return found
    return value


def keras_children(value: Any) -> list[tuple[str, Any]]:
    """Return the variables and the parts of an object of Keras by name."""
    if _kind(value) == OPTIMIZER:  # the names of its variables contain those of layers, which Keras numbers
        return [(f"variable_{index}", one) for index, one in enumerate(value.variables)]
    if _kind(value) != LAYER:
        return _numbered((_name(one), one) for one in _variables(value))
    if any(base.__name__ == "TorchModuleWrapper" and _is_of_keras(base) for base in type(value).__mro__):
        return [("module", value.module)]  # its buffers are no variables of Keras
    layers = value._flatten_layers(include_self=False, recursive=False)
    below = {id(one) for layer in layers for one in layer.variables}
    own = [(_name(one), one) for one in value.variables if id(one) not in below]
    if _overrides(type(value), _OWN_METHODS):
        own.append((OWN_STATE, _OwnVariables(value, OWN_STATE)))
    parts = [(_layer_name(layer), layer) for layer in layers if layer.variables]
    optimizer = getattr(value, "optimizer", None)
    if optimizer is not None:
        if getattr(optimizer, "built", True) is False and value.built:
            optimizer.build(value.trainable_variables)  # as fit() does before its first step
        parts.append(("optimizer", optimizer))
    return _numbered([*own, *parts])


def why_not_saved(value: Any) -> str | None:
    """Return why an object of Keras cannot be saved as it is."""
    if getattr(value, "built", True) is False:
        how = "build(variables)" if _kind(value) == OPTIMIZER else "build(input_shape), or call it once"
        return f"has no variables yet, as it is not built: call its {how}, before a save or a restore"
    if _kind(value) == LAYER and _overrides(type(value), ("save_assets",), everywhere=True):
        return "keeps assets, such as a vocabulary, besides variables; save it with Keras, and mark it with Untracked"
    return None


class _OwnVariables(PartState):
    """The variables that a layer of a program saves by ``save_own_variables``."""

    def get(self) -> Any:
        store: dict[str, Any] = {}
        self.thing.save_own_variables(store)
        return encode_state({name: _value(one) if _kind(one) == VARIABLE else one for name, one in store.items()})

    def set(self, value: Any) -> None:
        self.thing.load_own_variables(decode_state(value))


def _variables(value: Any) -> list[Any]:
    kind = _kind(value)
    return [value] if kind == VARIABLE else [value.state] if kind == "SeedGenerator" else list(value.variables)


def _value(variable: Any) -> Any:
    return getattr(variable, "value", None)


def _name(variable: Any) -> str:
    """Return the name of a variable, without a number that Keras gave it."""
    return "variable" if re.fullmatch(r"variable_\d+", variable.name) else str(variable.name)


def _layer_name(layer: Any) -> str:
    """Return the name of a layer, without a number that Keras gave it."""
    given = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", type(layer).__name__))
    given = re.sub("([a-z])([A-Z])", r"\1_\2", given).lower()  # Keras makes names of classes in this way
    # A Bidirectional layer adds the direction.
    found = re.fullmatch(rf"((forward_|backward_)?{re.escape(given)})(_\d+)?", layer.name)
    return found[1] if found else str(layer.name)


def _numbered(pairs: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Make names unique: the first keeps its own, later ones get numbers."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        unique, number = name, 0
        while unique in found:
            number += 1
            unique = f"{name}_{number}"
        found[unique] = value
    return list(found.items())


def _overrides(cls: type, methods: tuple[str, ...], *, everywhere: bool = False) -> bool:
    """Whether a class of a program overrides methods of Keras; with ``everywhere``, or a class of Keras does."""
    owners = [next((base for base in cls.__mro__ if name in vars(base)), None) for name in methods]
    return any(one is not None and (not _is_of_keras(one) or (everywhere and one.__name__ != LAYER)) for one in owners)
