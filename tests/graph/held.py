"""An object with a state, as data iterators and generators of a program are."""

from __future__ import annotations

from typing import Any


class Held:
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state
