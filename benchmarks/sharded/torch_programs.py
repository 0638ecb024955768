"""Programs of several torch processes with DTensors on the CPU: holdfast and torch.distributed.checkpoint."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

import holdfast as hf

from ..disk import fsync_all
from .base import Program, ShardedPeer, Tree, part_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from ..workloads import Array, Shape


class _Torch(ShardedPeer):
    """A flat state dict of DTensors, sharded along their first axis."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        address = f"tcp://127.0.0.1:{program.port}"
        dist.init_process_group("gloo", init_method=address, rank=program.index, world_size=program.count)
        self._mesh = init_device_mesh("cpu", (program.count,))

    @override
    def meet(self) -> None:
        dist.barrier()

    @override
    def hold(self, arrays: Mapping[str, Array]) -> Tree:
        return {name: self._tensor(torch.tensor(part_of(array, self.program))) for name, array in arrays.items()}

    def empty(self, shapes: Mapping[str, Shape]) -> Tree:
        """A state dict to load into."""
        count = self.program.count
        return {
            name: self._tensor(torch.empty((shape[0] // count, *shape[1:]), dtype=torch.float32))
            for name, shape in shapes.items()
        }

    def _tensor(self, part: torch.Tensor) -> Any:
        return DTensor.from_local(part, self._mesh, [Shard(0)], run_check=False)

    @override
    def parts(self, tree: Tree) -> Mapping[str, NDArray[np.float32]]:
        return {name: np.asarray(tensor.to_local()) for name, tensor in tree.items()}

    @override
    def close(self) -> None:
        dist.destroy_process_group()


class HoldfastTorch(_Torch):
    """``hf.save`` and ``hf.load`` on every process."""

    @override
    def save(self, path: Path, tree: Tree) -> None:
        hf.save(path, tree)

    @override
    def load(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        tree = hf.load(path, like=self.empty(shapes))
        assert isinstance(tree, dict)
        return tree


class TorchDcp(_Torch):
    """One writing thread for each core of this process's share; fsyncs its files, the directories are process 0's."""

    @override
    def save(self, path: Path, tree: Tree) -> None:
        threads = max(1, (os.cpu_count() or 1) // self.program.count)
        save(tree, storage_writer=FileSystemWriter(path, thread_count=threads))
        if self.program.index == 0:
            fsync_all(path)

    @override
    def load(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        tree = self.empty(shapes)
        load(tree, storage_reader=FileSystemReader(path))
        return tree
