"""The interface between a callback and the state of a training loop.

A :class:`StateAdapter` converts states to the items of a checkpoint and back: ``trees`` has the adapter for pytrees and
nnx objects, ``objects`` has those for torch modules, graphs and components.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ...engine.errors import OptionError
from ...engine.handlers import AsyncCheckpointHandler
from ...engine.manager import limits
from ...engine.pytree import MAX_DEPTH, flatten, loaded
from ...engine.sources import Misfits, Weights, load_weights
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

    # What can take weights from another checkpoint, for error messages: its modules, and what a state without one is.
    needs, modules, lacks = "a state with params", "", "a {} without params"
    is_component_tree = False  # whether the item is one; such a checkpoint has other items only for extras
    empty: Collection[str] = ()  # where the initial state has empty dictionaries, whose entries come and go
    is_live = False  # whether a state has objects or tensors of torch, with which earlier versions saved gradients

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

    def note_fresh(self, state: Any) -> None:
        """Note the initial state, perhaps abstract; raise UnsupportedLeafError for leaves that cannot be saved."""
        self.empty = empty_dicts(state)

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

    def note_step(self, state: Any) -> None:
        """Remember the state of the step that was just reported."""

    def why_lost(self, state: Any) -> str | None:
        """Return why the state of the last step cannot be saved any more, or None when it can."""
        return None

    def is_module(self, value: object) -> bool:
        """Return whether an object in a state is a module, whose weights :meth:`fill` can replace."""
        return False

    def fill(self, path: str, module: Any, place: Place) -> Weights:
        """Give a module of a state the weights of a checkpoint."""
        raise NotImplementedError

    def with_weights(self, state: Any, place: Place) -> tuple[Any, str]:
        """Return a state with the weights of a checkpoint and everything else unchanged, and a text that names them."""
        modules = list(located(state, self.is_module))
        if len(modules) == 1:
            return state, str(self.fill(*modules[0], place))
        is_dataclass = dataclasses.is_dataclass(state) and not isinstance(state, type)
        if isinstance(state, dict) and _PARAMS in state:
            weights = load_weights(place, state[_PARAMS], misfits=self.misfits)
            return type(state)({**state, _PARAMS: weights.tree}), str(weights)
        if hasattr(state, _PARAMS) and (is_dataclass or hasattr(state, "_replace")):
            weights = load_weights(place, state.params, misfits=self.misfits)
            replace = state._replace if hasattr(state, "_replace") else partial(dataclasses.replace, state)
            return replace(**{_PARAMS: weights.tree}), str(weights)
        found = f"{len(modules)} {self.modules}" if modules else self.lacks.format(type(state).__name__)
        raise OptionError(
            f"init_from={str(place)!r} needs {self.needs}, and this is {found}; load the weights with hf.load, and put "
            "them where they belong"
        )


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


def empty_dicts(value: Any) -> set[str]:
    """Return where the empty dictionaries in dicts, lists and tuples are, as keys joined by dots."""
    containers = (dict, list, tuple)
    found, open_, seen = set[str](), [("", value)] if isinstance(value, containers) else [], set[int]()
    while open_:
        path, one = open_.pop()
        if isinstance(one, dict) and not one:
            found.add(path)
        if id(one) not in seen:
            seen.add(id(one))
            below = one.items() if isinstance(one, dict) else enumerate(one)  # most entries are values
            inner = [(key, item) for key, item in below if isinstance(item, containers)]
            open_ += [(f"{path}.{key}" if path else str(key), item) for key, item in inner]
    return found


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
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in flatten(tree).values)
