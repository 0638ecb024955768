"""The last step that the loop reported, kept for the save at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ..stateful import state_of
from .counter import UpdateCounter
from .extras import changes_in_place, is_own, tree_of
from .states import is_deleted, to_tree

_CHEAP = 100e-6  # seconds a step
_SAMPLES = 3


class LastStep:
    """References to what ``on_step`` was given last, so that leaving the loop can still save it.

    Arrays of jax never change, so a reference is enough. Data iterators do change, and a loop may draw one more batch
    before it ends; so their positions are taken at every step, unless that costs more than 0.1 ms a step, in which
    case they are taken at the end.

    Attributes:
        step: The step.
        state: The state after it.
        metrics: The metrics of the step, as they were given, with those that came later.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.metrics: Mapping[str, Any] | None = None
        self.state: Any = None
        self._extras: Mapping[str, Any] = {}
        self._counter = UpdateCounter()
        self._positions: dict[str, Any] = {}
        self._cost: list[float] | None = []
        self._passed: list[tuple[str, type]] = []
        self._moving: list[str] = []

    def see(self, step: int, state: Any, metrics: Mapping[str, Any] | None, extras: Mapping[str, Any]) -> None:
        """Takes note of a step that the loop has finished."""
        self.step = step
        self.metrics = metrics
        self.state = state
        self._extras = extras
        self._counter.note(state)
        if extras or self._positions:
            self._take_positions()

    def items(self, *, alone: bool) -> dict[str, Any]:
        """Returns what a checkpoint of this step holds, by item.

        Args:
            alone: Whether there is one process only; otherwise each keeps its own extras but those of arrays, which
                all of them hold together.
        """
        taken = self._positions
        extras = {name: taken[name] if name in taken else tree_of(extra) for name, extra in self._extras.items()}
        own = {} if alone else {name: extras.pop(name) for name, extra in self._extras.items() if is_own(extra)}
        found = {"state": to_tree(self.state), "extras": extras}
        return {**found, "process": own} if own else found

    def why_lost(self) -> str | None:
        """Returns why the step cannot be saved any more, or None when it can."""
        if self._counter.has_moved(self.state):
            return "its objects were updated since; call on_step after every update"
        if is_deleted(to_tree(self.state)):
            return "its arrays were donated to a later update; call on_step after every update"
        if is_deleted([extra for name, extra in self._extras.items() if name not in self._positions]):
            return "arrays of its extras were donated since; call on_step after every update"
        return None

    def _take_positions(self) -> None:
        if self._cost is not None and len(self._cost) == _SAMPLES:
            if min(self._cost) > _CHEAP:
                self._positions = {}
                return
            self._cost = None
        begin = time.perf_counter()
        self._positions = {name: state_of(self._extras[name]) for name in self._moving_names()}
        if self._cost is not None:
            self._cost.append(time.perf_counter() - begin)

    def _moving_names(self) -> list[str]:
        """Returns the names of the extras that change in place, looked for only when others are passed than before."""
        passed = [(name, type(extra)) for name, extra in self._extras.items()]
        if passed != self._passed:
            self._passed = passed
            self._moving = [name for name, extra in self._extras.items() if changes_in_place(extra)]
        return self._moving
