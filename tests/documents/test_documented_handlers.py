"""The document's sections on checkpointers and handlers: its interfaces, implemented and called on small real data."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax  # type: ignore[import-untyped]  # it comes without type information
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray
from sklearn.datasets import load_iris  # type: ignore[import-untyped]  # it comes without type information

import holdfast as hf

Spec: Any = PartitionSpec
INPUTS, LABELS = load_iris(return_X_y=True)
STATE = {"mean": INPUTS.mean(0), "labels": LABELS, "step": 3}
MESH = Mesh(np.array(jax.devices()[:4]), ("data",))


def test_checkpointer(tmp_path: Path) -> None:
    """Saves one object, atomically; only ``save``, ``restore`` and ``structure``."""
    checkpointer = hf.Checkpointer(hf.PyTreeCheckpointHandler())
    checkpointer.save(tmp_path / "one", STATE)
    assert checkpointer.restore(tmp_path / "one")["step"] == 3
    assert str(checkpointer.structure(tmp_path / "one")["mean"]) == "float64[4]"
    with pytest.raises(hf.errors.UnsupportedLeafError):
        checkpointer.save(tmp_path / "two", {"mean": INPUTS, "code": print})
    assert not (tmp_path / "two").exists()


def test_async_checkpointer(tmp_path: Path) -> None:
    """Returns at once; the values are those of that moment, and are there after waiting."""
    state = {"mean": INPUTS.mean(0)}
    checkpointer = hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler())
    checkpointer.save(tmp_path / "one", state)
    state["mean"] += 100
    checkpointer.wait_until_finished()
    np.testing.assert_array_equal(hf.load(tmp_path / "one")["mean"], INPUTS.mean(0))
    with pytest.raises(TypeError, match="TextLines cannot save in the background"):
        hf.AsyncCheckpointer(TextLines())  # type: ignore[arg-type]  # that is what the error is about


class TextLines(hf.handlers.CheckpointHandler):
    """A list of texts as one file."""

    def save(self, directory: hf.storage.Location, item: Any, *, end: str = "\n", **kwargs: Any) -> None:
        with open(directory / "lines", "w") as file:
            file.writelines(line + end for line in item)

    def restore(self, directory: hf.storage.Location, item: Any = None, *, end: str = "\n", **kwargs: Any) -> Any:
        with open(directory / "lines") as file:
            return file.read().split(end)[:-1]


def test_checkpoint_handler(tmp_path: Path) -> None:
    """An interface of two methods; what is atomic about it is the checkpointer's."""
    names = ["setosa", "versicolor", "virginica"]
    checkpointer = hf.Checkpointer(TextLines())
    checkpointer.save(tmp_path / "one", names, end=";")
    assert checkpointer.restore(tmp_path / "one", end=";") == names
    assert checkpointer.structure(tmp_path / "one") is None

    class Interrupted(TextLines):
        def save(self, directory: hf.storage.Location, item: Any, *, end: str = "\n", **kwargs: Any) -> None:
            super().save(directory, item[:1], end=end)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hf.Checkpointer(Interrupted()).save(tmp_path / "two", names)
    assert not (tmp_path / "two").exists()


