"""torch.distributed.checkpoint in one process."""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from typing_extensions import override

from ..disk import fsync_all
from . import torch_arrays
from .base import Peer, Tree, Wait

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..workloads import Array, Shape

# Pinned memory, a staging thread and non-blocking copies are refused without CUDA.
STAGING = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


class TorchDcp(Peer):
    """One writing thread a core and staging memory that is kept; fsyncs its files, the directories are ours."""

    library = "torch"
    asynchronous = True

    def __init__(self) -> None:
        self._stager = DefaultStager(STAGING)

    @override
    def hold(self, arrays: Mapping[str, Array]) -> Tree:
        return torch_arrays.hold(arrays)

    @override
    def save(self, path: Path, tree: Tree) -> None:
        save(tree, storage_writer=_writer(path), no_dist=True)
        fsync_all(path)

    @override
    def save_async(self, path: Path, tree: Tree) -> Wait:
        pending = async_save(tree, storage_writer=_writer(path), async_stager=self._stager, no_dist=True)
        assert isinstance(pending, Future)

        def wait() -> None:
            pending.result()
            fsync_all(path)

        return wait

    @override
    def load_numpy(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        return torch_arrays.as_numpy(self.load_native(path, shapes))

    @override
    def load_native(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        tree = torch_arrays.empty(shapes)
        load(tree, storage_reader=FileSystemReader(path), no_dist=True)
        return tree

    @override
    def close(self) -> None:
        self._stager.close()


def _writer(path: Path) -> FileSystemWriter:
    return FileSystemWriter(path, thread_count=os.cpu_count() or 1)
