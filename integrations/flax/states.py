"""The state of a training loop as a plain tree, and back: pytrees as they are, nnx objects through their variables.

flax is never imported here: a state that is made of its objects has imported it already.
"""

from __future__ import annotations

import sys
from typing import Any


def is_nnx(value: object) -> bool:
    """Returns whether a value is an nnx object, such as a Module, an Optimizer or Rngs."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, _nnx_types(nnx))


def is_train_state(value: object) -> bool:
    """Returns whether a value is a ``flax.training.train_state.TrainState``."""
    module = sys.modules.get("flax.training.train_state")
    return module is not None and isinstance(value, module.TrainState)


def to_tree(state: Any) -> Any:
    """Returns the state with every nnx object replaced by nested dicts of its variables' values.

    Args:
        state: A pytree, an nnx object, or dicts, lists and tuples of nnx objects. Variables shared by several
            objects appear under the first of them only.
    """
    objects = _objects(state)
    if not objects:
        return state
    from flax import nnx

    values: dict[Any, Any] = nnx.to_pure_dict(nnx.state(tuple(objects)))
    return _replace(state, iter([values.get(index, {}) for index in range(len(objects))]))


def from_tree(state: Any, tree: Any) -> Any:
    """Puts a tree that :func:`to_tree` returned, or one like it, back into a state.

    Args:
        state: What the tree was made from. Its nnx objects are updated in place.
        tree: The tree with the values to take.

    Returns:
        The tree itself for a pytree; otherwise the state's containers with the same, updated, nnx objects.
    """
    objects = _objects(state)
    if not objects:
        return tree
    from flax import nnx

    found: list[Any] = []
    _gather(state, tree, found)
    variables = nnx.state(tuple(objects))
    pure: dict[Any, Any] = {index: value for index, value in enumerate(found) if value}
    nnx.replace_by_pure_dict(variables, pure)
    nnx.update(tuple(objects), variables)
    return _merge(state, tree)


def is_deleted(tree: Any) -> bool:
    """Returns whether an array of the tree is gone, as its memory was donated to a later step."""
    jax = sys.modules.get("jax")
    if jax is None:
        return False
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(tree))


def _nnx_types(nnx: Any) -> tuple[type, ...]:
    # Module, Optimizer and Rngs share this base under a name that differs between releases.
    base = getattr(nnx, "Pytree", None) or nnx.Object
    return (base, nnx.Module, nnx.Optimizer)


def _children(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _objects(value: Any) -> list[Any]:
    if "flax.nnx" not in sys.modules:
        return []
    if is_nnx(value):
        return [value]
    if type(value) in (dict, list, tuple):
        return [found for item in _children(value) for found in _objects(item)]
    return []


def _replace(value: Any, values: Any) -> Any:
    if is_nnx(value):
        return next(values)
    if type(value) is dict:
        return {key: _replace(item, values) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_replace(item, values) for item in value])
    return value


def _gather(value: Any, tree: Any, found: list[Any]) -> None:
    if is_nnx(value):
        found.append(tree)
    elif type(value) is dict:
        for key, item in value.items():
            _gather(item, tree[key], found)
    elif type(value) in (list, tuple):
        for item, part in zip(value, tree, strict=True):
            _gather(item, part, found)


def _merge(value: Any, tree: Any) -> Any:
    if is_nnx(value):
        return value
    if type(value) is dict:
        return {key: _merge(item, tree[key]) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_merge(item, part) for item, part in zip(value, tree, strict=True)])
    return tree
