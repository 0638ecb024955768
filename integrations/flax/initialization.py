"""Weights for a fresh run, out of any checkpoint: the parameters of a state, and nothing else of it."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator
from typing import Any

from ...engine.checkpointer import Place
from ...engine.errors import OptionError
from ...engine.interop.weights import Weights, load_weights
from ...engine.tree import flatten, split
from .states import is_nnx

logger = logging.getLogger("holdfast")

_PARAMS = "params"


def with_weights(state: Any, place: Place) -> Any:
    """Puts the weights of a checkpoint into a state, and says so in the log.

    Args:
        state: A ``TrainState``, a dictionary, dataclass or namedtuple with ``params``, or a module of nnx, alone or in
            a container; modules are updated in place.
        place: The checkpoint.

    Returns:
        The state, with everything but the parameters as it was.

    Raises:
        OptionError: The state has no parameters that could be found.
        TreeMismatchError: The parameters differ from those of the checkpoint; lists every difference.
    """
    state, weights = _initialized(state, place)
    logger.info("took the weights from %s; all else starts fresh", weights)
    return state


def _initialized(state: Any, place: Place) -> tuple[Any, Weights]:
    modules = list(_modules(state))
    if len(modules) == 1:
        path, module = modules[0]
        return state, _fill(module, path, place)
    if isinstance(state, dict) and _PARAMS in state:
        weights = load_weights(place, state[_PARAMS])
        return type(state)({**state, _PARAMS: weights.tree}), weights
    if hasattr(state, _PARAMS):
        weights = load_weights(place, state.params)
        if hasattr(state, "_replace"):
            return state._replace(params=weights.tree), weights
        if dataclasses.is_dataclass(state) and not isinstance(state, type):
            return dataclasses.replace(state, **{_PARAMS: weights.tree}), weights
    what = f"{len(modules)} modules of nnx" if modules else f"a {type(state).__name__} without params"
    raise OptionError(
        f"init_from={str(place)!r} needs a state with params, or one module of nnx, and this is {what}; load the "
        "weights with hf.load, and put them where they belong"
    )


def _modules(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Generates the nnx modules in dicts, lists and tuples, each with its keys joined by dots."""
    if is_nnx(value):
        if isinstance(value, sys.modules["flax.nnx"].Module):
            yield path, value
    elif type(value) in (dict, list, tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _modules(item, f"{path}.{key}" if path else str(key))


def _fill(module: Any, path: str, place: Place) -> Weights:
    from flax import nnx

    parameters = nnx.state(module, nnx.Param)
    # What the module has beside parameters: statistics, generators, caches. Its checkpoints hold them, too.
    others = {".".join(split(name)) for name in flatten(nnx.to_pure_dict(nnx.state(module))).names}
    pure: dict[Any, Any] = nnx.to_pure_dict(parameters)
    weights = load_weights(place, pure, ignored=others, containers=[path] if path else ())
    nnx.replace_by_pure_dict(parameters, weights.tree)
    nnx.update(module, parameters)
    return weights
