"""Modules, variables and optimizers of flax nnx as parts of a graph."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..tree.frameworks import is_jax_array

_PARAMETER_LIKE = frozenset({"mu", "nu", "nu_max", "trace", "ema", "sum_of_squares"})
"""Fields of optax's states that hold one value for each parameter, under the parameter's own path."""


def _nnx() -> Any | None:
    module = sys.modules.get("flax.nnx")
    return module if module is not None and hasattr(module, "Variable") and hasattr(module, "Module") else None


def is_nnx_variable(value: object) -> bool:
    """Whether the value is an nnx variable, such as a parameter."""
    nnx = _nnx()
    return nnx is not None and isinstance(value, nnx.Variable)


def is_nnx_object(value: object) -> bool:
    """Whether the value is an nnx module, optimizer, or another of nnx's objects with attributes."""
    nnx = _nnx()
    if nnx is None:
        return False
    base = getattr(nnx, "Pytree", None) or getattr(nnx, "Object", nnx.Module)
    return isinstance(value, base) and hasattr(value, "__dict__")


def nnx_children(value: Any) -> list[tuple[str, Any]]:
    """Returns what an nnx object holds, without what is configuration and not data."""
    data = vars(value).get("_pytree__nodes")
    children = []
    for name, child in vars(value).items():
        if name.startswith(("_pytree__", "_object__")):
            continue
        if is_nnx_variable(child) or is_nnx_object(child) or (_is_data(child) if data is None else data.get(name)):
            children.append((name, child))
    return children


def _is_data(child: object) -> bool:
    """Whether an attribute is data, in versions of flax that do not say so themselves."""
    return is_jax_array(child) or isinstance(child, np.ndarray | list | dict | tuple)


def variable_value(variable: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Returns what reads and what changes the value of a variable."""
    if hasattr(variable, "get_value"):
        return variable.get_value, variable.set_value
    return lambda: variable.value, lambda value: setattr(variable, "value", value)


def parameter_like(holder: Any, name: str) -> bool:
    """Whether a field of an object keeps one value for each parameter of something else, as optax's moments do.

    Args:
        holder: Any object.
        name: The name of one of its fields.
    """
    kind = type(holder)
    if not (isinstance(holder, tuple) and hasattr(kind, "_fields") and kind.__module__.partition(".")[0] == "optax"):
        return False
    return name in _PARAMETER_LIKE
