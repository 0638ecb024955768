"""The state of a training loop, and the extras beside it: data positions, random keys, averages, plain data.

A :class:`StateAdapter` turns states into what a checkpoint holds and back. The base class knows pytrees, which a loop
replaces and never changes; frameworks whose states are live objects derive their own.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ...engine.checkpoint import Place
from ...engine.errors import OptionError, TreeMismatchError
from ...engine.handlers import DEFAULT_REGISTRY, AsyncCheckpointHandler
from ...engine.pytree import flatten
from ...engine.sources import load_weights
from ...engine.stateful import is_plain, is_stateful, restore_state, state_of
from ..options import CallbackOptions

_PARAMS = "params"
_CALL_EVERY_TIME = "call on_step after every update"


class StateAdapter:
    """Knows the states of one framework. A callback has its own, which may remember the last state it has seen.

    Attributes:
        item: The name of the state's item in the checkpoints.
        takes_extras: Whether extras are saved beside the state.
        needs: What a state must have to take weights from another checkpoint.
    """

    item = "state"
    takes_extras = True
    needs = "a state with params"

    def handler(self, options: CallbackOptions) -> AsyncCheckpointHandler:
        """Return the handler that saves states."""
        return options.tree_handler()

    def is_live(self, value: object) -> bool:
        """Return whether a value is an object of the framework, which changes in place."""
        return False

    def is_stream(self, value: object) -> bool:
        """Return whether a live object is a random stream, whose values are few and never change themselves."""
        return False

    def to_tree(self, state: Any) -> Any:
        """Return what is given to the handler to save a state, or to restore one."""
        return state

    def from_tree(self, state: Any, tree: Any) -> Any:
        """Return a state with what the handler has restored; live objects are updated in place."""
        return tree

    def check_step(self, step: int, state: Any) -> None:
        """Raise OptionError if the state shows that it is not of this step; must not wait for a device."""

    def warn_of_step(self, step: int, state: Any) -> None:
        """Warn if the state is not the state of this step, at a moment that may wait for a device."""

    def note(self, state: Any) -> None:
        """Remember the state of the step that was just reported."""

    def why_lost(self, step: int, state: Any) -> str | None:
        """Return why the state of the last step cannot be saved any more, or None when it can."""
        if is_deleted(self.to_tree(state)):
            return f"its arrays were donated to a later update; {_CALL_EVERY_TIME}"
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
            weights = load_weights(place, state[_PARAMS])
            return type(state)({**state, _PARAMS: weights.tree}), str(weights)
        if _has_params(state):
            weights = load_weights(place, state.params)
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


_TAKEN = ("step", "state", "metrics")


class Extras:
    """Saves and restores the named extras of one callback."""

    def __init__(self, adapter: StateAdapter) -> None:
        self._adapter = adapter

    def tree_of(self, extra: Any) -> Any:
        """Return what a checkpoint holds of one extra: a snapshot of stateful objects, the values of anything else."""
        if self._adapter.is_live(extra):
            return self._adapter.to_tree(extra)
        return state_of(extra) if is_stateful(extra) else extra

    def changes_in_place(self, extra: Any) -> bool:
        """Return whether a snapshot of the extra has to be taken, as the object itself moves on."""
        return is_stateful(extra) and not self._adapter.is_live(extra)

    def moves(self, extra: Any) -> bool:
        """Return whether a snapshot is taken at every step: also of random streams of the framework."""
        return self.changes_in_place(extra) or self._adapter.is_stream(extra)

    def is_own(self, extra: Any) -> bool:
        """Return whether each of several processes has its own, such as the position of its data iterator."""
        return self.changes_in_place(extra) or is_plain(extra)

    def templates_of(self, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Return the extras that are restored into the types, dtypes and shardings of what was passed."""
        # Stateful objects and plain data may change their structure, as a list grows, so they come back as saved.
        return {
            name: self._adapter.to_tree(extra)
            for name, extra in extras.items()
            if self._adapter.is_live(extra) or not (is_stateful(extra) or is_plain(extra))
        }

    def restore(
        self, extras: Mapping[str, Any], saved: Mapping[str, Any], fresh: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return by name the same object where it was changed in place, and the restored value otherwise.

        The ``fresh`` ones stay as they are.
        """
        values = {name: saved[name] for name in extras}
        for name, extra in extras.items():
            if name in fresh:
                values[name] = extra
            elif self._adapter.is_live(extra):
                values[name] = self._adapter.from_tree(extra, saved[name])
            elif is_stateful(extra) or is_plain(extra):
                values[name] = restore_state(extra, saved[name])
        return values

    def check(self, extras: Mapping[str, Any]) -> None:
        """Raise OptionError for names that are taken, and for iterators and loaders without a state.

        The first save may be an hour away.
        """
        if taken := [name for name in extras if name in _TAKEN]:
            raise OptionError(
                f"an extra cannot be called {taken[0]!r}, as on_step has an argument of this name; choose another name"
            )
        for name, extra in extras.items():
            if isinstance(extra, Iterable) and not self._is_saveable(extra):
                raise OptionError(
                    f"{name}= is a {type(extra).__qualname__}, whose position can be neither saved nor restored: pass "
                    "an object with get_state and set_state, or state_dict and load_state_dict, such as an iterator of "
                    f"Grain or a StatefulDataLoader of torchdata, or leave {name}= out and begin the data anew after a "
                    "resume"
                )

    def _is_saveable(self, extra: Any) -> bool:
        if hasattr(extra, "dtype") or self._adapter.is_live(extra) or is_stateful(extra) or is_plain(extra):
            return True
        is_container = not any(leaf is extra for leaf in flatten(extra).values)
        return is_container or DEFAULT_REGISTRY.find(extra) is not None


def check_names(extras: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> None:
    """Raise TreeMismatchError if a checkpoint lacks an extra that is asked for."""
    missing = [name for name in extras if name not in saved]
    if missing:
        held = ", ".join(saved) or "none"
        names = ", ".join(f"{name}=" for name in missing)
        raise TreeMismatchError(
            f"{where} does not hold all extras that are to be restored (it holds: {held}). Leave {names} out of "
            "restore_or_initialize and pass it to on_step only, to begin saving it from now on",
            [f"{name}: expected an extra of this name, found none" for name in missing],
        )


def missing_extras(names: Collection[str]) -> str:
    """Return the message about extras that were restored and are not passed on."""
    listed = ", ".join(f"{name}=" for name in sorted(names))
    return f"restore_or_initialize was given {listed} but on_step was not: pass it at every step, so that it is saved"


def is_deleted(tree: Any) -> bool:
    """Return whether an array of the tree is gone, as its memory was donated to a later step."""
    jax = sys.modules.get("jax")
    if jax is None:
        return False
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(tree))
