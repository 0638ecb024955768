"""torch.save and torch.load: one zip file of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from ..disk import fsync_all
from . import torch_arrays
from .base import Peer, Tree

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..workloads import Array, Shape


class TorchSave(Peer):
    """Has neither an asynchronous save nor an fsync; the fsync is ours. Loads by mapping the file, its quicker way."""

    library = "torch"

    @override
    def hold(self, arrays: Mapping[str, Array]) -> Tree:
        return torch_arrays.hold(arrays)

    @override
    def save(self, path: Path, tree: Tree) -> None:
        torch.save(tree, path)
        fsync_all(path)

    @override
    def load_numpy(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        return torch_arrays.as_numpy(self.load_native(path, shapes))

    @override
    def load_native(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        tree = torch.load(path, weights_only=True, mmap=True)
        assert isinstance(tree, dict)
        return torch_arrays.touched(tree)
