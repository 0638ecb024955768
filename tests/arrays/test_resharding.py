"""A checkpoint saved on some devices loads on any others, and reads only the chunks that these need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.engine.arrays import SavedLeaf, TreeReader, TreeSource, load_tree
from holdfast.engine.handlers import PyTreeCheckpointHandler
from holdfast.engine.pytree import LeafRequest
from holdfast.engine.storage import as_location

jax: Any = pytest.importorskip("jax")

NamedSharding, P = jax.sharding.NamedSharding, jax.sharding.PartitionSpec
Same = Callable[[Any, Any], None]
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


def save(place: str, tree: Any, layout: hf.Layout = SMALL) -> None:
    hf.Checkpointer(PyTreeCheckpointHandler(layout=layout)).save(place, tree)


def reader_of(place: str) -> TreeReader:
    return TreeReader(as_location(place) / "state")


def stored_bytes(place: str) -> int:
    folder = as_location(place) / "state"
    names = [entry.name for entry in (folder / "d").entries()]
    return sum(len((folder / "d" / name).read_bytes()) for name in names)


@pytest.mark.parametrize("before", LAYOUTS)
def test_any_devices_after_any_others(before: str, tmp_path: Path) -> None:
    place = str(tmp_path / "ckpt")
    expected = values()
    origin = sharding(before)
    save(place, {"w": expected if origin is None else jax.device_put(expected, origin)})
    total = stored_bytes(place)
    for after in LAYOUTS:
        reader = reader_of(place)
        opened = reader.bytes_read
        wanted = sharding(after)
        if wanted is None:
            found = load_tree(reader)["w"]
        else:
            like = {"w": jax.ShapeDtypeStruct(expected.shape, np.float32, sharding=wanted)}
            found = load_tree(reader, like=like)["w"]
            assert found.sharding == wanted
            assert found.committed
            for shard in found.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
            asked = reader_of(place)
            again = load_tree(asked, requests={"w": LeafRequest(sharding=wanted)})["w"]
            assert again.sharding == wanted
            np.testing.assert_array_equal(np.asarray(again), expected)
        np.testing.assert_array_equal(np.asarray(found), expected)
        assert expected.nbytes <= reader.bytes_read - opened <= 1.1 * expected.nbytes <= 1.1 * total


def test_keys_on_other_devices(place: str) -> None:
    keys = jax.random.split(jax.random.key(3), 8)
    save(place, {"keys": jax.device_put(keys, sharding("rows over 2"))})
    for layout in ("one device", "rows over 4", "replicated"):
        like = {"keys": jax.device_put(jax.random.split(jax.random.key(0), 8), sharding(layout))}
        found = load_tree(reader_of(place), like=like)["keys"]
        assert found.sharding == like["keys"].sharding
        np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys))


@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "int8", "complex64", "int4"])
def test_other_types(dtype: str, place: str) -> None:
    expected = jax.numpy.asarray(values() > 0).astype(dtype)
    save(place, {"w": jax.device_put(expected, sharding("rows over 4"))})
    like = {"w": jax.ShapeDtypeStruct(expected.shape, expected.dtype, sharding=sharding("both, other order"))}
    found = load_tree(reader_of(place), like=like)["w"]
    assert found.sharding == like["w"].sharding
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_scalars_and_empty_arrays_everywhere(place: str) -> None:
    tree = {"scalar": np.float32(3), "empty": np.zeros((4, 0), np.float32), "step": 7}
    save(place, tree)
    everywhere = sharding("replicated")
    like = {
        "scalar": jax.ShapeDtypeStruct((), np.float32, sharding=everywhere),
        "empty": jax.ShapeDtypeStruct((4, 0), np.float32, sharding=sharding("rows over 4")),
        "step": jax.ShapeDtypeStruct((), np.int32, sharding=everywhere),
    }
    found = load_tree(reader_of(place), like=like)
    assert [float(found["scalar"]), int(found["step"]), found["empty"].shape] == [3.0, 7, (4, 0)]
    assert all(found[name].sharding == like[name].sharding for name in like)


def test_uneven_shardings_are_refused(place: str) -> None:
    save(place, {"a": np.zeros((6, 4), np.float32), "b": np.zeros((8, 4), np.float32)})
    like = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding("rows over 4"))
        for name, shape in {"a": (6, 4), "b": (8, 4)}.items()
    }
    with pytest.raises(hf.TreeMismatchError, match=r"a: float32\[6, 4\] cannot be sharded") as caught:
        load_tree(reader_of(place), like=like)
    assert len(caught.value.differences) == 1


def test_one_box_reads_its_chunks(tmp_path: Path) -> None:
    """An array in chunks of two rows: a box of some rows and columns needs a few of them."""
    place = str(tmp_path / "ckpt")
    expected = values()
    save(place, {"w": expected, "other": expected})
    reader = reader_of(place)
    opened = reader.bytes_read
    box = hf_box((10, 100), (15, 200))
    [leaf] = [leaf for leaf in reader.leaves if leaf.name == "w"]
    [[found, empty]] = reader.read_boxes([leaf], [[box, hf_box((3, 7), (3, 9))]])
    np.testing.assert_array_equal(found, expected[10:15, 100:200])
    assert empty.shape == (0, 2)
    assert found.flags.writeable
    assert 3 * 4096 <= reader.bytes_read - opened <= 3 * 4096 + 1024


def hf_box(start: tuple[int, ...], stop: tuple[int, ...]) -> Any:
    from holdfast.engine.pytree import Box

    return Box(start, stop)


def test_a_tenth_of_the_leaves_takes_a_tenth_of_the_reading(tmp_path: Path, assert_same: Same) -> None:
    tree = {f"group_{i}": {f"leaf_{j:02}": np.full(8192, 10.0 * i + j) for j in range(20)} for i in range(10)}
    place = str(tmp_path / "ckpt")
    save(place, tree, hf.Layout())
    total = stored_bytes(place)
    for select in ("group_3/**", "*/leaf_?5"):
        reader = reader_of(place)
        found = load_tree(reader, select=select)
        assert found["group_3"]["leaf_15"][7] == 45
        assert found["group_3"]["leaf_05"][7] == 35
        assert reader.bytes_read <= 0.11 * total, select
    reader = reader_of(place)
    assert_same(load_tree(reader), tree)
    assert reader.bytes_read <= 1.1 * sum(leaf.nbytes for leaf in reader.leaves)


def test_many_small_leaves_on_many_devices(place: str) -> None:
    tree = {f"leaf_{i}": np.arange(i, i + 8, dtype=np.float32) for i in range(300)}
    save(place, tree)
    wanted = [sharding(layout) for layout in ("rows over 4", "replicated", "one device")]
    like = {name: jax.ShapeDtypeStruct((8,), np.float32, sharding=wanted[i % 3]) for i, name in enumerate(tree)}
    found = load_tree(reader_of(place), like=like)
    for i, (name, expected) in enumerate(tree.items()):
        assert found[name].sharding == wanted[i % 3]
        np.testing.assert_array_equal(np.asarray(found[name]), expected)


@pytest.mark.parametrize("compression", [None, 1, 9])
def test_compressed_chunks(compression: int | None, place: str, assert_same: Same) -> None:
    layout = hf.Layout(chunk_bytes=4096, segment_bytes=16384, data_file_bytes=65536, compression=compression)
    tree: dict[str, Any] = {
        "zeros": np.zeros((300, 50)),
        "noise": values(),
        "small": np.arange(5),
        "text": "x",
        "none": None,
    }
    save(place, tree, layout)
    reader = reader_of(place)
    assert_same(load_tree(reader), tree)
    assert reader.verify() == []
    like = {**tree, "noise": jax.ShapeDtypeStruct((ROWS, COLUMNS), np.float32, sharding=sharding("both"))}
    found = load_tree(reader_of(place), like=like)
    np.testing.assert_array_equal(np.asarray(found["noise"]), tree["noise"])
    if compression is not None:
        assert stored_bytes(place) < tree["noise"].nbytes + tree["zeros"].nbytes // 4


class WholeLeaves(TreeSource):
    """A tree that can only be read leaf by leaf, like those of other libraries."""

    def __init__(self, reader: TreeReader) -> None:
        self.location, self.tree, self.leaves = reader.location, reader.tree, reader.leaves
        self._reader = reader

    def read_leaves(self, leaves: Sequence[SavedLeaf]) -> list[Any]:
        return self._reader.read_leaves(leaves)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_leaves_that_cannot_be_read_in_parts(layout: str, place: str) -> None:
    save(place, {"w": values()})
    source = WholeLeaves(reader_of(place))
    wanted = sharding(layout)
    like = None if wanted is None else {"w": jax.ShapeDtypeStruct((ROWS, COLUMNS), np.float32, sharding=wanted)}
    found = load_tree(source, like=like)["w"]
    np.testing.assert_array_equal(np.asarray(found), values())
    assert wanted is None or found.sharding == wanted
    small = load_tree(source, requests={"w": LeafRequest(shape=(2, 3), resize=True)})["w"]
    np.testing.assert_array_equal(small, values()[:2, :3])


@pytest.mark.parametrize("layout", ["rows over 4", "columns over 4"])
def test_damage_is_found_where_it_is_read(layout: str, place: str, stored: Callable[[str], Any]) -> None:
    """A chunk of the last row is damaged: boxes that do not need it are read."""
    save(place, {"w": values()}, hf.Layout(chunk_bytes=4096, segment_bytes=16384))
    files = stored(place)
    content = bytearray(files.read()["state/d/0"])
    content[-100] ^= 1
    files.write("state/d/0", bytes(content))
    reader = reader_of(place)
    [[first]] = reader.read_boxes(reader.leaves, [[hf_box((0, 0), (4, COLUMNS))]])
    np.testing.assert_array_equal(first, values()[:4])
    like = {"w": jax.ShapeDtypeStruct((ROWS, COLUMNS), np.float32, sharding=sharding(layout))}
    with pytest.raises(hf.DamagedCheckpointError, match=r"(?s)in 1 of its leaves.*w: .*crc32c"):
        load_tree(reader, like=like)
