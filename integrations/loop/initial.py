"""The initial state of a loop, which the program passes, or a function makes on a fresh start only."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Collection
from typing import Any

from ...engine.errors import OptionError, TreeMismatchError, shortened
from ...engine.pytree import (
    LeafMetadata,
    flatten,
    format_path,
    is_jax_abstract,
    is_nnx,
    loaded,
    template_sharding,
    unflatten,
)
from .objects import is_versioned
from .states import StateAdapter
from .trees import TreeAdapter, from_tree, to_tree


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
