"""``holdfast.checkpoint_utils`` builds the arguments that restore a pytree to match a target."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .engine.handlers import ArrayRestoreArgs, RestoreArgs, broadcast_prefix
from .engine.pytree import (
    LeafMetadata,
    describe_template,
    flatten,
    is_jax_abstract,
    is_jax_array,
    is_key,
    is_torch_tensor,
    loaded,
    number_kind,
    unflatten,
)

__all__ = ["construct_restore_args"]

_PLAIN: dict[str, type] = {plain.__name__: plain for plain in (bool, int, float, complex, str)}


def construct_restore_args(target: Any, sharding_tree: Any = None, set_global_shape: bool = True) -> Any:
    """Build the ``restore_args=`` that restore a pytree with the types, dtypes, shapes and shardings of a target.

    Saved values are cast to the dtypes of the target; a shape mismatch is an error.

    Args:
        target: The pytree to match. Its leaves may be abstract, such as `jax.ShapeDtypeStruct`. A leaf that is a bare
            ``object()`` or ``...`` is restored as saved. The same applies to the leaves of ``structure()``, which are
            :class:`~holdfast.reports.LeafMetadata` objects, except that jax and torch arrays become numpy arrays if
            their library is not loaded.
        sharding_tree: A `jax.sharding.Sharding` for all jax arrays, or a pytree of shardings with the structure of the
            target. A sharding in place of a container applies to all leaves below it, and keys may be omitted.
            Leaves without a sharding get the target's sharding.
        set_global_shape: Whether to require the target's shapes; otherwise, arrays keep their saved shapes.

    Returns:
        A pytree with the structure of the target, whose leaves are :class:`~holdfast.RestoreArgs`, or
        :class:`~holdfast.ArrayRestoreArgs` for jax arrays.

    Raises:
        OptionError: ``sharding_tree`` does not match the target.

    >>> construct_restore_args({"w": np.zeros(2, np.float32), "step": 0})["w"].dtype
    dtype('float32')
    """
    flat = flatten(target)
    jax: Any = loaded("jax")
    if sharding_tree is None or jax is None:
        shardings: list[Any] = [None] * len(flat.values)
    else:
        shardings = broadcast_prefix(sharding_tree, flat.structure, jax.sharding.Sharding, "sharding_tree")
    args = [_args(value, sharding, set_global_shape) for value, sharding in zip(flat.values, shardings, strict=True)]
    return unflatten(flat.structure, args)


def _args(value: Any, sharding: Any, set_global_shape: bool) -> RestoreArgs:
    if isinstance(value, LeafMetadata):
        return _args_of_saved(value, sharding, set_global_shape)
    if is_jax_array(value) or is_jax_abstract(value):
        if is_key(value):
            return RestoreArgs()  # the template determines the key implementation
        return ArrayRestoreArgs(
            dtype=value.dtype,
            sharding=value.sharding if sharding is None else sharding,
            global_shape=value.shape if set_global_shape else None,
        )
    if is_torch_tensor(value):
        [template] = describe_template([""], [value])
        return RestoreArgs(restore_type=type(value), dtype=template.dtype if template.variant is None else None)
    if isinstance(value, np.ndarray):
        return RestoreArgs(restore_type=np.ndarray, dtype=_number(value.dtype))
    return RestoreArgs(restore_type=type(value) if type(value) in _PLAIN.values() else None)


def _args_of_saved(saved: LeafMetadata, sharding: Any, set_global_shape: bool) -> RestoreArgs:
    """Return the restore arguments for a leaf that is known only by its metadata."""
    jax, torch = loaded("jax"), loaded("torch")
    dtype = None if saved.dtype is None else _number(np.dtype(getattr(ml_dtypes, saved.dtype, saved.dtype)))
    if saved.kind == "jax" and jax is not None:
        return ArrayRestoreArgs(dtype=dtype, sharding=sharding, global_shape=saved.shape if set_global_shape else None)
    if saved.kind == "key" and jax is not None:
        return RestoreArgs(restore_type=jax.Array)
    if saved.kind == "torch" and torch is not None:
        return RestoreArgs(restore_type=torch.Tensor)
    if saved.kind in {"jax", "numpy"}:
        return RestoreArgs(restore_type=np.ndarray, dtype=dtype)
    return RestoreArgs(restore_type=_PLAIN.get(saved.kind))


def _number(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the dtype if it is numeric; None otherwise, because values are cast only to numeric dtypes."""
    return None if number_kind(dtype) is None else dtype
