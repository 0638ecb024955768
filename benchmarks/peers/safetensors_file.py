"""safetensors: one file, written from and read into torch tensors, or read into numpy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import safetensors.numpy
import safetensors.torch
from typing_extensions import override

from ..disk import fsync_all
from . import torch_arrays
from .base import Peer, Tree

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..workloads import Array, Shape


class Safetensors(Peer):
    """Has neither an asynchronous save nor an fsync; the fsync is ours.

    Read in the quicker of its two ways: ``pread`` into numpy, a mapped file with every page touched for torch.
    """

    library = "torch"

    @override
    def hold(self, arrays: Mapping[str, Array]) -> Tree:
        return torch_arrays.hold(arrays)

    @override
    def save(self, path: Path, tree: Tree) -> None:
        safetensors.torch.save_file(tree, path)
        fsync_all(path)

    @override
    def load_numpy(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        return safetensors.numpy.load_file(path, backend="pread")

    @override
    def load_native(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        return torch_arrays.touched(safetensors.torch.load_file(path))
