"""The initial state and hyperparameters of a program, before a restore replaces them."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import math
import operator
import sys
from collections.abc import Collection, Iterator, Mapping
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
from .objects import is_versioned, live_objects
from .states import StateAdapter
from .trees import TreeAdapter, from_tree, to_tree

logger = logging.getLogger("holdfast")


class InitialState:
    """The state passed to ``restore_or_initialize``, or the function that creates it and its optional template."""

    def __init__(self, given: Any, like: Any = None) -> None:
        self._given = given
        self._like = like
        self._is_function = _is_function(given)
        if like is not None and not self._is_function:
            raise OptionError("like= is the template of a function that makes the state; a state is its own template")
        self.template: Any = given if like is None else like  # template for the restore
        if self._is_function and like is None:
            self.template = _abstract(given)

    def check_fresh(self, adapter: StateAdapter) -> None:
        """Raise OptionError if the given state is abstract. Called if there is no checkpoint to provide the values."""
        if not self._is_function and (names := _abstract_leaves(adapter, self._given)):
            raise OptionError(
                f"the state is abstract, and there is no checkpoint to take its values from: {shortened(names)}. Pass "
                "the function that makes it: restore_or_initialize(init), with like= for shardings"
            )

    def make(self) -> Any:
        if not self._is_function:
            return self._given
        return self._given() if self._like is None else _sharded(self._given, self._like)

    def values(self, names: Collection[str]) -> dict[str, Any]:
        """If a function creates the state, compute only the named leaves; otherwise, return an empty dict."""
        if not self._is_function:
            return {}
        jax: Any = importlib.import_module("jax")

        def chosen() -> dict[str, Any]:
            flat = flatten(to_tree(self._given()))
            return {name: value for name, value in zip(flat.names, flat.values, strict=True) if name in names}

        return dict(jax.jit(chosen)())

    def completed(self, adapter: StateAdapter, state: Any) -> Any:
        """Fill in fresh values for leaves of a restored state that the checkpoint lacks."""
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
        named = zip(flat.names, flat.values, strict=True)
        merged = [values[name] if _is_abstract(value) else value for name, value in named]
        return adapter.from_tree(state, unflatten(flat.structure, merged))


def _is_function(given: object) -> bool:
    if is_versioned(given) or is_nnx(given):
        return False
    wrapped = callable(given) and hasattr(given, "__wrapped__")  # such as the result of jax.jit
    return inspect.isroutine(given) or isinstance(given, functools.partial) or wrapped


def _is_abstract(value: object) -> bool:
    return is_jax_abstract(value) or value is ... or isinstance(value, LeafMetadata)


def _abstract_leaves(adapter: StateAdapter, state: Any) -> list[str]:
    if not isinstance(adapter, TreeAdapter):
        return []
    flat = flatten(to_tree(state))
    return [format_path(name) for name, value in zip(flat.names, flat.values, strict=True) if _is_abstract(value)]


def _abstract(init: Any) -> Any:
    """Return the abstract state that a function would create, by tracing the function without running it."""
    try:
        import jax

        nnx = loaded("flax.nnx")
        try:
            state = jax.eval_shape(init)
        except TypeError:
            if nnx is None:
                raise
            return nnx.eval_shape(init)  # before flax 0.12, nnx modules were not jax pytrees
        if nnx is None or flatten(to_tree(state)).names == flatten(state).names:
            return state
        return nnx.eval_shape(init)  # preserves variables shared by several modules
    except (ImportError, TypeError) as error:
        name = getattr(init, "__qualname__", type(init).__qualname__)
        raise OptionError(
            f"{name} was passed as the function that makes the state with jax, and jax.eval_shape cannot trace it: "
            f"{error}. Pass the state itself"
        ) from error


def _sharded(init: Any, like: Any) -> Any:
    """Call a function under jit, giving every array the sharding of the template."""
    jax: Any = importlib.import_module("jax")
    wanted = jax.tree.leaves(to_tree(like))
    shardings = [template_sharding(leaf) if hasattr(leaf, "sharding") else None for leaf in wanted]
    state = _abstract(init)
    made = jax.jit(lambda: jax.tree.leaves(to_tree(init())), out_shardings=shardings)()
    # The structure comes from the function, because the static fields of its state may differ from the template's.
    return from_tree(state, jax.tree.unflatten(jax.tree.structure(to_tree(state)), made))


# ---- hyperparameters in a state, and the choice between the program's values and the saved values
#
# The options of torch optimizers, such as learning rates, and the values that ``optax.inject_hyperparams`` stores are
# part of a state, so a restore replaces them. A value that a schedule controls does not count as a difference, but the
# initial rate of the schedule does.

HYPERPARAMETERS = "hyperparameters"  # step metadata key for `Hyperparameters.changed`
_SCHEDULED = ("lr", "base_momentum", "max_momentum", "max_lr", "min_lr")
_INJECTED, _MOVED = "hyperparams", "hyperparams_states"


class Hyperparameters:
    """The initial values of a run's hyperparameters: the program's values, unless a resume uses the saved ones."""

    def __init__(
        self, adapter: StateAdapter, state: Any, extras: Mapping[str, Any], initial: InitialState | None = None
    ) -> None:
        self._adapter = adapter
        self._options = list(_options(state, extras))
        leaves = _injected(adapter, state)
        abstract = {name for name, value in leaves.items() if is_jax_abstract(value)}
        made = initial.values(abstract) if abstract and initial is not None else {}
        self._leaves = {name: value for name, value in leaves.items() if name not in abstract} | made
        self._values = {name: _plain(group[option]) for name, group, option in self._options}
        self._values |= {name: _plain(leaf) for name, leaf in self._leaves.items()}

    def settle(
        self, state: Any, extras: Mapping[str, Any], counting: str, *, shown: bool, began: Mapping[str, Any]
    ) -> Any:
        """Return the restored state with the chosen hyperparameters. Log differences not caused by training."""
        is_mine = counting == "program"
        began = {} if is_mine else began
        self._options = list(_options(state, extras))  # collected again, because the restore has replaced these groups
        pairs = {name: (self._values.get(name, saved), saved) for name, saved in self._now(state).items()}
        differing = {
            name: (mine, saved)
            for name, (mine, saved) in pairs.items()
            if not (_same(mine, saved) or _same(mine, began.get(name)))
        }
        if differing:
            whose = "of the program" if is_mine else "that were saved"
            lines = [
                f"{format_path(name) if name in self._leaves else name} (program {_short(mine)}, saved {_short(saved)})"
                for name, (mine, saved) in differing.items()
            ]
            text = "hyperparameters differ, and those %s count (hyperparameters=%r): %s"
            if is_mine:
                state = self._with_program(state, extras, differing)
                announce(text, whose, counting, shortened(lines), shown=shown)
            elif shown:  # warn, because the saved values replace those that the program has set
                logger.warning(text, whose, counting, shortened(lines))
        self._values = {**self._now(state), **began}
        return state

    def _with_program(self, state: Any, extras: Mapping[str, Any], differing: Mapping[str, tuple[Any, Any]]) -> Any:
        """Use the program's values: set torch optimizer options in place, and return a state with the optax values."""
        for name, group, option in self._options:
            if name in differing:
                mine, saved = differing[name]
                if option == "initial_lr" and saved:  # scale the current rate, which a schedule has changed
                    _set(group, "lr", _plain(group["lr"]) * (mine / saved))
                _set(group, option, mine)
        for _, schedule in _objects(state, extras, "lr_scheduler.LRScheduler"):
            groups = schedule.optimizer.param_groups
            if hasattr(schedule, "base_lrs") and all("initial_lr" in group for group in groups):
                schedule.base_lrs = [_plain(group["initial_lr"]) for group in groups]
                schedule._last_lr = [_plain(group["lr"]) for group in groups]
        if differing.keys().isdisjoint(self._leaves):
            return state
        flat = flatten(self._adapter.to_tree(state))
        named = zip(flat.names, flat.values, strict=True)
        leaves = [self._leaves[name] if name in differing else value for name, value in named]
        return self._adapter.from_tree(state, unflatten(flat.structure, leaves))

    def changed(self, state: Any) -> dict[str, Any]:
        """Return the initial values of all hyperparameters that have different values in a state."""
        pairs = {name: (self._values.get(name, value), value) for name, value in self._now(state).items()}
        return {
            name: start
            for name, (start, value) in pairs.items()
            if _is_finite(start) and _is_finite(value) and not _same(start, value)
        }

    def _now(self, state: Any) -> dict[str, Any]:
        """Return the current values of the hyperparameters that no schedule controls."""
        options = [(name, group, key) for name, group, key in self._options if key in group]
        values = {name: _plain(group[key]) for name, group, key in options if not _is_moved(group, key)}
        leaves = _injected(self._adapter, state) if self._leaves else {}
        return values | {name: _plain(leaf) for name, leaf in leaves.items()}


