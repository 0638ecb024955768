"""Arrays of other libraries, and conversions, at the URL of a store."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.object_stores.conftest import Store

import holdfast as hf


def test_arrays_of_others(store: Store) -> None:
    """A folder of arrays that TensorStore wrote."""
    import tensorstore as ts

    from holdfast.engine.storage import as_location
    from holdfast.integrations.formats.orbax.arrays import directory_spec

    base = directory_spec(as_location(f"{store.url}/theirs"))
    spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": "w/"}}
    array = ts.open(spec, create=True, dtype=ts.float32, shape=[10]).result()
    array.write(np.arange(10, dtype=np.float32)).result()
    assert hf.load(f"{store.url}/theirs")["w"].tolist() == list(range(10))


@pytest.mark.parametrize(("name", "kind"), [("out.safetensors", "safetensors"), ("out", "orbax")])
def test_conversions(store: Store, name: str, kind: Any) -> None:
    hf.save(f"{store.url}/ckpt", {"w": np.arange(5000.0), "b": {"x": np.arange(3)}})
    hf.export_checkpoint(f"{store.url}/ckpt", f"{store.url}/{name}", kind)
    hf.import_checkpoint(f"{store.url}/{name}", f"{store.url}/back")
    assert hf.verify(f"{store.url}/back").ok
    assert hf.load(f"{store.url}/back")["b"]["x"].tolist() == [0, 1, 2]
