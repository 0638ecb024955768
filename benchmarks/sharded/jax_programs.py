"""Programs of several jax processes, one CPU device each: holdfast and orbax-checkpoint."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax.experimental import multihost_utils
from typing_extensions import override

import holdfast as hf

from ..disk import fsync_all
from ..workloads import nest, unnest
from .base import Program, ShardedPeer, Tree, part_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from ..workloads import Array, Shape


class _Jax(ShardedPeer):
    """Arrays over a mesh of all processes' devices."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        jax.distributed.initialize(f"127.0.0.1:{program.port}", program.count, program.index)
        mesh = jax.make_mesh((program.count,), ("x",))
        spec = jax.sharding.PartitionSpec("x")  # type: ignore[no-untyped-call]  # jax leaves it unannotated
        self._sharding = jax.sharding.NamedSharding(mesh, spec)

    @override
    def meet(self) -> None:
        multihost_utils.sync_global_devices("meet")

    @override
    def hold(self, arrays: Mapping[str, Array]) -> Tree:
        device = jax.local_devices()[0]
        flat: dict[str, Any] = {}
        for name, array in arrays.items():
            local = jax.device_put(np.array(part_of(array, self.program)), device)
            flat[name] = jax.make_array_from_single_device_arrays(array.shape, self._sharding, [local])
        return nest(flat)

    def template(self, shapes: Mapping[str, Shape]) -> Tree:
        """A tree of shapes and shardings, as a program that resumes has before it loads."""
        abstract: Any = jax.ShapeDtypeStruct  # unannotated in jax
        return nest({name: abstract(shape, np.float32, sharding=self._sharding) for name, shape in shapes.items()})

    @override
    def parts(self, tree: Tree) -> Mapping[str, NDArray[np.float32]]:
        return {name: np.asarray(array.addressable_shards[0].data) for name, array in unnest(tree).items()}

    @override
    def close(self) -> None:
        jax.distributed.shutdown()  # type: ignore[no-untyped-call]  # jax leaves it unannotated


class HoldfastJax(_Jax):
    """``hf.save`` and ``hf.load`` on every process."""

    @override
    def save(self, path: Path, tree: Tree) -> None:
        hf.save(path, tree)

    @override
    def load(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        tree = hf.load(path, like=self.template(shapes))
        jax.block_until_ready(tree)  # type: ignore[no-untyped-call]  # jax leaves it unannotated
        assert isinstance(tree, dict)
        return tree


class Orbax(_Jax):
    """``StandardCheckpointer``, as its documentation shows it; what it does not fsync is fsynced by process 0."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        import orbax.checkpoint as ocp  # type: ignore[import-untyped]  # ships no types

        self._checkpointer = ocp.StandardCheckpointer()

    @override
    def save(self, path: Path, tree: Tree) -> None:
        self._checkpointer.save(path, tree)
        self._checkpointer.wait_until_finished()
        if self.program.index == 0:
            fsync_all(path)

    @override
    def load(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        tree = self._checkpointer.restore(path, self.template(shapes))
        jax.block_until_ready(tree)  # type: ignore[no-untyped-call]  # jax leaves it unannotated
        assert isinstance(tree, dict)
        return tree

    @override
    def close(self) -> None:
        self._checkpointer.close()
        super().close()
