"""Arrays of jax and DTensors over several processes: who holds what, as every process sees it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.processes.harness import Process, run_processes
from tests.processes.meshes import box, distribute, sharding, spread, torch_mesh
from tests.versions import allow_empty_arrays

from holdfast.engine.errors import UnsupportedLeafError
from holdfast.engine.pytree import ArrayLeaf, Part, describe

Facts = tuple[tuple[Part, ...] | None, Any]  # parts and details of a leaf: what all processes have to agree on


def described(value: Any) -> ArrayLeaf:
    [leaf] = describe(["x"], [value])
    assert isinstance(leaf, ArrayLeaf)
    return leaf


def checked(value: Any, process: int, expected: NDArray[Any]) -> Facts:
    """Describe a value in one process, and compare it with the whole array."""
    leaf = described(value)
    assert (leaf.dtype, leaf.shape) == (expected.dtype, expected.shape)
    held = np.zeros(leaf.shape, np.int64)
    if leaf.parts is None:
        held += 1
    else:
        everything = np.zeros(leaf.shape, np.int64)
        for part in leaf.parts:
            assert part.holders == tuple(sorted(set(part.holders)))
            everything[box(part.start, part.shape)] += 1
            held[box(part.start, part.shape)] += process in part.holders
        assert (everything == 1).all(), leaf.parts
        assert list(leaf.parts) == sorted(leaf.parts, key=lambda part: part.start)
    covered = np.zeros(leaf.shape, np.int64)
    for piece in leaf.pieces:
        index = box(piece.start, piece.array.shape)
        np.testing.assert_array_equal(piece.array, expected[index], strict=True)
        covered[index] += 1
    np.testing.assert_array_equal(covered, held)
    return leaf.parts, leaf.details


def agreed(facts: list[dict[str, Facts]]) -> dict[str, Facts]:
    """Return what all processes say, which has to be the same."""
    for other in facts[1:]:
        assert other == facts[0]
    return facts[0]


def holders(facts: Facts) -> list[tuple[int, ...]] | None:
    """Return the holders of each part."""
    return None if facts[0] is None else [part.holders for part in facts[0]]


def numbers(*shape: int, dtype: Any = np.float32) -> Any:
    return np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)


EACH, BOTH, ALL = [(0,), (1,), (2,), (3,)], [(0, 1)], [(0, 1, 2, 3)]


# ---- jax


def mesh_of(shape: tuple[int, ...], *names: str) -> Any:
    import jax

    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return jax.sharding.Mesh(devices, names)


def on_two(process: Process) -> dict[str, Facts]:
    """Two processes with two devices each."""
    import jax
    import jax.numpy as jnp

    mesh = mesh_of((2, 2), "x", "y")
    array, small = numbers(8, 12), numbers(8, 12).astype(jnp.bfloat16)
    cases: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "everywhere": (array, ()),
        "rows by process": (array, ("x",)),
        "rows by device": (array, (("x", "y"),)),
        "columns, each on both": (array, (None, "y")),
        "both": (array, ("x", "y")),
        "swapped": (array, ("y", "x")),
        "empty": (np.zeros((0, 4), np.int8), ("x",)),
        "scalar": (np.asarray(np.float32(3)), ()),
        "bfloat16": (small, ("x",)),
    }
    facts = {name: checked(spread(one, mesh, *spec), process.index, one) for name, (one, spec) in cases.items()}
    keys = jax.random.split(jax.random.key(7), 4)
    data = np.asarray(jax.random.key_data(keys))
    for name, key, expected, spec in [("keys", keys, data, ["x"]), ("key", keys[0], data[0], [])]:
        copied: Any = jax.jit(lambda key: key, out_shardings=sharding(mesh, *spec))(key)
        facts[name] = checked(copied, process.index, expected)
    # Arrays on this process's own devices are what the process has, like those of numpy.
    own = jax.sharding.Mesh(np.array(jax.local_devices()), ("x",))
    for local in (spread(array, own, "x"), spread(array, own), jnp.asarray(array)):
        parts, _ = checked(local, process.index, array)
        assert parts is None
    return facts


def test_parts_are_what_the_sharding_says() -> None:
    facts = agreed(run_processes(on_two, 2, devices_per_process=2))
    assert {name: holders(each) for name, each in facts.items()} == {
        "everywhere": BOTH,
        "rows by process": EACH[:2],
        "rows by device": [(0,), (0,), (1,), (1,)],
        "columns, each on both": BOTH * 2,
        "both": [(0,), (0,), (1,), (1,)],
        "swapped": [(0,), (1,), (0,), (1,)],
        "empty": BOTH,
        "scalar": BOTH,
        "bfloat16": EACH[:2],
        "keys": EACH[:2],
        "key": BOTH,
    }
    mesh = {"axes": [["x", 2], ["y", 2]]}
    _, details = facts["rows by device"]
    assert details["sharding"] == {"type": "NamedSharding", "mesh": mesh, "spec": [["x", "y"]]}
    assert facts["keys"][1]["impl"] == "threefry2x32"


def on_four(process: Process) -> dict[str, Facts]:
    """Four processes with one device each, some arrays on three of them."""
    allow_empty_arrays()
    array = numbers(4, 6, dtype=np.int32)
    facts = {"all": checked(spread(array, mesh_of((4,), "x"), "x"), process.index, array)}
    partly = spread(array, mesh_of((2, 2), "x", "y"), None, "y")
    facts["in pairs"] = checked(partly, process.index, array)
    facts["on three"] = checked(spread(array, mesh_of((3,), "x"), None, "x"), process.index, array)
    return facts


def test_some_processes_may_hold_nothing() -> None:
    facts = agreed(run_processes(on_four, 4))
    expected = {"all": EACH, "in pairs": [(0, 2), (1, 3)], "on three": EACH[:3]}
    assert {name: holders(each) for name, each in facts.items()} == expected


# ---- torch


def placed(process: Process) -> dict[str, Facts]:
    """Every placement on meshes of four processes, of arrays whose sizes the mesh divides, and of others."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    line, square = torch_mesh(4, names=("dp",)), torch_mesh(2, 2, names=("dp", "tp"))
    ways: list[Any] = [Shard(0), Shard(1), Replicate()]
    facts = {}
    for shape in [(8, 4), (7, 5), (3, 1), (1, 9), (0, 3)]:
        array = numbers(*shape)
        for way in ways:
            facts[f"{shape} {way}"] = checked(distribute(array, line, way), process.index, array)
        for both in itertools.product(ways, ways):
            facts[f"{shape} {both}"] = checked(distribute(array, square, *both), process.index, array)
    array, small = numbers(13, 3), numbers(13, 3).astype(np.float16)
    crossed: Any = [_StridedShard(0, split_factor=2), Shard(0)]
    three = DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("pp",))
    cases: dict[str, tuple[Any, Any, list[Any]]] = {
        "in turns of 2": (array, square, [_StridedShard(0, split_factor=2), Replicate()]),
        "in turns of 3": (array, square, [_StridedShard(0, split_factor=3), Replicate()]),
        "crossed": (numbers(8, 2), square, crossed),
        "last axis": (numbers(2, 8), line, [Shard(-1)]),
        "scalar": (numbers(), line, [Replicate()]),
        "on three": (array, three, [Shard(0)]),
        "half precision": (small, line, [Shard(0)]),
    }
    for name, (one, mesh, ways) in cases.items():
        facts[name] = checked(distribute(one, mesh, *ways), process.index, one)
    facts_of_half, _ = checked(
        distribute(array, torch_mesh(2, 2, names=("a", "b"))["b"], Shard(0)), process.index, array
    )
    assert facts_of_half is not None
    first = 0 if process.index < 2 else 2
    assert [part.holders for part in facts_of_half] == [(first,), (first + 1,)]
    complex_numbers = torch.complex(torch.arange(6.0), torch.arange(6.0)).to(torch.complex64)
    pairs = np.stack([np.arange(6), np.arange(6)], 1).astype(np.float16)
    halves = distribute(complex_numbers, line, Shard(0))
    facts["complex32"] = checked(halves.to(torch.complex32), process.index, pairs)
    return facts


