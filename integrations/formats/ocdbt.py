"""Folders of arrays that TensorStore wrote by itself: zarr v3 in an OCDBT database, without a tree around them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.errors import DamagedCheckpointError
from ...engine.format import MANIFEST_NAME
from ...engine.sources import FetchedArray, FetchedTree, SingleTree, total_bytes
from ...engine.storage import Location
from .orbax.arrays import OpenedArrays, Wanted, directory_spec, new_context, reason

_METADATA = b"zarr.json"


def recognise(location: Location, names: frozenset[str]) -> SingleTree | None:
    if MANIFEST_NAME not in names:
        return None
    return SingleTree("TensorStore", location, ArrayFolder(location), total_bytes(location))


class ArrayFolder(FetchedTree):
    """The arrays of a folder in one dictionary, by their names in the database."""

    def __init__(self, location: Location) -> None:
        import tensorstore

        self.location = location
        database = {"driver": "ocdbt", "base": directory_spec(location)}
        try:
            keys = tensorstore.KvStore.open(database, context=new_context()).result().list().result()
            prefixes = [key.removesuffix(_METADATA).decode() for key in sorted(keys) if key.endswith(_METADATA)]
        except (ValueError, NotImplementedError, OSError) as error:
            raise DamagedCheckpointError(f"{location}: {reason(error, location)}") from error
        specs = {
            prefix.removesuffix("/"): {"driver": "zarr3", "kvstore": {**database, "path": prefix}}
            for prefix in prefixes
            if prefix.endswith("/") or not prefix
        }
        self._opened = OpenedArrays(location, specs)
        super().__init__(location, [self._described(name) for name in specs])

    def _described(self, name: str) -> FetchedArray:
        if name in self._opened.failed:
            return FetchedArray((name,), name, np.dtype("V1"), (), self._opened.failed[name])
        return FetchedArray((name,), name, self._opened.dtypes[name], self._opened.shapes[name])

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[str], NDArray[Any]]]:
        def fetch(name: str) -> NDArray[Any]:
            found: list[NDArray[Any]] = []
            self._opened.check_sizes([Wanted(name)], total_bytes(self.location), filled=True)
            for _, what in self._opened.read([Wanted(name)], lambda _, array: found.append(array)):
                raise DamagedCheckpointError(what)
            return found[0]

        yield fetch
