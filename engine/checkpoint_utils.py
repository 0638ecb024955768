"""Helps with the arguments of checkpoints: ``holdfast.checkpoint_utils``."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .handlers.args import ArrayRestoreArgs, RestoreArgs, spread
from .tree import LeafMetadata, flatten, torch_leaves, unflatten
from .tree.frameworks import is_jax_abstract, is_jax_array, is_torch_tensor, loaded
from .tree.jax_leaves import is_key
from .tree.leaves import NUMBER_KINDS
from .tree.numpy_leaves import number_kind


def construct_restore_args(target: Any, sharding_tree: Any = None, set_global_shape: bool = True) -> Any:
    """Makes the arguments that restore a tree as another one is: types, dtypes, shapes and shardings.

    A saved dtype that differs from the target's is cast. A saved shape that differs is an error.

    Args:
        target: The tree to restore as. Its leaves may be abstract, such as `jax.ShapeDtypeStruct`; bare ``object()``
            and ``...`` ask for what was saved; so does a :class:`~holdfast.LeafMetadata`, of which trees consist that
            ``structure()`` returns, with jax and torch where these are loaded and numpy arrays otherwise.
        sharding_tree: Where arrays of jax shall lie: one `jax.sharding.Sharding` for all; or a tree of them like the
            target, which may end early with one for all leaves below, and may leave out keys. Other leaves have those
            of the target.
        set_global_shape: Whether the target's shapes are asked for; otherwise arrays have the shapes that were saved.

    Returns:
        A tree like the target, of :class:`~holdfast.RestoreArgs`, and :class:`~holdfast.ArrayRestoreArgs` for arrays of
        jax; for ``restore_args=``.

    Raises:
        OptionError: ``sharding_tree`` does not fit the target.

    >>> construct_restore_args({"w": np.zeros(2, np.float32), "step": 0})["w"].dtype
    dtype('float32')
    """
    flat = flatten(target)
    jax: Any = loaded("jax")
    if sharding_tree is None or jax is None:
        shardings: list[Any] = [None] * len(flat.values)
    else:
        shardings = spread(sharding_tree, flat.structure, jax.sharding.Sharding, "sharding_tree")
    args = [_args(value, sharding, set_global_shape) for value, sharding in zip(flat.values, shardings, strict=True)]
    return unflatten(flat.structure, args)


def _args(value: Any, sharding: Any, set_global_shape: bool) -> RestoreArgs:
    if isinstance(value, LeafMetadata):
        return _args_of_saved(value, sharding, set_global_shape)
    if is_jax_array(value) or is_jax_abstract(value):
        if is_key(value):
            return RestoreArgs()  # its implementation is for the template to say
        return ArrayRestoreArgs(
            dtype=value.dtype,
            sharding=value.sharding if sharding is None else sharding,
            global_shape=value.shape if set_global_shape else None,
        )
    if is_torch_tensor(value):
        _, dtype, _, variant = torch_leaves.abstract_facts(value)
        return RestoreArgs(restore_type=type(value), dtype=dtype if variant is None else None)
    if isinstance(value, np.ndarray):
        return RestoreArgs(restore_type=np.ndarray, dtype=_number(value.dtype))
    kind = next((kind for kind in (bool, int, float, complex, str) if type(value) is kind), None)
    return RestoreArgs(restore_type=kind)


def _args_of_saved(saved: LeafMetadata, sharding: Any, set_global_shape: bool) -> RestoreArgs:
    """Says what restores a leaf of which only the metadata is known."""
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
    plain = {one.__name__: one for one in (bool, int, float, complex, str)}
    return RestoreArgs(restore_type=plain.get(saved.kind) if saved.kind in NUMBER_KINDS | {"str"} else None)


def _number(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Returns a dtype of numbers; None for others, to which nothing is cast."""
    return None if number_kind(dtype) is None else dtype
