"""What a program has before a restore: its initial state, which it passes or a function makes, and hyperparameters."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import math
import sys
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

import numpy as np

from ...engine.errors import OptionError, TreeMismatchError, shortened
from ...engine.pytree import (
    LeafMetadata,
    flatten,
    format_path,
    is_jax_abstract,
    is_nnx,
    is_torch_tensor,
    loaded,
    template_sharding,
    unflatten,
)
from .announce import announce
from .objects import is_versioned, searched
from .states import StateAdapter
from .trees import TreeAdapter, from_tree, to_tree

logger = logging.getLogger("holdfast")


class InitialState:
    """What ``restore_or_initialize`` was given: a state, or a function that makes one and perhaps a template."""

    def __init__(self, given: Any, like: Any = None) -> None:
        self._given = given
        self._like = like
        self._is_function = _is_function(given)
        self._template: Any = None
        if like is not None and not self._is_function:
            raise OptionError("like= is the template of a function that makes the state; a state is its own template")

    def template(self) -> Any:
        """Return the template of a restore; a function is traced for its shapes, and not called."""
        if not self._is_function:
            return self._given
        if self._like is not None:
            return self._like
        if self._template is None:
            self._template = _abstract(self._given)
        return self._template

    def check_fresh(self, adapter: StateAdapter) -> None:
        """Raise OptionError if there is no checkpoint, and the state that was given has no values."""
        if not self._is_function and (names := _abstract_leaves(adapter, self._given)):
            raise OptionError(
                f"the state is abstract, and there is no checkpoint to take its values from: {shortened(names)}. Pass "
                "the function that makes it: restore_or_initialize(init), with like= for shardings"
            )

    def make(self) -> Any:
        """Return the state of a fresh start."""
        if not self._is_function:
            return self._given
        return self._given() if self._like is None else _sharded(self._given, self._like)

    def values(self, names: Collection[str]) -> dict[str, Any]:
        """Return the leaves of these names that the function makes; the others are not computed."""
        if not self._is_function:
            return {}
        jax: Any = importlib.import_module("jax")

        def chosen() -> dict[str, Any]:
            flat = flatten(to_tree(self._given()))
            return {name: value for name, value in zip(flat.names, flat.values, strict=True) if name in names}

        return dict(jax.jit(chosen)())

    def completed(self, adapter: StateAdapter, state: Any) -> Any:
        """Return a restored state, with fresh values for those that the checkpoint lacks."""
        names = _abstract_leaves(adapter, state) if adapter.misfits is not None else []
        if not names:
            return state
        if not self._is_function:
            raise TreeMismatchError(
                "these leaves are not in the checkpoint, and the state that was given is abstract. Pass the function "
                "that makes it: restore_or_initialize(init)",
                names,
            )
        flat = flatten(adapter.to_tree(state))
        fresh = flatten(adapter.to_tree(self.make()))
        values = dict(zip(fresh.names, fresh.values, strict=True))
        merged = [
            values[name] if _is_abstract(value) else value for name, value in zip(flat.names, flat.values, strict=True)
        ]
        return adapter.from_tree(state, unflatten(flat.structure, merged))


def _is_function(given: object) -> bool:
    if is_versioned(given) or is_nnx(given):
        return False
    wrapped = callable(given) and hasattr(given, "__wrapped__")  # A result of jax.jit is one.
    return inspect.isroutine(given) or isinstance(given, functools.partial) or wrapped


def _is_abstract(value: object) -> bool:
    return is_jax_abstract(value) or value is ... or isinstance(value, LeafMetadata)


def _abstract_leaves(adapter: StateAdapter, state: Any) -> list[str]:
    if not isinstance(adapter, TreeAdapter):
        return []
    flat = flatten(to_tree(state))
    return [format_path(name) for name, value in zip(flat.names, flat.values, strict=True) if _is_abstract(value)]


def _abstract(init: Any) -> Any:
    """Return the state that a function makes, with abstract leaves."""
    try:
        import jax

        nnx = loaded("flax.nnx")
        try:
            state = jax.eval_shape(init)
        except TypeError:
            if nnx is None:
                raise
            return nnx.eval_shape(init)  # Before flax 0.12, its modules are no trees of jax.
        if nnx is None or flatten(to_tree(state)).names == flatten(state).names:
            return state
        return nnx.eval_shape(init)  # This keeps variables that several modules share.
    except (ImportError, TypeError) as error:
        name = getattr(init, "__qualname__", type(init).__qualname__)
        raise OptionError(
            f"{name} was passed as the function that makes the state with jax, and jax.eval_shape cannot trace it: "
            f"{error}. Pass the state itself"
        ) from error


def _sharded(init: Any, like: Any) -> Any:
    """Call a function under jit, so that every array has the sharding of the template."""
    jax: Any = importlib.import_module("jax")
    wanted = jax.tree.leaves(to_tree(like))
    shardings = [template_sharding(leaf) if hasattr(leaf, "sharding") else None for leaf in wanted]
    state = _abstract(init)
    made = jax.jit(lambda: jax.tree.leaves(to_tree(init())), out_shardings=shardings)()
    # The template may have other static fields than the state that the function makes.
    return from_tree(state, jax.tree.unflatten(jax.tree.structure(to_tree(state)), made))


# ---- hyperparameters in a state: those of the program, those that were saved, and the choice between them
#
# The options of torch's optimizers, such as learning rates, and the values that ``optax.inject_hyperparams`` keeps are
# part of a state, so a restore replaces them. A value that a schedule changes is no difference, but its initial rate
# is.

_SCHEDULED = ("lr", "initial_lr", "momentum", "betas", "base_momentum", "max_momentum", "max_lr", "min_lr")
_INJECTED, _MOVED = "hyperparams", "hyperparams_states"

Groups = Mapping[tuple[str, int, str], Any]  # by the path of the optimizer, the index of the group, and the option


class Hyperparameters:
    """The hyperparameters of a program before a restore replaces them."""

    def __init__(
        self, adapter: StateAdapter, state: Any, extras: Mapping[str, Any], initial: InitialState | None = None
    ) -> None:
        self._adapter = adapter
        self._groups = {place: _plain(value) for place, value in _options(state, extras).items()}
        found = _injected(adapter, state)
        abstract = {name for name, value in found.items() if is_jax_abstract(value)}
        self._leaves = {name: value for name, value in found.items() if name not in abstract}
        if abstract and initial is not None:
            self._leaves |= initial.values(abstract)

    def settle(self, state: Any, extras: Mapping[str, Any], counting: str, *, shown: bool) -> Any:
        """Return the restored state with the hyperparameters that count, ``"saved"`` or ``"program"``; log others."""
        if not (differing := self.differences(state, extras)):
            return state
        is_mine = counting == "program"
        state = self.put_back(state, extras) if is_mine else state
        text = "hyperparameters differ, and those %s count (hyperparameters=%r): %s"
        whose = "of the program" if is_mine else "that were saved"
        if is_mine:
            announce(text, whose, counting, shortened(differing), shown=shown)
        elif shown:  # The program has asked for values that it does not get.
            logger.warning(text, whose, counting, shortened(differing))
        return state

    def differences(self, state: Any, extras: Mapping[str, Any]) -> list[str]:
        """Return a readable line for each hyperparameter that differs from the restored one."""
        groups, found = _options(state, extras), []
        for place, mine in self._groups.items():
            saved = _plain(groups.get(place, mine))
            if not _same(mine, saved) and not self._is_moved(place, groups):
                path, index, option = place
                found.append(f"{path}.param_groups[{index}].{option} (program {_short(mine)}, saved {_short(saved)})")
        restored = _injected(self._adapter, state)
        for name, mine in self._leaves.items():
            if name in restored and not _same(_plain(mine), _plain(restored[name])):
                values = f"program {_short(_plain(mine))}, saved {_short(_plain(restored[name]))}"
                found.append(f"{format_path(name)} ({values})")
        return found

    def put_back(self, state: Any, extras: Mapping[str, Any]) -> Any:
        """Return the state with the program's hyperparameters; optimizers of torch are changed in place."""
        groups = _options(state, extras)
        moved = {place for place in self._groups if self._is_moved(place, groups)}
        for path, optimizer in _optimizers(state, extras):
            for index, group in enumerate(optimizer.param_groups):
                self._scale(group, self._groups.get((path, index, "initial_lr")))
                for option in group:
                    place = (path, index, option)
                    if place in self._groups and place not in moved:
                        _set(group, option, self._groups[place])
        for schedule in _schedules(state, extras):
            groups_of = schedule.optimizer.param_groups
            if all("initial_lr" in group for group in groups_of):
                schedule.base_lrs = [_plain(group["initial_lr"]) for group in groups_of]
                schedule._last_lr = [_plain(group["lr"]) for group in groups_of]
        if not self._leaves:
            return state
        flat = flatten(self._adapter.to_tree(state))
        leaves = [self._leaves.get(name, value) for name, value in zip(flat.names, flat.values, strict=True)]
        return self._adapter.from_tree(state, unflatten(flat.structure, leaves))

    def _is_moved(self, place: tuple[str, int, str], groups: Groups) -> bool:
        """Return whether a schedule changes an option; its initial rate belongs to the program."""
        path, index, option = place
        scheduled = (path, index, "initial_lr") in groups
        if option in ("betas", "momentum"):
            return scheduled and (path, index, "max_momentum") in groups
        return scheduled and option in _SCHEDULED and option != "initial_lr"

    def _scale(self, group: dict[str, Any], mine: Any) -> None:
        """Scale the present rate of a schedule by the change of its initial rate."""
        saved = _plain(group.get("initial_lr"))
        if isinstance(mine, float) and isinstance(saved, float) and saved and not _same(mine, saved):
            _set(group, "lr", _plain(group["lr"]) * (mine / saved))


