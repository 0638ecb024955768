"""A checkpoint saved on some devices loads on any others, and reads only the chunks that these need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.damage import flipped
from tests.equality import assert_same

import holdfast as hf
from holdfast.engine.arrays import SavedLeaf, TreeReader, TreeSource, load_tree
from holdfast.engine.pytree import Box, LeafRequest
from holdfast.engine.storage import as_location

jax: Any = pytest.importorskip("jax")
jnp: Any = jax.numpy

NamedSharding, P = jax.sharding.NamedSharding, jax.sharding.PartitionSpec

SMALL = hf.Layout(chunk_bytes=4096, segment_bytes=65536, data_file_bytes=65536)
ROWS, COLUMNS = 96, 512  # 192 KiB of float32: three data files

LAYOUTS: dict[str, tuple[dict[str, int], tuple[Any, ...]] | None] = {
    "one device": ({"x": 1}, ()),
    "replicated": ({"x": 4}, ()),
    "rows over 2": ({"x": 2}, ("x",)),
    "rows over 4": ({"x": 4}, ("x",)),
    "columns over 4": ({"x": 4}, (None, "x")),
    "both": ({"x": 2, "y": 2}, ("x", "y")),
    "both, other order": ({"x": 2, "y": 2}, ("y", "x")),
    "rows over both": ({"x": 2, "y": 2}, (("y", "x"),)),
    "partly replicated": ({"x": 2, "y": 2}, (None, "y")),
    "not jax": None,
}


def sharding(layout: str) -> Any:
    facts = LAYOUTS[layout]
    if facts is None:
        return None
    axes, spec = facts
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])[::-1]
    return NamedSharding(jax.sharding.Mesh(devices.reshape(tuple(axes.values())), tuple(axes)), P(*spec))


def values() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def reader_of(place: str) -> TreeReader:
    return TreeReader(as_location(place) / "state")


def stored_bytes(place: str) -> int:
    folder = as_location(place) / "state"
    names = [entry.name for entry in (folder / "d").entries()]
    return sum(len((folder / "d" / name).read_bytes()) for name in names)


class WholeLeaves(TreeSource):
    """A tree that can only be read leaf by leaf, like those of other libraries."""

    def __init__(self, reader: TreeReader) -> None:
        self.location, self.tree, self.leaves = reader.location, reader.tree, reader.leaves
        self._reader = reader

    def read_leaves(self, leaves: Sequence[SavedLeaf]) -> list[Any]:
        return self._reader.read_leaves(leaves)


@pytest.mark.parametrize(("before", "compression"), [*((layout, None) for layout in LAYOUTS), ("both", 1)])
def test_any_devices_after_any_others(before: str, compression: int | None, tmp_path: Path) -> None:
    """Each chunk is read once, whatever devices want it, and wherever it was."""
    place = str(tmp_path / "ckpt")
    expected = values()
    origin = sharding(before)
    tree = {"w": expected if origin is None else jax.device_put(expected, origin)}
    hf.save(place, tree, layout=replace(SMALL, compression=compression))
    total = stored_bytes(place)
    for after in LAYOUTS:
        wanted = sharding(after)
        like = None if wanted is None else {"w": jax.ShapeDtypeStruct(expected.shape, np.float32, sharding=wanted)}
        reader, asked = reader_of(place), reader_of(place)
        opened = reader.bytes_read
        loads = [load_tree(reader, like=like)["w"], load_tree(WholeLeaves(reader_of(place)), like=like)["w"]]
        assert 0.9 * total <= reader.bytes_read - opened <= total <= 1.1 * expected.nbytes
        if wanted is not None:
            loads.append(load_tree(asked, requests={"w": LeafRequest(sharding=wanted)})["w"])
            for found in loads:
                assert found.sharding == wanted
                assert found.committed
                for shard in found.addressable_shards:
                    np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
        for found in loads:
            np.testing.assert_array_equal(np.asarray(found), expected)
    part = load_tree(WholeLeaves(reader_of(place)), requests={"w": LeafRequest(shape=(2, 3), resize=True)})["w"]
    np.testing.assert_array_equal(part, expected[:2, :3])


def test_other_types_and_shapes_on_other_devices(place: str) -> None:
    signs = jnp.asarray(values() > 0)
    tree = {dtype: signs.astype(dtype) for dtype in ("bfloat16", "bool", "int8", "complex64", "int4")}
    tree["keys"] = jax.random.split(jax.random.key(3), 8)
    hf.save(
        place,
        {
            **{name: jax.device_put(array, sharding("rows over 4")) for name, array in tree.items()},
            "empty": np.zeros((4, 0), np.float32),
            "scalar": np.float32(3),
            "step": 7,
        },
        layout=SMALL,
    )
    tree |= {"empty": jnp.zeros((4, 0)), "scalar": jnp.float32(3), "step": jnp.int32(7)}
    for layout in ("one device", "rows over 2", "replicated", "both, other order"):
        wanted = {name: sharding(layout if array.ndim == 2 else "replicated") for name, array in tree.items()}
        wanted["keys"] = sharding("rows over 2" if layout.startswith("both") else layout)
        wanted["empty"] = sharding("rows over 4")
        like = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=wanted[name]) for name, array in tree.items()
        }
        found = load_tree(reader_of(place), like=like)
        assert all(array.sharding.is_equivalent_to(wanted[name], array.ndim) for name, array in found.items())
        assert_same(found, tree)


def test_uneven_shardings_are_refused(place: str) -> None:
    shapes = {"a": (6, 4), "b": (8, 4)}
    hf.save(place, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    like = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding("rows over 4"))
        for name, shape in shapes.items()
    }
    with pytest.raises(hf.TreeMismatchError, match=r"a: float32\[6, 4\] cannot be sharded") as caught:
        load_tree(reader_of(place), like=like)
    assert len(caught.value.differences) == 1


def test_many_small_leaves_on_many_devices(place: str) -> None:
    tree = {f"leaf_{i}": np.arange(i, i + 8, dtype=np.float32) for i in range(300)}
    hf.save(place, tree, layout=SMALL)
    wanted = [sharding(layout) for layout in ("rows over 4", "replicated", "one device")]
    like = {name: jax.ShapeDtypeStruct((8,), np.float32, sharding=wanted[i % 3]) for i, name in enumerate(tree)}
    found = load_tree(reader_of(place), like=like)
    for i, (name, expected) in enumerate(tree.items()):
        assert found[name].sharding == wanted[i % 3]
        np.testing.assert_array_equal(np.asarray(found[name]), expected)


@pytest.mark.parametrize("layout", ["rows over 4", "columns over 4"])
def test_damage_is_found_where_it_is_read(layout: str, place: str, stored: Callable[[str], Any]) -> None:
    """A chunk of the last row is damaged: boxes that do not need it are read."""
    hf.save(place, {"w": values()}, layout=hf.Layout(chunk_bytes=4096, segment_bytes=16384))
    files = stored(place)
    files.write("state/d/0", flipped(files.read()["state/d/0"], -100))
    reader = reader_of(place)
    [[first]] = reader.read_boxes(reader.leaves, [[Box((0, 0), (4, COLUMNS))]])
    np.testing.assert_array_equal(first, values()[:4])
    like = {"w": jax.ShapeDtypeStruct((ROWS, COLUMNS), np.float32, sharding=sharding(layout))}
    with pytest.raises(hf.DamagedCheckpointError, match=r"(?s)in 1 of its leaves.*w: .*crc32c"):
        load_tree(reader, like=like)