class DeviceArrays(hf.handlers.AsyncCheckpointHandler):
    """Copies from the device while it is awaited, and writes in futures of the standard library."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1)
        self.may_write = threading.Event()

    async def async_save(
        self, directory: hf.storage.Location, item: Any, **kwargs: Any
    ) -> list[hf.handlers.SaveFuture]:
        await asyncio.sleep(0)
        on_host = {name: np.array(value) for name, value in item.items()}
        return [self.executor.submit(self._write, directory, name, array) for name, array in on_host.items()]

    def _write(self, directory: hf.storage.Location, name: str, array: NDArray[Any]) -> int:
        assert self.may_write.wait(30)
        np.save(f"{directory}/{name}.npy", array)
        return array.nbytes

    def restore(self, directory: hf.storage.Location, item: Any = None, **kwargs: Any) -> Any:
        return {path.stem: np.load(path) for path in sorted(directory.path.glob("*.npy"))}


def test_async_checkpoint_handler(tmp_path: Path) -> None:
    """After ``async_save`` has been awaited the object may change; its futures complete the save."""
    handler = DeviceArrays()
    item = {"mean": INPUTS.mean(0), "labels": jnp.asarray(LABELS)}
    with hf.AsyncCheckpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "one", item)
        item["mean"][...] = 0  # it has been copied, and not written yet
        assert not (tmp_path / "one" / "checkpoint.json").exists()
        handler.may_write.set()
        found = checkpointer.restore(tmp_path / "one")
    np.testing.assert_array_equal(found["mean"], INPUTS.mean(0))
    hf.Checkpointer(handler).save(tmp_path / "two", item)  # `save` follows from `async_save`
    np.testing.assert_array_equal(hf.Checkpointer(handler).restore(tmp_path / "two")["labels"], LABELS)
    handler.executor.shutdown()


def train_state() -> TrainState:
    params = {"w": jnp.asarray(INPUTS[:4], jnp.float32), "b": jnp.zeros(4)}
    state: TrainState = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))  # type: ignore[no-untyped-call]
    return state


def test_pytree_checkpoint_handler(tmp_path: Path) -> None:
    """Dictionaries come back by themselves; for another object there has to be an item to restore its structure."""
    checkpointer = hf.Checkpointer(hf.PyTreeCheckpointHandler())
    state = train_state()
    checkpointer.save(tmp_path / "one", state)
    plain = checkpointer.restore(tmp_path / "one")
    assert sorted(plain) == ["opt_state", "params", "step"]
    restored = checkpointer.restore(tmp_path / "one", item=state)
    assert type(restored) is TrainState
    assert type(restored.opt_state[0]) is type(state.opt_state[0])
    np.testing.assert_array_equal(restored.params["w"], state.params["w"])


def test_pytree_checkpoint_handler_with_partitioned_arrays(tmp_path: Path) -> None:
    sharded = jax.device_put(jnp.asarray(INPUTS[:8]), NamedSharding(MESH, Spec("data")))
    checkpointer = hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler())
    checkpointer.save(tmp_path / "one", {"w": sharded})
    restored = checkpointer.restore(tmp_path / "one", item={"w": sharded})
    assert restored["w"].sharding == sharded.sharding
    np.testing.assert_array_equal(restored["w"], INPUTS[:8].astype(np.float32))


def test_save_args(tmp_path: Path) -> None:
    checkpointer = hf.Checkpointer(hf.PyTreeCheckpointHandler())
    save_args = {"mean": hf.SaveArgs(aggregate=True), "labels": hf.SaveArgs(dtype=np.int8), "step": hf.SaveArgs()}
    checkpointer.save(tmp_path / "one", STATE, save_args=save_args)
    assert (tmp_path / "one" / "state" / "aggregate.msgpack").exists()
    found = hf.load(tmp_path / "one")
    np.testing.assert_array_equal(found["mean"], STATE["mean"])
    assert found["labels"].dtype == np.int8
    np.testing.assert_array_equal(found["labels"], LABELS)

    sharded = jax.device_put(jnp.asarray(INPUTS[:8]), NamedSharding(MESH, Spec("data")))
    with pytest.raises(hf.errors.UnsupportedLeafError, match="w: is sharded over devices; leave out aggregate=True"):
        checkpointer.save(tmp_path / "two", {"w": sharded}, save_args={"w": hf.SaveArgs(aggregate=True)})


def test_restore_args(tmp_path: Path) -> None:
    checkpointer = hf.Checkpointer(hf.PyTreeCheckpointHandler())
    checkpointer.save(tmp_path / "one", {**STATE, "scale": np.float32(2)})
    restore_args = {
        "mean": hf.RestoreArgs(restore_type=jax.Array, dtype=jnp.bfloat16),
        "labels": hf.RestoreArgs(dtype=np.float32),
        "step": hf.RestoreArgs(restore_type=np.ndarray),
        "scale": hf.RestoreArgs(restore_type=int),
    }
    found = checkpointer.restore(tmp_path / "one", restore_args=restore_args)
    assert isinstance(found["mean"], jax.Array)
    assert found["mean"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found["mean"]), INPUTS.mean(0).astype(ml_dtypes.bfloat16))
    assert found["labels"].dtype == np.float32
    assert isinstance(found["step"], np.ndarray)
    assert type(found["scale"]) is int


def test_array_restore_args(tmp_path: Path) -> None:
    checkpointer = hf.Checkpointer(hf.PyTreeCheckpointHandler())
    checkpointer.save(tmp_path / "one", {"w": INPUTS[:8].astype(np.float32)})
    args = hf.ArrayRestoreArgs(mesh=MESH, mesh_axes=Spec("data"))
    found = checkpointer.restore(tmp_path / "one", restore_args={"w": args})["w"]
    assert found.sharding == NamedSharding(MESH, Spec("data"))
    assert found.shape == (8, 4)
    padded = hf.ArrayRestoreArgs(mesh=MESH, mesh_axes=Spec("data"), global_shapes=(12, 3), strict=False)
    found = checkpointer.restore(tmp_path / "one", restore_args={"w": padded})["w"]
    np.testing.assert_array_equal(found[:8], INPUTS[:8, :3].astype(np.float32))
    np.testing.assert_array_equal(found[8:], np.zeros((4, 3)))
    strict = hf.ArrayRestoreArgs(mesh=MESH, mesh_axes=Spec("data"), global_shape=(12, 3))
    with pytest.raises(hf.TreeMismatchError, match="w"):
        checkpointer.restore(tmp_path / "one", restore_args={"w": strict})


def test_array_checkpoint_handler(tmp_path: Path) -> None:
    checkpointer = hf.AsyncCheckpointer(hf.ArrayCheckpointHandler())
    checkpointer.save(tmp_path / "one", jnp.asarray(INPUTS))
    np.testing.assert_array_equal(checkpointer.restore(tmp_path / "one"), INPUTS.astype(np.float32))
    args = hf.ArrayRestoreArgs(mesh=MESH, mesh_axes=Spec(), dtype=np.float16)
    found = checkpointer.restore(tmp_path / "one", restore_args=args)
    assert (found.dtype, found.sharding) == (np.float16, NamedSharding(MESH, Spec()))
    assert hf.load(tmp_path / "one").shape == INPUTS.shape
    for item in ({"a": INPUTS}, [1.0], None, "text"):
        with pytest.raises(hf.errors.UnsupportedLeafError, match="ArrayCheckpointHandler saves one array"):
            hf.Checkpointer(hf.ArrayCheckpointHandler()).save(tmp_path / "two", item)


def test_json_checkpoint_handler(tmp_path: Path) -> None:
    metrics = {"accuracy": 0.97, "confusion": [[50, 0], [1, 49]], "name": "iris", "nothing": None}
    checkpointer = hf.Checkpointer(hf.JsonCheckpointHandler())
    checkpointer.save(tmp_path / "one", metrics)
    assert checkpointer.restore(tmp_path / "one") == metrics
    assert hf.load(tmp_path / "one") == metrics


class Sparse:
    """An array that is mostly zero: a type of one's own."""

    def __init__(self, dense: NDArray[Any]) -> None:
        self.dense = dense