def _optimizers(state: Any, extras: Mapping[str, Any]) -> list[tuple[str, Any]]:
    torch: Any = loaded("torch")
    found = () if torch is None else chain(searched(state), searched(dict(extras)))
    return [(name, value) for name, value in found if isinstance(value, torch.optim.Optimizer)]


def _schedules(state: Any, extras: Mapping[str, Any]) -> list[Any]:
    torch: Any = loaded("torch")
    found = () if torch is None else chain(searched(state), searched(dict(extras)))
    schedules = [value for _, value in found if isinstance(value, torch.optim.lr_scheduler.LRScheduler)]
    return [one for one in schedules if hasattr(one, "base_lrs")]


def _options(state: Any, extras: Mapping[str, Any]) -> dict[tuple[str, int, str], Any]:
    """Return those options of all groups of torch's optimizers that are numbers, flags or pairs of numbers."""
    found = {}
    for path, optimizer in _optimizers(state, extras):
        for index, group in enumerate(optimizer.param_groups):
            for option, value in group.items():
                is_number = is_torch_tensor(value) and value.numel() == 1
                if option != "params" and (is_number or isinstance(value, (bool, int, float, tuple))):
                    found[path, index, option] = value
    return found


def _injected(adapter: StateAdapter, state: Any) -> dict[str, Any]:
    """Return the hyperparameters in states of ``optax.inject_hyperparams`` that no schedule changes, by leaf."""
    if not isinstance(adapter, TreeAdapter) or "optax" not in sys.modules:
        return {}
    flat = flatten(adapter.to_tree(state))
    names = set(flat.names)
    found = {}
    for name, value in zip(flat.names, flat.values, strict=True):
        before, key, option = name.rpartition(f".{_INJECTED}.")
        moved = any(other.startswith(f"{before}.{_MOVED}.{option}.") for other in names) if key else True
        if not moved and "." not in option and getattr(value, "shape", ()) == ():
            found[name] = value
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if not hasattr(value, "dtype") or not getattr(value, "is_fully_replicated", True):
        return value
    return value.item() if is_torch_tensor(value) else np.asarray(value).item()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def _set(group: dict[str, Any], option: str, value: Any) -> None:
    if is_torch_tensor(group[option]):
        group[option].fill_(value)
    else:
        group[option] = value


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
