"""Parts of the arrays of Orbax checkpoints: what is read for them, and that they are the right ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.engine.pytree import Box, whole
from holdfast.engine.storage import as_location
from holdfast.integrations.formats.orbax.arrays import cut, gather
from holdfast.integrations.formats.orbax.tree import OrbaxTree

jax: Any = pytest.importorskip("jax")
ocp: Any = pytest.importorskip("orbax.checkpoint")

SHAPE = (6, 5, 4)
ARRAY = np.arange(120).reshape(SHAPE)


@st.composite
def boxes(draw: st.DrawFn) -> list[Box]:
    found = []
    for _ in range(draw(st.integers(0, 4))):
        ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in SHAPE]
        found.append(Box(tuple(low for low, _ in ends), tuple(high for _, high in ends)))
    return found


@settings(deadline=None, max_examples=100)
@given(boxes())
def test_every_box_is_cut_out_of_what_is_read(wanted: list[Box]) -> None:
    regions = gather(wanted)
    arrays = [ARRAY[region.within(whole(SHAPE))] for region in regions]
    for box in wanted:
        np.testing.assert_array_equal(cut(box, regions, arrays, ARRAY.dtype), ARRAY[box.within(whole(SHAPE))])
    assert sum(region.size for region in regions) <= 2 * sum({box: box.size for box in wanted}.values())


@pytest.mark.parametrize(
    ("wanted", "regions"),
    [
        ([], []),
        ([Box((0, 0), (0, 4))], []),
        ([Box((0, 0), (2, 4)), Box((2, 0), (4, 4))], [Box((0, 0), (4, 4))]),
        ([Box((0, 0), (1, 1)), Box((9, 9), (10, 10))], [Box((0, 0), (1, 1)), Box((9, 9), (10, 10))]),
        ([Box((1, 1), (3, 3)), Box((1, 1), (3, 3))], [Box((1, 1), (3, 3))]),
        ([Box((), ())], [Box((), ())]),
    ],
    ids=["none", "empty", "side by side", "far apart", "twice the same", "a scalar"],
)
def test_what_is_read(wanted: list[Box], regions: list[Box]) -> None:
    assert gather(wanted) == regions


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An array in four files, for the rows 0 to 4, 4 to 8 and so on."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    tree = {"rows": jax.device_put(np.arange(48.0, dtype=np.float32).reshape(16, 3), sharding), "n": np.float32(3)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(tmp_path / "one", args=ocp.args.PyTreeSave(tree))
    return tmp_path / "one"


def test_only_the_files_that_are_needed_are_read(saved: Path) -> None:
    (saved / "rows" / "1.0").unlink()
    tree = OrbaxTree(as_location(saved))
    (leaf,) = (leaf for leaf in tree.leaves if leaf.name == "rows")
    wanted = [Box((1, 0), (3, 2)), Box((12, 1), (16, 3)), Box((2, 2), (2, 3))]
    ((first, second, empty),) = tree.read_boxes([leaf], [wanted])
    assert first.tolist() == [[3, 4], [6, 7]]
    assert second.tolist() == [[37, 38], [40, 41], [43, 44], [46, 47]]
    assert (empty.shape, empty.dtype) == ((0, 1), np.dtype(np.float32))
    with pytest.raises(hf.DamagedCheckpointError, match=r"rows: .*1\.0"):
        tree.read_boxes([leaf], [[Box((4, 0), (5, 1))]])


def test_parts_for_devices(saved: Path) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    like = {"rows": jax.ShapeDtypeStruct((16, 3), np.float32, sharding=sharding)}
    found = hf.load(saved, like=like, select="rows")["rows"]
    assert found.sharding == sharding
    np.testing.assert_array_equal(found, np.arange(48.0).reshape(16, 3))