class SparseHandler(hf.type_handlers.TypeHandler):
    """Stores where something is, and what."""

    name = "sparse"

    def param_infos(self, values: Sequence[Any], names: Sequence[str]) -> list[hf.type_handlers.ParamInfo]:
        return [
            hf.type_handlers.ParamInfo(name=name, facts={"shape": list(value.dense.shape)})
            for name, value in zip(names, values, strict=True)
        ]

    def serialize(
        self, values: Sequence[Any], infos: Sequence[hf.type_handlers.ParamInfo], args: Sequence[hf.SaveArgs]
    ) -> None:
        for value, info in zip(values, infos, strict=True):
            (places,) = np.nonzero(value.dense.reshape(-1))
            np.savez(f"{info.folder}/sparse.npz", places=places, values=value.dense.reshape(-1)[places])

    def deserialize(self, infos: Sequence[hf.type_handlers.ParamInfo], args: Sequence[hf.RestoreArgs]) -> list[Any]:
        found = []
        for info in infos:
            with np.load(f"{info.folder}/sparse.npz") as stored:
                dense = np.zeros(info.facts["shape"])
                dense.reshape(-1)[stored["places"]] = stored["values"]
            found.append(Sparse(dense))
        return found


def test_type_handler(tmp_path: Path) -> None:
    """``param_infos``, ``serialize`` and ``deserialize``, for leaves of a type of one's own."""
    one_hot = np.eye(3)[LABELS]
    registry = hf.type_handlers.TypeHandlerRegistry({Sparse: SparseHandler()})
    checkpointer = hf.Checkpointer(hf.PyTreeCheckpointHandler(type_handler_registry=registry))
    checkpointer.save(tmp_path / "one", {"inputs": INPUTS, "labels": Sparse(one_hot)})
    restored = checkpointer.restore(tmp_path / "one")
    np.testing.assert_array_equal(restored["labels"].dense, one_hot)
    np.testing.assert_array_equal(restored["inputs"], INPUTS)


class NumpyArchive(hf.type_handlers.AggregateHandler):
    """One file of numpy's for all small leaves."""

    name, filename = "npz", "aggregate.npz"

    def serialize(self, leaves: Mapping[str, NDArray[Any]]) -> bytes:
        file = io.BytesIO()
        arrays: dict[str, Any] = dict(leaves)
        np.savez(file, **arrays)
        return file.getvalue()

    def deserialize(self, content: bytes) -> dict[str, NDArray[Any]]:
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            return dict(stored)


@pytest.mark.parametrize("handler", [hf.type_handlers.MsgpackHandler(), NumpyArchive()], ids=["msgpack", "another"])
def test_aggregate_handler(tmp_path: Path, handler: hf.type_handlers.AggregateHandler) -> None:
    """Several leaves in one file; what was stored as an array is not in it."""
    checkpointer = hf.Checkpointer(hf.PyTreeCheckpointHandler(aggregate_handler=handler))
    save_args = {"mean": hf.SaveArgs(aggregate=True), "step": hf.SaveArgs(aggregate=True)}
    checkpointer.save(tmp_path / "one", STATE, save_args=save_args)
    content = (tmp_path / "one" / "state" / handler.filename).read_bytes()
    assert sorted(handler.deserialize(content)) == ["mean", "step"]
    restored = checkpointer.restore(tmp_path / "one", item=STATE)
    assert restored["step"] == 3
    np.testing.assert_array_equal(restored["labels"], LABELS)
    np.testing.assert_array_equal(restored["mean"], STATE["mean"])
