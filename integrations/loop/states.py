"""What a callback knows of the state of a training loop.

A :class:`StateAdapter` turns states into what a checkpoint holds and back: ``trees`` has the one for pytrees and nnx
objects, ``objects`` those for torch modules, graphs and components.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...engine.errors import OptionError
from ...engine.handlers import AsyncCheckpointHandler
from ...engine.pytree import MAX_DEPTH, flatten, loaded
from ...engine.sources import Misfits, load_weights
from ...engine.storage import Place
from ..options import CallbackOptions, ProgramOptions

STATE = "state"  # the item of a checkpoint that holds the state of the loop
_PARAMS = "params"


@dataclass(frozen=True, kw_only=True)
class LoopArguments(ProgramOptions):
    """The arguments of a callback for training loops."""

    directory: Place = field(kw_only=False)
    global_generators: bool = True


class StateAdapter:
    """Knows one kind of states. A callback has its own, which may remember the last state it has seen.

    Attributes:
        needs: What a state must have to take weights from another checkpoint.
        is_component_tree: Whether the item is a tree of components, which is the only tree of a checkpoint without
            extras.
        may_have_gradients: Whether a state may hold gradients that no optimizer has used.
        misfits: Where a restore that takes what fits notes the rest; None where everything has to match.
    """

    needs = "a state with params"
    is_component_tree = False
    may_have_gradients = False

    def __init__(self, misfits: Misfits | None = None) -> None:
        self.misfits = misfits

    def handler(self, options: CallbackOptions) -> AsyncCheckpointHandler:
        """Return the handler that saves states."""
        raise NotImplementedError

    def to_tree(self, state: Any) -> Any:
        """Return what is given to the handler to save a state."""
        return state

    def template(self, state: Any) -> Any:
        """Return what is given to the handler to restore a state."""
        return self.to_tree(state)

    def begin(self, state: Any) -> None:
        """Take note of the state, perhaps abstract, that the program begins with, before the first step.

        Raises:
            UnsupportedLeafError: A leaf cannot be saved; names every such leaf.
        """

    def check_savable(self, state: Any) -> None:
        """Raise UnsupportedLeafError if a save of the state would raise it."""

    def save_kwargs(self) -> Mapping[str, Any]:
        """Return the other arguments for the handler when it saves."""
        return {}

    def restore_kwargs(self) -> Mapping[str, Any]:
        """Return the other arguments for the handler when it restores."""
        return {}

    def from_tree(self, state: Any, restored: Any) -> Any:
        """Return a state with what the handler has restored; live objects are updated in place."""
        return restored

    def check_step(self, step: int, state: Any) -> None:
        """Raise OptionError if the state shows that it is not of this step; must not wait for a device."""

    def warn_of_step(self, step: int, state: Any) -> None:
        """Warn if the state is not the state of this step, at a moment that may wait for a device; never raises."""

    def watch(self, state: Any) -> None:
        """Remember what steps will change, before the first one."""

    def gradients(self, *, certain: bool = False) -> Mapping[str, Any]:
        """Return by name the gradients in the last step's state that no optimizer has used; ``certain``: but will."""
        return {}

    def note(self, state: Any) -> None:
        """Remember the state of the step that was just reported."""

    def why_lost(self, step: int, state: Any) -> str | None:
        """Return why the state of the last step cannot be saved any more, or None when it can."""
        return None

    def describe(self, state: Any) -> str:
        """Return what a state without weights is, for an error message."""
        return f"a {type(state).__name__} without params"

    def with_weights(self, state: Any, place: Place) -> tuple[Any, str]:
        """Return a state with the weights of a checkpoint, everything else as it was, and what was taken.

        Raises:
            OptionError: The state has no parameters.
            TreeMismatchError: The parameters differ from those of the checkpoint; lists every difference.
        """
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
    """Return whether an array of the tree is gone, as its memory was donated to a later step."""
    jax = loaded("jax")
    if jax is None:
        return False
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(tree))
