"""orbax-checkpoint on jax arrays: as its documentation shows it, and with the settings that were quickest here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]  # ships no types
from typing_extensions import override

from ..disk import fsync_all
from . import jax_arrays
from .base import Peer, Tree, Wait

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..workloads import Array, Shape


class Orbax(Peer):
    """``StandardCheckpointer``: OCDBT, compressed, asynchronous; its metadata and directories are fsynced by us."""

    library = "jax"
    asynchronous = True

    def __init__(self) -> None:
        self._checkpointer: ocp.AsyncCheckpointer = ocp.StandardCheckpointer()

    @override
    def hold(self, arrays: Mapping[str, Array]) -> Tree:
        return jax_arrays.hold(arrays)

    @override
    def save(self, path: Path, tree: Tree) -> None:
        self.save_async(path, tree)()

    @override
    def save_async(self, path: Path, tree: Tree) -> Wait:
        self._start(path, tree)

        def wait() -> None:
            self._checkpointer.wait_until_finished()
            fsync_all(path)

        return wait

    def _start(self, path: Path, tree: Tree) -> None:
        self._checkpointer.save(path, tree)

    @override
    def load_numpy(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        template = jax_arrays.template(shapes)
        restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), template)
        with ocp.PyTreeCheckpointer() as checkpointer:
            tree = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=restore_args))
        assert isinstance(tree, dict)
        return tree

    @override
    def load_native(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        return jax_arrays.ready(self._checkpointer.restore(path, jax_arrays.template(shapes)))

    @override
    def close(self) -> None:
        self._checkpointer.close()


class OrbaxTuned(Orbax):
    """Uncompressed files, one an array: the quickest for large arrays."""

    def __init__(self) -> None:
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
        self._checkpointer = ocp.AsyncCheckpointer(handler)

    @override
    def _start(self, path: Path, tree: Tree) -> None:
        self._checkpointer.save(path, args=ocp.args.PyTreeSave(tree))

    @override
    def load_native(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        template = jax_arrays.template(shapes)
        restore_args = ocp.checkpoint_utils.construct_restore_args(template)
        args = ocp.args.PyTreeRestore(template, restore_args=restore_args)
        return jax_arrays.ready(self._checkpointer.restore(path, args=args))
