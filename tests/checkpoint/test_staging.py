"""A checkpoint holds the values at the return of ``save``; later changes by the loop do not reach it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import holdfast as hf
from holdfast.engine.arrays.snapshot import StagingBuffer
from holdfast.engine.pytree import ArrayLeaf, Piece, describe, flatten


class Gate:
    """Holds each save back between its snapshot and its first write, until it is released."""

    def __init__(self) -> None:
        self._released = threading.Semaphore(0)

    def release(self) -> None:
        self._released.release()

    def wait(self) -> None:
        assert self._released.acquire(timeout=30)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    from holdfast.engine.checkpoint.save import Save

    made, write = Gate(), Save.write

    def gated(self: Save, *rest: Any) -> Any:
        made.wait()
        return write(self, *rest)

    monkeypatch.setattr(Save, "write", gated)
    yield made
    made.release()


def numpy_tree(step: int) -> dict[str, Any]:
    big = np.arange(24, dtype=">f8").reshape(4, 6) + step
    return {
        "plain": np.full((50, 3), step, np.float32),
        "turned": (np.arange(12.0).reshape(3, 4) + step).T,
        "every_other": (np.arange(20) + step)[::2],
        "fortran": np.asfortranarray(np.full((3, 5), step, np.int16)),
        "big_endian": big,
        "view": big[1:3],
        "flag": np.array(step % 2 == 0),
        "empty": np.zeros((0, 3)),
        "nested": [np.full(3, step), {"deep": np.full(1, step, np.complex64)}],
    }


def change_numpy(tree: Any) -> None:
    for value in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(value, np.ndarray):
            value[...] = 0 if value.dtype == bool else 99
        else:
            change_numpy(value)


def test_numpy_arrays_that_change(tmp_path: Path, gate: Gate, assert_same: Callable[[Any, Any], None]) -> None:
    with hf.CheckpointManager(tmp_path) as manager:
        tree = numpy_tree(0)
        for step in range(4):
            for name, value in numpy_tree(step).items():
                if isinstance(value, np.ndarray):
                    tree[name][...] = value
                else:
                    tree[name] = value
            manager.save(step, tree)
            change_numpy(tree)
            gate.release()
        manager.wait_until_finished()
        for step in range(4):
            found = manager.restore(step)
            for name, value in numpy_tree(step).items():
                if name != "nested":
                    np.testing.assert_array_equal(found[name], value, err_msg=name)
                    assert found[name].dtype == value.dtype
            assert_same(found["nested"], numpy_tree(step)["nested"])


@pytest.mark.parametrize("handler", [hf.PyTreeCheckpointHandler(), hf.JsonCheckpointHandler()])
def test_containers_that_change(tmp_path: Path, gate: Gate, handler: hf.handlers.AsyncCheckpointHandler) -> None:
    tree: dict[str, Any] = {"list": [1, 2], "dict": {"a": "text"}, "number": 1}
    with hf.CheckpointManager(tmp_path, hf.AsyncCheckpointer(handler)) as manager:
        manager.save(1, tree)
        tree["list"].append(3)
        tree["dict"].clear()
        tree |= {"number": 2, "new": 3}
        gate.release()
        assert manager.restore(1) == {"list": [1, 2], "dict": {"a": "text"}, "number": 1}


TREES = hf.PyTreeCheckpointHandler()


@pytest.mark.parametrize(
    ("one", "two"),
    [
        pytest.param(hf.PyTreeCheckpointer(), hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler()), id="one at once"),
        pytest.param(hf.AsyncCheckpointer(TREES), hf.AsyncCheckpointer(TREES), id="one handler for both"),
    ],
)
def test_several_items_that_change(tmp_path: Path, gate: Gate, one: hf.Checkpointer, two: hf.Checkpointer) -> None:
    with hf.CheckpointManager(tmp_path, {"one": one, "two": two}) as manager:
        for step in range(3):
            first, second = np.full(1000, step), np.full(1000, -step)
            manager.save(step, {"one": first, "two": second})
            first[:] = second[:] = 99
            gate.release()
        manager.wait_until_finished()
        for step in range(3):
            found = manager.restore(step)
            assert (set(found["one"]), set(found["two"])) == ({step}, {-step})


def test_jax_arrays_that_are_donated_or_deleted(tmp_path: Path, gate: Gate) -> None:
    jax = pytest.importorskip("jax")
    step_function = jax.jit(lambda tree: {"w": tree["w"] + 1, "b": tree["b"] * 2}, donate_argnums=0)
    state = {"w": jax.numpy.zeros((300, 7)), "b": jax.numpy.ones(5)}
    with hf.CheckpointManager(tmp_path) as manager:
        for step in range(4):
            manager.save(step, state)
            old, state = state, step_function(state)
            for leaf in old.values():
                if not leaf.is_deleted():
                    leaf.delete()
            jax.block_until_ready(state)
            gate.release()
        manager.wait_until_finished()
        for step in range(4):
            found = manager.restore(step)
            np.testing.assert_array_equal(found["w"], np.full((300, 7), step, np.float32))
            np.testing.assert_array_equal(found["b"], np.full(5, 2.0**step, np.float32))


def test_sharded_jax_arrays_that_are_deleted(tmp_path: Path, gate: Gate) -> None:
    jax = pytest.importorskip("jax")
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    with hf.CheckpointManager(tmp_path) as manager:
        array = jax.device_put(values, sharding)
        manager.save(1, {"w": array})
        array.delete()
        gate.release()
        np.testing.assert_array_equal(manager.restore(1)["w"], values)


def leaves(tree: Any) -> list[Any]:
    flat = flatten(tree)
    return list(describe(flat.names, flat.values))


def addresses(snapshot: Any) -> list[int]:
    return [p.array.ctypes.data for leaf in snapshot if isinstance(leaf, ArrayLeaf) for p in leaf.pieces]


def test_the_buffer_is_used_again() -> None:
    buffer = StagingBuffer()
    first = addresses(buffer.snapshot(leaves({"a": np.ones(1 << 17), "b": np.ones((3, 5))})))
    held = buffer.nbytes
    assert held >= (1 << 20) + 120
    assert addresses(buffer.snapshot(leaves({"a": np.zeros(1 << 17), "b": np.zeros((3, 5))}))) == first
    assert addresses(buffer.snapshot(leaves({"a": np.ones(10)})))[0] == first[0]
    assert buffer.nbytes == held
    buffer.snapshot(leaves({"a": np.ones(1 << 18)}))
    assert buffer.nbytes >= 1 << 21


def test_what_cannot_change_is_not_copied() -> None:
    jax = pytest.importorskip("jax")
    array = jax.numpy.arange(1000)
    buffer = StagingBuffer()
    [leaf] = buffer.snapshot(leaves([array]))
    assert isinstance(leaf, ArrayLeaf)
    assert buffer.nbytes == 0
    assert np.shares_memory(leaf.pieces[0].array, np.asarray(array))


class FailingArray:
    """An array whose copy fails in helper threads; the saving thread waits for that failure."""

    def __init__(self, array: Any, failed: threading.Event) -> None:
        self.dtype, self.shape, self.nbytes = array.dtype, array.shape, array.nbytes
        self._array, self._failed = array, failed
        self._saving = threading.current_thread()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if threading.current_thread() is not self._saving:
            self._failed.set()
            raise MemoryError("no memory for the copy")
        self._failed.wait(30)
        return self._array


def test_a_copy_that_fails_in_the_second_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, failed = StagingBuffer.snapshot, threading.Event()

    def failing(self: StagingBuffer, leaves: Any) -> Any:
        return snapshot(
            self,
            [
                replace(
                    leaf, pieces=[Piece(one.start, cast(Any, FailingArray(one.array, failed))) for one in leaf.pieces]
                )
                for leaf in leaves
            ],
        )

    with hf.CheckpointManager(tmp_path) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(StagingBuffer, "snapshot", failing)
            with pytest.raises(MemoryError, match="no memory for the copy"):
                manager.save(1, {name: np.ones(3 << 20) for name in "abcd"})  # large enough for several threads
        assert failed.is_set()
        assert manager.all_steps() == []
        assert not (tmp_path / "1").exists()
        manager.save(2, {"a": np.ones(1000)})
        assert set(manager.restore(2)["a"]) == {1.0}
