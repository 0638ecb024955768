"""Whether nnx objects have been trained further since a step was reported."""

from __future__ import annotations

import sys
from typing import Any

from .states import is_deleted

_ITSELF = object()


class UpdateCounter:
    """Watches the counter of an ``nnx.Optimizer`` within a state, at no cost on the device.

    nnx objects change in place. As jax arrays do not, comparing the counter's array then with its array now tells
    whether the objects were updated in between. States without an optimizer are never reported as updated.
    """

    def __init__(self) -> None:
        self._kind: type | None = None
        self._place: Any = None
        self._noted: Any = None

    def note(self, state: Any) -> None:
        """Remembers the counter as it is now."""
        if type(state) is not self._kind:  # the state is searched once, not at every step
            self._kind, self._place = type(state), _find(state)
        self._noted = None if self._place is None else self._read(state)

    def has_moved(self, state: Any) -> bool:
        """Returns whether the optimizer of the state has done updates since :meth:`note`."""
        if self._noted is None:
            return False
        now = self._read(state)
        if now is self._noted or now is None:
            return False
        # A jitted function that passes the optimizer through gives it a new array with the same value.
        return is_deleted(self._noted) or is_deleted(now) or int(self._noted) != int(now)

    def _read(self, state: Any) -> Any:
        try:
            step = (state if self._place is _ITSELF else state[self._place]).step
        except (AttributeError, LookupError):
            return None
        return step.get_raw_value() if hasattr(step, "get_raw_value") else step.raw_value  # flax before 0.12


def _find(state: Any) -> Any:
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return None
    if isinstance(state, nnx.Optimizer):
        return _ITSELF
    items = state.items() if type(state) is dict else enumerate(state) if type(state) in (list, tuple) else ()
    return next((place for place, item in items if isinstance(item, nnx.Optimizer)), None)
