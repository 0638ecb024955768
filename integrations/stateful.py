"""Objects that carry a state of their own, as the callbacks see them; see :mod:`holdfast.engine.stateful`."""

from __future__ import annotations

from ..engine.stateful import is_plain, is_stateful, restore_state, state_of

__all__ = ["is_plain", "is_stateful", "restore_state", "state_of"]
