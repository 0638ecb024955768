"""Objects of flax.nnx, such as modules and optimizers, as containers: opened by ``nnx.state``, made anew on a load.

flax is never imported here: where there is an object of it, the program has imported it.
"""

from __future__ import annotations

import sys
from typing import Any


def is_nnx(value: object) -> bool:
    """Return whether a value is an nnx object, such as a Module, an Optimizer or Rngs."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, _types(nnx)) and not isinstance(value, nnx.Variable)


def _types(nnx: Any) -> tuple[type, ...]:
    # Module, Optimizer and Rngs share this base under a name that differs between releases.
    base = getattr(nnx, "Pytree", None) or getattr(nnx, "Object", None) or nnx.Module
    return (base, nnx.Module, nnx.Optimizer)


class NnxObjects:
    """The nnx objects of one tree. A variable that several of them share belongs to the first, also after a load."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._copies: Any = None

    def state_of(self, value: Any) -> tuple[int, dict[Any, Any]]:
        """Return the number of an object in the tree and the variables that no object before it has, by their keys."""
        nnx = sys.modules["flax.nnx"]
        number = len(self._objects)
        self._objects.append(value)
        state = nnx.state(tuple(self._objects))
        return number, dict(state[number].items()) if number in state else {}

    def build(self, number: int, keys: list[Any], children: list[Any]) -> Any:
        """Return a copy of an object, which may be abstract, with these variables."""
        nnx = sys.modules["flax.nnx"]
        if self._copies is None:
            self._copies = nnx.clone(tuple(self._objects))
        if keys:
            nested = [child.raw_mapping if isinstance(child, nnx.State) else child for child in children]
            nnx.update(self._copies[number], nnx.State(dict(zip(keys, nested, strict=True))))
        return self._copies[number]