def refused(process: Process) -> list[str]:
    import torch
    from torch.distributed.tensor import DTensor, Partial, Shard

    mesh = torch_mesh(4)
    wrong = [
        DTensor.from_local(torch.ones(2), mesh, [Partial()]),
        DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=torch.Size([4]), stride=(1,)),
    ]
    messages = []
    for tensor in wrong:
        with pytest.raises(UnsupportedLeafError) as caught:
            described(tensor)
        messages.append(str(caught.value).splitlines()[1])
    return messages


def placed_and_refused(process: Process) -> tuple[dict[str, Facts], list[str]]:
    return placed(process), refused(process)


def test_parts_are_what_the_placements_say_and_others_are_refused() -> None:
    found = run_processes(placed_and_refused, 4, backend="torch")
    facts = agreed([each for each, _ in found])
    expected = {
        "(8, 4) S(0)": EACH,
        "(8, 4) R": ALL,
        "(8, 4) (Shard(dim=0), Shard(dim=1))": EACH,
        "(8, 4) (Replicate(), Shard(dim=1))": [(0, 2), (1, 3)],
        "(8, 4) (Shard(dim=1), Replicate())": [(0, 1), (2, 3)],
        "(3, 1) S(0)": EACH[:3],  # nothing is left for the last one
        "(0, 3) S(1)": ALL,
        "in turns of 2": [(0, 1), (2, 3)] * 2,
        "in turns of 3": [(0, 1), (2, 3)] * 3,
        "crossed": [(0,), (2,), (1,), (3,)],
        "last axis": EACH,
        "scalar": ALL,
        "on three": EACH[:3],
        "complex32": EACH[:3],
    }
    assert {name: holders(facts[name]) for name in expected} == expected
    common = {"type": "DTensor", "mesh": {"axes": [["dp", 2], ["tp", 2]]}}
    assert facts["(8, 4) (Shard(dim=0), Replicate())"][1]["sharding"] == {**common, "spec": ["dp", None]}
    assert facts["crossed"][1]["sharding"] == {**common, "spec": [["dp", "tp"], None], "rounds": [2, 1]}
    for _, (partial, uneven) in found:
        assert "x: is a DTensor with Partial(sum), not reduced yet" in partial
        assert "x: is a DTensor whose local part has shape (3,); its placements give (1,)" in uneven


def alone(process: Process) -> bool:
    from torch.distributed.tensor import Shard

    leaf = described(distribute(numbers(4), torch_mesh(1), Shard(0)))
    return leaf.parts is None and leaf.volatile and leaf.pieces[0].array.shape == (4,)


def test_a_program_of_one_process_has_everything() -> None:
    assert run_processes(alone, 1, backend="torch") == [True]
