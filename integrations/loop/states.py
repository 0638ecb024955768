"""The interface between a callback and the state of a training loop.

A :class:`StateAdapter` converts states to the items of a checkpoint and back: ``trees`` has the adapter for pytrees and
nnx objects, ``objects`` has those for torch modules, graphs and components.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...engine.errors import OptionError
from ...engine.handlers import AsyncCheckpointHandler
from ...engine.manager import limits
from ...engine.pytree import MAX_DEPTH, flatten, loaded
from ...engine.sources import Misfits, load_weights
from ...engine.storage import Place
from ..options import CallbackOptions, ProgramOptions

logger = logging.getLogger("holdfast")

STATE = "state"  # the item with the state of the loop
_PARAMS = "params"


@dataclass(frozen=True, kw_only=True)
class LoopArguments(ProgramOptions):
    """The arguments of a callback for training loops."""

    directory: Place = field(kw_only=False)
    global_generators: bool = True
    step_offset: Literal[0, 1] | None = field(default=None, metadata=limits(0, 1))


class StateAdapter:
    """Saves and restores one kind of state. A callback has its own adapter, which may remember the last state."""

    needs = "a state with params"  # what can take weights from another checkpoint, for error messages
    is_component_tree = False  # whether the item is one; such a checkpoint has other items only for extras
    may_have_gradients = False  # whether earlier versions have saved gradients with such states

    def __init__(self, misfits: Misfits | None = None) -> None:
        self.misfits = misfits  # of a partial restore; None if everything must match

    def handler(self, options: CallbackOptions) -> AsyncCheckpointHandler:
        """Return the handler that saves states."""
        raise NotImplementedError

    def to_tree(self, state: Any) -> Any:
        """Return the item that the handler saves for a state."""
        return state

    def template(self, state: Any) -> Any:
        """Return the template that the handler restores a state with."""
        return self.to_tree(state)

    def begin(self, state: Any) -> None:
        """Note the initial state, perhaps abstract; raise UnsupportedLeafError for leaves that cannot be saved."""

    def refused(self, state: Any) -> list[str]:
        """Return what a restore of a state into the initial one would refuse, as text for users."""
        return []

    def check_savable(self, state: Any) -> None:
        """Raise UnsupportedLeafError if a save of the state would raise it."""

    def save_kwargs(self) -> Mapping[str, Any]:
        """Return further arguments for the handler's save."""
        return {}

    def restore_kwargs(self) -> Mapping[str, Any]:
        """Return further arguments for the handler's restore."""
        return {}

    def from_tree(self, state: Any, restored: Any) -> Any:
        """Return the state from what the handler has restored; live objects are updated in place."""
        return restored

    def watch(self, state: Any) -> None:
        """Begin to watch the state, before the first step."""

    @property
    def has_updated(self) -> bool:
        """Whether the last step has changed a parameter that has gradients."""
        return False

    def new_gradients(self) -> list[str]:
        """Return the parameters whose gradients the last step has made; may wait for a device."""
        return []

    def note(self, state: Any) -> None:
        """Remember the state of the step that was just reported."""

    def why_lost(self, step: int, state: Any) -> str | None:
        """Return why the state of the last step cannot be saved any more, or None when it can."""
        return None

    def describe(self, state: Any) -> str:
        """Describe a state without weights, for an error message."""
        return f"a {type(state).__name__} without params"

    def with_weights(self, state: Any, place: Place) -> tuple[Any, str]:
        """Return a state with the weights of a checkpoint and everything else unchanged, and a text that names them."""
        if isinstance(state, dict) and _PARAMS in state:
            weights = load_weights(place, state[_PARAMS], misfits=self.misfits)
            return type(state)({**state, _PARAMS: weights.tree}), str(weights)
        if _has_params(state):
            weights = load_weights(place, state.params, misfits=self.misfits)
            if hasattr(state, "_replace"):
                return state._replace(params=weights.tree), str(weights)
            return dataclasses.replace(state, **{_PARAMS: weights.tree}), str(weights)
        raise OptionError(
            f"init_from={str(place)!r} needs {self.needs}, and this is {self.describe(state)}; load the weights with "
            "hf.load, and put them where they belong"
        )


def _has_params(state: Any) -> bool:
    """Return whether a state is a namedtuple or a dataclass with params, which can be replaced."""
    is_replaceable = hasattr(state, "_replace") or (dataclasses.is_dataclass(state) and not isinstance(state, type))
    return is_replaceable and hasattr(state, _PARAMS)


def located(value: Any, wanted: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Generate the objects in dicts, lists and tuples, each with its keys joined by dots; open each once."""
    open_, seen = [("", value)], set[int]()
    while open_:
        path, one = open_.pop()
        if wanted(one):
            yield path, one
        elif isinstance(one, (dict, list, tuple)) and id(one) not in seen:
            seen.add(id(one))
            below = one.items() if isinstance(one, dict) else enumerate(one)
            open_ += reversed([(f"{path}.{key}" if path else str(key), item) for key, item in below])


def check_depth(tree: Any) -> None:
    """Raise UnsupportedLeafError if containers are nested too deeply, or hold themselves: other code recurses."""
    level = [tree] if isinstance(tree, (dict, list, tuple)) else []
    for _ in range(MAX_DEPTH + 1):
        items = (item for one in level for item in (one.values() if isinstance(one, dict) else one))
        level = list({id(item): item for item in items if isinstance(item, (dict, list, tuple))}.values())
        if not level:
            return
    flatten(tree)


def is_deleted(tree: Any) -> bool:
    """Return whether an array of the tree is deleted, as its memory was donated to a later step."""
    jax = loaded("jax")
    if jax is None:
        return False
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(tree))