def _objects(state: Any, extras: Mapping[str, Any], kind: str) -> list[tuple[str, Any]]:
    """Return the instances of a ``torch.optim`` class in a state and extras, each with its path."""
    torch: Any = loaded("torch")
    objects = () if torch is None else chain(live_objects(state), live_objects(dict(extras)))
    return [(name, value) for name, value in objects if isinstance(value, operator.attrgetter(kind)(torch.optim))]


def _options(state: Any, extras: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the name, group and key of each torch optimizer option that is a number, a flag or a tuple."""
    for path, optimizer in _objects(state, extras, "Optimizer"):
        # Entries in ``defaults`` other than constructor arguments are state, such as sums in schedule-free optimizers.
        arguments = inspect.signature(type(optimizer)).parameters
        state_of_groups = {*optimizer.defaults} - {*arguments} if "lr" in arguments else set()
        for index, group in enumerate(optimizer.param_groups):
            for option, value in [*group.items()]:
                if option in state_of_groups:
                    continue
                is_number = is_torch_tensor(value) and value.numel() == 1
                if option != "params" and (is_number or isinstance(value, (bool, int, float, tuple))):
                    yield f"{path}.param_groups[{index}].{option}", group, option


def _is_moved(group: Mapping[str, Any], option: str) -> bool:
    """Return whether a schedule, rather than the program, determines the current value of an option."""
    moves_momentum = "max_momentum" in group and option in ("betas", "momentum")
    return "initial_lr" in group and (moves_momentum or option in _SCHEDULED)


def _injected(adapter: StateAdapter, state: Any) -> dict[str, Any]:
    """Return the ``optax.inject_hyperparams`` values that no schedule controls, by leaf name."""
    if not isinstance(adapter, TreeAdapter) or "optax" not in sys.modules:
        return {}
    flat = flatten(adapter.to_tree(state))
    injected = {}
    for name, value in zip(flat.names, flat.values, strict=True):
        before, key, option = name.rpartition(f".{_INJECTED}.")
        moved = any(other.startswith(f"{before}.{_MOVED}.{option}.") for other in flat.names) if key else True
        if not moved and "." not in option and getattr(value, "shape", ()) == ():
            injected[name] = value
    return injected


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if not hasattr(value, "dtype") or not getattr(value, "is_fully_replicated", True):
        return value
    return value.item() if is_torch_tensor(value) else np.asarray(value).item()


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, float) and isinstance(right, (int, float)):
        return math.isclose(left, right, rel_tol=1e-6) or (math.isnan(left) and math.isnan(right))
    return bool(left == right)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _set(group: dict[str, Any], option: str, value: Any) -> None:
    if is_torch_tensor(group[option]):
        group[option].fill_(value)
    else:
        group[option] = value


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
