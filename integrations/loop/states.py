"""The interface between a callback and the state of a training loop.

A :class:`StateAdapter` converts states to checkpoint items and back. The adapter for pytrees and nnx objects is in
``trees``, and the adapters for torch modules, graphs and components are in ``objects``.
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

STATE = "state"  # name of the checkpoint item that holds the loop's state
_PARAMS = "params"


@dataclass(frozen=True, kw_only=True)
class LoopArguments(ProgramOptions):
    """The arguments of a training loop callback."""

    directory: Place = field(kw_only=False)
    global_generators: bool = True
    step_offset: Literal[0, 1] | None = field(default=None, metadata=limits(0, 1))


@dataclass(frozen=True, slots=True)
class Start:
    """The state and extras, restored or new, from which a run starts."""

    step: int
    state: Any
    extras: Mapping[str, Any]
    offset: int  # the state's update count minus the step number
    is_known: bool = True  # False if the state before the first report is unknown


class StateAdapter:
    """Saves and restores one kind of state. Each callback has its own adapter, which may store the last state."""

    # Phrases for error messages: a state that accepts weights, the modules in a state, and a state without modules.
    needs, modules, lacks = "a state with params", "", "a {} without params"
    is_component_tree = False  # whether states are component trees, which omit an empty item for extras
    empty: Collection[str] = ()  # paths of dicts that are empty in the initial state; the loop may fill them
    is_live = False  # whether states contain live objects or torch tensors; old checkpoints may hold gradients

    def __init__(self, misfits: Misfits | None = None) -> None:
        self.misfits = misfits  # collects the misfits of a partial restore; None if all values must match
        self._fresh: Any = None  # description of the initial state; None until note_fresh is called

    def handler(self, options: CallbackOptions) -> AsyncCheckpointHandler:
        """Return the handler that saves states."""
        raise NotImplementedError

    def to_tree(self, state: Any) -> Any:
        """Convert a state to the item that the handler saves."""
        return state

    def template(self, state: Any) -> Any:
        """Return the template that the handler uses to restore a state."""
        return self.to_tree(state)

    def note_fresh(self, state: Any) -> None:
        """Record the initial (possibly abstract) state; raise UnsupportedLeafError for leaves that cannot be saved."""
        self.empty = empty_dicts(state)
        self._fresh = self.described(state)

    def described(self, state: Any) -> Any:
        """Return a description of a state, which :meth:`refused` compares with the initial state's description."""

    def refused(self, state: Any) -> list[str]:
        """Return one message for each reason why a state cannot be restored into the initial state."""
        return []

    def check_savable(self, state: Any) -> None:
        """Raise UnsupportedLeafError if the state cannot be saved."""

    def save_kwargs(self) -> Mapping[str, Any]:
        """Return additional keyword arguments for the handler's save."""
        return {}

    def restore_kwargs(self) -> Mapping[str, Any]:
        """Return additional keyword arguments for the handler's restore."""
        return {}

    def from_tree(self, state: Any, restored: Any) -> Any:
        """Convert the handler's result back to a state, updating live objects in place."""
        return restored

    def note_step(self, state: Any) -> None:
        """Record the state of a step that was just reported."""

    def why_lost(self, state: Any) -> str | None:
        """Return why the state of the last step can no longer be saved, or None if it can."""
        return None

    def is_module(self, value: object) -> bool:
        """Return whether an object in a state is a module whose weights :meth:`fill` can replace."""
        return False

    def fill(self, path: str, module: Any, source: Place) -> Weights:
        """Load the weights of a checkpoint into a module of a state."""
        raise NotImplementedError

    def with_weights(self, state: Any, source: Place) -> tuple[Any, str]:
        """Return a state whose weights come from a checkpoint, and a description of these weights."""
        modules = list(located(state, self.is_module))
        if len(modules) == 1:
            return state, str(self.fill(*modules[0], source))
        is_dataclass = dataclasses.is_dataclass(state) and not isinstance(state, type)
        if isinstance(state, dict) and _PARAMS in state:
            weights = load_weights(source, state[_PARAMS], misfits=self.misfits)
            return type(state)({**state, _PARAMS: weights.tree}), str(weights)
        if hasattr(state, _PARAMS) and (is_dataclass or hasattr(state, "_replace")):
            weights = load_weights(source, state.params, misfits=self.misfits)
            replace = state._replace if hasattr(state, "_replace") else partial(dataclasses.replace, state)
            return replace(**{_PARAMS: weights.tree}), str(weights)
        given = f"{len(modules)} {self.modules}" if modules else self.lacks.format(type(state).__name__)
        raise OptionError(
            f"init_from={str(source)!r} needs {self.needs}, and this is {given}; load the weights with hf.load, and "
            "put them where they belong"
        )


def located(value: Any, wanted: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and value of each wanted object in dicts, lists and tuples. Visit each container once."""
    pending, seen = [("", value)], set[int]()
    while pending:
        path, part = pending.pop()
        if wanted(part):
            yield path, part
        elif isinstance(part, (dict, list, tuple)) and id(part) not in seen:
            seen.add(id(part))
            below = part.items() if isinstance(part, dict) else enumerate(part)
            pending += reversed([(f"{path}.{key}" if path else str(key), item) for key, item in below])


def empty_dicts(value: Any) -> set[str]:
    """Return the dotted paths of empty dictionaries in nested dicts, lists and tuples."""
    return {path for path, _ in located(value, lambda part: isinstance(part, dict) and not part)}


def check_depth(tree: Any) -> None:
    """Raise UnsupportedLeafError for containers that are nested too deeply or contain themselves."""
    level = [tree] if isinstance(tree, (dict, list, tuple)) else []
    for _ in range(MAX_DEPTH + 1):
        items = (item for part in level for item in (part.values() if isinstance(part, dict) else part))
        level = list({id(item): item for item in items if isinstance(item, (dict, list, tuple))}.values())
        if not level:
            return
    flatten(tree)


def is_deleted(tree: Any) -> bool:
    """Return whether an array in the tree was deleted, for example because it was donated to a later step."""
    jax = loaded("jax")
    if jax is None:
        return False
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in flatten(tree).values)
