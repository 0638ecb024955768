"""A checkpoint holds the values at the return of ``save``; later changes by the loop do not reach it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tests.equality import assert_same

import holdfast as hf
from holdfast.engine.arrays.snapshot import StagingBuffer
from holdfast.engine.pytree import ArrayLeaf, Piece, describe, flatten


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Holds each save back between its snapshot and its first write, until it is released."""
    from holdfast.engine.checkpoint.save import Save

    made, write = threading.Semaphore(0), Save.write

    def gated(self: Save, *rest: Any) -> Any:
        assert made.acquire(timeout=30)
        return write(self, *rest)

    monkeypatch.setattr(Save, "write", gated)
    yield made
    made.release()


def host_tree(step: int) -> dict[str, Any]:
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
        "list": [1, step],
        "dict": {"a": "text"},
        "number": step,
    }


def change(tree: Any) -> None:
    for value in list(tree.values()) if isinstance(tree, dict) else tree:
        if isinstance(value, np.ndarray):
            value[...] = 0 if value.dtype == bool else 99
        elif isinstance(value, dict | list):
            change(value)
            value.clear()


ONE = hf.PyTreeCheckpointHandler()


@pytest.mark.parametrize(
    ("one", "two"),
    [
        pytest.param(hf.PyTreeCheckpointer(), hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler()), id="one at once"),
        pytest.param(hf.AsyncCheckpointer(ONE), hf.AsyncCheckpointer(ONE), id="one handler for both"),
    ],
)
def test_arrays_and_containers_that_change(
    tmp_path: Path, gate: threading.Semaphore, one: hf.Checkpointer, two: hf.Checkpointer
) -> None:
    facts = hf.AsyncCheckpointer(hf.JsonCheckpointHandler())
    with hf.CheckpointManager(tmp_path, {"one": one, "two": two, "facts": facts}) as manager:
        tree = host_tree(0)
        for step in range(4):
            for name, value in host_tree(step).items():
                if isinstance(value, np.ndarray):
                    tree[name][...] = value  # the same memory again
                else:
                    tree[name] = value
            items = {"one": dict(tree), "two": np.full(1000, -step), "facts": {"list": [1, 2], "dict": {"a": "text"}}}
            manager.save(step, items)
            change(items)
            gate.release()
        manager.wait_until_finished()
        for step in range(4):
            found = manager.restore(step)
            assert_same(found["one"], host_tree(step))
            assert_same(found["two"], np.full(1000, -step))
            assert found["facts"] == {"list": [1, 2], "dict": {"a": "text"}}


def test_jax_arrays_that_are_donated_or_deleted(tmp_path: Path, gate: threading.Semaphore) -> None:
    jax = pytest.importorskip("jax")
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
    step_function = jax.jit(lambda tree: {"w": tree["w"] + 1, "b": tree["b"] * 2}, donate_argnums=0)
    state = {"w": jax.device_put(np.zeros((300, 8), np.float32), sharding), "b": jax.numpy.ones(5)}
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
            np.testing.assert_array_equal(found["w"], np.full((300, 8), step, np.float32))
            np.testing.assert_array_equal(found["b"], np.full(5, 2.0**step, np.float32))


def snapshot(buffer: StagingBuffer, tree: Any) -> list[Any]:
    """The arrays of a snapshot."""
    flat = flatten(tree)
    copies = buffer.snapshot(list(describe(flat.names, flat.values)))
    return [piece.array for leaf in copies if isinstance(leaf, ArrayLeaf) for piece in leaf.pieces]


def test_the_buffer_is_used_again() -> None:
    buffer = StagingBuffer()
    array = pytest.importorskip("jax").numpy.arange(1000)
    [same] = snapshot(buffer, [array])
    assert np.shares_memory(same, np.asarray(array)), "what cannot change is not copied"
    assert buffer.nbytes == 0
    addresses = [
        [copy.ctypes.data for copy in snapshot(buffer, tree)]
        for tree in (
            {"a": np.ones(1 << 17), "b": np.ones((3, 5))},
            {"a": np.zeros(1 << 17), "b": np.zeros((3, 5))},
            {"a": np.ones(10)},
        )
    ]
    assert addresses[0] == addresses[1] == [addresses[2][0], addresses[0][1]]
    assert (1 << 20) + 120 <= buffer.nbytes < 1 << 21
    snapshot(buffer, {"a": np.ones(1 << 18)})
    assert buffer.nbytes >= 1 << 21


class FailingArray:
    """An array whose copy fails in helper threads; the saving thread waits for that failure."""

    failed = threading.Event()

    def __init__(self, array: Any) -> None:
        self.dtype, self.shape, self.nbytes = array.dtype, array.shape, array.nbytes
        self._array, self._saving = array, threading.current_thread()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if threading.current_thread() is not self._saving:
            self.failed.set()
            raise MemoryError("no memory for the copy")
        self.failed.wait(30)
        return self._array


def test_a_copy_that_fails_in_the_second_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = StagingBuffer.snapshot

    def failing(self: StagingBuffer, leaves: Any) -> Any:
        pieces = [[Piece(one.start, cast(Any, FailingArray(one.array))) for one in leaf.pieces] for leaf in leaves]
        return real(self, [replace(leaf, pieces=found) for leaf, found in zip(leaves, pieces, strict=True)])

    with hf.CheckpointManager(tmp_path) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(StagingBuffer, "snapshot", failing)
            with pytest.raises(MemoryError, match="no memory for the copy"):
                manager.save(1, {name: np.ones(3 << 20) for name in "abcd"})  # large enough for several threads
        assert FailingArray.failed.is_set()
        assert manager.all_steps() == []
        assert not (tmp_path / "1").exists()
        manager.save(2, {"a": np.ones(1000)})
        assert set(manager.restore(2)["a"]) == {1.0}
