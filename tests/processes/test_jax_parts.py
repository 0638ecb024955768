"""Jax arrays on the devices of several processes: who holds what, as every process sees it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.processes.harness import Process, run_processes
from tests.processes.leaf_checks import Facts, agreed, checked, described, holders
from tests.versions import allow_empty_arrays

pytest.importorskip("jax")


def sharding_of(mesh: Any, *spec: Any) -> Any:
    import jax

    named: Any = jax.sharding.NamedSharding
    specification: Any = jax.sharding.PartitionSpec
    return named(mesh, specification(*spec))


def place(array: Any, mesh: Any, *spec: Any) -> Any:
    import jax

    make: Any = jax.make_array_from_callback
    return make(array.shape, sharding_of(mesh, *spec), lambda index: array[index], dtype=array.dtype)


def mesh_of(shape: tuple[int, ...], *names: str) -> Any:
    import jax

    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return jax.sharding.Mesh(devices, names)


def on_two(process: Process) -> dict[str, Facts]:
    """Two processes with two devices each."""
    import jax
    import jax.numpy as jnp

    mesh = mesh_of((2, 2), "x", "y")
    numbers = np.arange(96, dtype=np.float32).reshape(8, 12)
    specs: dict[str, Any] = {
        "everywhere": (),
        "rows by process": ("x",),
        "rows by device": (("x", "y"),),
        "columns, each on both": (None, "y"),
        "both": ("x", "y"),
        "swapped": ("y", "x"),
    }
    facts = {name: checked(place(numbers, mesh, *spec), process.index, numbers) for name, spec in specs.items()}
    empty = np.zeros((0, 4), np.int8)
    facts["empty"] = checked(place(empty, mesh, "x"), process.index, empty)
    scalar = np.float32(3)
    facts["scalar"] = checked(place(np.asarray(scalar), mesh), process.index, np.asarray(scalar))
    small = numbers.astype(jnp.bfloat16)
    facts["bfloat16"] = checked(place(small, mesh, "x"), process.index, small)
    keys = jax.random.split(jax.random.key(7), 4)
    data = np.asarray(jax.random.key_data(keys))
    for name, array, expected, spec in [("keys", keys, data, ["x"]), ("key", keys[0], data[0], [])]:
        spread: Any = jax.jit(lambda key: key, out_shardings=sharding_of(mesh, *spec))(array)
        facts[name] = checked(spread, process.index, expected)
    # Arrays on this process's own devices are what the process has, like those of numpy.
    own = jax.sharding.Mesh(np.array(jax.local_devices()), ("x",))
    for local in (place(numbers, own, "x"), place(numbers, own), jnp.asarray(numbers)):
        parts, _ = checked(local, process.index, numbers)
        assert parts is None
    return facts


def test_parts_are_what_the_sharding_says() -> None:
    facts = agreed(run_processes(on_two, 2, devices_per_process=2))
    both = (0, 1)
    assert {name: holders(each) for name, each in facts.items()} == {
        "everywhere": [both],
        "rows by process": [(0,), (1,)],
        "rows by device": [(0,), (0,), (1,), (1,)],
        "columns, each on both": [both, both],
        "both": [(0,), (0,), (1,), (1,)],
        "swapped": [(0,), (1,), (0,), (1,)],
        "empty": [both],
        "scalar": [both],
        "bfloat16": [(0,), (1,)],
        "keys": [(0,), (1,)],
        "key": [both],
    }
    _, details = facts["rows by device"]
    assert details["sharding"] == {
        "type": "NamedSharding",
        "mesh": {"axes": [["x", 2], ["y", 2]]},
        "spec": [["x", "y"]],
    }
    assert facts["keys"][1]["impl"] == "threefry2x32"


def on_four(process: Process) -> dict[str, Facts]:
    """Four processes with one device each, some arrays on three of them."""
    allow_empty_arrays()
    numbers = np.arange(24, dtype=np.int32).reshape(4, 6)
    facts = {"all": checked(place(numbers, mesh_of((4,), "x"), "x"), process.index, numbers)}
    partly = place(numbers, mesh_of((2, 2), "x", "y"), None, "y")
    facts["in pairs"] = checked(partly, process.index, numbers)
    facts["on three"] = checked(place(numbers, mesh_of((3,), "x"), None, "x"), process.index, numbers)
    return facts


def test_some_processes_may_hold_nothing() -> None:
    facts = agreed(run_processes(on_four, 4))
    assert {name: holders(each) for name, each in facts.items()} == {
        "all": [(0,), (1,), (2,), (3,)],
        "in pairs": [(0, 2), (1, 3)],
        "on three": [(0,), (1,), (2,)],
    }


def prefetched(process: Process) -> list[int]:
    from holdfast.engine.pytree.jax_leaves import JaxDescriber

    array = place(np.arange(8.0, dtype=np.float32), mesh_of((2, 2), "x", "y"), "x")
    assert JaxDescriber([array]).describe(array).parts == described(array).parts
    array.delete()
    JaxDescriber([array])
    with pytest.raises(Exception, match="was deleted or donated"):
        described(array)
    return [piece.array.size for piece in described(place(np.zeros(8, np.float32), mesh_of((2, 2), "x", "y"))).pieces]


def test_copies_are_started_for_what_is_read() -> None:
    assert run_processes(prefetched, 2, devices_per_process=2) == [[8], [8]]
