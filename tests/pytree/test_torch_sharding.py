"""Shardings of DTensors, computed without torch, compared with arrays of indices that are cut step by step."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.pytree.torch_leaves import Division, DTensorSharding, Mesh


def cut(indices: list[int], rounds: int, count: int, index: int) -> list[int]:
    """Cuts into blocks, each of those into shares, and takes the same share of each; as torch.chunk does it."""

    def chunks(some: list[int], number: int) -> list[list[int]]:
        size = -(-len(some) // number) or 1
        return [some[size * each : size * (each + 1)] for each in range(number)]

    return [one for block in chunks(indices, rounds) for one in chunks(block, count)[index]]


@st.composite
def shardings(draw: st.DrawFn) -> DTensorSharding:
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    processes = draw(st.permutations(range(int(np.prod(mesh_shape)))))
    names = tuple(f"m{axis}" for axis in range(len(mesh_shape)))
    mesh = Mesh(mesh_shape, tuple(3 * process for process in processes), names)
    divisions = []
    for _ in mesh_shape:
        axis = draw(st.one_of(st.none(), st.integers(0, len(shape) - 1)))
        divisions.append(Division(axis, 1 if axis is None else draw(st.integers(1, 3))))
    return DTensorSharding(mesh, tuple(divisions), shape)


@settings(deadline=None, max_examples=100)
@given(shardings())
def test_parts_cover_the_array_once_and_processes_hold_what_cutting_gives(sharding: DTensorSharding) -> None:
    covered = np.zeros(sharding.shape, int)
    holders = {process: np.zeros(sharding.shape, int) for process in sharding.mesh.processes}
    for part in sharding.parts():
        index = tuple(slice(low, low + size) for low, size in zip(part.start, part.shape, strict=True))
        covered[index] += 1
        assert part.holders == tuple(sorted(part.holders))
        for process in part.holders:
            holders[process][index] += 1
    assert (covered == 1).all()
    for process, place in sharding.mesh.coordinates.items():
        expected = [list(range(size)) for size in sharding.shape]
        for (axis, rounds), count, turn in zip(sharding.divisions, sharding.mesh.shape, place, strict=True):
            if axis is not None:
                expected[axis] = cut(expected[axis], rounds, count, turn)
        held = sharding.intervals(process)
        assert held is not None
        assert [[one for low, high in each for one in range(low, high)] for each in held] == expected
        mask = np.zeros(sharding.shape, int)
        mask[np.ix_(*[np.array(each, int) for each in expected])] = 1
        assert (holders[process] == mask).all()
        local = np.zeros([len(each) for each in expected], int)
        share = sharding.share(process)
        assert share is not None
        assert local.shape == share.shape
        for box, inside in share.boxes:
            assert local[inside].shape == box.shape
            assert [expected[axis][part.start] for axis, part in enumerate(inside)] == list(box.start)
            local[inside] += 1
        assert (local == 1).all()
    assert sharding.intervals(1) is None


def test_facts_are_those_of_a_jax_sharding() -> None:
    mesh = Mesh((2, 3), tuple(range(6)), ("a", "b"))
    divisions = (Division(1), Division(1))
    assert DTensorSharding(mesh, divisions, (4, 6)).describe() == {
        "type": "DTensor",
        "mesh": {"axes": [["a", 2], ["b", 3]]},
        "spec": [None, ["a", "b"]],
    }
    assert DTensorSharding(mesh, (Division(None), Division(0, 2)), (4,)).describe()["rounds"] == [1, 2]
