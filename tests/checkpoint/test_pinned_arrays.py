"""Snapshots of jax arrays in pinned host memory, on GPUs where jax has some, or on CPUs that are taken for GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.equality import assert_same

import holdfast as hf
from holdfast.engine.pytree import jax_leaves

jax = pytest.importorskip("jax")

Tree = dict[str, Any]


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def put(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Return the arrays that jax was asked to copy to pinned memory, in a list that grows."""
    if jax.default_backend() != request.param:
        pytest.skip(f"jax uses the platform {jax.default_backend()}")
    if "pinned_host" not in {memory.kind for memory in jax.devices()[0].addressable_memories()}:
        pytest.skip("this jax has no pinned memory on the CPU")
    found: list[Any] = []
    device_put = jax.device_put

    def noted(arrays: Any, where: Any = None, **kwargs: Any) -> Any:
        if isinstance(where, list) and {getattr(each, "memory_kind", None) for each in where} == {"pinned_host"}:
            found.extend(arrays)
        return device_put(arrays, where, **kwargs)

    monkeypatch.setattr(jax, "device_put", noted)
    monkeypatch.setattr(jax_leaves, "PINNED_PLATFORMS", {"gpu", "cpu"})
    jax_leaves._may_be_pinned.cache_clear()
    yield found
    jax_leaves._may_be_pinned.cache_clear()


def mesh() -> Any:
    devices = np.array(jax.devices())
    return jax.sharding.Mesh(devices.reshape(-1, 2 if len(devices) % 2 == 0 else 1), ("x", "y"))


def sharded(array: Any, *axes: str | tuple[str, ...] | None) -> Any:
    return jax.device_put(array, jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec(*axes)))


def a_tree(step: int) -> Tree:
    numbers = jax.numpy.arange(4096.0).reshape(64, 64) + step
    return {
        "plain": numbers,
        "committed": jax.device_put(numbers * 2, jax.devices()[-1]),
        "half": numbers.astype("bfloat16"),
        "eighth": numbers.astype("float8_e4m3fn"),
        "four bits": (numbers % 7).astype("int4"),
        "scalar": jax.numpy.float32(step),
        "empty": jax.numpy.zeros((0, 3)),
        "key": jax.random.key(step),
        "keys": jax.random.split(jax.random.key(step), 6),
        "divided": sharded(numbers + 1, "x", "y"),
        "rows": sharded(numbers + 2, ("x", "y")),
        "copied": sharded(numbers + 3),
        "partly copied": sharded(numbers + 4, None, "y"),
        "offloaded": jax.device_put(numbers, numbers.sharding.with_memory_kind("pinned_host")),
        "number": step,
    }


def on_host(tree: Tree) -> Tree:
    """Return copies that are no views: on the CPU, views keep memory from being donated."""
    data = {name: jax.random.key_data(value) if "key" in name else value for name, value in tree.items()}
    return {name: np.array(value) if name != "number" else value for name, value in data.items()}


def donate(tree: Tree) -> None:
    """Give the memory of arrays away, to arrays of other values."""
    for name, value in tree.items():
        if name in {"plain", "committed", "divided"}:
            jax.jit(lambda array: array * 0, donate_argnums=0)(value).block_until_ready()
        elif name != "number":
            value.delete()


WHOLE = {"plain", "committed", "half", "scalar", "key", "keys"}


@pytest.mark.parametrize("pinned_bytes", [None, 0, 60_000])
def test_bits(put: list[Any], tmp_path: Path, pinned_bytes: int | None) -> None:
    """Arrays of all shardings keep their bits, and may be donated as soon as ``save`` has returned.

    Each part is copied once; packed elements and arrays that are on the host already are not pinned.
    """
    parts = {"divided": mesh().size, "rows": mesh().size, "copied": 1, "partly copied": mesh().shape["y"]}
    was: dict[int, Tree] = {}
    checkpointer = hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler(pinned_bytes=pinned_bytes))
    with hf.CheckpointManager(tmp_path, checkpointer) as manager:
        for step in range(3):
            tree = a_tree(step)
            was[step] = on_host(tree)
            put.clear()
            manager.save(step, tree)
            if pinned_bytes is None:
                assert len(put) == len(WHOLE) + sum(parts.values()), step
            else:
                assert sum(array.nbytes for array in put) <= pinned_bytes
                assert (len(put) > 0) == (pinned_bytes > 0)
            donate(tree)
        for gone in ("plain", "divided"):  # before the save
            tree = a_tree(3)
            donate({gone: tree[gone]})
            with pytest.raises(hf.errors.UnsupportedLeafError, match=f"{gone}.*was deleted or donated"):
                manager.save(3, tree)
        manager.wait_until_finished()
        for step, expected in was.items():
            assert_same(on_host(manager.restore(step, a_tree(9))), expected)


@pytest.mark.parametrize("level", ["disallow", "disallow_explicit"])
def test_a_transfer_guard(put: list[Any], tmp_path: Path, level: str, caplog: pytest.LogCaptureFixture) -> None:
    """A program that forbids copies between devices still saves: those of a save were asked for."""
    tree = a_tree(1)
    expected = on_host(tree)
    with hf.CheckpointManager(tmp_path) as manager:
        for step in range(2):
            put.clear()
            with jax.transfer_guard(level):
                manager.save(step, tree)
            assert put
        manager.wait_until_finished()
        assert_same(on_host(manager.restore(1, a_tree(9))), expected)
    assert not caplog.records


@pytest.mark.parametrize("function", ["device_put", "block_until_ready"])
def test_memory_that_jax_refuses(
    put: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    function: str,
) -> None:
    """Jax says so at once, or once the copies should be there."""
    original = getattr(jax, function)

    def refuse(arrays: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(arrays, list) and arrays:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of pinned memory")
        return original(arrays, *args, **kwargs)

    trees = [a_tree(step) for step in range(2)]
    expected = [on_host(tree) for tree in trees]
    with hf.CheckpointManager(tmp_path) as manager:
        for step, tree in enumerate(trees):
            with monkeypatch.context() as patched:
                patched.setattr(jax, function, refuse)
                manager.save(step, tree)
            assert "RESOURCE_EXHAUSTED" in caplog.text
            caplog.clear()
            manager.wait_until_finished()
            assert_same(on_host(manager.restore(step, a_tree(9))), expected[step])
