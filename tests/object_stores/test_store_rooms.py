"""Graphs, components, arrays of other libraries and training loops at the URL of a store."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest
from tests.object_stores.conftest import Store

import holdfast as hf
from holdfast import components
from holdfast.engine.storage import object_store


class Counter(components.Checkpointable):
    """A component with a number and an array."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.count = 0
        self.values = np.zeros(size)


def test_a_component_that_cannot_be_written_leaves_the_old_one(store: Store) -> None:
    url = f"{store.url}/components/two"
    made = Counter(4)
    made.count = 1
    made.save_to_path(url)
    made.count = 2
    store.server.fail(r"(PUT|POST).*manifest", times=1000, answer=store.server.error(403, "AccessDenied"))
    with pytest.raises(hf.errors.StoragePermissionError, match="credentials"):
        made.save_to_path(url, overwrite=True)
    store.server.reset()
    assert Counter.from_checkpoint(url).count == 1
    made.save_to_path(url, overwrite=True)
    assert Counter.from_checkpoint(url).count == 2


def test_a_flax_loop(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    jnp = pytest.importorskip("jax.numpy")
    from holdfast.integrations.flax import CheckpointCallback

    def run(last: int) -> tuple[dict[str, Any], int]:
        state = {"w": jnp.zeros(100), "step": 0}
        with CheckpointCallback(f"{store.url}/flax", save_interval_steps=2, max_to_keep=2) as callback:
            state, start = callback.restore_or_initialize(state)
            for step in range(start, last):
                state = {"w": state["w"] + step, "step": step + 1}
                callback.on_step(step + 1, state)
        return state, start

    straight = 0.0
    for step in range(9):
        straight += step
    assert run(5)[1] == 0
    state, start = run(9)
    assert start >= 4
    assert float(state["w"][0]) == straight
    store.server.fail(".", times=1000, answer=store.server.error(403, "AccessDenied"))
    with caplog.at_level(logging.ERROR), pytest.raises(hf.errors.StoragePermissionError, match="credentials"):
        run(12)


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


@pytest.mark.parametrize("done", [True, False], ids=["done", "arrives late"])
def test_a_tree_of_components_whose_commit_has_no_answer(
    store: Store, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "REQUEST_TIMEOUT", 0.3)
    monkeypatch.setattr(object_store, "SLOWEST", 1 << 40)
    url = f"{store.url}/components/three"
    made = Counter(4)
    made.count = 1
    made.save_to_path(url)
    made.count = 2
    answer = None if done else store.server.error(500, "InternalError")
    store.server.fail(r"(PUT|POST).*three/checkpoint\.json", times=1000, how="never", answer=answer)
    if done:
        made.save_to_path(url, overwrite=True)
    else:
        with store.server.watch() as seen, pytest.raises(hf.errors.StorageUnavailableError, match="no answer"):
            made.save_to_path(url, overwrite=True)
        assert Counter.from_checkpoint(url).count == 1
        commit = re.compile(rf"(PUT|POST) .*\b{store.bucket}\b.*three/checkpoint\.json")
        store.server.answer(next(one for one in seen if commit.match(one.what)))
    assert Counter.from_checkpoint(url).count == 2
    store.server.reset()
    made.count = 3
    made.save_to_path(url, overwrite=True)
    assert Counter.from_checkpoint(url).count == 3
    assert hf.verify(url).ok


@pytest.mark.parametrize(("name", "kind"), [("out.safetensors", "safetensors"), ("out", "orbax")])
def test_conversions(store: Store, name: str, kind: Any) -> None:
    hf.save(f"{store.url}/ckpt", {"w": np.arange(5000.0), "b": {"x": np.arange(3)}})
    hf.export_checkpoint(f"{store.url}/ckpt", f"{store.url}/{name}", kind)
    hf.import_checkpoint(f"{store.url}/{name}", f"{store.url}/back")
    assert hf.verify(f"{store.url}/back").ok
    assert hf.load(f"{store.url}/back")["b"]["x"].tolist() == [0, 1, 2]
