"""holdfast, saving jax arrays and torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

import holdfast as hf

from .base import Peer, Tree, Wait

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..workloads import Array, Shape


class _Holdfast(Peer):
    """Fsyncs everything itself; ``save`` is ``hf.save``, ``save_async`` an ``AsyncCheckpointer``."""

    asynchronous = True

    def __init__(self) -> None:
        self._checkpointer = hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler())

    @override
    def save(self, path: Path, tree: Tree) -> None:
        hf.save(path, tree)

    @override
    def save_async(self, path: Path, tree: Tree) -> Wait:
        self._checkpointer.save(path, tree)
        return self._checkpointer.wait_until_finished

    @override
    def load_numpy(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        tree = hf.load(path)
        assert isinstance(tree, dict)
        return tree

    @override
    def close(self) -> None:
        self._checkpointer.close()


class HoldfastJax(_Holdfast):
    """A nested dict of jax arrays."""

    library = "jax"

    @override
    def hold(self, arrays: Mapping[str, Array]) -> Tree:
        from . import jax_arrays

        return jax_arrays.hold(arrays)

    @override
    def load_native(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        from . import jax_arrays

        return jax_arrays.ready(hf.load(path, like=jax_arrays.template(shapes)))


class HoldfastTorch(_Holdfast):
    """A flat state dict of torch tensors."""

    library = "torch"

    @override
    def hold(self, arrays: Mapping[str, Array]) -> Tree:
        from . import torch_arrays

        return torch_arrays.hold(arrays)

    @override
    def load_native(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        from . import torch_arrays

        tree = hf.load(path, like=torch_arrays.empty(shapes))
        assert isinstance(tree, dict)
        return tree
