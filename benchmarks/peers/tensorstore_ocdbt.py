"""TensorStore's own OCDBT writer: checksummed zarr v3 arrays in one transaction, no library above it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorstore as ts
from typing_extensions import override

from ..disk import fsync_all
from .base import Peer, Tree, Wait

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..workloads import Array, Shape

CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
CONCURRENCY = 128  # requests in flight, as jax and orbax set it


class TensorStoreOcdbt(Peer):
    """References the arrays' memory instead of copying it; fsyncs files and directories itself."""

    asynchronous = True

    @override
    def hold(self, arrays: Mapping[str, Array]) -> Tree:
        return {name: array.copy() for name, array in arrays.items()}

    @override
    def save(self, path: Path, tree: Tree) -> None:
        self.save_async(path, tree)()

    @override
    def save_async(self, path: Path, tree: Tree) -> Wait:
        path.mkdir()
        context, transaction = _context(), ts.Transaction()
        stores = [
            ts.open(
                _spec(path, name) | {"metadata": _metadata(array)},
                create=True,
                context=context,
                transaction=transaction,
            )
            for name, array in tree.items()
        ]
        writes = [
            store.result().write(array, can_reference_source_data_indefinitely=True)
            for store, array in zip(stores, tree.values(), strict=True)
        ]
        for write in writes:
            write.copy.result()
        committed = transaction.commit_async()

        def wait() -> None:
            committed.result()
            fsync_all(path)

        return wait

    @override
    def load_numpy(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        context = _context()
        stores = {name: ts.open(_spec(path, name), open=True, context=context) for name in shapes}
        reads = {name: store.result().read() for name, store in stores.items()}
        return {name: np.asarray(read.result()) for name, read in reads.items()}


def _context() -> Any:
    return ts.Context({"file_io_concurrency": {"limit": CONCURRENCY}, "data_copy_concurrency": {"limit": "shared"}})


def _spec(path: Path, name: str) -> dict[str, Any]:
    kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}, "path": f"{name}/"}
    return {"driver": "zarr3", "kvstore": kvstore}


def _metadata(array: Array) -> dict[str, Any]:
    return {
        "shape": list(array.shape),
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.shape)}},
        "codecs": CODECS,
    }
