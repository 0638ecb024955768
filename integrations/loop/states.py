"""The interface between a callback and the state of a training loop.

A :class:`StateAdapter` converts states to the items of a checkpoint and back: ``trees`` has the adapter for pytrees and
nnx objects, ``objects`` has those for torch modules, graphs and components.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from random import SystemRandom
from typing import Any

import numpy as np

from ...engine.errors import OptionError, shortened
from ...engine.generators import generator_state, is_generator
from ...engine.handlers import AsyncCheckpointHandler
from ...engine.pytree import MAX_DEPTH, flatten, is_torch_tensor, loaded
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

    def check_step(self, step: int, state: Any) -> None:
        """Raise OptionError if the state is evidently not that of this step; does not wait for a device."""

    def warn_of_step(self, step: int, state: Any) -> None:
        """Warn if the state is not that of this step; may wait for a device, and never raises."""

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


# ---- attributes of torch modules and optimizers that steps change, and that state_dict() lacks

Values = Mapping[str, Any]  # by path: what tells a value from that after a change
_SMALL = 1 << 16  # bytes of arrays of numpy whose values are all compared; of larger ones, some are
_MOST = 1024  # entries of a container that are compared
_OF_OPTIMIZERS = frozenset({"state", "defaults", "param_groups"})


def unsaved_attributes(objects: Iterable[tuple[str, Any]]) -> Values:
    """Return what tells whether attributes have changed that a checkpoint leaves out, as ``state_dict()`` does.

    ``objects`` come with paths; modules are searched. Those that define their own state are left out, and so are those
    of torch.
    """
    from ..graph import is_module

    found: dict[str, Any] = {}
    for path, value in objects:
        for below, part in value.named_modules() if is_module(value) else [("", value)]:
            if not _decides_itself(part):
                name = ".".join(filter(None, (path, below)))
                marks = {f"{name}.{key}": _mark(one) for key, one in _unsaved(part)}
                found |= {key: mark for key, mark in marks.items() if mark is not None}
    return found


class UnsavedAttributes:
    """Watches attributes that a checkpoint leaves out; saves warn of those that have changed, once of each.

    Args:
        remedy: What the program can do about them.
    """

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._before: Values = {}
        self._warned: set[str] = set()
        self._saves = 0

    def begin(self, before: Values) -> None:
        """Note the attributes before the first step."""
        self._before = before

    def warn(self, find: Callable[[], Values]) -> None:
        """Warn of attributes that have changed; from now on, watch those that are new, too. Each save calls this."""
        self._saves += 1
        if not _looks_for_changes(self._saves):
            return
        now, before = find(), self._before
        known = before.keys() - self._warned
        changed = [path for path, one in now.items() if path in known and before[path] != one]
        self._before = {**now, **before}
        self._warned.update(changed)
        if changed:
            logger.warning(
                "steps have changed attributes that no state_dict() has, so they are not saved: %s. If later steps "
                "depend on them, %s; if not, name them in __untracked__ of the class",
                shortened(changed),
                self._remedy,
            )


def _looks_for_changes(saves: int) -> bool:
    """Return whether the latest of so many saves looks for changes, as the 1st, 2nd and 4th do; that takes its time."""
    return saves & (saves - 1) == 0


def _decides_itself(part: Any) -> bool:
    from ..graph import has_own_protocol, is_module

    if type(part).__module__.startswith(("torch.", "torchmetrics.")) or has_own_protocol(part):
        return True
    torch: Any = loaded("torch")
    return is_module(part) and type(part).get_extra_state is not torch.nn.Module.get_extra_state


def _unsaved(part: Any) -> list[tuple[str, Any]]:
    """Return the attributes that the class of the program has, and the buffers that are not persistent."""
    from ..graph import is_module, is_optimizer, tracked_attributes

    own: Collection[str] = _OF_OPTIMIZERS if is_optimizer(part) else ()
    passing: list[tuple[str, Any]] = []
    if is_module(part):
        torch: Any = loaded("torch")
        own = vars(torch.nn.Module())
        passing = [(name, part._buffers[name]) for name in part._non_persistent_buffers_set]
    return [(name, one) for name, one in tracked_attributes(part) if name not in own] + passing


@dataclass(frozen=True, eq=False)
class _Version:
    """A tensor in a version. A later tensor may have the address, and so the ``id``, of one that is gone."""

    tensor: Callable[[], Any]
    version: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Version) or (mine := self.tensor()) is None:
            return False
        return mine is other.tensor() and self.version == other.version


def _mark(value: Any, depth: int = 4, most: int = _MOST) -> Any:
    """Return what differs after a change of a plain value, array or generator, or a container of them; or None.

    Of large arrays of numpy and large containers, such as a replay buffer, evenly spaced entries are looked at.
    """
    if isinstance(value, int | float | complex | str | bytes | np.number | Enum | type(None)):
        return (value,)
    if is_generator(value) and not isinstance(value, SystemRandom):
        state = generator_state(value)  # A pickled tensor holds its address.
        return state.numpy().tobytes() if is_torch_tensor(state) else pickle.dumps(state)
    if isinstance(value, np.ndarray):
        is_fixed = not value.flags.writeable  # as a mapped file is that the program reads
        return value.shape, None if is_fixed else hash(value.flat[:: 1 + value.nbytes // _SMALL].tobytes())
    if is_torch_tensor(value):
        is_trained = value.is_inference() or (value.is_leaf and value.requires_grad)  # An optimizer may change it.
        return None if is_trained else _Version(weakref.ref(value), value._version)
    if isinstance(value, set | frozenset):
        return len(value), hash(frozenset(value))
    if not isinstance(value, list | tuple | deque | dict) or not depth:
        return None
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value))  # Another thread may change the value.
    seen = pairs[:: 1 + len(pairs) // most]
    marks = [_mark(one, depth - 1, max(most // len(seen), 8)) for _, one in seen]
    # Keys that are tensors cannot be compared by their values.
    return None if None in marks else (len(pairs), marks, [hash(key) for key, _ in seen])
