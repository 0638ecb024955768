"""jax arrays for the contenders that save them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from ..workloads import Array, Shape, nest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .base import Tree


def hold(arrays: Mapping[str, Array]) -> Tree:
    """Copy into arrays that own their memory, as a training step's results do."""
    tree = nest({name: jnp.array(array, copy=True) for name, array in arrays.items()})
    return ready(tree)


def template(shapes: Mapping[str, Shape]) -> Tree:
    """A tree of shapes and dtypes on the default device, as a program that resumes has before it loads."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract: Any = jax.ShapeDtypeStruct  # unannotated in jax
    return nest({name: abstract(shape, jnp.float32, sharding=sharding) for name, shape in shapes.items()})


def ready(tree: Any) -> Tree:
    """Wait until every array of a loaded tree is there."""
    tree = jax.block_until_ready(tree)  # type: ignore[no-untyped-call]  # jax leaves it unannotated
    assert isinstance(tree, dict)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))
    return tree
